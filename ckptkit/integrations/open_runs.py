"""The Checkpointers that integrations have opened, and that have to end before the program does."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.settings import Options

_OPEN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def opened(checkpointer: Checkpointer) -> None:
    """Notes a Checkpointer that `close_all` is to close; it may be closed before."""
    _OPEN.add(checkpointer)


def close_all() -> list[CkptkitError]:
    """Closes all that were opened, each after its saves under way.

    Returns:
        The failures of saves that nobody has asked for.
    """
    failures: list[CkptkitError] = []
    while _OPEN:
        try:
            _OPEN.pop().close()
        except CkptkitError as error:
            failures.append(error)
    return failures


class OpenRun:
    """At most one Checkpointer, opened when it is needed and again for another run.

    Each has a copy of the local state, so that two at a time would be one too many.
    """

    def __init__(self) -> None:
        self._checkpointer: Checkpointer | None = None
        self._run = Path()
        self._options: Mapping[str, Any] = {}
        self._failed: list[CkptkitError] = []

    @property
    def checkpointer(self) -> Checkpointer | None:
        return self._checkpointer

    def of(self, run: Path, options: Options, *, prefix: str | None = None) -> Checkpointer:
        """Returns a Checkpointer for a run, the one that is open where it serves.

        Args:
            run: The run's directory.
            options: For the Checkpointer.
            prefix: What the names of its steps begin with, None where that does not matter.
        """
        wanted: dict[str, Any] = dict(options)
        if prefix is not None:
            wanted["prefix"] = prefix
        elif "prefix" in self._options:
            wanted["prefix"] = self._options["prefix"]
        if self._checkpointer is None or (self._run, self._options) != (run, wanted):
            self.end()
            self._checkpointer = Checkpointer(run, **wanted)
            opened(self._checkpointer)
            self._run, self._options = run, wanted
        return self._checkpointer

    def end(self) -> None:
        """Closes what is open; what failed is kept for `close`."""
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            try:
                checkpointer.close()
            except CkptkitError as error:
                self._failed.append(error)

    def close(self) -> None:
        """Closes what is open; it may be opened again."""
        self.end()
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]
