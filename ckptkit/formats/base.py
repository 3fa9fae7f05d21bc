"""The interface of a reader of one on-disk format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

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
