"""Files that are written from start to end, fed by threads that come in about that order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

WAITING_BYTES = 16 << 20
"""What may wait for its turn in memory, of all files together."""


class Room:
    """The memory in which writes wait for their turn.

    Whoever finds no room waits for those before it. That ends, as long as writes are begun in the
    order of files and bytes: the first of those begun never waits.
    """

    def __init__(self, limit_bytes: int = WAITING_BYTES) -> None:
        self.changed = threading.Condition()
        self.left_bytes = limit_bytes
        self.is_given_up = False

    def give_up(self) -> None:
        """Lets everybody go who waits, and takes nothing any more."""
        with self.changed:
            self.is_given_up = True
            self.changed.notify_all()


class Stream:
    """One file."""

    def __init__(self, opened: Callable[[], Any], size_bytes: int, room: Room) -> None:
        """Prepares it.

        Args:
            opened: Opens the file for writing; called with the first bytes.
            size_bytes: Its size.
            room: For what comes early.
        """
        self._opened = opened
        self.size_bytes = size_bytes
        self._room = room
        self._file: Any = None
        self._position = 0
        self._early: dict[int, bytes] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all of its bytes were written."""
        return self._position == self.size_bytes

    def write(self, start: int, data: memoryview) -> None:
        """Writes bytes, at once or when those before them are there."""
        if not data.nbytes or not self._is_next(start, data):
            return
        now: bytes | memoryview | None = data
        while now is not None:
            if self._file is None:
                self._file = self._opened()
            self._file.write(now)
            now = self._advance(len(now))

    def publish(self) -> None:
        """Makes it visible."""
        if self._file is None:
            self._file = self._opened()
        self._file.close()
        self._file.commit()

    def discard(self) -> None:
        """Throws away what was written."""
        if self._file is None:
            return
        try:
            self._file.discard()
        finally:
            with suppress(AttributeError):
                self._file.closed = True  # or its end would write the rest, and make it visible

    def _is_next(self, start: int, data: memoryview) -> bool:
        """Tells whether it is a write's turn; keeps it for later where it is not."""
        room = self._room
        with room.changed:
            room.changed.wait_for(
                lambda: (
                    room.is_given_up or start == self._position or data.nbytes <= room.left_bytes
                )
            )
            if room.is_given_up:
                return False
            if start == self._position:
                return True
            self._early[start] = bytes(data)
            room.left_bytes -= data.nbytes
            return False

    def _advance(self, count: int) -> bytes | None:
        """Takes note of bytes written; returns those that follow them if they are there."""
        room = self._room
        with room.changed:
            self._position += count
            following = self._early.pop(self._position, None)
            if following is not None:
                room.left_bytes += len(following)
            room.changed.notify_all()
            return None if room.is_given_up else following
