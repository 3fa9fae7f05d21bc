"""The interface of a reader of one on-disk format."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

from msgspec import Struct

from ckptkit.core.errors import CkptkitError
from ckptkit.core.index import TensorIndex
from ckptkit.storage.base import Source


class Candidate(Struct, frozen=True):
    """A checkpoint that a reader recognised by file names alone.

    Attributes:
        format: The reader's name.
        folder: Its folder, relative to the source's root; empty for the root itself.
        files: Its files, relative to the source's root, sorted.
        reason: Why it was recognised, such as "'.metadata' beside 4 '.distcp' files".
    """

    format: str
    folder: str
    files: tuple[str, ...]
    reason: str


class CheckpointReader(Protocol):
    """Reads one on-disk format: headers only, never tensor data."""

    @property
    def name(self) -> str:
        """Short name of the format, such as `dcp`."""
        ...

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises checkpoints among the paths of all files in a source; reads nothing."""
        ...

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses headers into an index whose file paths are relative to the source's root.

        Raises:
            InputError: If the headers are damaged, hostile or not modelled.
        """
        ...


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Gives a place to errors that have none."""
    try:
        yield
    except CkptkitError as error:
        if error.where:
            raise
        placed = error.located(where).with_traceback(error.__traceback__)
        raise placed from error.__cause__  # one error in a traceback, raised where it was found


class FormatReader:
    """A reader of ckptkit's own: a subclass in any module of `ckptkit.formats` is one.

    Attributes:
        name: Short name of the format.
        order: Readers are asked in this order, and take files from those after them: first where
            files may have any name, last where a single file of a common ending is a checkpoint.
        expected: The names of its files, for the message that nothing was found; empty where they
            are no checkpoint by themselves.
        endings: A regular expression for how paths of its files end; where none does, the reader is
            not asked.
        index_memory: The name of a large index, and the measured ratio of the memory that parsing
            it takes to its size.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 55
    expected: ClassVar[str] = ""
    endings: ClassVar[str] = ""
    index_memory: ClassVar[tuple[str, int]] = ("", 0)

    def find_deep_folders(self, paths: Sequence[str]) -> Collection[str]:  # noqa: ARG002  few have some
        """Returns folders whose files may be deeper than checkpoints are searched for."""
        return ()

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises checkpoints, as in `CheckpointReader`."""
        raise NotImplementedError

    def read_index(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses headers, as in `CheckpointReader`; an error without a place is of the folder."""
        with errors_at(posixpath.join(source.location, candidate.folder)):
            return self.parse(source, candidate)

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses headers; called by `read_index`."""
        raise NotImplementedError
