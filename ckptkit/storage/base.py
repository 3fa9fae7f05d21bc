"""The interfaces between ckptkit and storage: sources that are read, targets that are written.

`OutputAttempt` and the note of a plan are what processes share that fill one output together.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from ckptkit.core.errors import CkptkitError, InputError, TruncatedFileError
from ckptkit.core.index import FileRange, FileRef
from ckptkit.core.object_parts import CopiedRange, ObjectPart, SharedRange

if TYPE_CHECKING:
    from ckptkit.storage.local.disk import OpenFile


class Source(ABC):
    """A folder of files that is only read, local or remote. Paths are relative, with `/`.

    Attributes:
        location: The place as the user named it, for messages.
        is_remote: Whether each read costs a round trip, so that many ranges are read together.
        closed_folders: The folders that `walk` has met so far, and was not allowed to enter.
    """

    location: str
    is_remote: bool = False
    closed_folders: Collection[str] = ()

    @abstractmethod
    def walk(self, depth: int) -> Iterator[str]:
        """Yields the paths of files down to `depth` folders below, sorted."""

    @abstractmethod
    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file.

        Raises:
            MissingFileError: If it does not exist.
            UnsafePathError: If it leads out of the source.
        """

    @abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Returns exactly the bytes `[start, stop)`.

        Raises:
            TruncatedFileError: If the file ends before `stop`.
        """

    @abstractmethod
    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start` on; thread-safe.

        Raises:
            TruncatedFileError: If the file ends before `target` is full.
        """

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        """Fills each buffer from its range, many at a time where the source is remote."""
        for wanted, view in reads:
            self.read_into(wanted.path, wanted.start, view)

    def prefetch(self, ranges: Collection[FileRange]) -> None:  # noqa: B027  optional
        """Announces small reads that `read` will be called for one by one; may do nothing."""

    def copy_source(self, path: str) -> CopySource | None:  # noqa: ARG002  of a store
        """Returns the object of a file, None for a file that is not an object of a store."""
        return None

    def local_file(self, path: str) -> AbstractContextManager[OpenFile] | None:  # noqa: ARG002
        """Returns a file of this machine, opened; None for a file that is none."""
        return None

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        """Returns the first file that is no longer the one it was, or None."""
        for ref in refs:
            try:
                now = self.stat(ref.path)
            except CkptkitError:
                return ref
            if now.identity != ref.identity:
                return ref
        return None

    def linked_folders(self) -> list[str]:
        """Returns the names of folders right below that are links, which `walk` does not enter."""
        return []

    def close(self) -> None:  # noqa: B027  not all have something to close
        """Closes descriptors and connections; later reads fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def is_there(source: Source, path: str) -> bool:
    """Says whether a file exists and may be read, also where listings do not show it yet."""
    try:
        source.stat(path)
    except InputError:
        return False
    return True


def truncated_error(where: str, start: int, stop: int, end: int) -> TruncatedFileError:
    """Returns the error for a file that ends at byte `end`, before the bytes `[start, stop)` do."""
    return TruncatedFileError(
        f"the file ends at byte {end:,} but bytes [{start:,}, {stop:,}) were expected "
        f"({stop - end:,} missing)",
        where=where,
        hint="the copy was cut short; compare its size with the source's",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CopySource:
    """An object that the store itself can copy from.

    Attributes:
        store: The client that reads it; a store copies only objects of its own client.
        path: Bucket and key, with a slash between.
        etag: Its version.
    """

    store: object = dataclasses.field(repr=False)
    path: str
    etag: str


class Sink(ABC):
    """Where files are written; a store may copy ranges of them itself, a file system share blocks.

    Attributes:
        copies_objects: Whether `copy` may work, without moving bytes through here.
        shares_blocks: Whether `create_shared` may work.
        shared_bytes: How much is shared so far.
    """

    copies_objects: bool = False
    shares_blocks: bool = False
    shared_bytes: int = 0

    @abstractmethod
    def create(self, path: str, size_bytes: int) -> None:
        """Makes a file of that size, its content undefined until written.

        Raises:
            NoSpaceError: If the place has no room for it.
        """

    @abstractmethod
    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges."""

    def give_up(self) -> None:  # noqa: B027  optional
        """Ends all waits for a write that will not come, where writes wait for their turn."""

    def why_no_copies(self, source: CopySource) -> str:
        """Tries to copy from an object; returns why that fails, empty if it works."""
        raise NotImplementedError

    def create_copied(self, path: str, size_bytes: int, copies: Sequence[CopiedRange]) -> None:
        """Makes a file as `create` does; these ranges of it are copied, and not written."""
        raise NotImplementedError

    def why_no_sharing(self, source: Source, path: str) -> str:
        """Tries to share a block of a file; returns why that fails, empty if it works."""
        raise NotImplementedError

    def create_shared(
        self, path: str, size_bytes: int, shared: Sequence[tuple[Source, SharedRange]]
    ) -> None:
        """Makes a file as `create` does, and gives it blocks of others; `write` leaves these out.

        `shared`: in the order of the file. What the file system refuses is to be written.
        """
        raise NotImplementedError

    def unshared(self, path: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of a range of a created file that `create_shared` did not make."""
        raise NotImplementedError

    def copied_parts(self, path: str) -> tuple[ObjectPart, ...]:
        """Returns the parts of a created file that `copy` has to be called for."""
        raise NotImplementedError

    def copy(self, path: str, part: ObjectPart, source: CopySource) -> None:
        """Lets the store copy a part of a file; thread-safe."""
        raise NotImplementedError


class Target(Sink):
    """A folder where the files of one output are put, invisible until committed.

    Attributes:
        location: The place as the user named it, for messages.
    """

    location: str

    def free_bytes(self) -> int | None:
        """Returns how much room there is, None where that is not known, as of stores."""
        return None

    @abstractmethod
    def commit(self, last: str) -> None:
        """Makes everything durable and visible at once, the file `last` after all others.

        Raises:
            OutputExistsError: If another process has filled the destination meanwhile.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Removes what was written; does nothing after a commit."""


SentRows = dict[str, list[Sequence[Any]]]
"""What a store has returned for the parts that it took, by file, as JSON values."""
Cut = Callable[[str], Sequence[ObjectPart]]


class OutputAttempt(Struct, frozen=True):
    """What all processes that fill one output have in common.

    Attributes:
        nonce: 16 hexadecimal digits.
        name: Of what they write; distinguishes abandoned work from work in progress.
        overwrite: Whether the commit replaces an earlier output.
        is_agreed: Whether the processes agree through notes; else one of them begins for all.
        seen: What identifies the manifest that was there when they began, empty where there was
            none; None for the one that is there when the target is opened.
    """

    nonce: str
    name: str = "all"
    overwrite: bool = False
    is_agreed: bool = True
    seen: str | None = None


def encode_plan_note(plan: bytes, seen: str | None) -> bytes:
    """Returns the note of a plan, with what identifies the manifest that it replaces."""
    return (b"" if seen is None else b"=" + seen.encode()) + b"\n" + plan


def parse_plan(note: bytes) -> bytes:
    """Returns the plan in such a note."""
    return note.rpartition(b"\n")[2]


def parse_seen(note: bytes | None) -> str | None:
    """Returns what identifies the manifest to replace, by such a note; None if it says nothing."""
    seen = (note or b"").rpartition(b"\n")[0]
    return seen[1:].decode() if seen else None


Row = tuple[str, Sequence[int], int, int]
"""A file of the output, where in it runs of one length begin, their bytes in all, their CRC-32."""
