"""The open Checkpointers of integrations, which are closed before the program ends."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.training.checkpointer import Checkpointer
from ckptkit.training.settings import Options

_OPEN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def register(checkpointer: Checkpointer) -> None:
    """Registers a Checkpointer for `close_all`; it may be closed before."""
    _OPEN.add(checkpointer)


def close_all() -> list[CkptkitError]:
    """Closes all registered Checkpointers after their saves.

    Returns:
        The errors of saves that no call has raised.
    """
    failures: list[CkptkitError] = []
    while _OPEN:
        try:
            _OPEN.pop().close()
        except CkptkitError as error:
            failures.append(error)
    return failures


class OpenRun:
    """At most one Checkpointer, opened when needed, and again for another run.

    Each holds a copy of the local state, so only one is open at a time.
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
        """Returns a Checkpointer for a run; the open one if it fits.

        Args:
            run: The run's directory.
            options: For the Checkpointer.
            prefix: The prefix of step folders, None for any.
        """
        wanted: dict[str, Any] = dict(options)
        if prefix is not None:
            wanted["prefix"] = prefix
        elif "prefix" in self._options:
            wanted["prefix"] = self._options["prefix"]
        if self._checkpointer is None or (self._run, self._options) != (run, wanted):
            self.end()
            self._checkpointer = Checkpointer(run, **wanted)
            register(self._checkpointer)
            self._run, self._options = run, wanted
        return self._checkpointer

    def end(self) -> None:
        """Closes the Checkpointer; an error is kept for `close`."""
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            try:
                checkpointer.close()
            except CkptkitError as error:
                self._failed.append(error)

    def close(self) -> None:
        """Closes the Checkpointer, and raises the first error; it may be opened again."""
        self.end()
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]
