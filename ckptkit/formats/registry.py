"""The readers, and the one place where a format is recognised."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate, CheckpointReader
from ckptkit.formats.dcp import METADATA, DcpReader
from ckptkit.formats.foreign import ForeignReader
from ckptkit.formats.safetensors import SafetensorsReader
from ckptkit.formats.torch_file import TorchFileReader
from ckptkit.formats.zero import ZeroReader
from ckptkit.storage.base import Source

READERS: tuple[CheckpointReader, ...] = (
    ForeignReader(),  # first: what it takes is kept from the others, who would misread it
    ZeroReader(),
    DcpReader(),
    SafetensorsReader(),
    TorchFileReader(),
)
_PARSING_FACTOR = 3  # measured: 900 MB for 350 MB of `.metadata`, the file itself included
SEARCH_DEPTH = 4  # runs/a/checkpoint-500/pytorch_model_fsdp_0 is found from `runs`


def find_candidates(source: Source) -> list[Candidate]:
    """Recognises every checkpoint at or under the root of a source, by file names alone."""
    return recognise(list(source.walk(SEARCH_DEPTH)))


def recognise(paths: Sequence[str]) -> list[Candidate]:
    """Recognises every checkpoint among the paths of files; a file belongs to one of them."""
    found: list[Candidate] = []
    left = list(paths)
    for reader in READERS:
        found += reader.find(left)
        taken = {path for candidate in found for path in candidate.files}
        left = [path for path in left if path not in taken]
    return found


def parsing_bytes(source: Source, candidate: Candidate) -> int:
    """Estimates the memory that parsing a candidate takes at its peak, in bytes."""
    indexes = [path for path in candidate.files if posixpath.basename(path) == METADATA]
    return sum(_PARSING_FACTOR * source.stat(path).size_bytes for path in indexes)


def read_index(source: Source, candidate: Candidate) -> TensorIndex:
    """Parses a candidate with the reader that recognised it.

    Returns:
        The index, its file paths relative to the root of the source.

    Raises:
        InputError: If its headers are damaged, hostile or not modelled.
    """
    reader = next(reader for reader in READERS if reader.name == candidate.format)
    return reader.read_index(source, candidate)
