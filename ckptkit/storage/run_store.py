"""The directory of a run as a whole: what lies in it, who uses it, and removal step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a run.

    Attributes:
        path: Relative to the run, with `/` between segments.
        size_bytes: Its size.
        modified: When it was written, in seconds since 1970; 0 where that is unknown.
        identity: Changes when the file is replaced or rewritten.
        links: How many names the file has, of which this is one.
        inode: What the names of one file have in common; empty where a file has one name only.
    """

    path: str
    size_bytes: int
    modified: float
    identity: str
    links: int = 1
    inode: str = ""


class RunStore(Protocol):
    """A run on some storage. Steps are called by the names of their folders."""

    @property
    def location(self) -> str:
        """The place as the user named it, for messages."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """Returns the files of all steps, sorted by path.

        Raises:
            InputError: If the run cannot be listed.
        """
        ...

    def is_live(self) -> bool | None:
        """Tells whether a job is writing to the run; None where nobody can know."""
        ...

    def is_there(self, path: str) -> bool:
        """Tells whether a file is there at this moment."""
        ...

    def hold(self, step: str, markers: Collection[str]) -> AbstractContextManager[object]:
        """Marks a step as being read, until the result is left.

        Args:
            step: The name of its folder.
            markers: Files of the step by which its readers are known, relative to the run.

        Raises:
            MissingFileError: If it is gone, or is being removed.
        """
        ...

    def in_use(self, step: str, markers: Collection[str]) -> bool:
        """Tells whether somebody reads a step now; changes nothing."""
        ...

    def claim(
        self, step: str, markers: Collection[str], files: Sequence[StoredFile]
    ) -> AbstractContextManager[object] | None:
        """Keeps new readers from a step that is to be removed, until the result is left.

        Args:
            step: The name of its folder.
            markers: Files of the step by which its readers are known, relative to the run.
            files: What is to be removed.

        Returns:
            What keeps them out, or None where somebody reads it now.

        Raises:
            CkptkitError: If the storage does not allow it.
        """
        ...

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Removes a step; at no moment does half of it look like a whole one.

        Args:
            step: The name of its folder.
            files: What was seen in it, and no file that came later.

        Raises:
            OutputError: If not all of it can be removed.
        """
        ...

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Removes what removals left behind that were interrupted.

        Args:
            remove: Whether it goes; otherwise it is only named.

        Returns:
            The steps concerned, by name.

        Raises:
            OutputError: If something cannot be removed.
        """
        ...
