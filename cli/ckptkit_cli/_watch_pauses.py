"""Where a watch waits: for time, for news on standard input, or for its end."""

from __future__ import annotations

import os
import sys
import threading

_READ_BYTES = 4096


class WatchPauses:
    """Waits until there may be news; told to end by whoever closes standard input."""

    def __init__(self, *, ending: bool, reads_input: bool) -> None:
        """Begins to read standard input, if it is to be read.

        Args:
            ending: Whether the watch ends as soon as nothing waits.
            reads_input: Whether it does once standard input has ended.
        """
        self.ending = ending
        self._news = threading.Event()
        if reads_input:
            threading.Thread(target=self._read, name="ckptkit-input", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits, at most so long: less when there may be news."""
        self._news.wait(seconds)
        self._news.clear()

    def _read(self) -> None:
        # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
        try:
            descriptor = sys.stdin.fileno()
            while os.read(descriptor, _READ_BYTES):
                self._news.set()
        except (AttributeError, OSError, ValueError):
            pass  # closed from the beginning: it has ended
        self.ending = True
        self._news.set()
