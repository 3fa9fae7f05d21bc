"""Proving stored checksums of blobs that no rank reads whole, from what all ranks read together."""

from __future__ import annotations

import base64
import posixpath
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ckptkit.core.errors import ChecksumError
from ckptkit.core.index import TensorIndex
from ckptkit.kernels.checksums import crc32_combine
from ckptkit.training.blobs import PartialBlob, check_crc32

MOST_PACKED_CHARACTERS = 2 << 20  # per rank and index; the store takes 4 MiB in one value
_COLUMNS = 6


def cross_check(partial: Sequence[PartialBlob]) -> int:
    """Proves blobs from the parts that different ranks read.

    Args:
        partial: What all ranks together report, of one index.

    Returns:
        How many blobs stay unproven, because no parts fit together to the whole.

    Raises:
        ChecksumError: If a blob has another checksum than the stored one.
    """
    unproven = 0
    by_number: dict[int, list[PartialBlob]] = defaultdict(list)
    for blob in partial:
        by_number[blob.number].append(blob)
    for blobs in by_number.values():
        parts = {part for blob in blobs for part in blob.parts}
        found = _joined(parts, blobs[0].size_bytes, where=blobs[0].where)
        if found is None:
            unproven += 1
        else:
            check_crc32(found, blobs[0].expected, where=blobs[0].where)
    return unproven


def _joined(parts: Iterable[tuple[int, int, int]], size_bytes: int, *, where: str) -> int | None:
    """Returns the checksum of the whole from parts that follow one another, or None."""
    reached: dict[int, int] = {0: 0}  # how far some parts lead, and their checksum
    for start, length, crc32 in sorted(parts):
        if start in reached:
            joined = crc32_combine(reached[start], crc32, length)
            if reached.setdefault(start + length, joined) != joined:
                raise ChecksumError("two ranks read different bytes from it", where=where)
    return reached.get(size_bytes)


def pack(partial: Sequence[PartialBlob]) -> str:
    """Returns blobs as a text that is small enough for the store; what does not fit is left out.

    Blobs that are left out stay unproven, which is no error.
    """
    rows = [
        (blob.number, blob.size_bytes, blob.expected, *part)
        for blob in sorted(partial, key=lambda blob: blob.number)
        for part in blob.parts
    ]
    while True:
        table = np.array(rows, "<i8").reshape(len(rows), _COLUMNS)
        text = base64.b85encode(zlib.compress(table.T.tobytes(), 1)).decode()
        if len(text) <= MOST_PACKED_CHARACTERS:
            return text
        rows = rows[: len(rows) // 2]


def unpack(text: str, index: TensorIndex, location: str) -> list[PartialBlob]:
    """Returns what `pack` was given, one entry a part.

    Args:
        text: What it returned.
        index: The same that the ranks read from.
        location: Of the index's files, for messages.
    """
    table = np.frombuffer(zlib.decompress(base64.b85decode(text)), "<i8").reshape(_COLUMNS, -1)
    return [
        PartialBlob(number, _where(index, number, location), size, expected, (tuple(part),))
        for number, size, expected, *part in table.T.tolist()
    ]


def _where(index: TensorIndex, number: int, location: str) -> str:
    return posixpath.join(location, index.files[int(index.records.file[number])].path)
