"""Checksums of parts, joined to those of the whole without reading it again.

Two kinds: the CRC-32 that zip archives hold, and the digest of a tensor that the manifest
holds. Both can be computed from pieces, in any order and by any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.core.manifest import LEAF_BYTES

DIGEST_SCHEME = "xxh3-128-8MiB"

# CRC-32's polynomial with the bits reversed: bit 31 is x^0, bit 0 is x^31, and x^32 is left
# out. Source: ISO/IEC 8802-3 (Ethernet), PKWARE APPNOTE.TXT 4.4.7.
_POLYNOMIAL = 0xEDB8_8320
_ONE = 1 << 31
_X = 1 << 30
# The polynomial is primitive: the powers of x repeat after so many, and not before.
_PERIOD = (1 << 32) - 1


def _product(left: int, right: int) -> int:
    """Multiplies two polynomials over GF(2) modulo CRC-32's."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFF_FFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


def _squarings() -> tuple[int, ...]:
    """Returns x to the powers 1, 2, 4, ..., 2^31."""
    powers = [_X]
    for _ in range(31):
        powers.append(_product(powers[-1], powers[-1]))
    return tuple(powers)


_POWERS = _squarings()


@lru_cache(maxsize=1024)
def _shift(length_bytes: int) -> int:
    """Returns x^(8 n): what appending n bytes multiplies a CRC by."""
    exponent = 8 * length_bytes % _PERIOD
    result = _ONE
    for bit, power in enumerate(_POWERS):
        if exponent >> bit & 1:
            result = _product(power, result)
    return result


def crc32_combine(first: int, second: int, second_length_bytes: int) -> int:
    """Computes the CRC-32 of two byte strings joined, from those of each.

    A length that was seen before costs microseconds, a new one tens of them.

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second.
        second_length_bytes: Length of the second; 0 needs `second` to be 0.

    Returns:
        The CRC-32, as `zlib.crc32` gives it.

    Example:
        >>> import zlib
        >>> crc32_combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True

    Source:
        The inversions at both ends of CRC-32 cancel, so that
        crc(A B) = crc(A) x^(8 |B|) + crc(B) modulo its polynomial.
    """
    return crc32_moved(first, second_length_bytes) ^ second


def crc32_moved(crc32: int, length_bytes: int) -> int:
    """Returns what a part adds to the CRC-32 of a whole in which so many bytes come after it.

    The CRC-32 of byte strings joined is the exclusive or of what each of them adds.
    """
    return _product(crc32, _shift(length_bytes)) if crc32 else 0


def crc32s_moved(crc32s: NDArray[np.uint32], length_bytes: int) -> NDArray[np.uint32]:
    """Returns what `crc32_moved` does, for many parts that all have as many bytes after them."""
    factor, moved, added = _shift(length_bytes), crc32s.copy(), np.zeros_like(crc32s)
    while factor:
        if factor & _ONE:
            added ^= moved
        factor = (factor << 1) & 0xFFFF_FFFF
        moved = (moved >> np.uint32(1)) ^ (moved & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return added


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
