"""The choice among the candidates under a path: the newest step, and models without companions.

A step of a run is a folder, or a file such as `epoch=0-step=500.ckpt` and `iter_2000.pth`. The
newest one is taken, or that which Megatron-LM's file `latest_checkpointed_iteration.txt` names;
verl, slime and Megatron-Bridge write this file too. nanotron's file is `latest.txt`.

Source: lightning/pytorch/callbacks/model_checkpoint.py (`format_checkpoint_name`,
`CHECKPOINT_NAME_LAST`), nemo/lightning/pytorch/callbacks/model_checkpoint.py,
megatron/training/checkpointing.py (`get_checkpoint_tracker_filename`, `read_metadata`),
mmengine/hooks/checkpoint_hook.py, fairseq/checkpoint_utils.py.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, NotACheckpointError
from ckptkit.core.text import Aside, counted, quote
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.megatron import RUN_CONFIG
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.safetensors.hf_shards import SHARDED_FOLDER, HfShardsReader
from ckptkit.formats.torch_files import (
    TorchOptimizerReader,
    drop_lone_optimizers,
    is_optimizer_candidate,
    model_number,
)
from ckptkit.storage.locations import relative_path

_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
# Ignored next to a model: formats that are only refused, and those from which a model was made.
_SECONDARY = {ForeignReader.name, "zero", "universal"}
_SHARDS = HfShardsReader.name  # noted where they are compared with the model next to them
_NO_CHECKPOINTS = {ForeignReader.name, TorchOptimizerReader.name}  # by themselves
_OF_RANKS = RankFilesReader.name
_COPY_OF_RANKS = "huggingface"  # verl's folder for the same weights, gathered
_COPY_OF_DCP = "hf"  # Megatron-Bridge's, below the step
# Meta's and Mistral's files that a model was made of, in its folder on the Hub or below it.
_ORIGINAL, _CONSOLIDATED, _TRANSFORMERS = "original", "consolidated", "model"


def is_certain(candidate: Candidate) -> bool:
    """Returns whether names alone identify a candidate as a checkpoint that ckptkit reads.

    Files that are only refused, and `.pt` files of any name, may be part of other formats.
    """
    return candidate.format not in _NO_CHECKPOINTS and (
        candidate.format != "torch" or _is_model(candidate)
    )


def _is_primary(candidate: Candidate) -> bool:
    return is_certain(candidate) and candidate.format not in _SECONDARY


def _main_path(candidate: Candidate) -> str:
    """Returns a candidate's index, or its first file."""
    files = candidate.files
    return next((path for path in files if path.endswith(".index.json")), files[0])


def _main_file(candidate: Candidate) -> str:
    return posixpath.basename(_main_path(candidate))


def drop_companions(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops the companions of a readable model.

    These are single `.pt` files, formats that are not read, and the same model in another form,
    such as the `.bin` files of a model in safetensors.
    """
    safe = {c.folder for c in candidates if c.format == "safetensors" and _is_model(c)}
    leftover = [c for c in candidates if is_leftover(c, safe)]
    has_model = bool(safe) or any(
        c.format in {"dcp", _SHARDS} or (c.format == "torch" and _is_model(c)) for c in candidates
    )
    of_ranks = {c.folder for c in candidates if c.format == _OF_RANKS}
    of_bridge = {c.folder for c in candidates if _has_run_config(c)}

    def is_kept(candidate: Candidate) -> bool:
        above, name = posixpath.split(candidate.folder)
        if name == _COPY_OF_RANKS and above in of_ranks:
            return False
        if name == _COPY_OF_DCP and above in of_bridge:
            return False
        place = above if name == _ORIGINAL else candidate.folder
        if (
            place in safe
            and _main_file(candidate).startswith(_CONSOLIDATED)
            and any(
                c.folder == place and _main_file(c).startswith(_TRANSFORMERS) for c in candidates
            )
        ):
            return False
        if candidate.format in _SECONDARY or candidate in leftover:
            return not has_model
        if candidate.format != "torch":
            return True
        has_better = has_model or bool(of_ranks)
        return candidate.folder not in safe if _is_model(candidate) else not has_better

    return [candidate for candidate in candidates if is_kept(candidate)]


def _has_run_config(candidate: Candidate) -> bool:
    return any(posixpath.basename(path) == RUN_CONFIG for path in candidate.files)


def is_leftover(candidate: Candidate, models: Collection[str]) -> bool:
    """Returns whether a candidate is the shards from which a model was consolidated.

    Args:
        candidate: The candidate.
        models: Folders with models in safetensors.
    """
    if candidate.format != _SHARDS:
        return False
    above, name = posixpath.split(candidate.folder)
    return candidate.folder in models or (name == SHARDED_FOLDER and above in models)


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(_main_file(candidate)) is not None


_WORD = r"checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch"
_STEP_FILE = re.compile(
    rf"(?P<kind>(?:\w+?[-_])?(?:{_WORD}))[-_=]?0*(?P<number>\d{{1,15}})", re.IGNORECASE
)
_LIGHTNING = re.compile(
    r"(?:.*[-_])?(?P<kind>step|epoch)=0*(?P<number>\d{1,15})(?:-\D.*)?", re.IGNORECASE
)
_ENDING = re.compile(r"(\.pth\.tar|\.ckpt|\.pth|\.pt|\.bin)$")
_LAST = re.compile(r"(checkpoint_)?(last|latest)(-v\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StepName:
    """The step in a file's name: a number, and the word for what is counted."""

    kind: str
    number: int


def parse_step_file(path: str) -> StepName | None:
    """Returns the step in the name of a file, or None.

    >>> [parse_step_file(name) for name in ("epoch=3-step=500.ckpt", "iter_2000.pth", "model.pt")]
    [StepName(kind='step', number=500), StepName(kind='iter', number=2000), None]
    """
    stem = _stem(path)
    match = _STEP_FILE.fullmatch(stem) or _LIGHTNING.fullmatch(stem)
    return None if match is None else StepName(match["kind"].lower(), int(match["number"]))


def is_called_last(path: str) -> bool:
    """Returns whether a file or folder is named as the last of a run, without its step.

    >>> is_called_last("run/last.ckpt"), is_called_last("run/epoch=0-step=2.ckpt")
    (True, False)
    """
    return _LAST.fullmatch(_stem(path)) is not None


def _stem(path: str) -> str:
    return _ENDING.sub("", posixpath.basename(path))


def is_single_file(candidate: Candidate) -> bool:
    return candidate.format == "torch" and len(candidate.files) == 1


_STEP = re.compile(
    r"(?:(?:checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch)?[-_=]?|.*\bstep=)"
    r"0*(\d{1,15})(?:-\w+=-?[\d.]+)*(?:-last)?(?:\.ckpt)?",  # as NeMo names them
    re.IGNORECASE,
)
_OF_VERL = "dist_ckpt"  # its folder for Megatron-Core's files
_UNIT_FOLDER = re.compile(
    r"(pytorch_model_fsdp|optimizer|model|base_model)_\d+|model|actor|critic|state\.ckpt|optim(izer)?"
    rf"|{_OF_VERL}"
    r"|pytorch_model(_\d+)?"  # accelerate's tags for DeepSpeed
)
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?(_\d+)?")
# In the folder of a run: Megatron-LM's, and that of nanotron, whose steps are numbers only.
TRACKERS = ("latest_checkpointed_iteration.txt", "latest.txt")
UNFINISHED = "the save was not finished"  # in what a step lacks, which then is not damaged
RELEASE = "release"  # the folder of weights that no training of the run has changed
_HERE = "."  # the name of the run in the root itself, also for --select


@dataclass(frozen=True, slots=True)
class CheckpointUnit:
    """One or several state dicts that were written together.

    Attributes:
        label: Its name for `--select`: its folder under the step, or its main file.
        candidate: The candidate that the reader recognised.
        is_optimizer: Whether the folder is named as that of a model's optimizer.
    """

    label: str
    candidate: Candidate
    is_optimizer: bool


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """The checkpoint that a path stands for.

    Attributes:
        folder: The step's folder relative to the source's root; empty for the root.
        units: The units in it.
        select: The rest of the selection, for a state dict inside the units, or None.
        notes: What was passed over, and why.
        damaged: Steps that were passed over though their saves had ended: what each lacks.
    """

    folder: str
    units: tuple[CheckpointUnit, ...]
    select: str | None = None
    notes: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)


DescribeMissing = Callable[[Candidate], str]
"""Says what a candidate lacks; empty if it is complete."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the files of runs say of their steps.

    Attributes:
        find_rolled_back: Returns those of some folders of steps that training went back from.
        read_tracker: Returns which of `TRACKERS` a folder has, and what it says: the number of an
            iteration, or `RELEASE`; None where there is no such file.
    """

    find_rolled_back: Callable[[Sequence[str]], Collection[str]] = lambda _folders: ()
    read_tracker: Callable[[str], tuple[str, str] | None] = lambda _folder: None


ReadStep = Callable[[Candidate], int | None]
"""Returns the step in a candidate's contents, or None."""
MakeNotFoundError = Callable[[str], NotACheckpointError]
"""Returns the error for a folder, relative to the root, in which nothing was recognised."""


def is_unit_folder(name: str) -> bool:
    return _UNIT_FOLDER.fullmatch(name) is not None


def is_optimizer_folder(name: str) -> bool:
    return _OPTIMIZER_FOLDER.fullmatch(name) is not None


def parse_step(folder: str) -> int | None:
    """Returns the step in a folder's name; for the folder of a unit, in that above it.

    >>> parse_step("runs/a/checkpoint-500"), parse_step("checkpoint-500/pytorch_model_fsdp_0")
    (500, 500)
    """
    for part in reversed(folder.replace("\\", "/").rstrip("/").split("/")):
        match = _STEP.fullmatch(part)
        if match:
            return int(match[1])
        if not is_unit_folder(part):
            return None
    return None


_NO_RECORDS = RunRecords()


def names_step(tag: str, folder: str) -> bool:
    """Returns whether the tag in a tracker names the folder of a step.

    >>> names_step("5", "iter_0000005"), names_step("release", "release"), names_step("5", "iter_7")
    (True, True, False)
    """
    is_number = tag.isascii() and tag.isdigit()
    return folder == tag or (is_number and parse_step(folder) == int(tag))


def resolve(
    candidates: Sequence[Candidate],
    *,
    location: str,
    select: str | None,
    describe_missing: DescribeMissing,
    not_found: MakeNotFoundError,
    read_step: ReadStep = lambda _candidate: None,
    records: RunRecords = _NO_RECORDS,
    links: Sequence[str] = (),
) -> ResolvedSource:
    """Decides which candidates a path stands for.

    Folders, or files, that are named after steps are one run, and its newest complete step is
    chosen; one that is named as the last counts by the step in its contents. All other candidates
    in one folder are returned together; `--select` chooses one of them.

    Args:
        candidates: The candidates that the readers recognised.
        location: The path as the user typed it.
        select: The user's selection, or None.
        describe_missing: Says what a candidate lacks.
        not_found: Returns the error for a folder without a candidate.
        read_step: Returns the step in a candidate's contents.
        records: What the files of runs say of their steps.
        links: Folders that are links, which were not searched.

    Returns:
        The candidates, and what was passed over.
    """
    resolver = _Resolver(location, describe_missing, not_found, read_step, records)
    resolved = resolver.choose(drop_lone_optimizers(candidates), "", select)
    chosen = parse_step(resolved.folder) if resolved.folder else None
    is_tracked = records.read_tracker(posixpath.dirname(resolved.folder)) is not None
    newer = [
        link
        for link in links
        if not is_tracked and chosen is not None and (parse_step(link) or 0) > chosen
    ]
    if newer and select is None:
        raise AmbiguousSourceError(
            f"{newer[-1]!r} is newer than {resolved.folder!r}, but a link, which is not followed",
            where=location,
            hint=f"give its own path: {posixpath.join(location, newer[-1])}",
        )
    return resolved


@dataclass(slots=True)
class _Resolver:
    """Descends from the root and decides folder by folder; its fields are those of `resolve`."""

    location: str
    describe_missing: DescribeMissing
    not_found: MakeNotFoundError
    read_step: ReadStep
    records: RunRecords
    # The numbers of steps that are files, or named as the last.
    numbers: dict[str, int] = field(default_factory=dict)

    def choose(
        self, candidates: Sequence[Candidate], base: str, select: str | None
    ) -> ResolvedSource:
        """Decides among candidates that are all in the folder `base`, or are that file."""
        if [candidate.files for candidate in candidates] == [(base,)]:
            folder = posixpath.dirname(base)
            return ResolvedSource(folder, _units(candidates, folder), select)
        all_steps, others = self._split_steps(candidates, base)
        kept = drop_companions(others)
        units, steps = _units(kept, base), all_steps
        if any(map(_is_primary, kept)):
            steps = {
                folder: inside
                for folder, inside in steps.items()
                if not {candidate.format for candidate in inside} <= _SECONDARY
            }
        runs = {relative_path(posixpath.dirname(folder), base) for folder in steps}
        if select is not None:
            chosen = self._select(all_steps, _units(others, base), base, select)
            if chosen is not None:
                return chosen
        if len(runs) + bool(units) > 1:
            here = [step for step in steps if posixpath.dirname(step) == base]
            newest = max(here, key=self._sort_key, default="")
            labels = [*(unit.label for unit in units), *sorted(runs)]
            raise self._ambiguous(labels, select, relative_path(newest, base))
        if steps:
            return self._choose_newest(steps, select)
        if not units:
            raise self.not_found(base)
        passed = [c for folder in all_steps.keys() - steps.keys() for c in all_steps[folder]]
        ignored = [c for c in (*others, *passed) if c not in kept and c.format != _SHARDS]
        names = ", ".join(candidate.files[0] for candidate in ignored)
        notes = (f"left alone beside the model: {names}",) if ignored else ()
        return ResolvedSource(base, units, select, notes)

    def _select(
        self, steps: _Steps, units: Sequence[CheckpointUnit], base: str, select: str
    ) -> ResolvedSource | None:
        """Follows a selection that names a step, a run or a unit; None if it names none."""
        for folder, inside in steps.items():
            rest = _rest(select, relative_path(folder, base))
            if rest is not None:
                return self.choose(inside, folder, rest or None)
        run = {
            f: c for f, c in steps.items() if relative_path(posixpath.dirname(f), base) == select
        }
        if run:
            return self._choose_newest(run, None)
        # A folder of a unit can be in that of another one.
        for unit in sorted(units, key=lambda unit: -len(unit.label)):
            rest = _rest(select, unit.label)
            if rest is None:
                continue
            # The optimizer's file in the folder of a model, with its number, belongs to it.
            number = model_number(_main_file(unit.candidate))
            optimizers = (
                other
                for other in units
                if is_optimizer_candidate(other.candidate)
                and other is not unit
                and other.candidate.folder == unit.candidate.folder
                and model_number(other.candidate.files[0]) == number
            )
            return ResolvedSource(base, (unit, *optimizers), rest or None)
        return None

    def _split_steps(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Splits candidates into steps, which are folders and files, and others."""
        folders, others = self._split_step_folders(candidates, base)
        numbers: dict[str, int] = {}
        files: _Steps = {}
        kinds = set()
        for candidate in others:
            name = parse_step_file(candidate.files[0]) if is_single_file(candidate) else None
            if name is not None:
                numbers[candidate.files[0]], files[candidate.files[0]] = name.number, [candidate]
                kinds.add((candidate.folder, name.kind))
        if len(kinds) > 1:  # they count different things, such as two models
            numbers, files = {}, {}
        rest = [candidate for candidate in others if [candidate] not in files.values()]
        for candidate in list(rest):
            path = candidate.files[0] if is_single_file(candidate) else candidate.folder
            has_steps = bool(folders or files)
            number = self.read_step(candidate) if has_steps and is_called_last(path) else None
            if number is not None:
                numbers[path], files[path] = number, [candidate]
                rest.remove(candidate)
        if any(map(_is_primary, rest)):
            return folders, others
        self.numbers |= numbers
        return folders | files, rest

    def _split_step_folders(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Splits candidates into those of folders of steps below a folder, and others."""
        steps: _Steps = {}
        others: list[Candidate] = []
        for candidate in candidates:
            parts = [p for p in relative_path(candidate.folder, base).split("/") if p != _HERE]
            folders = [posixpath.join(base, *parts[: at + 1]) for at in range(len(parts))]
            step = next(filter(self._is_step, folders), None)
            if step is None:
                others.append(candidate)
            else:
                steps.setdefault(step, []).append(candidate)
        return steps, others

    def _is_step(self, folder: str) -> bool:
        above, name = posixpath.split(folder)
        if name == RELEASE:
            return self.records.read_tracker(above) is not None
        return _STEP.fullmatch(name) is not None

    def _sort_key(self, step: str) -> tuple[int, bool, str]:
        """Returns the sort key of a step; one that is named as the last precedes its equal."""
        number = self.numbers.get(step, parse_step(step) or 0)
        return number, not is_called_last(step), step

    def _choose_newest(self, steps: _Steps, select: str | None) -> ResolvedSource:
        rolled_back: Collection[str] = frozenset()  # only complete steps count
        if self.records.find_rolled_back(list(steps)):
            inside = {folder: self._resolve_step(steps[folder], folder, select) for folder in steps}
            complete = [f for f, (resolved, missing) in inside.items() if resolved and not missing]
            rolled_back = frozenset(self.records.find_rolled_back(complete))
        named, passed = self._follow_tracker(steps)
        ordered = sorted(
            steps, key=lambda s: (s in named, s not in rolled_back, self._sort_key(s))
        )[::-1]
        damaged: dict[str, str] = {}
        for at, folder in enumerate(ordered):
            resolved, missing = self._resolve_step(steps[folder], folder, select)
            # The reader's own error is more precise, so that of an only step is left to it.
            if resolved is not None and (not missing or len(ordered) == 1):
                rest = set(ordered[at + 1 :])
                gone = self._describe_rest(folder, rest, rolled_back, is_named=folder in named)
                taken = [f"{folder} was taken"] if folder in self.numbers else []
                notes = (*taken, *passed, *gone, *resolved.notes)
                return replace(resolved, notes=notes, damaged=damaged)
            if UNFINISHED not in missing:
                damaged[folder] = missing
            passed.append(f"{folder} was passed over: {missing}")
        raise NotACheckpointError(
            f"none of {len(ordered)} steps is complete; {passed[0]}",
            where=self.location,
            hint=f"see `ckptkit inspect {posixpath.join(self.location, ordered[0])}`",
        )

    def _follow_tracker(self, steps: _Steps) -> tuple[Collection[str], list[str]]:
        """Returns the steps that the run's tracker names, and a note if there is none."""
        run = posixpath.dirname(next(iter(steps)))
        tracked = self.records.read_tracker(run)
        if tracked is None:
            return (), []
        file, tag = tracked
        named = [step for step in steps if names_step(tag, posixpath.basename(step))]
        return named, [] if named else [f"{file!r} names {quote(tag)}, which is not there"]

    def _describe_rest(
        self, taken: str, rest: set[str], rolled_back: Collection[str], *, is_named: bool
    ) -> list[str]:
        """Returns notes about steps that are left alone."""
        back = sorted(rest & set(rolled_back), key=self._sort_key)
        notes: list[str] = []
        if back:
            notes.append(Aside(f"{', '.join(back)} left alone: training went back from it"))
        rest -= set(back)
        newer = [s for s in rest if is_named and self._sort_key(s) > self._sort_key(taken)]
        tracked = self.records.read_tracker(posixpath.dirname(taken)) if newer else None
        if tracked is not None:
            names = ", ".join(sorted(newer, key=self._sort_key))
            notes.append(f"{names} left alone: {tracked[0]!r} names {taken}")
        older = len(rest) - len(newer)
        if older:
            steps = counted(older, "older step")
            notes.append(Aside(f"{posixpath.basename(taken)} is used; {steps} left alone"))
        return notes

    def _resolve_step(
        self, candidates: Sequence[Candidate], folder: str, select: str | None
    ) -> tuple[ResolvedSource | None, str]:
        """Returns the contents of a step, and what it lacks."""
        try:
            resolved = self.choose(candidates, folder, select)
        except NotACheckpointError as error:
            return None, error.message
        missing = (self.describe_missing(unit.candidate) for unit in resolved.units)
        return resolved, next(filter(None, missing), "")

    def _ambiguous(
        self, labels: Sequence[str], select: str | None, step: str
    ) -> AmbiguousSourceError | CannotPlanError:
        shown = (f"'.' with step {step!r}" if label == _HERE else repr(label) for label in labels)
        names = ", ".join(shown)
        newest = f", or --select {_HERE} for the newest step" if _HERE in labels[1:] else ""
        hint = f"choose one with --select {labels[0]}{newest}, or give its path"
        if select is None:
            text = f"holds several checkpoints: {names}"
            return AmbiguousSourceError(text, where=self.location, hint=hint)
        text = f"holds no {select!r}; found {names}"
        return CannotPlanError(text, where=self.location, hint=hint)


_Steps = dict[str, list[Candidate]]


def _rest(select: str, label: str) -> str | None:
    """Returns the part of a selection after `label`; None if it does not begin with it."""
    if select == label:
        return ""
    return select[len(label) + 1 :] if select.startswith(f"{label}/") else None


def _units(candidates: Sequence[Candidate], base: str) -> tuple[CheckpointUnit, ...]:
    folders = [
        candidate.folder for candidate in candidates if not is_optimizer_candidate(candidate)
    ]
    units = []
    for candidate in candidates:
        above, name = posixpath.split(candidate.folder)
        home = above if name == _OF_VERL and above not in (*folders, base) else candidate.folder
        relative = relative_path(home, base)
        is_optimizer = is_optimizer_candidate(candidate)
        label = "" if relative == _HERE else relative
        if not label or is_optimizer or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, relative_path(_main_path(candidate), candidate.folder))
        is_optimizer = is_optimizer or is_optimizer_folder(posixpath.basename(candidate.folder))
        units.append(CheckpointUnit(label, candidate, is_optimizer))
    return tuple(units)
