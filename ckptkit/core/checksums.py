"""Checksums of parts, joined to those of the whole without reading it again.

There are two kinds: the CRC-32 that zip archives hold, and the digest of a tensor in a manifest.
Both can be computed from pieces, in any order and by any number of threads.

A process that wrote some byte ranges of a tensor returns a share: what its ranges add to the
tensor's CRC-32, and a mark of where they begin and end. The joined shares of all processes give
the CRC-32 of the whole without reading it, and prove that each byte was written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.core.crc import ONE, POLYNOMIAL, crc32, crc32_combine, crc32_moved, factor_after
from ckptkit.core.index import Ints
from ckptkit.core.manifest import CRC32_SCHEME, LEAF_BYTES

DIGEST_SCHEME = "xxh3-128-8MiB"
_DIGEST_BYTES = 16  # of a leaf


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


def join_pieces(pieces: Sequence[ChecksumPiece]) -> list[ChecksumPiece]:
    """Joins pieces, in any order, where one ends as the next begins; what overlaps stays as it is.

    Example:
        >>> import zlib
        >>> join_pieces([(2, 1, zlib.crc32(b"c")), (0, 2, zlib.crc32(b"ab"))]) == [
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


def crc32_of_pieces(pieces: Iterable[ChecksumPiece], total_bytes: int) -> int:
    """Returns the CRC-32 of bytes `[0, total_bytes)`, which the pieces fill, in any order."""
    joined = join_pieces([piece for piece in pieces if piece[1]]) or [(0, 0, 0)]
    start, length, crc = joined[0]
    if len(joined) > 1 or (start, length) != (0, total_bytes):
        raise ValueError(f"pieces of {total_bytes:,} bytes lack some, or overlap: {joined[:3]}")
    return crc


def leaf_ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of a tensor's leaves, as `(start, stop)`; none when it is empty."""
    for start in range(0, size_bytes, LEAF_BYTES):
        yield start, min(start + LEAF_BYTES, size_bytes)


def leaf_digest(data: memoryview) -> bytes:
    """Returns the XXH3-128 of a leaf: 16 bytes, seed 0, big-endian."""
    return xxhash.xxh3_128_digest(data)


def leaf_sums(data: memoryview) -> bytes:
    """Returns the digest of a leaf, and behind it the CRC-32 of the leaf: 20 bytes, big-endian."""
    return join_sums(leaf_digest(data), crc32(data))


def join_sums(digest: bytes, crc: int) -> bytes:
    """Returns what `leaf_sums` does, from the two sums."""
    return digest + crc.to_bytes(4, "big")


def tree_digest(leaves: Sequence[bytes]) -> str:
    """Joins the digests of a tensor's leaves to the digest of the tensor.

    A tensor's bytes (row-major, little-endian, without padding) are cut into leaves of 8 MiB
    from its first byte on, the last one shorter; an empty tensor has none. The digest is the
    XXH3-128 of the leaves' 16-byte digests joined in order, written as 32 hexadecimal digits
    behind the name of the scheme. It depends on the bytes alone, not on files or threads.

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
    """Returns the digest of a tensor from its leaves by number, digested in any order."""
    return tree_digest([leaves[number][:_DIGEST_BYTES] for number in sorted(leaves)])


def join_crc32s(leaves: Mapping[int, bytes], size_bytes: int) -> int:
    """Returns the CRC-32 of a tensor from what `leaf_sums` gave for its leaves, by number."""
    pieces = []
    for number, leaf in leaves.items():
        start = number * LEAF_BYTES
        length = min(LEAF_BYTES, size_bytes - start)
        pieces.append((start, length, int.from_bytes(leaf[_DIGEST_BYTES:], "big")))
    return crc32_of_pieces(pieces, size_bytes)


def digest_of(data: memoryview) -> str:
    """Returns the digest of a tensor whose bytes are all in memory, contiguous."""
    flat = data.cast("B")
    return tree_digest([leaf_digest(flat[a:b]) for a, b in leaf_ranges(flat.nbytes)])


_FEW = 32  # ranges whose sums are joined faster one by one
_MASK = (1 << 64) - 1


class ChecksumShare(NamedTuple):
    """What one process knows of a tensor."""

    crc32: int = 0  # what its ranges add to the CRC-32; shares are joined by exclusive or
    # Marks of the ends of its ranges less those of their starts, modulo 2^64. Where one range goes
    # on where another one ended the two cancel. What is left of ranges that fill a tensor once, and
    # only of those, are the ends of the tensor.
    edges: int = 0

    def joined(self, other: ChecksumShare) -> ChecksumShare:
        return ChecksumShare(self.crc32 ^ other.crc32, (self.edges + other.edges) & _MASK)


def compute_share(
    starts: Ints, length_bytes: int, crc32s: NDArray[np.uint32], total_bytes: int
) -> ChecksumShare:
    """Returns the share of ranges of one length, which ascend, do not overlap, and are not none."""
    stops = starts + length_bytes
    ends, begins = (_mark_positions(at).sum(dtype=np.uint64) for at in (stops, starts))
    edges = int(ends) - int(begins)
    crc32 = crc32_moved(_join_ranges(starts, crc32s), total_bytes - int(stops[-1]))
    return ChecksumShare(crc32, edges & _MASK)


def _join_ranges(starts: Ints, crc32s: NDArray[np.uint32]) -> int:
    """Returns what ranges add to the CRC-32 of bytes that end with the last of them."""
    gaps = np.diff(starts)
    if len(starts) < _FEW or bool((gaps != gaps[0]).any()):
        joined = 0
        for gap, crc32 in zip([0, *gaps.tolist()], crc32s.tolist(), strict=True):
            joined = crc32_moved(joined, gap) ^ crc32
        return joined
    # Pairs of ranges, then pairs of pairs: zeros in front add nothing.
    gap, width = int(gaps[0]), 1 << (len(starts) - 1).bit_length()
    level = np.zeros(width, np.uint32)
    level[width - len(starts) :] = crc32s
    while len(level) > 1:
        level = crc32s_moved(level[::2], gap) ^ level[1::2]
        gap *= 2
    return int(level[0])


def is_whole(share: ChecksumShare, total_bytes: int) -> bool:
    """Says whether the joined shares cover every byte, each written once."""
    start, stop = map(int, _mark_positions(np.array([0, total_bytes], np.int64)))
    return share.edges == (stop - start) & _MASK


def _mark_positions(positions: Ints) -> NDArray[np.uint64]:
    """Returns 64 bits for each position that look random, and are the same everywhere.

    Source:
        The finaliser of SplitMix64, https://prng.di.unimi.it/splitmix64.c
    """
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ mixed >> np.uint64(31)


class Digest:
    """The digest of one tensor, from leaves by number that may come from several threads."""

    def __init__(self, *, is_crc32: bool) -> None:
        self._is_crc32 = is_crc32
        self._leaves: dict[int, bytes] = {}

    def add(self, leaf: int, data: memoryview) -> None:
        digest = join_sums(bytes(_DIGEST_BYTES), crc32(data)) if self._is_crc32 else None
        self._leaves[leaf] = digest or leaf_digest(data)

    def value(self, size_bytes: int) -> str:
        if self._is_crc32:
            return f"{CRC32_SCHEME}:{join_crc32s(self._leaves, size_bytes):08x}"
        return join_leaves(self._leaves)


def digest_like(digest: str) -> Digest:
    """Returns an empty digest in the scheme of a known one.

    What several processes wrote has the CRC-32 of its bytes, `crc32:` and 8 hexadecimal digits,
    because that can be joined over ranges of any kind; everything else a tree of XXH3-128.
    """
    return Digest(is_crc32=digest.startswith(f"{CRC32_SCHEME}:"))


def digest_as(other: str, data: memoryview) -> str:
    """Returns the digest of a whole content in the scheme of another digest."""
    digest = digest_like(other)
    for leaf, (start, stop) in enumerate(leaf_ranges(len(data))):
        digest.add(leaf, data[start:stop])
    return digest.value(len(data))
