"""What an execution tells whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan stands; `notes` are what the user should know before it runs."""

    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """Work begins on that many output bytes."""

    total_bytes: int


@dataclass(frozen=True, slots=True)
class BytesWritten:
    """That many more output bytes are written, or checked."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """All bytes are written; the output becomes visible once `what` is done."""

    what: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The output is durable and visible."""

    path: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The output was there already, whole and the one asked for; nothing was written."""

    path: str


@dataclass(frozen=True, slots=True)
class Left:
    """The run fails; what it has finished stays in that folder, for one that resumes it."""

    path: str


Event = Planned | Started | BytesWritten | Waiting | Committed | Kept | Left
Listener = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Listens to nothing."""
