"""Which of the checkpoints under a path is meant: of steps the newest, of models the chosen."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, NotACheckpointError
from ckptkit.formats.base import Candidate

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
_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
# Formats that yield to a model beside them: what is only refused, and what a model was made from.
_LESSER = {"foreign", "zero"}
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


def is_unit_folder(name: str) -> bool:
    """Tells whether a folder's name is one under which frameworks keep a part of a step."""
    return _UNIT_FOLDER.fullmatch(name) is not None


def is_optimizer_folder(name: str) -> bool:
    """Tells whether a folder's name is one under which frameworks keep an optimizer's state."""
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
    links: Sequence[str] = (),
) -> Found:
    """Decides which candidates are meant.

    Folders named by a step are one run, of which the newest complete step is taken. Everything
    else that lies side by side is returned together, to be told apart by `--select`.

    Args:
        candidates: What the readers recognised.
        location: The path as the user typed it.
        select: What the user selected, or None.
        lacks: Tells whether a candidate is complete.
        links: Folders that are links, which were not searched.

    Returns:
        The candidates, and what was passed over.

    Raises:
        NotACheckpointError: If there is nothing.
        AmbiguousSourceError: If there are several runs, or a run beside a model, and nothing
            was selected; or if the newest step is a link.
        CannotPlanError: If what was selected is not there.
    """
    found = _Resolution(location, lacks).choose(candidates, "", select)
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

    def __init__(self, location: str, lacks: Complete) -> None:
        self._location = location
        self._lacks = lacks

    def choose(self, candidates: Sequence[Candidate], base: str, select: str | None) -> Found:
        """Decides among candidates that all lie in the folder `base`."""
        steps, beside = _by_step(candidates, base)
        kept = _worth_reading(beside)
        units = _units(kept, base)
        given = steps
        if any(candidate.format not in _LESSER for candidate in kept):
            steps = {f: c for f, c in steps.items() if any(x.format not in _LESSER for x in c)}
        runs = {_relative(posixpath.dirname(folder), base) for folder in steps}
        if select is not None:
            chosen = self._selected(given, _units(beside, base), base, select)
            if chosen is not None:
                return chosen
        if len(runs) + bool(units) > 1:
            raise self._ambiguous([*(unit.label for unit in units), *sorted(runs)], select)
        if steps:
            return self._newest(steps, select)
        if not units:
            raise NotACheckpointError(
                "no checkpoint of a known format lies here",
                where=posixpath.join(self._location, base) if base else self._location,
                hint="give a directory with '.metadata' and '.distcp' files, with '.safetensors',"
                " or with '.bin' or '.pt' files, or one above it",
            )
        passed = [one for folder in given.keys() - steps.keys() for one in given[folder]]
        return Found(base, units, select, _ignored([*beside, *passed], kept))

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
                return Found(base, (unit,), rest or None)
        return None

    def _newest(self, steps: _Steps, select: str | None) -> Found:
        ordered = sorted(steps, key=lambda folder: (step_of(folder) or 0, folder), reverse=True)
        passed: list[str] = []
        for folder in ordered:
            found, missing = self._inside(steps[folder], folder, select)
            # What is wrong with the only step, its reader tells better.
            if found is not None and (not missing or len(ordered) == 1):
                others = len(ordered) - len(passed) - 1
                older = f"{others} older step{'' if others == 1 else 's'} left alone"
                notes = [*passed, older] if others else passed
                return replace(found, notes=(*notes, *found.notes))
            passed.append(f"{folder} was passed over: {missing}")
        raise NotACheckpointError(
            f"none of {len(ordered)} steps is complete; {passed[0]}",
            where=self._location,
            hint=f"see `ckptkit inspect {posixpath.join(self._location, ordered[0])}`",
        )

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
        self, labels: Sequence[str], select: str | None
    ) -> AmbiguousSourceError | CannotPlanError:
        names = ", ".join(repr(label) for label in labels)
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
    folders = [candidate.folder for candidate in candidates]
    units = []
    for candidate in candidates:
        relative = _relative(candidate.folder, base)
        label = "" if relative == _HERE else relative
        if not label or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, _main_file(candidate))
        last = posixpath.basename(candidate.folder)
        units.append(Unit(label, candidate, is_optimizer_folder(last)))
    return tuple(units)


def _main_file(candidate: Candidate) -> str:
    names = [posixpath.basename(path) for path in candidate.files]
    return next((name for name in names if name.endswith(".index.json")), names[0])


def _worth_reading(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops what accompanies a model, or is the same model in a lesser format.

    Beside a readable model these are loose `.pt` files, formats that are not read, and the
    `.bin` form of a model in safetensors.
    """
    safe = {c.folder for c in candidates if c.format == "safetensors" and _is_model(c)}
    has_model = bool(safe) or any(
        c.format == "dcp" or (c.format == "torch" and _is_model(c)) for c in candidates
    )

    def is_kept(candidate: Candidate) -> bool:
        if candidate.format in _LESSER:
            return not has_model
        if candidate.format != "torch":
            return True
        return candidate.folder not in safe if _is_model(candidate) else not has_model

    return [candidate for candidate in candidates if is_kept(candidate)]


def _ignored(candidates: Sequence[Candidate], kept: Sequence[Candidate]) -> tuple[str, ...]:
    names = [c.files[0] for c in candidates if c not in kept]
    return (f"left alone beside the model: {', '.join(names)}",) if names else ()


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(_main_file(candidate)) is not None
