"""A limit on bytes per second, kept by all threads of a process together."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Makes whoever moves bytes wait until they fit into a rate.

    Attributes:
        stopped: Set where nothing more is to be moved, so that nobody waits any longer.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        """Begins with nothing moved.

        Args:
            bytes_per_second: The rate, or None for no limit.
        """
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.stopped = threading.Event()

    def take(self, size_bytes: int) -> None:
        """Books bytes that were moved, and waits until the next may be."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size_bytes / self._rate
            wait = self._free_at - now
        self.stopped.wait(wait)
