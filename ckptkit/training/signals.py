"""Signals that ask for a last save: noted when they arrive, and nothing done in the handler."""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ckptkit.core.errors import UsageError

logger = logging.getLogger(__name__)

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR2")


class SignalWatch:
    """Notes signals, and calls the handler that was there before.

    A handler that was there is called after the signal is noted; the default action, which would
    end the process, is not. Python runs handlers in the main thread, between two of its
    instructions: a long call into C, a collective say, delays them.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        """Installs the handlers.

        Args:
            names: Of the signals. `DEFAULT_SIGNALS` when left out, and then a thread that may not
                install handlers gets a warning instead of an error.

        Raises:
            UsageError: If a name is unknown, a signal cannot be handled, or signals were named
                in a thread other than the main one.
        """
        self._arrived: deque[str] = deque()
        self._earlier: dict[int, Any] = {}
        self._closed = False
        numbers = [_number(name) for name in (DEFAULT_SIGNALS if names is None else names)]
        if numbers and threading.current_thread() is not threading.main_thread():
            if names is not None:
                raise UsageError(
                    "only the main thread can handle signals, and this is another",
                    where="signals",
                    hint="make the Checkpointer in the main thread, or pass signals=()",
                )
            logger.warning("signals are not handled: this is not the main thread")
            return
        try:
            for number in numbers:
                self._install(number)
        except BaseException:
            self.close()
            raise

    def take(self) -> str | None:
        """Returns the name of a signal that arrived, each arrival once; None if there is none."""
        try:
            return self._arrived.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Puts back the earlier handlers, except where somebody has replaced ours since."""
        self._closed = True
        for number, earlier in self._earlier.items():
            # A handler that was not installed from Python reads as None and cannot be put back;
            # outside the main thread ours stays, and only calls the earlier one from now on.
            with suppress(ValueError):
                if earlier is not None and signal.getsignal(number) == self._handle:
                    signal.signal(number, earlier)

    def _install(self, number: int) -> None:
        try:
            self._earlier[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{signal.Signals(number).name} cannot be handled", where="signals"
            ) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No lock and no logging here: the thread that runs this may hold either.
        if not self._closed:
            self._arrived.append(signal.Signals(number).name)
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)


def _number(name: str) -> int:
    number = getattr(signal, name, None) if name.startswith("SIG") else None
    if not isinstance(number, signal.Signals):
        raise UsageError(
            f"{name!r} is no signal of this system", where="signals", hint='pass "SIGTERM"'
        )
    return number
