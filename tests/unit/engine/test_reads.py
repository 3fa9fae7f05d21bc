"""Which ranges are read together, and what that costs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.index import FileRange
from ckptkit.engine.locate import (
    FREE_GAP_BYTES,
    GAP_BYTES,
    REQUEST_BYTES,
    VAIN_SHARE,
    coalesce,
    requests,
)

MiB = 1 << 20


def ranges(*pairs: tuple[int, int], path: str = "a") -> list[FileRange]:
    return [FileRange(path, start, stop) for start, stop in pairs]


def test_a_gap_that_costs_less_than_a_question_is_read() -> None:
    apart = 100 + FREE_GAP_BYTES
    assert coalesce(ranges((0, 100), (apart, apart + 1))) == ranges((0, apart + 1))
    assert len(coalesce(ranges((0, 100), (apart + 1, apart + 2)))) == 2


def test_larger_gaps_are_read_while_they_are_a_hundredth_of_what_is_wanted() -> None:
    gap = 20 << 10
    wanted = ranges((0, MiB), (MiB + gap, 3 * MiB), (3 * MiB + 2 * gap, 4 * MiB))
    assert coalesce(wanted) == ranges((0, 3 * MiB), (3 * MiB + 2 * gap, 4 * MiB))
    assert len(coalesce(ranges((0, 64 * MiB), (64 * MiB + GAP_BYTES + 1, 128 * MiB)))) == 2


def test_large_ranges_are_cut_into_equal_requests() -> None:
    cut = list(requests(ranges((10, 10 + 2 * REQUEST_BYTES + 2))))
    assert cut[0].start == 10
    assert len(cut) == 3
    assert max(one.size_bytes for one in cut) - min(one.size_bytes for one in cut) <= 2


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40 * MiB), st.integers(1, 9 * MiB)),
        max_size=12,
    )
)
def test_everything_wanted_is_read_once_and_little_besides(
    found: list[tuple[str, int, int]],
) -> None:
    wanted = [FileRange(path, start, start + size) for path, start, size in found]
    reads = list(requests(coalesce(wanted)))
    assert all(0 < one.size_bytes <= REQUEST_BYTES for one in reads)
    for path in "ab":
        mine = sorted(one for one in reads if one.path == path)
        assert all(a.stop <= b.start for a, b in pairwise(mine))
        for one in (one for one in wanted if one.path == path):
            at = one.start
            for read in mine:
                if read.start <= at < read.stop:
                    at = read.stop
            assert at >= one.stop
    distinct = _distinct_bytes(wanted)
    total = sum(one.size_bytes for one in reads)
    assert total <= distinct + distinct // VAIN_SHARE + len(wanted) * FREE_GAP_BYTES


def _distinct_bytes(wanted: list[FileRange]) -> int:
    total = 0
    for path in "ab":
        at = -1
        for one in sorted(one for one in wanted if one.path == path):
            total += max(one.stop - max(one.start, at), 0)
            at = max(at, one.stop)
    return total
