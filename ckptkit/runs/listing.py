"""`ckptkit.list_run`: the steps of a run, complete or not, and the one to resume from."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import MissingFileError, NotACheckpointError
from ckptkit.core.frameworks import is_optimizer_folder
from ckptkit.core.manifest import NODE_RANKS, RUN_FACTS, TRAINING, Manifest
from ckptkit.core.text import counted, size_text
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.reader import METADATA
from ckptkit.formats.discovery import (
    TRACKERS,
    find_step_files,
    name_step,
    names_step,
    parse_step,
    read_tag,
)
from ckptkit.formats.registry import describe_missing, find_unread, recognise
from ckptkit.formats.torch_files import TorchOptimizerReader
from ckptkit.runs.find_run import (
    NO_CHECKPOINT,
    describe_links,
    find_runs_nearby,
    find_steps_without_weights,
)
from ckptkit.runs.local_run import RunStore, marker, open_run
from ckptkit.runs.marks import STEP_PREFIXES, is_step_folder
from ckptkit.runs.push_journal import read_commands, read_pushes, read_watch
from ckptkit.runs.retention import TRAINER_STATE, save_orders, trainer_state
from ckptkit.runs.step_manifests import OF_UNKNOWN, StepManifests, list_files
from ckptkit.runs.steps import (
    RunStep,
    StoredFile,
    abandoned,
    bytes_of,
    parse_metrics,
    series_of,
    step_files,
    step_of_manifest,
)
from ckptkit.storage.base import Source
from ckptkit.storage.places import PathLike, is_url, open_source

if TYPE_CHECKING:
    from ckptkit.runs.push_journal import WatchStatus

_T = TypeVar("_T")
_UNFINISHED = {"checkpoint-is-incomplete.txt": "the Trainer", ".incomplete": "nemo-automodel"}
_RANDOM_STATES = "random_states_0.pkl"
_WRITTEN_LAST = (TRAINER_STATE, _RANDOM_STATES)  # by the Trainer, and by accelerate
_BEST = "best_model_checkpoint"
_NAMED = 5
_OPTIMIZER_ALONE = "it holds the state of an optimizer, and no model"
OF_SOME_RANKS = "holds the files of some ranks only"
"""What begins the problem of a step on the disk of one of several nodes."""
OF_UNREAD = "holds no checkpoint that is read"
"""What begins the problem of a step in a format that is known and not read."""


class RunListing(Displayed, Struct, frozen=True):
    """The steps of a run.

    Attributes:
        location: The path or URL of the run, as passed.
        live: Whether a job is writing to it; None if unknown.
        steps: All steps, the lowest number first.
        best: Names of the steps that the Trainer would load as the best.
        tracked: Names of the steps that the tracker of the run names, as Megatron-LM writes it.
        notes: What was ignored, and why.
        watch: What the last watch has not pushed; None where there was none.
    """

    location: str
    live: bool | None
    steps: tuple[RunStep, ...]
    best: frozenset[str] = frozenset()
    tracked: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    watch: WatchStatus | None = None

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "listing.steps, or `step.complete` of one of them")

    def _facts(self) -> Facts:
        complete = sum(step.complete for step in self.steps)
        steps = f"{counted(len(self.steps), 'step')}, {complete:,} complete"
        rows = [
            (s.name, "complete" if s.complete else s.problem, size_text(s.size_bytes))
            for s in self.steps
        ]
        lines = [("steps", steps), ("size", size_text(self.size_bytes))]
        return Facts(self.location, lines, ("step", "state", "size"), rows)

    @property
    def size_bytes(self) -> int:
        """The size of all steps; files that several steps share count once."""
        return bytes_of(file for step in self.steps for file in step.files)

    def to_json(self, *, now: float) -> dict[str, Any]:
        return {
            "run": self.location,
            "live": self.live,
            "complete": sum(step.complete for step in self.steps),
            "bytes": self.size_bytes,
            "steps": [step.to_json(now=now) for step in self.steps],
            "notes": list(self.notes),
            "watch": None if self.watch is None else self.watch.to_json(),
        }


def list_run(run: PathLike, *, state: PathLike | None = None) -> RunListing:
    """Lists the steps of a run, on any storage; headers alone are read."""
    store = open_run(run)
    with open_source(run) as source:
        return _Listing(source, store, run, state).listing()


class _Listing:
    """Lists the steps of one run."""

    def __init__(
        self, source: Source, store: RunStore, run: PathLike, state: PathLike | None
    ) -> None:
        self._source = source
        self._store = store
        self._run = run
        self._pushes = read_pushes(run, state)
        self._commands = read_commands(run, state)
        self._watch = read_watch(run, state)
        self._listed = paths = list_files(source)
        candidates = recognise(paths)
        tags = (read_tag(source, tracker) for tracker in TRACKERS if tracker in paths)
        self._tag = next((tag for tag in tags if tag is not None), "")
        self._manifests = StepManifests(source, candidates)
        candidates = self._manifests.without_side_files(candidates)
        right_here = [candidate for candidate in candidates if not candidate.folder]
        as_files = {
            name_step(first): [candidate]
            for first, (_, candidate) in find_step_files(right_here).items()
        }
        inside = (c for c in candidates if [c] not in as_files.values())
        self._candidates = _group(inside, lambda candidate: candidate.folder.split("/", 1)[0])
        self._candidates |= as_files
        files = store.files()
        self._paths = {file.path for file in files}
        self._files = _group(files, lambda file: name_step(file.path))

    def listing(self) -> RunListing:
        names = [n for n in self._files if n in self._candidates or is_step_folder(n)]
        if not names:
            raise self._no_steps()
        steps = [self._step(name) for name in names]
        orders: dict[str, int] = {}
        for series in {step.series for step in steps}:
            complete = [step for step in steps if step.complete and step.series == series]
            orders |= save_orders(self._source, complete)
        steps = [replace(step, save_number=orders.get(step.name, 0)) for step in steps]
        steps.sort(key=lambda step: (step.step, step.name))
        links = [n for n in self._source.linked_folders() if parse_step(n) is not None]
        newest = max((step for step in steps if step.complete), key=_number, default=steps[-1])
        return RunListing(
            location=self._store.location,
            live=self._store.is_live(),
            steps=tuple(steps),
            best=frozenset(self._best_of_trainer(steps)),
            tracked=frozenset(step.name for step in steps if names_step(self._tag, step.name)),
            notes=(
                *(f"{name} is a link, which is not followed" for name in links),
                *find_steps_without_weights(
                    self._source, self._listed, "", names, newest.name, newest.step
                ),
            ),
            watch=self._watch,
        )

    def _step(self, name: str) -> RunStep:
        files = tuple(self._files[name])
        candidates = self._candidates.get(name, [])
        manifest = self._manifests.manifest(name)
        number = parse_step(name) or 0
        if manifest is None:
            problem = self._problem(name, candidates)
            path = posixpath.join(self._store.location, name)
            step = RunStep(
                number, name, path, complete=not problem, problem=problem, has_manifest=False
            )
        else:
            step = self._step_of_manifest(name, number, manifest)
        return replace(
            step,
            metrics=step.metrics or self._metrics_of_trainer(name, number),
            writer=_writer(name, files, manifest),
            size_bytes=bytes_of(files),
            files=files,
            modified=max((file.modified for file in step_files(step, files)), default=0.0),
            pushes=tuple(push for push in self._pushes if push.step == number),
            commands=tuple(one for one in self._commands if one.step == number),
            markers=tuple(sorted(map(marker, candidates))),
        )

    def _step_of_manifest(self, name: str, number: int, manifest: Manifest) -> RunStep:
        def size_bytes(file: str) -> int | None:
            try:
                return self._source.stat(posixpath.join(name, file)).size_bytes
            except MissingFileError:
                return None

        path = posixpath.join(self._store.location, name)
        step = step_of_manifest(number, path, manifest, size_bytes)
        ranks = manifest.source.get(NODE_RANKS)
        if not ranks:
            return step
        listed = ", ".join(map(str, ranks)) if isinstance(ranks, list) else ranks
        problem = f"{OF_SOME_RANKS}: {listed}"
        return replace(step, complete=False, problem=problem)

    def _problem(self, name: str, candidates: Sequence[Candidate]) -> str:
        """Returns why a step that ckptkit has not saved is not complete; empty where it is."""
        if all(map(is_of_optimizer, candidates)):
            inside = (path for path in self._listed if path.startswith(f"{name}/"))
            unread = find_unread(self._source, inside, name)
            if unread is not None:
                return f"{OF_UNREAD}: {unread.message}; {unread.hint}"
            is_known = any(c.format != TorchOptimizerReader.name for c in candidates)
            return _OPTIMIZER_ALONE if is_known else NO_CHECKPOINT
        for file, framework in _UNFINISHED.items():
            if self._has(name, file):
                return f"{framework} has not finished it"
        series = series_of(name)
        alike = [other for other in self._files if series_of(other) == series]
        for last in () if self._has(name, METADATA) else _WRITTEN_LAST:  # that is of `dcp.save`
            if not self._has(name, last) and any(self._has(other, last) for other in alike):
                return f"it has no {last}, which is written last"
        # Single torch files often accompany a model without being checkpoints. If a model comes
        # with its optimizer, both have to be complete.
        main = [c for c in candidates if c.format not in {"torch", "foreign"}] or candidates
        return next(filter(None, map(self._lacks, main)), "")

    def _lacks(self, candidate: Candidate) -> str:
        lacking = self._manifests.lacks(candidate)
        if lacking in {"", OF_UNKNOWN}:
            return describe_missing(self._source, candidate) or lacking
        return lacking

    def _has(self, name: str, file: str) -> bool:
        return f"{name}/{file}" in self._paths

    def _metrics_of_trainer(self, name: str, step: int) -> dict[str, float | None]:
        """Returns what the Trainer's evaluations at this step gave, if it saved the step."""
        entries = trainer_state(self._source, name).get("log_history")
        metrics: dict[str, float | None] = {}
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("step") == step:
                metrics |= {k: v for k, v in parse_metrics(entry).items() if k.startswith("eval_")}
        return metrics

    def _best_of_trainer(self, steps: Sequence[RunStep]) -> Iterator[str]:
        """Yields the best step according to the newest state of a Trainer.

        If times and numbers disagree on which state is the newest, both count.
        """
        ordered = sorted(steps, key=lambda step: (step.save_number, step.step), reverse=True)
        orders = [ordered]
        if not any(step.save_number for step in steps):
            orders.append(sorted(steps, key=lambda step: step.modified, reverse=True))
        for candidates in orders:
            states = (trainer_state(self._source, step.name) for step in candidates)
            best = next(filter(None, states), {}).get(_BEST)
            if isinstance(best, str):
                yield posixpath.basename(best.replace("\\", "/").rstrip("/"))

    def _no_steps(self) -> NotACheckpointError:
        location = self._store.location
        message = "it holds no step of a run"
        if parse_step(posixpath.basename(location.rstrip("/"))) is not None:
            hint = "this is a step itself; pass the directory above it"
            return NotACheckpointError(message, where=location, hint=hint)
        links, targets = describe_links([self._source], as_run=True)
        message += f"; {links}" if links else ""
        nearby = find_runs_nearby(self._run)
        hint = "pass the directory with the checkpoint-N folders"
        if targets:
            hint = targets
        elif nearby:
            hint += f": {' or '.join(nearby)}"
        else:
            apart = sorted(name for name in self._candidates if parse_step(name) is None)
            if apart:
                names = ", ".join(name for name in apart[:_NAMED] if name)
                named = f"checkpoints whose names have no step: {names}"
                message += f"; {named}" if names else "; it is itself a checkpoint or a model"
            walked = (path.split("/", 1)[0] for path in self._source.walk(2) if "/" in path)
            below = sorted({name for name in walked if not name.startswith(".")})
            hint += f"; below it are {', '.join(below[:_NAMED])}" if below else ""
        return NotACheckpointError(message, where=location, hint=hint)


def _group(entries: Iterable[_T], name_of: Callable[[_T], str]) -> dict[str, list[_T]]:
    groups: dict[str, list[_T]] = {}
    for entry in entries:
        groups.setdefault(name_of(entry), []).append(entry)
    return groups


def is_of_optimizer(candidate: Candidate) -> bool:
    """Returns whether a checkpoint in a step is the state of an optimizer, and no model."""
    name = posixpath.basename(candidate.folder)
    return candidate.format == TorchOptimizerReader.name or is_optimizer_folder(name)


def _writer(name: str, files: Sequence[StoredFile], manifest: Manifest | None) -> str:
    if manifest is not None and manifest.kind == TRAINING and not manifest.is_sealed:
        return "ckptkit"
    paths = {file.path.removeprefix(f"{name}/") for file in files}
    if TRAINER_STATE in paths:
        return "Transformers Trainer"
    if _RANDOM_STATES in paths or any(path.startswith("pytorch_model_fsdp_") for path in paths):
        return "accelerate"
    if "meta.pt" in paths:
        return "Lightning"
    if any(path.endswith("_model_states.pt") for path in paths):
        return "DeepSpeed"
    return ""


_CALLS = {
    "Transformers Trainer": "trainer.train(resume_from_checkpoint={path!r})",
    "accelerate": "accelerator.load_state({path!r})",
    "Lightning": "trainer.fit(model, ckpt_path={path!r})",
    "DeepSpeed": "engine.load_checkpoint({run!r}, tag={name!r})",
    "ckptkit": "Checkpointer({run!r}).resume(state{folder})",
    "ckptkit, to a URL": "Checkpointer({run!r}, local=LOCAL).resume(state{folder})",
    "torch.distributed.checkpoint": "dcp.load(state, checkpoint_id={path!r})",
}
"""By the framework that saved a step."""


def advise_on_resume(listing: RunListing) -> tuple[RunStep, str] | None:
    """Returns the step to resume from, and the line of Python that does; None without a step.

    It is the newest complete one that training did not go back from, or the one that the tracker of
    the run names. The line is empty where the framework is unknown.
    """
    complete = [step for step in listing.steps if step.complete]
    left = {
        (series, number)
        for series in {step.series for step in complete}
        for number in abandoned(step for step in complete if step.series == series)
    }
    current = [
        step for step in complete if (step.series, step.step) not in left and not step.thinned
    ]
    tracked = [step for step in current if step.name in listing.tracked]
    step = max(tracked or current, key=_resume_order, default=None)
    if step is None:
        return None
    inside = {file.path.removeprefix(f"{step.name}/") for file in step.files}
    # accelerate's automatic names, under which its integration of ckptkit saves as well.
    is_accelerates = step.name.startswith(STEP_PREFIXES[1])
    writer = "accelerate" if is_accelerates else step.writer
    if TRAINER_STATE in inside:
        writer = "Transformers Trainer"
    elif writer == "ckptkit" and "meta.pt" in inside:
        writer = "Lightning"
    elif writer == "ckptkit" and RUN_FACTS not in inside:
        writer = "torch.distributed.checkpoint"  # through the functions of ckptkit.training.dcp
    elif writer == "ckptkit" and not any(path.endswith(".metadata") for path in inside):
        writer = "accelerate"  # whole, as without FSDP
    elif writer == "ckptkit" and is_url(listing.location):
        writer = "ckptkit, to a URL"
    # Without its folder a Checkpointer finds steps of its own names only.
    is_named = step.name != f"{STEP_PREFIXES[0]}{step.step}"
    folder = f", folder={step.path!r}" if is_named else ""
    call = _CALLS.get(writer, "")
    text = call.format(path=step.path, run=listing.location, name=step.name, folder=folder)
    return step, text


def _number(step: RunStep) -> int:
    return step.step


def _resume_order(step: RunStep) -> tuple[int, int, float]:
    return step.save_number, step.step, step.modified
