"""Signals become an exception, so that `finally` removes what is unfinished."""

from __future__ import annotations

import signal
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(BaseException):
    """Raised in the main thread by the first signal; no `except Exception` can hold it up.

    Attributes:
        signal: The signal that arrived.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_status(self) -> int:
        """What a shell reports for a process that the signal ended, such as 130 or 143."""
        return 128 + self.signal


def raise_on_signals() -> None:
    """Makes the first signal raise `Stopped`; later ones do not disturb the clean-up.

    Signals that the parent chose to ignore, as nohup does, stay ignored.
    """
    stopping = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise Stopped(number)

    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
