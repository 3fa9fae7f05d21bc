"""In which order the steps of a run were saved, whoever saved them.

ckptkit counts the saves of a run. Of steps that stock frameworks saved, times tell the order, and a
copy of a run may have changed them. So a lower step that is newer than a higher one proves that
training went back only where the Trainer's log in it is not the beginning of the other one's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.planning.retention import StepFacts, abandoned
from ckptkit.storage.base import Source, is_there

TRAINER_STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """A complete step of a run.

    Attributes:
        folder: Relative to the source.
        step: Its number.
        save_number: What its manifest says; None of a step that others saved.
        modified: When its newest file was written, in seconds since 1970; 0 where unknown.
    """

    folder: str
    step: int
    save_number: int | None
    modified: float


def series_of(name: str) -> str:
    """Returns what the name of a step's folder has beside numbers.

    >>> series_of("checkpoint-500"), series_of("epoch=3-step=500")
    ('checkpoint-', 'epoch=-step=')
    """
    return _NUMBER.sub("", name)


def save_orders(source: Source, steps: Sequence[SavedFolder]) -> dict[str, int]:
    """Returns a number for each folder, the larger the later it was saved; 0 where unknown.

    Args:
        source: What the steps lie in.
        steps: Complete steps of one series of names.
    """
    if any(step.save_number is not None for step in steps):
        return {step.folder: step.save_number or 0 for step in steps}
    ordered = sorted(steps, key=lambda step: step.step)
    pairs = [
        (lower, higher)
        for position, higher in enumerate(ordered)
        for lower in ordered[:position]
        if lower.modified > higher.modified
    ]
    is_known = all(step.modified > 0 for step in steps) and _are_apart(source, pairs)
    return {step.folder: int(step.modified * 1000) if is_known else 0 for step in steps}


def _are_apart(source: Source, pairs: Sequence[tuple[SavedFolder, SavedFolder]]) -> bool:
    """Tells whether the Trainer's log in no step is the beginning of that in the other one."""
    folders = {step.folder for pair in pairs for step in pair}
    logs = {folder: _log(source, folder) for folder in folders}
    return all(
        logs[higher.folder][: len(logs[lower.folder])] != logs[lower.folder]
        for lower, higher in pairs
    )


def left_behind(source: Source, steps: Sequence[SavedFolder]) -> frozenset[str]:
    """Returns the folders of the steps that training went back from, see `abandoned`."""
    orders = save_orders(source, steps)
    facts = [StepFacts(step.step, save_number=orders[step.folder]) for step in steps]
    gone = abandoned(facts)
    return frozenset(step.folder for step in steps if step.step in gone)


def trainer_state(source: Source, folder: str) -> Mapping[str, Any]:
    """Returns the Trainer's state in a step; empty where there is none that can be read."""
    path = f"{folder}/{TRAINER_STATE}"
    if not is_there(source, path):
        return {}
    try:
        size_bytes = source.stat(path).size_bytes
        document = json.loads(source.read(path, 0, size_bytes)) if size_bytes <= _MOST_BYTES else {}
    except (CkptkitError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _log(source: Source, folder: str) -> list[Any]:
    found = trainer_state(source, folder).get("log_history")
    return found if isinstance(found, list) else []
