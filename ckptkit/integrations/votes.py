"""Answers that are the same on all ranks, without waiting for any: who asks first decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ckptkit.training.boards import Board

_REMEMBERED = 256  # answers that stay on the board


class Votes:
    """Questions that all ranks ask, in any order and at any time."""

    def __init__(self, board: Board) -> None:
        """Takes the board on which the answers stand."""
        self._board = board
        self._asked: deque[str] = deque()

    def answer(self, question: str, find: Callable[[], str]) -> str:
        """Returns the answer of the rank that asked first.

        Args:
            question: Names the question; each is asked once by a rank.
            find: Returns this rank's answer, which is not looked for where one stands already.

        Raises:
            PeerError: If the store failed.
        """
        key = f"votes/{question}"
        self._asked.append(key)
        if len(self._asked) > _REMEMBERED:  # every rank has long since asked
            self._board.delete(self._asked.popleft())
        found = self._board.get(key)
        if found is None:
            own = f"={find()}"  # as an empty value stands for none
            found = self._board.compare_set(key, b"", own.encode())
        return found.decode().removeprefix("=")
