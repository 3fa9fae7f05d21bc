"""Checks the objects of a checkpoint, which are stored beside its tensors, without parsing them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, InputError
from ckptkit.core.index import Problem, TensorIndex
from ckptkit.formats.dcp import BlobRef, content_of
from ckptkit.formats.torch_zip import data_start, open_archive
from ckptkit.formats.zip_directory import Read
from ckptkit.storage.base import Source

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedObjects:
    """What came of it.

    Attributes:
        proven: How many objects have the checksums that were stored for them.
        unverified: How many have none.
        problems: What is wrong with the others.
    """

    proven: int
    unverified: int
    problems: tuple[Problem, ...]


def check_objects(source: Source, index: TensorIndex) -> CheckedObjects:
    """Compares every object in a DCP directory with its stored CRC-32.

    Returns:
        How many there are, and what is wrong with them.
    """
    summed: list[bool] = []
    problems = []
    for path, value in index.values.items():
        if not isinstance(value, BlobRef):
            continue
        where = f"{value.path}, object {'.'.join(map(str, path))!r}"
        try:
            summed.append(_is_proven(source, value, where))
        except InputError as error:
            problems.append(Problem(error.code, where, error.message))
    return CheckedObjects(sum(summed), len(summed) - sum(summed), tuple(problems))


def _is_proven(source: Source, blob: BlobRef, where: str) -> bool:
    """Tells whether checksums are stored for an object, having compared them."""
    read, size = content_of(source, blob, where=where)
    archive = open_archive(read, size, where=where)
    sums = []
    for entry in archive.entries.values():
        if entry.crc32 is None:
            continue
        start = data_start(read, entry, where=where)
        sums.append((entry, _crc32(read, start, start + entry.size_bytes)))
    for entry, found in sums:
        if found != entry.crc32:
            raise ChecksumError(
                f"{posixpath.basename(entry.name)!r} has CRC-32 {found:#010x},"
                f" {entry.crc32:#010x} was stored",
                where=where,
            )
    return bool(sums)


def _crc32(read: Read, start: int, stop: int) -> int:
    crc = 0
    for piece in _pieces(start, stop):
        crc = crc32(read(*piece), crc)
    return crc


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + _READ_BYTES, stop)) for at in range(start, stop, _READ_BYTES))
