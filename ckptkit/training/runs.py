"""What training has to know of a run, wherever it lies: the names in it, and what was saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckptkit.core.errors import FormatError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, Manifest
from ckptkit.planning.retention import (
    Retention,
    StepFacts,
    abandoned,
    missing_metric,
    steps_to_remove,
)
from ckptkit.storage.names import WORK_INFIX
from ckptkit.storage.places import Place
from ckptkit.storage.run_marks import Owner, is_step_folder, take_request
from ckptkit.training.writer_process import Patience, WriterProcess

logger = logging.getLogger(__name__)

PlaceT = TypeVar("PlaceT", Path, Place)


@dataclass(frozen=True, slots=True)
class SavedStep(StepFacts):
    """A step that lies in a run.

    Attributes:
        path: Its directory; where the run lies at a URL, only the name of that.
        problem: Why it is not complete; empty where it is.
        finished: Whether it was once: it has a manifest.
    """

    path: Path = Path()
    problem: str = ""
    finished: bool = True


class Run(Generic[PlaceT]):
    """What training has to know of a run, wherever it lies.

    Attributes:
        place: Where its steps lie.
        path: A directory of this machine for marks, and for what is being written.
        prefix: What comes before the number in the names of its steps.
    """

    place: PlaceT
    path: Path
    prefix: str
    takes_saves = True
    """Whether the ranks can write to it themselves."""
    _has_warned = False

    def step_folder(self, step: int) -> PlaceT:
        """Returns where a committed step lies."""
        return self.below(f"{self.prefix}{step}")

    def named_folder(self, name: str) -> PlaceT:
        """Returns where a step lies that has a name of its own.

        Raises:
            UsageError: If it is none for a directory, or that of a step with a number.
        """
        if not name or name.startswith(".") or "\0" in name or Path(name).name != name:
            raise UsageError(
                f"is {name!r}, where the name of a directory in the run was expected", where="name"
            )
        if is_step_folder(name.lower()):  # some file systems take no notice of case
            raise UsageError(
                f"is {name!r}, which is the name of a step",
                where="name",
                hint="leave it out, and give the number as `step`",
            )
        return self.below(name)

    def working_folder(self, final: PlaceT, nonce: str, attempt: int) -> Path:
        """Returns where an attempt at a step is written; no tool takes it for a checkpoint.

        Args:
            final: Where the step will lie.
            nonce: Of the session: 8 hexadecimal digits.
            attempt: Of this session at this step.
        """
        return self.path / f".{Path(final).name}{WORK_INFIX}{nonce}-{attempt}"

    def steps(self) -> tuple[SavedStep, ...]:
        """Returns what lies there, as `saved_steps` does.

        Raises:
            CkptkitError: If the run cannot be listed.
        """
        raise NotImplementedError

    def last_save_number(self) -> int:
        """Returns the largest `save_number` of the complete steps, 0 where there is none.

        Raises:
            OutputError: If the run cannot be listed.
        """
        return max((step.save_number for step in self.steps()), default=0)

    def save_number_of(self, name: str) -> int:
        """Returns the `save_number` of the step in a folder of that name, 0 where there is none.

        Numbers of steps that are named by their number are compared with `last_save_number`.
        """
        manifest = self._manifest(name)
        number = manifest.source.get("save_number") if manifest is not None else None
        return number if isinstance(number, int) else 0

    def retired_by(
        self, step: int, metrics: Mapping[str, Any], retention: Retention
    ) -> tuple[PlaceT, ...]:
        """Returns the steps that go once a new one is durable; nothing is read where all stay.

        The first time that no step has the metric of `keep_best` a warning says so.

        Args:
            step: The new one, which counts as the one saved last.
            metrics: Of the new one, as its manifest has them.
            retention: The rules.

        Raises:
            OutputError: If the run cannot be listed.
        """
        if retention.keeps_all:
            return ()
        there: list[StepFacts] = [saved for saved in self.steps() if saved.step != step]
        number = 1 + max((saved.save_number for saved in there), default=0)
        every = [*there, StepFacts(step, metrics=_finite(metrics), save_number=number)]
        problem = missing_metric(every, retention)
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", problem)
        return tuple(self.step_folder(old) for old in steps_to_remove(every, retention))

    def identity(self) -> str:
        """Returns what tells the run from all others; called with the lock of the run.

        Raises:
            CkptkitError: If it cannot be read or written.
        """
        raise NotImplementedError

    def process(
        self, patience: Patience, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns what will write to the run, not started yet.

        Args:
            patience: How long it is waited for.
            name: What it is called in messages.
            niceness: By how much its priority is lowered, if not as usual.
        """
        raise NotImplementedError

    def look(self) -> None:
        """Sees that this rank can use it.

        Raises:
            CkptkitError: If it cannot.
        """

    def sweep(self) -> None:
        """Removes what was found not to be of use while the run was opened; by rank 0."""

    def take_request(self) -> Owner | None:
        """Takes up a request left by `ckptkit save-now`.

        Returns:
            Whose it was, or None if there is none.

        Raises:
            OSError: If there is one, and it cannot be removed.
        """
        return take_request(self.path)

    def below(self, name: str) -> PlaceT:
        """Returns where the step of that name lies."""
        raise NotImplementedError

    def _manifest(self, name: str) -> Manifest | None:
        raise NotImplementedError


def in_order(steps: Iterable[SavedStep]) -> tuple[SavedStep, ...]:
    """Returns steps by their number, those that training went back from before all others."""
    found = tuple(steps)
    left = abandoned(found)
    return tuple(sorted(found, key=lambda saved: (saved.step not in left, saved.step)))


def unfinished_step(step: int, path: Path) -> SavedStep:
    """Returns what is known of a step without a manifest."""
    problem = f"it has no {MANIFEST_NAME}"
    return SavedStep(step, complete=False, path=path, problem=problem, finished=False)


def step_of_manifest(
    step: int, path: Path, manifest: Manifest, size_bytes: Callable[[str], int | None]
) -> SavedStep:
    """Returns what is known of a step, which is complete if its manifest is true.

    Args:
        step: Its number.
        path: Its directory.
        manifest: What it says of itself.
        size_bytes: Tells the length of a file in it, None where it is not there.
    """
    try:
        _check(step, manifest, size_bytes)
    except FormatError as error:
        return SavedStep(step, complete=False, path=path, problem=str(error))
    metrics = _finite(manifest.source.get("metrics"))
    number = manifest.source.get("save_number")
    number = number if isinstance(number, int) and number > 0 else 0
    return SavedStep(step, metrics=metrics, save_number=number, path=path)


def _check(step: int, manifest: Manifest, size_bytes: Callable[[str], int | None]) -> None:
    if manifest.kind != TRAINING or manifest.source.get("step") != step:
        raise FormatError(
            f"a manifest of kind {manifest.kind!r} and step {manifest.source.get('step')!r} was"
            f" found against {TRAINING!r} and {step}"
        )
    for name, record in manifest.files.items():
        size = size_bytes(name)
        if size is None:
            raise FormatError(f"file {name!r} is missing")
        if size != record.size_bytes:
            raise FormatError(
                f"file {name!r} has {size:,} bytes against {record.size_bytes:,} in the manifest"
            )


def _finite(metrics: object) -> Mapping[str, float]:
    if not isinstance(metrics, dict):
        return {}
    table: dict[str, Any] = metrics
    return {
        name: float(value)
        for name, value in table.items()
        if isinstance(value, (int, float)) and _is_finite(value)
    }


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer without bound, in a manifest that somebody else made
        return False
