"""Which of the checkpoints under a path is meant: of steps the newest, of models the chosen.

Which of the candidates in one place are the model, and which only accompany it.

Steps of a run that are files and not folders: `epoch=0-step=500.ckpt`, `iter_2000.pth`.

Source: lightning/pytorch/callbacks/model_checkpoint.py (`format_checkpoint_name`,
`CHECKPOINT_NAME_LAST`), mmengine/hooks/checkpoint_hook.py, fairseq/checkpoint_utils.py.

Files that belong to no checkpoint, in groups that are few enough to be shown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, NotACheckpointError
from ckptkit.formats.base import Candidate
from ckptkit.formats.ranks.reader import ForeignReader, RankFilesReader
from ckptkit.formats.safetensors.hf_shards import SHARDED_FOLDER, HfShardsReader
from ckptkit.formats.torch_files.optimizer import (
    TorchOptimizerReader,
    is_optimizer_candidate,
    number_of,
    with_their_models,
)

_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
# Formats that yield to a model beside them: what is only refused, and what a model was made from.
_LESSER = {ForeignReader.name, "zero", "universal"}
_SHARDS = HfShardsReader.name  # told of where they are compared with the model beside them
_BESIDE = {ForeignReader.name, TorchOptimizerReader.name}  # what is no checkpoint by itself
_OF_RANKS = RankFilesReader.name
_COPY_OF_RANKS = "huggingface"  # where verl puts the same weights again, gathered


def is_certain(candidate: Candidate) -> bool:
    """Tells whether names alone leave no doubt that a candidate is a checkpoint that we read.

    Files that are only refused, and `.pt` files of any name, may be part of what others read.
    """
    return candidate.format not in _BESIDE and (candidate.format != "torch" or _is_model(candidate))


def yields(candidate: Candidate) -> bool:
    return candidate.format in _LESSER


def is_chosen_first(candidate: Candidate) -> bool:
    """Tells whether a candidate is certain to be a checkpoint, and yields to no other."""
    return is_certain(candidate) and not yields(candidate)


def main_file(candidate: Candidate) -> str:
    """Returns the name of a candidate's index, or of its first file."""
    names = [posixpath.basename(path) for path in candidate.files]
    return next((name for name in names if name.endswith(".index.json")), names[0])


def worth_reading(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops what accompanies a model, or is the same model in a lesser format.

    Beside a readable model these are loose `.pt` files, formats that are not read, and the
    `.bin` form of a model in safetensors.
    """
    safe = {c.folder for c in candidates if c.format == "safetensors" and _is_model(c)}
    left = [c for c in candidates if is_left_of(c, safe)]
    has_model = bool(safe) or any(
        c.format in {"dcp", _SHARDS} or (c.format == "torch" and _is_model(c)) for c in candidates
    )
    of_ranks = {c.folder for c in candidates if c.format == _OF_RANKS}

    def is_kept(candidate: Candidate) -> bool:
        if _is_copy(candidate, of_ranks):
            return False
        if yields(candidate) or candidate in left:
            return not has_model
        if candidate.format != "torch":
            return True
        has_better = has_model or bool(of_ranks)
        return candidate.folder not in safe if _is_model(candidate) else not has_better

    return [candidate for candidate in candidates if is_kept(candidate)]


def _is_copy(candidate: Candidate, of_ranks: Collection[str]) -> bool:
    above, name = posixpath.split(candidate.folder)
    return name == _COPY_OF_RANKS and above in of_ranks


def is_left_of(candidate: Candidate, models: Collection[str]) -> bool:
    """Tells whether a candidate is the shards that one of the models was consolidated from.

    Args:
        candidate: What was recognised.
        models: Folders that hold models in safetensors.
    """
    if candidate.format != _SHARDS:
        return False
    above, name = posixpath.split(candidate.folder)
    return candidate.folder in models or (name == SHARDED_FOLDER and above in models)


def note_of_ignored(candidates: Sequence[Candidate], kept: Sequence[Candidate]) -> tuple[str, ...]:
    """Names the files of what is left alone beside a model; nothing where all is kept."""
    dropped = [c for c in candidates if c not in kept and c.format != _SHARDS]
    names = [c.files[0] for c in dropped]
    return (f"left alone beside the model: {', '.join(names)}",) if names else ()


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(main_file(candidate)) is not None


_WORD = r"checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch"
_NAMED = re.compile(
    rf"(?P<kind>(?:\w+?[-_])?(?:{_WORD}))[-_=]?0*(?P<number>\d{{1,15}})", re.IGNORECASE
)
_LIGHTNING = re.compile(
    r"(?:.*[-_])?(?P<kind>step|epoch)=0*(?P<number>\d{1,15})(?:-\D.*)?", re.IGNORECASE
)
_ENDING = re.compile(r"(\.pth\.tar|\.ckpt|\.pth|\.pt|\.bin)$")
_LAST = re.compile(r"(checkpoint_)?(last|latest)(-v\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StepName:
    """What the name of a file tells: a number, and what is counted."""

    kind: str
    number: int


def step_name(path: str) -> StepName | None:
    """Returns what the name of a file tells of its step, or None.

    >>> step_name("epoch=3-step=500.ckpt"), step_name("iter_2000.pth"), step_name("model.pt")
    (StepName(kind='step', number=500), StepName(kind='iter', number=2000), None)
    """
    stem = _stem(path)
    match = _NAMED.fullmatch(stem) or _LIGHTNING.fullmatch(stem)
    return None if match is None else StepName(match["kind"].lower(), int(match["number"]))


def is_called_last(path: str) -> bool:
    """Tells whether a file or folder is called the last of a run, whatever its step.

    >>> is_called_last("run/last.ckpt"), is_called_last("run/epoch=0-step=2.ckpt")
    (True, False)
    """
    return _LAST.fullmatch(_stem(path)) is not None


def _stem(path: str) -> str:
    return _ENDING.sub("", posixpath.basename(path))


def files_by_step(candidates: Sequence[Candidate]) -> dict[str, tuple[Candidate, int]]:
    """Returns the single files among candidates that are one run's steps, with their numbers.

    Returns:
        By path; nothing where the names count different things, such as two models.
    """
    found = {}
    kinds = set()
    for candidate in candidates:
        name = step_name(candidate.files[0]) if is_single_file(candidate) else None
        if name is not None:
            found[candidate.files[0]] = candidate, name.number
            kinds.add((candidate.folder, name.kind))
    return found if len(kinds) == 1 else {}


def is_single_file(candidate: Candidate) -> bool:
    return candidate.format == "torch" and len(candidate.files) == 1


def place_of_step(candidate: Candidate) -> str:
    return candidate.files[0] if is_single_file(candidate) else candidate.folder


_STEP = re.compile(
    r"(?:(?:checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch)?[-_=]?|.*\bstep=)"
    r"0*(\d{1,15})(?:\.ckpt)?",
    re.IGNORECASE,
)
_UNIT_FOLDER = re.compile(
    r"(pytorch_model_fsdp|optimizer|model|base_model)_\d+|model|actor|critic|state\.ckpt|optim(izer)?"
    r"|pytorch_model(_\d+)?"  # the tags under which accelerate lets DeepSpeed save
)
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?(_\d+)?")
_HERE = "."  # how the run in the root itself is named and selected


@dataclass(frozen=True, slots=True)
class Unit:
    """One state dict, or several, written together.

    Attributes:
        label: What `--select` calls it: its folder under the step, or its main file.
        candidate: What the reader recognised.
        is_optimizer: Whether the folder's name says that it is the optimizer of a model.
    """

    label: str
    candidate: Candidate
    is_optimizer: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a path stands for.

    Attributes:
        folder: The step's folder relative to the source's root; empty for the root.
        units: What lies in it.
        select: What is left to select inside the units: a state dict, or None.
        notes: What was passed over, and why.
    """

    folder: str
    units: tuple[Unit, ...]
    select: str | None = None
    notes: tuple[str, ...] = ()


Complete = Callable[[Candidate], str]
"""Tells what a candidate lacks, in words; empty when it is complete."""
LeftBehind = Callable[[Sequence[str]], Collection[str]]
StepTold = Callable[[Candidate], int | None]
"""Returns the step that what a candidate holds tells, or None."""
Nothing = Callable[[str], NotACheckpointError]
"""Makes the error for a folder, relative to the root, in which nothing was recognised."""


def is_unit_folder(name: str) -> bool:
    return _UNIT_FOLDER.fullmatch(name) is not None


def is_optimizer_folder(name: str) -> bool:
    return _OPTIMIZER_FOLDER.fullmatch(name) is not None


def step_of(folder: str) -> int | None:
    """Returns the step that a folder's name tells, or the folder above a known part of a step.

    >>> step_of("runs/a/checkpoint-500"), step_of("checkpoint-500/pytorch_model_fsdp_0")
    (500, 500)
    """
    for part in reversed(folder.replace("\\", "/").rstrip("/").split("/")):
        match = _STEP.fullmatch(part)
        if match:
            return int(match[1])
        if not is_unit_folder(part):
            return None
    return None


def resolve(
    candidates: Sequence[Candidate],
    *,
    location: str,
    select: str | None,
    lacks: Complete,
    nothing: Nothing,
    told: StepTold = lambda _candidate: None,
    left_behind: LeftBehind = lambda _folders: (),
    links: Sequence[str] = (),
) -> Found:
    """Decides which candidates are meant.

    Folders, or files, named by a step are one run, of which the newest complete step is taken;
    what is called the last of it counts by the step that it holds. Everything else that lies
    side by side is returned together, to be told apart by `--select`.

    Args:
        candidates: What the readers recognised.
        location: The path as the user typed it.
        select: What the user selected, or None.
        lacks: Tells whether a candidate is complete.
        nothing: Makes the error for a folder in which there is nothing.
        told: Returns the step that a candidate itself tells.
        left_behind: Returns those of some folders of steps that training went back from.
        links: Folders that are links, which were not searched.

    Returns:
        The candidates, and what was passed over.
    """
    resolution = _Resolution(location, lacks, nothing, told, left_behind)
    found = resolution.choose(with_their_models(candidates), "", select)
    chosen = step_of(found.folder) if found.folder else None
    newer = [link for link in links if chosen is not None and (step_of(link) or 0) > chosen]
    if newer and select is None:
        raise AmbiguousSourceError(
            f"{newer[-1]!r} is newer than {found.folder!r}, but a link, which is not followed",
            where=location,
            hint=f"give its own path: {posixpath.join(location, newer[-1])}",
        )
    return found


class _Resolution:
    """Walks down from the root, deciding folder by folder."""

    def __init__(
        self,
        location: str,
        lacks: Complete,
        nothing: Nothing,
        told: StepTold,
        left_behind: LeftBehind,
    ) -> None:
        self._location = location
        self._lacks = lacks
        self._nothing = nothing
        self._told = told
        self._left_behind = left_behind
        self._numbers: dict[str, int] = {}  # of steps that are files, or called the last

    def choose(self, candidates: Sequence[Candidate], base: str, select: str | None) -> Found:
        """Decides among candidates that all lie in the folder `base`, or are that file."""
        if [candidate.files for candidate in candidates] == [(base,)]:
            folder = posixpath.dirname(base)
            return Found(folder, _units(candidates, folder), select)
        steps, beside = self._by_step(candidates, base)
        kept = worth_reading(beside)
        units = _units(kept, base)
        given = steps
        if any(is_chosen_first(one) for one in kept):
            steps = {f: c for f, c in steps.items() if any(not yields(x) for x in c)}
        runs = {_relative(posixpath.dirname(folder), base) for folder in steps}
        if select is not None:
            chosen = self._selected(given, _units(beside, base), base, select)
            if chosen is not None:
                return chosen
        if len(runs) + bool(units) > 1:
            here = [one for one in steps if posixpath.dirname(one) == base]
            newest = max(here, key=self._number, default="")
            labels = [*(unit.label for unit in units), *sorted(runs)]
            raise self._ambiguous(labels, select, _relative(newest, base))
        if steps:
            return self._newest(steps, select)
        if not units:
            raise self._nothing(base)
        passed = [one for folder in given.keys() - steps.keys() for one in given[folder]]
        return Found(base, units, select, note_of_ignored([*beside, *passed], kept))

    def _selected(
        self, steps: _Steps, units: Sequence[Unit], base: str, select: str
    ) -> Found | None:
        """Follows a selection that names a step, a run or a unit; None when it names neither."""
        for folder, inside in steps.items():
            rest = _rest(select, _relative(folder, base))
            if rest is not None:
                return self.choose(inside, folder, rest or None)
        run = {f: c for f, c in steps.items() if _relative(posixpath.dirname(f), base) == select}
        if run:
            return self._newest(run, None)
        for unit in units:
            rest = _rest(select, unit.label)
            if rest is not None:
                return Found(base, (unit, *_optimizers_of(unit, units)), rest or None)
        return None

    def _by_step(
        self, candidates: Sequence[Candidate], base: str
    ) -> tuple[_Steps, list[Candidate]]:
        """Sorts candidates into steps, folders and files, and what lies beside them."""
        steps, beside = _by_step(candidates, base)
        files = files_by_step(beside)
        numbers = {path: number for path, (_, number) in files.items()}
        made: _Steps = {path: [candidate] for path, (candidate, _) in files.items()}
        rest = [one for one in beside if [one] not in made.values()]
        for one in list(rest):
            place = place_of_step(one)
            number = self._told(one) if (steps or made) and is_called_last(place) else None
            if number is not None:
                numbers[place], made[place] = number, [one]
                rest.remove(one)
        if any(is_chosen_first(one) for one in rest):
            return steps, beside
        self._numbers |= numbers
        return steps | made, rest

    def _number(self, step: str) -> tuple[int, bool, str]:
        """Returns what steps are sorted by; of two with one number the last has no other name."""
        number = self._numbers.get(step, step_of(step) or 0)
        return number, not is_called_last(step), step

    def _newest(self, steps: _Steps, select: str | None) -> Found:
        left = self._left(steps, select)
        ordered = sorted(steps, key=lambda step: (step not in left, self._number(step)))[::-1]
        passed: list[str] = []
        for folder in ordered:
            found, missing = self._inside(steps[folder], folder, select)
            # What is wrong with the only step, its reader tells better.
            if found is not None and (not missing or len(ordered) == 1):
                back = sorted(left - {folder}, key=self._number)
                others = len(ordered) - len(passed) - 1 - len(back)
                gone = [f"{', '.join(back)} left alone: training went back from it"] if back else []
                older = f"{others} older step{'' if others == 1 else 's'} left alone"
                taken = [f"{folder} was taken"] if folder in self._numbers else []
                notes = [*taken, *passed, *gone, *([older] if others > 0 else [])]
                return replace(found, notes=(*notes, *found.notes))
            passed.append(f"{folder} was passed over: {missing}")
        raise NotACheckpointError(
            f"none of {len(ordered)} steps is complete; {passed[0]}",
            where=self._location,
            hint=f"see `ckptkit inspect {posixpath.join(self._location, ordered[0])}`",
        )

    def _left(self, steps: _Steps, select: str | None) -> frozenset[str]:
        """Returns the complete steps that training went back from."""
        if not self._left_behind(list(steps)):
            return frozenset()
        inside = {folder: self._inside(steps[folder], folder, select) for folder in steps}
        whole = [folder for folder, (found, lacks) in inside.items() if found and not lacks]
        return frozenset(self._left_behind(whole))

    def _inside(
        self, candidates: Sequence[Candidate], folder: str, select: str | None
    ) -> tuple[Found | None, str]:
        """Returns what a step holds, and what it lacks."""
        try:
            found = self.choose(candidates, folder, select)
        except NotACheckpointError as error:
            return None, error.message
        lacking = (self._lacks(unit.candidate) for unit in found.units)
        return found, next(filter(None, lacking), "")

    def _ambiguous(
        self, labels: Sequence[str], select: str | None, step: str
    ) -> AmbiguousSourceError | CannotPlanError:
        shown = (f"'.' with step {step!r}" if label == _HERE else repr(label) for label in labels)
        names = ", ".join(shown)
        newest = f", or --select {_HERE} for the newest step" if _HERE in labels[1:] else ""
        hint = f"choose one with --select {labels[0]}{newest}, or give its path"
        if select is None:
            text = f"holds several checkpoints: {names}"
            return AmbiguousSourceError(text, where=self._location, hint=hint)
        text = f"holds no {select!r}; found {names}"
        return CannotPlanError(text, where=self._location, hint=hint)


_Steps = dict[str, list[Candidate]]


def _by_step(candidates: Sequence[Candidate], base: str) -> tuple[_Steps, list[Candidate]]:
    """Sorts candidates into the steps below a folder, and what lies beside them."""
    steps: _Steps = {}
    beside: list[Candidate] = []
    for candidate in candidates:
        parts = [part for part in _relative(candidate.folder, base).split("/") if part != _HERE]
        at = next((i for i, part in enumerate(parts) if _STEP.fullmatch(part)), None)
        if at is None:
            beside.append(candidate)
        else:
            steps.setdefault(posixpath.join(base, *parts[: at + 1]), []).append(candidate)
    return steps, beside


def _relative(folder: str, base: str) -> str:
    return posixpath.relpath(folder or _HERE, base or _HERE)


def _rest(select: str, label: str) -> str | None:
    """Returns what a selection names inside `label`; None when it is about something else."""
    if select == label:
        return ""
    return select[len(label) + 1 :] if select.startswith(f"{label}/") else None


def _units(candidates: Sequence[Candidate], base: str) -> tuple[Unit, ...]:
    folders = [
        candidate.folder for candidate in candidates if not is_optimizer_candidate(candidate)
    ]
    units = []
    for candidate in candidates:
        relative = _relative(candidate.folder, base)
        is_beside = is_optimizer_candidate(candidate)
        label = "" if relative == _HERE else relative
        if not label or is_beside or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, main_file(candidate))
        last = posixpath.basename(candidate.folder)
        units.append(Unit(label, candidate, is_beside or is_optimizer_folder(last)))
    return tuple(units)


def _optimizers_of(model: Unit, units: Sequence[Unit]) -> list[Unit]:
    """Returns the optimizer's file that has the number of a model in the same folder, if any."""
    number = number_of(main_file(model.candidate))
    return [
        unit
        for unit in units
        if is_optimizer_candidate(unit.candidate)
        and unit is not model
        and unit.candidate.folder == model.candidate.folder
        and number_of(unit.candidate.files[0]) == number
    ]


_NUMBER = re.compile(r"\d+")
_MOST_GROUPS = 24


@dataclass(frozen=True, slots=True, order=True)
class FileGroup:
    """Files with alike names in one folder, or all that lie below a folder.

    Attributes:
        name: The path, with `*` for numbers that differ; that of a folder ends with `/`. Empty
            for the rest, where there are too many groups.
        files: How many there are.
    """

    name: str
    files: int

    def __str__(self) -> str:
        if not self.name:
            return f"{self.files:,} more"
        return self.name if self.files == 1 else f"{self.name} ({self.files:,})"


def grouped(
    paths: Sequence[str], *, base: str = "", known: Collection[str] = ()
) -> tuple[FileGroup, ...]:
    """Groups files.

    Args:
        paths: Those to be shown, all of them below `base`.
        base: A folder; names are relative to it.
        known: Paths of files that are accounted for. What lies beside one of them is shown file
            by file; a folder in which there is none is shown as one.

    Returns:
        The groups, sorted by name; the last one stands for the rest where there are too many.
    """
    opened = {base, *_above(base), *(folder for path in known for folder in _above(path))}
    groups: dict[str, list[str]] = {}
    for path in paths:
        name = _shown(path, opened)[len(base) :].lstrip("/")
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    named = sorted(
        FileGroup(names[0] if len(set(names)) == 1 else pattern, len(names))
        for pattern, names in groups.items()
    )
    rest = sum(group.files for group in named[_MOST_GROUPS:])
    return (*named[:_MOST_GROUPS], *([FileGroup("", rest)] if rest else []))


def _above(path: str) -> Iterator[str]:
    """Yields the folders that a file lies in, the innermost first; the root is empty."""
    while path:
        path = posixpath.dirname(path)
        yield path


def _shown(path: str, opened: Collection[str]) -> str:
    """Returns a file's path, or that of the outermost folder around it that is not opened."""
    closed = [folder for folder in _above(path) if folder not in opened]
    return f"{closed[-1]}/" if closed else path
