"""What is closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Has `close` called at the end of a `with` block, whatever ends it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
