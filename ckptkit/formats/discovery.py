"""Which of the checkpoints under a path is meant: of steps the newest, of models the chosen."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, NotACheckpointError
from ckptkit.formats.base import Candidate

_STEP = re.compile(
    r"(?:checkpoint|ckpt|step|global_?step|iter(?:ation)?|epoch)?[-_=]?0*(\d{1,15})", re.IGNORECASE
)
_MODEL_FILE = re.compile(r"(pytorch_)?model|consolidated|adapter_model")
_OPTIMIZER_FOLDER = re.compile(r"optim(izer)?s?(_\d+)?")


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
        notes: What was passed over, and why.
    """

    folder: str
    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()


Complete = Callable[[Candidate], str]
"""Tells what a candidate lacks, in words; empty when it is complete."""


def step_of(folder: str) -> int | None:
    """Returns the step that a folder's name tells, or None.

    >>> step_of("runs/a/checkpoint-500"), step_of("pytorch_model_fsdp_0")
    (500, None)
    """
    for part in reversed(folder.replace("\\", "/").split("/")):
        match = _STEP.fullmatch(part)
        if match:
            return int(match[1])
    return None


def resolve(
    candidates: Sequence[Candidate], *, location: str, select: str | None, lacks: Complete
) -> Found:
    """Decides which candidates are meant.

    Folders named by a step are one run, of which the newest complete step is taken. Everything
    else that lies side by side is returned together, to be told apart by `--select`.

    Returns:
        The candidates, and what was passed over.

    Raises:
        NotACheckpointError: If there is nothing.
        AmbiguousSourceError: If there are several runs, or a run beside a model, and nothing
            was selected.
    """  # noqa: DOC501  `_ambiguous` makes it
    if not candidates:
        raise NotACheckpointError(
            "no checkpoint of a known format lies here",
            where=location,
            hint="give a directory with '.metadata' and '.distcp' files, with '.safetensors',"
            " or with '.bin' or '.pt' files, or one above it",
        )
    steps: dict[str, list[Candidate]] = {}
    direct: list[Candidate] = []
    for candidate in candidates:
        folder = _step_folder(candidate.folder)
        if folder is None:
            direct.append(candidate)
        else:
            steps.setdefault(folder, []).append(candidate)
    runs = {posixpath.dirname(folder) for folder in steps}
    if select in steps:
        return Found(select, _units(steps[select], select))
    labels = _labels(direct, runs)
    if len(runs) + bool(direct) <= 1:
        return _newest(steps, lacks, location) if steps else Found("", _units(direct, ""))
    if select in runs:
        chosen = {f: c for f, c in steps.items() if posixpath.dirname(f) == select}
        return _newest(chosen, lacks, location)
    if any(unit.label == select for unit in _units(direct, "")):
        return Found("", _units(direct, ""))
    raise _ambiguous(labels, select, location)


def _ambiguous(
    labels: Sequence[str], select: str | None, location: str
) -> AmbiguousSourceError | CannotPlanError:
    names = ", ".join(repr(label) for label in labels)
    hint = f"choose one with --select {labels[0]}"
    if select is None:
        return AmbiguousSourceError(
            f"holds several checkpoints: {names}", where=location, hint=hint
        )
    return CannotPlanError(f"holds no {select!r}; found {names}", where=location, hint=hint)


def _labels(direct: Sequence[Candidate], runs: Iterable[str]) -> list[str]:
    return [unit.label for unit in _units(direct, "")] + sorted(run or "." for run in runs)


def _step_folder(folder: str) -> str | None:
    """Returns the part of a path down to the first folder that is named by a step."""
    parts = folder.split("/") if folder else []
    for depth, part in enumerate(parts):
        if _STEP.fullmatch(part):
            return "/".join(parts[: depth + 1])
    return None


def _newest(steps: dict[str, list[Candidate]], lacks: Complete, location: str) -> Found:
    ordered = sorted(steps, key=lambda folder: (step_of(folder) or 0, folder), reverse=True)
    passed: list[str] = []
    for folder in ordered:
        missing = next(filter(None, (lacks(candidate) for candidate in steps[folder])), "")
        if not missing:
            others = len(ordered) - len(passed) - 1
            kept = [f"{others} older step{'' if others == 1 else 's'} left alone"] if others else []
            return Found(folder, _units(steps[folder], folder), tuple(passed + kept))
        passed.append(f"{folder} was passed over: {missing}")
    if len(ordered) == 1:  # let the reader say what is wrong with it
        return Found(ordered[0], _units(steps[ordered[0]], ordered[0]))
    raise NotACheckpointError(
        f"none of {len(ordered)} steps is complete; {passed[0]}",
        where=location,
        hint=f"see `ckptkit inspect {posixpath.join(location, ordered[0])}`",
    )


def _units(candidates: Sequence[Candidate], base: str) -> tuple[Unit, ...]:
    kept = _without_duplicates(candidates)
    folders = [candidate.folder for candidate in kept]
    units = []
    for candidate in kept:
        relative = posixpath.relpath(candidate.folder or ".", base or ".")
        label = "" if relative == "." else relative
        if not label or folders.count(candidate.folder) > 1:
            label = posixpath.join(label, _main_file(candidate))
        last = posixpath.basename(candidate.folder)
        units.append(Unit(label, candidate, bool(_OPTIMIZER_FOLDER.fullmatch(last))))
    return tuple(units)


def _main_file(candidate: Candidate) -> str:
    names = [posixpath.basename(path) for path in candidate.files]
    return next((name for name in names if name.endswith(".index.json")), names[0])


def _without_duplicates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops `.bin` forms of models in safetensors, and `.pt` files beside sharded models."""
    safe = {c.folder for c in candidates if c.format == "safetensors" and _is_model(c)}
    sharded = any(c.format == "dcp" for c in candidates)
    return [
        c
        for c in candidates
        if c.format != "torch"
        or not ((c.folder in safe and _is_model(c)) or (sharded and not _is_model(c)))
    ]


def _is_model(candidate: Candidate) -> bool:
    return _MODEL_FILE.match(_main_file(candidate)) is not None
