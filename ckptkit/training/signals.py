"""Signals that request a last save: the handlers only record them."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import FrameType
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.core.text import a_kind
from ckptkit.core.threads import weak_callback

_HINT = 'pass names such as signals=("SIGTERM", "SIGUSR2"), or () for none'


def signal_names(given: object) -> tuple[str, ...]:
    """Parses signals: names, numbers or members of `signal.Signals`.

    Returns:
        The names, each once.

    >>> signal_names([signal.SIGTERM, 15, "SIGUSR2"]), signal_names("SIGTERM")
    (('SIGTERM', 'SIGUSR2'), ('SIGTERM',))
    """
    if given is None:
        return ()
    several: Iterable[object] = (given,) if isinstance(given, (str, int)) else ()
    if not several:
        if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
            raise UsageError(
                f"expected signals, got {a_kind(given)}",
                where="signals",
                hint=_HINT,
            )
        several = given
    return tuple(dict.fromkeys(_signal(entry).name for entry in several))


class SignalWatch:
    """Records signals, and calls the previous handlers.

    A previous handler is called after the signal is recorded; the default action, which would end
    the process, is not. Python runs handlers in the main thread between two of its instructions, so
    a long call into C, such as a collective, delays them.

    A process forked from this one, such as a worker of a DataLoader, has the previous handlers: a
    signal to it does not concern the training, and must be able to end it.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Installs the handlers."""
        self._arrived: deque[str] = deque()
        self._earlier: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
        self._masks: dict[int, set[int]] = {}
        numbers = [_signal(name) for name in signal_names(names)]
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "only the main thread can handle signals, and this is another one",
                where="signals",
                hint="create the Checkpointer in the main thread, or pass signals=()",
            )
        try:
            for number in numbers:
                try:
                    self._earlier[number] = signal.getsignal(number)
                    signal.signal(number, self._handle)
                except (OSError, ValueError) as error:
                    name = signal.Signals(number).name
                    raise UsageError(f"{name} cannot be handled", where="signals") from error
        except BaseException:
            self.close()
            raise
        if numbers and hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=weak_callback(self._block_signals),
                after_in_parent=weak_callback(self._unblock_signals),
                after_in_child=weak_callback(self._close_in_child),
            )

    def take(self) -> str | None:
        """Returns the name of a recorded signal, each once; None if there is none."""
        try:
            return self._arrived.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Restores the previous handlers, except where ours was replaced since."""
        self._closed = True
        for number, earlier in self._earlier.items():
            # A handler that was not installed from Python reads as None and cannot be restored.
            # Outside of the main thread ours stays, and only calls the previous one from now on.
            with suppress(ValueError):
                if earlier is not None and signal.getsignal(number) == self._handle:
                    signal.signal(number, earlier)

    def _block_signals(self) -> None:
        """Blocks the signals while this thread forks.

        Python clears pending signals when a child starts: a signal that arrives before the previous
        handlers are restored would be lost, and its sender would wait for ever.
        """
        if not self._closed:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._earlier)
            self._masks[threading.get_ident()] = {*before}

    def _unblock_signals(self) -> None:
        before = self._masks.pop(threading.get_ident(), None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _close_in_child(self) -> None:
        self.close()
        self._unblock_signals()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No lock and no logging here, since this thread may hold the locks already.
        earlier = self._earlier.get(number)
        if os.getpid() != self._pid:  # it came before the child has restored the handlers
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
            signal.raise_signal(number)
            return
        if not self._closed:
            self._arrived.append(signal.Signals(number).name)
        if callable(earlier):
            earlier(number, frame)


def _signal(given: object) -> signal.Signals:
    member: object = None
    if isinstance(given, int) and not isinstance(given, bool):
        with suppress(ValueError):
            member = signal.Signals(given)
    elif isinstance(given, str) and given.startswith("SIG"):
        member = getattr(signal, given, None)
    if isinstance(member, signal.Signals):
        return member
    near = get_close_matches(str(given).upper(), [number.name for number in signal.Signals], 1, 0.6)
    hint = f'pass "{near[0]}"' if near else _HINT
    raise UsageError(f"{given!r} is no signal of this system", where="signals", hint=hint)
