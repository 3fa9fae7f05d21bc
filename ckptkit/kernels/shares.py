"""Proof of bytes that several processes wrote, joined from one small number of each.

A process that wrote some byte ranges of a tensor tells a share: what its ranges add to the
tensor's CRC-32, and a mark of where they begin and end. The shares of all processes joined give
the CRC-32 of the whole without a look at the bytes, and prove that each byte was written once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.index import Ints
from ckptkit.kernels.checksums import crc32_moved, crc32s_moved

CRC32_SCHEME = "crc32"
_FEW = 32  # ranges whose sums are joined faster one by one
_MASK = (1 << 64) - 1


class Share(NamedTuple):
    """What one process knows of a tensor.

    Attributes:
        crc32: What its ranges add to the CRC-32; shares are joined by exclusive or.
        edges: Marks of the ends of its ranges less those of their starts, modulo 2^64. Where one
            range goes on where another one ended the two cancel. What is left of ranges that
            fill a tensor once, and only of those, are the ends of the tensor.
    """

    crc32: int = 0
    edges: int = 0

    def joined(self, other: Share) -> Share:
        """Returns the share of both."""
        return Share(self.crc32 ^ other.crc32, (self.edges + other.edges) & _MASK)


def share_of(
    starts: Ints, length_bytes: int, crc32s: NDArray[np.uint32], total_bytes: int
) -> Share:
    """Returns the share of some ranges of one length.

    Args:
        starts: int64; their first bytes, ascending, one at least; they do not overlap.
        length_bytes: Length of each.
        crc32s: Of each, its CRC-32.
        total_bytes: Length of the tensor.
    """
    stops = starts + length_bytes
    edges = int(_marks(stops).sum(dtype=np.uint64)) - int(_marks(starts).sum(dtype=np.uint64))
    crc32 = crc32_moved(_joined(starts, crc32s), total_bytes - int(stops[-1]))
    return Share(crc32, edges & _MASK)


def _joined(starts: Ints, crc32s: NDArray[np.uint32]) -> int:
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


def is_whole(share: Share, total_bytes: int) -> bool:
    """Tells whether the joined shares are those of every byte, each written once."""
    return share.edges == (_mark(total_bytes) - _mark(0)) & _MASK


def _mark(position: int) -> int:
    return int(_marks(np.array([position], np.int64))[0])


def _marks(positions: Ints) -> NDArray[np.uint64]:
    """Returns 64 bits for each position that look random, and are the same everywhere.

    Source:
        The finaliser of SplitMix64, https://prng.di.unimi.it/splitmix64.c
    """
    mixed = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ mixed >> np.uint64(31)
