"""Checksums of parts, joined to those of the whole without reading it again.

Two kinds: the CRC-32 that zip archives hold, and the digest of a tensor that the manifest
holds. Both can be computed from pieces, in any order and by any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.core.crc import ONE, POLYNOMIAL, crc32_combine, crc32_moved, factor_after
from ckptkit.core.manifest import LEAF_BYTES

DIGEST_SCHEME = "xxh3-128-8MiB"
__all__ = [
    "DIGEST_SCHEME",
    "ChecksumPiece",
    "RangeChecksum",
    "crc32_combine",
    "crc32_moved",
    "crc32s_moved",
    "digest_of",
    "join_leaves",
    "joined_pieces",
    "leaf_digest",
    "leaf_ranges",
    "tree_digest",
]


def crc32s_moved(crc32s: NDArray[np.uint32], length_bytes: int) -> NDArray[np.uint32]:
    """Returns what `crc32_moved` does, for many parts that all have as many bytes after them."""
    factor, moved, added = factor_after(length_bytes), crc32s.copy(), np.zeros_like(crc32s)
    while factor:
        if factor & ONE:
            added ^= moved
        factor = (factor << 1) & 0xFFFF_FFFF
        moved = (moved >> np.uint32(1)) ^ (moved & np.uint32(1)) * np.uint32(POLYNOMIAL)
    return added


ChecksumPiece = tuple[int, int, int]  # start in what is checked, length in bytes, CRC-32


def joined_pieces(pieces: Sequence[ChecksumPiece]) -> list[ChecksumPiece]:
    """Joins pieces where one ends as the next begins; what overlaps stays as it is.

    Args:
        pieces: In any order.

    Returns:
        The fewest pieces that say the same, by their starts.

    Example:
        >>> import zlib
        >>> joined_pieces([(2, 1, zlib.crc32(b"c")), (0, 2, zlib.crc32(b"ab"))]) == [
        ...     (0, 3, zlib.crc32(b"abc"))
        ... ]
        True
    """
    joined: list[ChecksumPiece] = []
    for start, length, crc in sorted(pieces):
        if joined and sum(joined[-1][:2]) == start:
            first, before, combined = joined[-1]
            joined[-1] = (first, before + length, crc32_combine(combined, crc, length))
        else:
            joined.append((start, length, crc))
    return joined


class RangeChecksum:
    """The CRC-32 of a byte range, collected from pieces that come in any order.

    `add` may be called by several threads at once; `value` once they are done.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []

    def add(self, start: int, length_bytes: int, crc32: int) -> None:
        """Notes a piece.

        Args:
            start: Its first byte, from the start of the range.
            length_bytes: Its length; pieces of 0 bytes count for nothing.
            crc32: Its CRC-32.
        """
        if length_bytes:
            self._pieces.append((start, length_bytes, crc32))

    def value(self, total_bytes: int) -> int:
        """Joins the pieces to the CRC-32 of the range.

        Args:
            total_bytes: Length of the range, which starts at byte 0.

        Returns:
            The CRC-32 of bytes [0, `total_bytes`).

        Raises:
            ValueError: If they leave a gap, overlap, or end elsewhere.
        """
        position = combined = 0
        for start, length, crc32 in sorted(self._pieces):
            if start != position:
                raise ValueError(f"piece starts at byte {start:,}, expected {position:,}")
            combined = crc32_combine(combined, crc32, length)
            position += length
        if position != total_bytes:
            raise ValueError(f"pieces end at byte {position:,}, expected {total_bytes:,}")
        return combined


def leaf_ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of a tensor's leaves, as `(start, stop)`; none when it is empty."""
    for start in range(0, size_bytes, LEAF_BYTES):
        yield start, min(start + LEAF_BYTES, size_bytes)


def leaf_digest(data: memoryview) -> bytes:
    """Digests one leaf: XXH3-128 with seed 0 in canonical, big-endian form, 16 bytes.

    Args:
        data: The leaf, contiguous: `LEAF_BYTES` bytes, the last of a tensor fewer, none empty.

    Returns:
        The 16 bytes that `tree_digest` joins.
    """
    return xxhash.xxh3_128_digest(data)


def tree_digest(leaves: Sequence[bytes]) -> str:
    """Joins the digests of a tensor's leaves to the digest of the tensor.

    A tensor's bytes (row-major, little-endian, without padding) are cut into leaves of 8 MiB
    from its first byte on, the last one shorter; an empty tensor has none. The digest is the
    XXH3-128 of the leaves' 16-byte digests joined in order, written as 32 hexadecimal digits
    behind the name of the scheme. It depends on the bytes alone, not on files or threads.

    Args:
        leaves: What `leaf_digest` gave for each, in order.

    Returns:
        The digest, such as `xxh3-128-8MiB:99aa06d3014798d86001c324468d497f` for no bytes.

    Example:
        Anyone can recompute it:

        >>> data = b"0123"
        >>> leaf = xxhash.xxh3_128(data).digest()
        >>> tree_digest([leaf]) == "xxh3-128-8MiB:" + xxhash.xxh3_128(leaf).hexdigest()
        True

    Source:
        https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """
    return f"{DIGEST_SCHEME}:{xxhash.xxh3_128_hexdigest(b''.join(leaves))}"


def join_leaves(leaves: Mapping[int, bytes]) -> str:
    """Joins leaves that were digested in any order to the digest of the tensor.

    Args:
        leaves: What `leaf_digest` gave for each, by the number of the leaf.

    Returns:
        The same as `tree_digest` over them in order.
    """
    return tree_digest([leaves[number] for number in sorted(leaves)])


def digest_of(data: memoryview) -> str:
    """Computes the digest of a tensor whose bytes are all in memory.

    Args:
        data: The bytes, one dimension, contiguous.

    Returns:
        The same as `tree_digest` over its leaves.
    """
    flat = data.cast("B")
    return tree_digest([leaf_digest(flat[a:b]) for a, b in leaf_ranges(flat.nbytes)])
