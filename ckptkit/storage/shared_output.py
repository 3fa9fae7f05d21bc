"""The seam between processes that fill one output together and the place that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.base import Sink

SentRows = dict[str, list[Sequence[Any]]]
"""What a store has told of the parts that it took, by file, as JSON values."""
Cut = Callable[[str], Sequence[ObjectPart]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all processes that fill an output have in common.

    Attributes:
        nonce: 16 hexadecimal digits.
        name: Of what they write, so that what was given up is told from what is under way.
        overwrite: Whether what lies there is replaced by the commit.
        is_agreed: Whether they agree among themselves; else one of them begins for all.
        seen: What identifies the manifest that was there when they began, empty where there was
            none; None for the one that is there when the target is made.
    """

    nonce: str
    name: str = "all"
    overwrite: bool = False
    is_agreed: bool = True
    seen: str | None = None


def plan_note(plan: bytes, seen: str | None) -> bytes:
    """Returns a note of what is to be done, and of the manifest that it replaces, if any."""
    return (b"" if seen is None else b"=" + seen.encode()) + b"\n" + plan


def plan_of(note: bytes) -> bytes:
    """Returns what is to be done, by such a note."""
    return note.rpartition(b"\n")[2]


def seen_in(note: bytes | None) -> str | None:
    """Returns what identifies the manifest to replace, by such a note; None if it says nothing."""
    seen = (note or b"").rpartition(b"\n")[0]
    return seen[1:].decode() if seen else None


class Notes(Protocol):
    """Small texts by which the processes tell each other what they have done."""

    def put(self, name: str, data: bytes) -> bytes:
        """Leaves a note unless there is one of that name; returns what the note says."""
        ...

    def get(self, name: str) -> bytes | None:
        """Returns what a note says, None where there is none."""
        ...

    def alone(self, name: str, owner: str) -> AbstractContextManager[bool]:
        """Yields whether this process may go on with what only one may do.

        Args:
            name: What that is.
            owner: Who asks; the same one may ask again after it was killed.
        """
        ...


class SharedOutput(Sink, Protocol):
    """One process's view of an output that several fill, invisible until one of them commits it."""

    takes_parts: bool
    """Whether what is written is taken in parts of objects, as `object_parts` cuts them."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    @property
    def removal(self) -> str:
        """The command by which a user gives up what other processes have begun."""
        ...

    @property
    def notes(self) -> Notes:
        """What the processes tell each other."""
        ...

    def plan(self) -> bytes | None:
        """Returns what the processes have agreed on, None where nobody has begun."""
        ...

    def agree(self, plan: bytes) -> bytes:
        """Says what is to be done, unless another process has; returns what was agreed on."""
        ...

    def free_bytes(self) -> int | None:
        """Returns how much room there is, None where nobody knows."""
        ...

    def why_no_ranges(self) -> str:
        """Returns why several processes cannot write there at once, empty if they can."""
        ...

    def sweep(self) -> None:
        """Removes what killed attempts left behind; for one of the processes."""
        ...

    def begin(self) -> None:
        """Makes the created files ready for the other processes, where one deals out the work."""
        ...

    def sync(self) -> None:
        """Makes what this process wrote durable; what it writes next it has to create again."""
        ...

    def sent(self) -> SentRows:
        """Returns what has to be known for the commit of the parts that were written."""
        ...

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Takes over what the processes have sent; returns which parts are missing, by file."""
        ...

    def commit(self, last: str, data: bytes) -> None:
        """Makes the whole visible, the file `last` after all others; for one process."""
        ...

    def leave(self) -> None:
        """Ends this process's part, whatever becomes of the whole."""
        ...

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it any more."""
        ...
