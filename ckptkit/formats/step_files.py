"""Steps of a run that are files and not folders: `epoch=0-step=500.ckpt`, `iter_2000.pth`.

Source: lightning/pytorch/callbacks/model_checkpoint.py (`format_checkpoint_name`,
`CHECKPOINT_NAME_LAST`), mmengine/hooks/checkpoint_hook.py, fairseq/checkpoint_utils.py.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.formats.base import Candidate

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
    """Tells whether a candidate is one file of `torch.save`, which may be called anything."""
    return candidate.format == "torch" and len(candidate.files) == 1


def place_of_step(candidate: Candidate) -> str:
    """Returns the file that a candidate is, or the folder that it takes up."""
    return candidate.files[0] if is_single_file(candidate) else candidate.folder
