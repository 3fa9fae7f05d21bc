"""The choice among the candidates under a path: the newest step, and models without companions.

A step of a run is a folder, or a file such as `epoch=0-step=500.ckpt` and `iter_2000.pth`. The
newest one is taken, or that which Megatron-LM's file `latest_checkpointed_iteration.txt` names;
verl, slime and Megatron-Bridge write this file too. nanotron's file is `latest.txt`.

Source: lightning/pytorch/callbacks/model_checkpoint.py (`format_checkpoint_name`,
`CHECKPOINT_NAME_LAST`), nemo/lightning/pytorch/callbacks/model_checkpoint.py,
megatron/training/checkpointing.py (`get_checkpoint_tracker_filename`, `read_metadata`),
mmengine/hooks/checkpoint_hook.py, fairseq/checkpoint_utils.py,
composer/callbacks/checkpoint_saver.py, lerobot/utils/train_utils.py (`get_step_checkpoint_dir`),
nemo_automodel/recipes/base_recipe.py (`epoch_E_step_S`), nemo_rl/utils/checkpoint.py (`step_N`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    InputError,
    MissingFileError,
    NotACheckpointError,
)
from ckptkit.core.text import Aside, counted, list_first, quote
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp.megatron import RUN_CONFIG
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.safetensors.hf_shards import (
    CONSOLIDATED_FOLDER,
    SHARDED_FOLDER,
    HfShardsReader,
)
from ckptkit.formats.torch_files import TorchOptimizerReader, is_optimizer_candidate, model_number
from ckptkit.storage.base import Source
from ckptkit.storage.locations import relative_path

_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
# Ignored next to a model: formats that are only refused, and those from which a model was made.
_SECONDARY = {ForeignReader.name, "zero", "universal"}
_SHARDS = HfShardsReader.name  # noted where they are compared with the model next to them
_NO_CHECKPOINTS = {ForeignReader.name, TorchOptimizerReader.name}  # by themselves
_OF_RANKS = RankFilesReader.name
_COPY_OF_RANKS = "huggingface"  # verl's folder for the same weights, gathered
_COPY_OF_BRIDGE = "hf"  # Megatron-Bridge's, below the step
_COPY_OF_DCP = "hf_ckpt"  # VeOmni's, below the step
_MODEL_FORMATS = {"safetensors", "torch", _SHARDS}  # which `save_model` of a framework writes
_FINAL = re.compile(r"final", re.IGNORECASE)
_SHARDED_MODEL = re.compile(
    r"pytorch_model_fsdp_\d+|pytorch_model(_\d+)?"
)  # of Trainer, accelerate
# Folders in that of a run, in which its steps are: of accelerate, Lightning, NeMo and others.
_IN_A_RUN = re.compile(r"checkpoints?|ckpts?|weights|lightning_logs|version_\d+")
_OF_STATES = re.compile(
    r"(^|[-_])(optim|sched|scheduler|lr|rng|random|scaler|sampler|state)", re.IGNORECASE
)
# The states of optimizers and generators, as LeRobot saves them.
_STATE_FILE = re.compile(
    r"(optim\w*|(lr_)?scheduler|rng|random|scaler|sampler)(_states?)?\.safetensors"
)
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
    of_dcp = [c for c in candidates if c.format == "dcp"]
    of_bridge = {c.folder for c in candidates if _has_run_config(c)}

    def is_kept(candidate: Candidate) -> bool:
        above, name = posixpath.split(candidate.folder)
        if name == _COPY_OF_RANKS and above in of_ranks:
            return False
        if name == _COPY_OF_BRIDGE and above in of_bridge:
            return False
        is_dcp = candidate.format == "dcp"
        if name == _COPY_OF_DCP and not is_dcp and any(_is_below(c.folder, above) for c in of_dcp):
            return False
        if _is_state(candidate):
            return all(map(_is_state, candidates))
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


def _is_state_of_training(path: str) -> bool:
    return _OF_STATES.search(posixpath.basename(path)) is not None


def _is_below(folder: str, above: str) -> bool:
    return posixpath.join("/", folder, "").startswith(posixpath.join("/", above, ""))


def _is_state(candidate: Candidate) -> bool:
    is_single = candidate.format == "safetensors" and len(candidate.files) == 1
    return is_single and _STATE_FILE.fullmatch(_main_file(candidate)) is not None


def _has_run_config(candidate: Candidate) -> bool:
    return any(posixpath.basename(path) == RUN_CONFIG for path in candidate.files)


def is_leftover(candidate: Candidate, models: Collection[str]) -> bool:
    """Returns whether a candidate is the shards of a model in safetensors in these folders."""
    if candidate.format != _SHARDS:
        return False
    above, name = posixpath.split(candidate.folder)
    whole = posixpath.join(candidate.folder, CONSOLIDATED_FOLDER)
    return not {candidate.folder, whole}.isdisjoint(models) or (
        name == SHARDED_FOLDER and above in models
    )


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(_main_file(candidate)) is not None


# What frameworks count: Composer `ep` and `ba`, NeMo Automodel `epoch` and `step`.
_EPOCHS = frozenset({"epoch", "ep"})
_WORD = r"checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch"
_COUNTER = rf"(?P<kind>{_WORD}|ep|batch|ba)[-_=]?0*(?P<number>\d{{1,15}})"
_EACH_COUNTER = re.compile(_COUNTER, re.IGNORECASE)
_ANY_COUNTER = re.sub(r"\?P<\w+>", "?:", _COUNTER)
_ALL_COUNTERS = rf"(?:(?:checkpoint|ckpt)[-_])?{_ANY_COUNTER}(?:[-_]{_ANY_COUNTER})*"
_COUNTERS = re.compile(_ALL_COUNTERS, re.IGNORECASE)
_STEP_FILE = re.compile(rf"(?P<of>(?:[\w-]+?[-_])??)(?P<counters>{_ALL_COUNTERS})", re.IGNORECASE)
_LIGHTNING = re.compile(
    r"(?:.*[-_])?(?P<kind>step|epoch)=0*(?P<number>\d{1,15})(?:-\D.*)?", re.IGNORECASE
)
_ENDING = re.compile(r"(\.pth\.tar|\.ckpt|\.pth|\.pt|\.bin)$")
_OF_ONE_RANK = re.compile(r"[-_.]rank[-_.]?\d{1,7}$")
_LAST = re.compile(r"(checkpoint_)?(last|latest)(-v\d+)?", re.IGNORECASE)
_FOLDER = re.compile(
    rf"(?:.*\bstep=|(?:{_WORD})?[-_=]?)"
    r"0*(\d{1,15})(?:-\w+=-?[\d.]+)*(?:-last)?(?:\.ckpt)?",  # as NeMo names them
    re.IGNORECASE,
)
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4}|\d{6})?")


class StepName(Struct, frozen=True):
    """The step in a name: a number, and the word for what is counted."""

    kind: str
    number: int


def parse_step_file(path: str) -> StepName | None:
    """Returns the step in the name of a file, or None; the files of all ranks are of one step.

    >>> [parse_step_file(name) for name in ("epoch=3-step=500.ckpt", "iter_2000.pth", "model.pt")]
    [StepName(kind='step', number=500), StepName(kind='iter', number=2000), None]
    >>> parse_step_file("ep1-ba40-rank0.pt")
    StepName(kind='ba', number=40)
    """
    stem = _stem(path)
    match = _STEP_FILE.fullmatch(stem)
    if match is not None:
        counted = _parse_counters(match["counters"])
        return counted and replace(counted, kind=match["of"].lower() + counted.kind)
    match = _LIGHTNING.fullmatch(stem)
    return None if match is None else StepName(match["kind"].lower(), int(match["number"]))


def _parse_counters(name: str) -> StepName | None:
    """Returns the step of a name that has nothing but counters: the last that counts no epochs."""
    if _COUNTERS.fullmatch(name) is None:
        return None
    found = [
        StepName(match["kind"].lower(), int(match["number"]))
        for match in _EACH_COUNTER.finditer(name)
    ]
    if [one.kind for one in found] == ["batch"]:
        return None  # the size of one
    return ([one for one in found if one.kind not in _EPOCHS] or found)[-1]


def is_called_last(path: str) -> bool:
    """Returns whether a file or folder is named as the last of a run, without its step.

    >>> is_called_last("run/last.ckpt"), is_called_last("run/epoch=0-step=2.ckpt")
    (True, False)
    """
    return _LAST.fullmatch(_stem(path)) is not None


def _stem(path: str) -> str:
    return _OF_ONE_RANK.sub("", _ENDING.sub("", posixpath.basename(path)))


def step_of_files(candidate: Candidate) -> StepName | None:
    """Returns the step in the names of a candidate's files, where these are a step by themselves.

    They are one file, or one for each rank; in other formats the folder is the step.
    """
    is_own = candidate.format == _OF_RANKS or (
        candidate.format == "torch" and len(candidate.files) == 1
    )
    return parse_step_file(candidate.files[0]) if is_own else None


_MOST_POINTER_BYTES = 4096


def read_pointer(source: Source, path: str) -> str | None:
    """Returns the step whose name a file holds, as copies of links do; None for other files.

    A link to what is no longer there names an empty step.
    """
    try:
        size = source.stat(path).size_bytes
        data = source.read(path, 0, size) if size <= _MOST_POINTER_BYTES else b""
        name = posixpath.basename(data.decode().strip())
    except MissingFileError:
        return ""
    except (InputError, UnicodeDecodeError):
        return None
    return name if parse_step(name) is not None else None


def find_step_files(candidates: Iterable[Candidate]) -> dict[str, tuple[int, Candidate]]:
    """Returns candidates that are steps of one run as files, by the path of their first file.

    There are none where names count different things, as those of two models do.
    """
    named = [(name, c) for c in candidates if (name := step_of_files(c)) is not None]
    kinds = {(candidate.folder, name.kind) for name, candidate in named}
    return {c.files[0]: (name.number, c) for name, c in named} if len(kinds) == 1 else {}


def name_step(path: str) -> str:
    """Returns the step of a run that a file in the run belongs to: a folder, or its first file.

    >>> name_step("ep0-ba10/__0_0.distcp"), name_step("ep0-ba10-rank3.pt")
    ('ep0-ba10', 'ep0-ba10-rank0.pt')
    """
    folder, slash, _ = path.partition("/")
    return folder if slash else _RANK_IN_FILE.sub(r"\g<1>0", folder)


_RANK_IN_FILE = re.compile(r"([-_.]rank[-_.]?)\d{1,7}(?=\.\w+$)")
_OF_VERL = "dist_ckpt"  # its folder for Megatron-Core's files
# Folders below a step, which are no step: of accelerate, verl, NeMo-RL, VeOmni, LeRobot and others.
_UNIT_FOLDER = re.compile(
    r"(pytorch_model_fsdp|optimizer|model|base_model)_\d+|model|actor|critic|state\.ckpt|optim(izer)?"
    rf"|{_OF_VERL}|policy|value|weights|ckpt|pretrained_model|hf_ckpt|huggingface|{CONSOLIDATED_FOLDER}"
    r"|pytorch_model(_\d+)?"  # accelerate's tags for DeepSpeed
)
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?(_\d+)?")
# In the folder of a run: Megatron-LM's, and that of nanotron, whose steps are numbers only.
TRACKERS = ("latest_checkpointed_iteration.txt", "latest.txt")
UNFINISHED = "the save was not finished"  # in what a step lacks, which then is not damaged
RELEASE = "release"  # the folder of weights that no training of the run has changed
ITSELF = "."
"""What selects the model in a folder itself, as `.` or `FOLDER/.`; never a step below it."""


class CheckpointUnit(Struct, frozen=True):
    """One or several state dicts that were written together."""

    label: str  # its name for `--select`: its folder under the step, or its main file
    candidate: Candidate
    is_optimizer: bool  # whether the folder is named as that of a model's optimizer


class ResolvedSource(Struct, frozen=True):
    """The checkpoint that a path stands for."""

    folder: str  # the step's folder relative to the source's root; empty for the root
    units: tuple[CheckpointUnit, ...]
    # the rest of the selection, for a state dict inside the units, or None
    select: str | None = None
    notes: tuple[str, ...] = ()  # what was passed over, and why
    # steps that were passed over though their saves had ended: what each lacks
    damaged: Mapping[str, str] = field(default_factory=dict)
    # all steps of the run, the newest last; relative to the source's root
    steps: tuple[str, ...] = ()
    # models that are beside the steps and no part of one: what `--select` takes each by, with
    # what it lacks, which is empty if it is whole
    finals: Mapping[str, str] = field(default_factory=dict)


class FoundCheckpoint(Struct, frozen=True):
    """A checkpoint under a path where none is chosen."""

    select: str
    format: str  # its format, or those of its parts
    step: int | None  # the number of the step that it is; None for others
    problem: str = ""  # what it lacks; empty if it is whole


def is_unit_folder(name: str) -> bool:
    return _UNIT_FOLDER.fullmatch(name) is not None


def is_optimizer_folder(name: str) -> bool:
    return _OPTIMIZER_FOLDER.fullmatch(name) is not None


def parse_step(folder: str) -> int | None:
    """Returns the step in the name of a folder or file; for the folder of a unit, in that above it.

    >>> parse_step("runs/a/checkpoint-500"), parse_step("checkpoint-500/pytorch_model_fsdp_0")
    (500, 500)
    >>> parse_step("run/epoch_0_step_100"), parse_step("run/ep0-ba10-rank0.pt")
    (100, 10)
    """
    found = _find_step(folder)
    return None if found is None else found[1]


def find_step(folder: str) -> str | None:
    """Returns the folder, or file, of the step that a folder is or belongs to; None without one.

    What a framework names iteration 0 below a step, as Megatron-Core in NeMo-RL, is that step.

    >>> find_step("run/step_10/policy/weights/iter_0000000"), find_step("run/model")
    ('run/step_10', None)
    """
    found = _find_step(folder)
    return None if found is None else found[0]


def _find_step(folder: str) -> tuple[str, int] | None:
    path, found, is_unit_below = folder.replace("\\", "/").rstrip("/"), None, False
    while path:
        above, name = posixpath.split(path)
        number = _parse_step(name)
        if number is not None and found is None:
            found, is_unit_below = (path, number), False
            if number or not name.startswith("iter_"):
                break
        elif number is not None and is_unit_below:
            return path, number
        elif number is None and is_unit_folder(name):
            is_unit_below = True
        else:
            break
        path = above
    return found


def _parse_step(name: str) -> int | None:
    match = _FOLDER.fullmatch(name)
    if match is not None:
        return None if _DATE.fullmatch(name) else int(match[1])
    counted = parse_step_file(name) if _ENDING.search(name) else _parse_counters(name)
    return None if counted is None else counted.number


def names_step(tag: str, folder: str) -> bool:
    """Returns whether the tag in a tracker names the folder of a step.

    >>> names_step("5", "iter_0000005"), names_step("release", "release"), names_step("5", "iter_7")
    (True, True, False)
    """
    is_number = tag.isascii() and tag.isdigit()
    return folder == tag or (is_number and parse_step(folder) == int(tag))


class CandidateChooser:
    """Chooses among the candidates below a path; by itself it knows no more than their names.

    Folders, or files, that are named after steps are one run, and its newest complete step is
    chosen; one that is named as the last counts by the step in its contents. All other candidates
    in one folder are returned together; `--select` chooses one of them. It descends from the root
    and decides folder by folder. A subclass that has the files open answers the four questions.
    """

    def __init__(self, location: str) -> None:
        self.location = location  # as the user typed it
        self.numbers: dict[str, int] = {}  # of steps that are files, or named as the last

    def describe_missing(self, candidate: Candidate) -> str:  # noqa: ARG002  names say nothing
        """Says what a candidate lacks; empty if it is whole."""
        return ""

    def read_step(self, candidate: Candidate) -> int | None:  # noqa: ARG002
        """Returns the step in a candidate's contents, or None."""
        return None

    def find_rolled_back(self, steps: Sequence[str]) -> Collection[str]:  # noqa: ARG002
        """Returns those of some steps that training went back from, by their folders."""
        return ()

    def read_tracker(self, run: str) -> tuple[str, str] | None:  # noqa: ARG002
        """Returns which of `TRACKERS` a folder has, and what it says, such as `RELEASE`."""
        return None

    def resolve(
        self, candidates: Sequence[Candidate], select: str | None, links: Sequence[str] = ()
    ) -> ResolvedSource:
        """Decides which candidates, of which there is one at least, the path stands for.

        Folders that are links were not searched: one that is a newer step is refused.
        """
        resolved = self.choose(candidates, "", select)
        chosen = parse_step(resolved.folder) if resolved.folder else None
        is_tracked = self.read_tracker(posixpath.dirname(resolved.folder)) is not None
        newer = [
            link
            for link in links
            if not is_tracked and chosen is not None and (parse_step(link) or 0) > chosen
        ]
        if newer and select is None:
            raise AmbiguousSourceError(
                f"{newer[-1]!r} is newer than {resolved.folder!r}, but a link, which is not"
                " followed",
                where=self.location,
                hint=f"give its own path: {posixpath.join(self.location, newer[-1])}",
            )
        return resolved

    def choose(
        self, candidates: Sequence[Candidate], base: str, select: str | None
    ) -> ResolvedSource:
        """Decides among candidates that are all in the folder `base`, or are that file."""
        if len(candidates) == 1 and base in candidates[0].files:
            folder = posixpath.dirname(base)
            return ResolvedSource(folder, _units(candidates, folder), select)
        all_steps, others = self._split_steps(candidates, base)
        kept = drop_companions(others)
        units, steps = _units(kept, base), all_steps
        if any(_is_primary(one) and one.folder == base for one in kept):
            steps = _drop_parts(steps, is_step=self._is_within_step(base))
        runs = {relative_path(posixpath.dirname(folder), base) for folder in steps}
        finals = self._find_finals(steps, units, base)
        if select is not None:
            named = _units(others, base)
            chosen = self._select_itself(named, base, select)
            chosen = chosen or self._select(all_steps, named, base, select)
            if chosen is not None:
                return replace(chosen, **self._list_run(steps, finals)) if finals else chosen
            is_itself = posixpath.basename(select) == ITSELF
            if (is_itself and candidates) or (steps and find_step(select) == select):
                home = posixpath.dirname(select)
                itself = f"{home!r} itself" if home else "the folder itself"
                text = f"no model in {itself}" if is_itself else f"no step {select!r}"
                raise self._holds_none(text, candidates, base)
        if finals:  # a selection may name a part of the newest step
            return self._choose_newest(steps, select, finals)
        if len(runs) + bool(units) > 1:
            models = _name_models(units, base)
            labels = [_show_label(label, own[0], base) for label, own in models.items()]
            whole = [n for n in models if not any(map(self.describe_missing, models[n]))]
            for run in sorted(runs):
                label, is_whole = self._describe_run(steps, run, base)
                labels.append(repr(label))
                whole += [label] if is_whole else []
            raise self._ambiguous(labels, whole, select)
        if steps:
            return self._choose_newest(steps, select)
        passed = [c for folder in all_steps.keys() - steps.keys() for c in all_steps[folder]]
        ignored = [
            c for c in (*others, *passed) if not (c in kept or c.format == _SHARDS or _is_state(c))
        ]
        names = ", ".join(candidate.files[0] for candidate in ignored)
        notes = (f"left alone beside the model: {names}",) if ignored else ()
        return ResolvedSource(base, units, select, notes)

    def _holds_none(self, text: str, candidates: Sequence[Candidate], base: str) -> CannotPlanError:
        """Returns the error for a selection that names nothing, with what there is."""
        steps, others = self._split_steps(candidates, base)
        names = [relative_path(s, base) for s in sorted(steps, key=self._sort_key, reverse=True)]
        names += _name_models(_units(drop_companions(others), base), base)
        found = self.list_all(candidates, base)
        whole = next((one.select for one in found if not one.problem), None)
        hint = f"none of them is whole: see `ckptkit inspect {self.location}`"
        if whole is not None:
            hint = f"choose one with --select {whole}"
        text = f"holds {text}; found {list_first(names)}"
        return CannotPlanError(text, where=self.location, hint=hint)

    def list_all(
        self, candidates: Sequence[Candidate], base: str = ""
    ) -> Iterator[FoundCheckpoint]:
        """Yields all checkpoints in a folder: steps, run by run and the newest first, and others.

        A step that holds several is listed as these.
        """
        steps, others = self._split_steps(candidates, base)
        newest_first = sorted(steps, key=self._sort_key, reverse=True)
        for folder in sorted(newest_first, key=posixpath.dirname):
            try:
                _, problem = self._resolve_step(steps[folder], folder, None)
            except AmbiguousSourceError:
                yield from self.list_all(steps[folder], folder)
                continue
            formats = dict.fromkeys(candidate.format for candidate in steps[folder])
            number, _, _ = self._sort_key(folder)
            yield FoundCheckpoint(folder, " + ".join(formats), number, problem)
        kept = drop_companions(others)
        units = _units([c for c in others if c in kept or c.format == _SHARDS], base)
        for label, inside in _name_models(units, base).items():
            problem = next(filter(None, map(self.describe_missing, inside)), "")
            joined = " + ".join(dict.fromkeys(candidate.format for candidate in inside))
            yield FoundCheckpoint(posixpath.join(base, label), joined, None, problem)

    def _select_itself(
        self, units: Sequence[CheckpointUnit], base: str, select: str
    ) -> ResolvedSource | None:
        """Follows a selection of the model in a folder itself; None for others.

        Of several state dicts in it, that without a name is meant.
        """
        if posixpath.basename(select) != ITSELF:
            return None
        home = posixpath.join(base, posixpath.dirname(select)).rstrip("/")
        kept = drop_companions([unit.candidate for unit in units])
        own = [u for u in units if u.candidate in kept and _is_in_run(u.candidate, home)]
        own = [unit for unit in own if _is_final(unit.candidate, home)] or own
        if all(unit.is_optimizer for unit in own):
            return None
        beside = (
            unit
            for unit in units
            if unit.is_optimizer and posixpath.dirname(unit.candidate.folder) == home
        )
        return ResolvedSource(base, tuple(dict.fromkeys([*own, *beside])), ITSELF)

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
        if run and select != ITSELF:
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
        folder = posixpath.join(base, select)
        inside = [u.candidate for u in units if _is_below(u.candidate.folder, folder)]
        return self.choose(inside, folder, None) if inside and select else None

    def _split_steps(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Splits candidates into steps, which are folders and files, and others."""
        folders, others = self._split_step_folders(candidates, base)
        named = find_step_files(others)
        numbers = {path: number for path, (number, _) in named.items()}
        files = {path: [candidate] for path, (_, candidate) in named.items()}
        lasts: _Steps = {}
        rest = []
        for candidate in others:
            home = _find_last(candidate, base) if folders or files else ""
            if home:
                lasts.setdefault(home, []).append(candidate)
            elif [candidate] not in files.values():
                rest.append(candidate)
        for home, inside in lasts.items():
            number = next(filter(None, map(self.read_step, inside)), None)
            if number is None:
                rest += inside
            else:
                numbers[home], files[home] = number, inside
        # Beside the model in a step, files with its number are parts of the step; a lone file with
        # a number is what the model was made of, but for those of Lightning.
        is_lone = len(files) == 1 and not min(files).endswith(".ckpt")
        is_part = self._is_within_step(base) or any(map(_is_state_of_training, files)) or is_lone
        if is_part and any(map(_is_primary, rest)):
            return folders, others
        self.numbers |= numbers
        return folders | files, rest

    def _is_within_step(self, base: str) -> bool:
        """Returns whether a folder, or the location itself, is a step or in one."""
        name = posixpath.basename(self.location.rstrip("/"))
        return bool(base) or (parse_step(name) is not None and not name.isdigit())

    def _find_finals(
        self, steps: _Steps, units: Sequence[CheckpointUnit], base: str
    ) -> dict[str, str]:
        """Returns the models that training left beside the steps of one run, with what they lack.

        Nothing is returned where the units may be another run, or a step without a number.
        """
        runs = {posixpath.dirname(folder) for folder in steps}
        if len(runs) != 1 or not units or self._is_within_step(base):
            return {}
        run = runs.pop()
        homes = {posixpath.dirname(run)} if _IN_A_RUN.fullmatch(posixpath.basename(run)) else set()
        while homes and _IN_A_RUN.fullmatch(posixpath.basename(min(homes, key=len))):
            homes.add(posixpath.dirname(min(homes, key=len)))
        homes.add(run)
        finals: dict[str, str] = {}
        for unit in units:
            folder = unit.candidate.folder
            is_beside = any(_is_below(folder, home) for home in homes) or _is_below(run, folder)
            is_final = any(_is_final(unit.candidate, home) for home in (base, run))
            if not (is_beside and is_final):
                return {}
            label = next(
                (
                    posixpath.join(home.removeprefix(base).strip("/"), ITSELF)
                    for home in (base, run)
                    if _is_in_run(unit.candidate, home)
                ),
                unit.label,
            )
            finals[label] = finals.get(label) or self.describe_missing(unit.candidate)
        return finals

    def _list_run(self, steps: _Steps, finals: Mapping[str, str]) -> dict[str, Any]:
        return {"steps": tuple(sorted(steps, key=self._sort_key)), "finals": finals}

    def _split_step_folders(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Splits candidates into those of folders of steps below a folder, and others."""
        steps: _Steps = {}
        others: list[Candidate] = []
        for candidate in candidates:
            parts = [p for p in relative_path(candidate.folder, base).split("/") if p != ITSELF]
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
            return self.read_tracker(above) is not None
        return _parse_step(name) is not None

    def _sort_key(self, step: str) -> tuple[int, bool, str]:
        """Returns the sort key of a step; one that is named as the last precedes its equal."""
        number = self.numbers.get(step, parse_step(step) or 0)
        return number, not is_called_last(step), step

    def _choose_newest(
        self, steps: _Steps, select: str | None, finals: Mapping[str, str] = MappingProxyType({})
    ) -> ResolvedSource:
        rolled_back: Collection[str] = frozenset()  # only complete steps count
        if self.find_rolled_back(list(steps)):
            inside = {folder: self._resolve_step(steps[folder], folder, select) for folder in steps}
            complete = [f for f, (resolved, missing) in inside.items() if resolved and not missing]
            rolled_back = frozenset(self.find_rolled_back(complete))
        named, passed = self._follow_tracker(steps)
        ordered = sorted(
            steps, key=lambda s: (s in named, s not in rolled_back, self._sort_key(s))
        )[::-1]
        damaged: dict[str, str] = {}
        for at, folder in enumerate(ordered):
            resolved, missing = self._resolve_step(steps[folder], folder, select)
            # The reader's own error is more precise, so that of an only step is left to it.
            if resolved is not None and (not missing or (len(ordered) == 1 and not finals)):
                rest = set(ordered[at + 1 :])
                gone = self._describe_rest(folder, rest, rolled_back, is_named=folder in named)
                is_choice = folder in self.numbers and len(ordered) > 1
                taken = [Aside(f"{folder} was taken")] if is_choice else []
                beside = _describe_finals(folder, finals)
                notes = (*taken, *passed, *gone, *beside, *resolved.notes)
                run = self._list_run(steps, finals)
                return replace(resolved, notes=notes, damaged=damaged, **run)
            if UNFINISHED not in missing:
                damaged[folder] = missing
            passed.append(f"{folder} was passed over: {missing}")
        whole = next((label for label, lack in finals.items() if not lack), "")
        take = f"take the model beside the steps with --select {whole}; " if whole else ""
        raise NotACheckpointError(
            f"none of {len(ordered)} steps is complete; {passed[0]}",
            where=self.location,
            hint=f"{take}see `ckptkit inspect {self.location}`",
        )

    def _follow_tracker(self, steps: _Steps) -> tuple[Collection[str], list[str]]:
        """Returns the steps that the run's tracker names, and a note if there is none."""
        run = posixpath.dirname(next(iter(steps)))
        tracked = self.read_tracker(run)
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
        number = self._sort_key(taken)[0]
        rest -= {s for s in rest if is_called_last(s) and self._sort_key(s)[0] == number}
        newer = [s for s in rest if is_named and self._sort_key(s) > self._sort_key(taken)]
        tracked = self.read_tracker(posixpath.dirname(taken)) if newer else None
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
        except AmbiguousSourceError:
            lacking = list(map(self.describe_missing, candidates))
            if not all(lacking):
                raise
            return None, lacking[0]
        missing = (self.describe_missing(unit.candidate) for unit in resolved.units)
        return resolved, next(filter(None, missing), "")

    def _describe_run(self, steps: _Steps, run: str, base: str) -> tuple[str, bool]:
        """Returns what `--select` takes a run by, and whether a step to take is in it.

        It is its folder; for the run in the folder `base` itself, the newest of its steps that is
        whole, or else the newest.
        """
        own = [folder for folder in steps if relative_path(posixpath.dirname(folder), base) == run]
        own.sort(key=self._sort_key, reverse=True)
        whole = None
        with suppress(AmbiguousSourceError):
            whole = next((f for f in own if not self._resolve_step(steps[f], f, None)[1]), None)
        label = relative_path(whole or own[0], base) if run == ITSELF else run
        return label, whole is not None

    def _ambiguous(
        self, labels: Sequence[str], whole: Sequence[str], select: str | None
    ) -> AmbiguousSourceError | CannotPlanError:
        """Returns the error for several checkpoints; what is not whole is not proposed."""
        names = ", ".join(labels)
        more = f", or --select {whole[-1]}" if whole[1:] else ""
        hint = f"choose one with --select {whole[0]}{more}, or give its path" if whole else ""
        hint = hint or f"none of them is whole: see `ckptkit inspect {self.location}`"
        if select is None:
            text = f"holds several checkpoints: {names}"
            return AmbiguousSourceError(text, where=self.location, hint=hint)
        text = f"holds no {select!r}; found {names}"
        return CannotPlanError(text, where=self.location, hint=hint)


_Steps = dict[str, list[Candidate]]


def _drop_parts(steps: _Steps, *, is_step: bool) -> _Steps:
    """Drops what is named like steps of DeepSpeed, and a part of the step that holds a model.

    Several are a run of their own, beside whose steps a model was saved, unless the folder is
    known as a step.
    """
    parts = {f for f, own in steps.items() if {one.format for one in own} <= _SECONDARY}
    is_run = len(parts) > 1 and not is_step
    return {f: own for f, own in steps.items() if is_run or f not in parts}


def _is_final(candidate: Candidate, base: str) -> bool:
    """Returns whether a candidate beside steps is a model, and not the state of a training.

    Such a state, as `best` or `last` without a number, may be newer than all steps. FSDP's
    `save_model` writes its shards into the folder of a unit.
    """
    name = posixpath.basename(candidate.folder)
    if any(map(is_called_last, (candidate.files[0], *filter(None, [name])))):
        return False
    if candidate.format in _MODEL_FORMATS:
        return candidate.format != "torch" or _is_model(candidate)
    return _is_in_run(candidate, base) or _FINAL.match(name) is not None


def _is_in_run(candidate: Candidate, base: str) -> bool:
    above, name = posixpath.split(candidate.folder)
    return candidate.folder == base or (
        above == base and _SHARDED_MODEL.fullmatch(name) is not None
    )


def _describe_finals(taken: str, finals: Mapping[str, str]) -> list[str]:
    notes: list[str] = []
    whole = [label for label, lack in finals.items() if not lack]
    if whole:
        names = ", ".join("that of the run's own folder" if n == ITSELF else repr(n) for n in whole)
        models = f"the final {'model' if len(whole) == 1 else 'models'}, {names}"
        takes = f"--select {whole[0]} takes {'it' if len(whole) == 1 else 'the first'}"
        notes.append(Aside(f"{taken} was taken; left alone: {models} ({takes})"))
    notes += [f"{label!r} beside the steps is not whole: {k}" for label, k in finals.items() if k]
    return notes


def _find_last(candidate: Candidate, base: str) -> str:
    """Returns the file, or the folder below `base`, that is named as the last; empty for none."""
    if step_of_files(candidate) is None and is_called_last(candidate.files[0]):
        return candidate.files[0]
    inside = candidate.folder.removeprefix(base).strip("/").split("/")
    at = next((at for at, part in enumerate(inside) if is_called_last(part)), None)
    return "" if at is None else posixpath.join(base, *inside[: at + 1])


def _name_models(units: Sequence[CheckpointUnit], base: str) -> dict[str, list[Candidate]]:
    """Returns the models among units, by what `--select` takes each by, below a folder."""
    models = [unit for unit in units if not unit.is_optimizer]
    own = [unit for unit in models if _is_in_run(unit.candidate, base)]
    named: dict[str, list[Candidate]] = {}
    for unit in models:
        above, name = posixpath.split(unit.label)
        label = above if above and _SHARDED_MODEL.fullmatch(name) else unit.label
        if own == [unit] and _is_final(unit.candidate, base):
            label = ITSELF
        named.setdefault(label, []).append(unit.candidate)
    return named


def _show_label(label: str, candidate: Candidate, base: str) -> str:
    """Returns a label for a message: that of the folder itself says nothing without its files."""
    inside = relative_path(candidate.folder, base)
    own = _main_file(candidate) if inside == ITSELF else inside
    return f"{label!r} ({own})" if label == ITSELF else repr(label)


def _rest(select: str, label: str) -> str | None:
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
        label = "" if relative == ITSELF else relative
        if not label or is_optimizer or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, relative_path(_main_path(candidate), candidate.folder))
        is_optimizer = is_optimizer or is_optimizer_folder(posixpath.basename(candidate.folder))
        units.append(CheckpointUnit(label, candidate, is_optimizer))
    return tuple(units)
