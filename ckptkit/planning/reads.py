"""Which bytes are asked for at once, where every question costs a round trip.

What a piece of work wants is known before it begins. Ranges that touch or overlap become one, and
so do those with little between them. What lies between is read in vain, so it is kept to a
hundredth of what is wanted; gaps that cost less than the question itself do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ckptkit.core.ranges import FileRange

REQUEST_BYTES = 8 << 20
"""Of a single request at most: far more than its latency costs, and little to repeat."""

READ_AHEAD_BYTES = 8 << 20
"""What one worker has in memory of what it is about to use."""

FREE_GAP_BYTES = 4 << 10
"""Up to which a gap is always read: the directory of one archive and the header of the next."""

FREE_GAP_OF_ENDS_BYTES = 32 << 10
"""The same where all that is wanted are the ends of archives: those of small ones lie close."""

GAP_BYTES = 256 << 10
"""Up to which a gap is read where what is wanted is large enough."""

VAIN_SHARE = 100
"""One byte in so many may lie in larger gaps."""


def coalesce(
    wanted: Iterable[FileRange], *, free_gap_bytes: int = FREE_GAP_BYTES
) -> list[FileRange]:
    """Joins ranges into those that are read.

    Args:
        wanted: In any order; they may overlap.
        free_gap_bytes: Up to which a gap is read in any case.

    Returns:
        Ranges that cover them, apart from each other, sorted.
    """
    distinct = _joined(sorted(one for one in wanted if one.size_bytes > 0), free_gap_bytes)
    allowance = sum(one.size_bytes for one in distinct) // VAIN_SHARE
    limit = -1
    for gap in sorted(_gaps(distinct)):
        allowance -= gap
        if allowance < 0 or gap > GAP_BYTES:
            break
        limit = gap
    return distinct if limit < 0 else _joined(distinct, limit)


def requests(reads: Iterable[FileRange]) -> Iterator[FileRange]:
    """Cuts ranges into equal parts of at most `REQUEST_BYTES`."""
    for one in reads:
        count = -(-one.size_bytes // REQUEST_BYTES)
        step = -(-one.size_bytes // max(count, 1))
        for start in range(one.start, one.stop, max(step, 1)):
            yield FileRange(one.path, start, min(start + step, one.stop))


def _joined(ranges: Sequence[FileRange], gap_bytes: int) -> list[FileRange]:
    found: list[FileRange] = []
    for one in ranges:
        last = found[-1] if found else None
        if last is not None and last.path == one.path and one.start - last.stop <= gap_bytes:
            found[-1] = FileRange(one.path, last.start, max(last.stop, one.stop))
        else:
            found.append(one)
    return found


def _gaps(ranges: Sequence[FileRange]) -> Iterator[int]:
    for one, following in pairwise(ranges):
        if one.path == following.path:
            yield following.start - one.stop
