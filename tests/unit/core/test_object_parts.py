"""Objects cut into the parts that S3 takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.object_parts import (
    MIN_PART_BYTES,
    MOST_PARTS,
    PART_BYTES,
    CopiedRange,
    choose_copies,
    choose_part_bytes,
    cut_into_parts,
)
from tests.property.examples import examples

MIB = 1 << 20
S3_MOST_COPIED_BYTES = 5 << 30


@st.composite
def found_ranges(draw: st.DrawFn) -> tuple[int, list[CopiedRange]]:
    sizes = st.one_of(st.integers(1, 20 * MIB), st.integers(1, 9 << 30))
    at, found = 0, []
    for number in range(draw(st.integers(0, 12))):
        at += draw(st.one_of(st.just(0), st.integers(1, 12 * MIB)))
        size = draw(sizes)
        found.append(CopiedRange(at, at + size, f"{number % 3}.distcp", 7 * number, number))
        at += size
    return at + draw(st.integers(0 if at else 1, 12 * MIB)), found


@settings(max_examples=examples(400), deadline=None)
@given(found_ranges())
def test_whatever_can_be_copied_the_parts_are_such_as_s3_takes(
    case: tuple[int, list[CopiedRange]],
) -> None:
    size, found = case
    chosen = choose_copies(size, found)
    parts = cut_into_parts(size, chosen)
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert len(parts) <= MOST_PARTS
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert all(part.stop - part.start >= MIN_PART_BYTES for part in parts[:-1])
    copied = [part for part in parts if part.copied is not None]
    assert all(part.stop - part.start <= S3_MOST_COPIED_BYTES for part in copied)
    assert {part.copied for part in copied} == set(chosen) <= set(found)
    for part in copied:
        assert part.copied is not None
        assert part.source_start - part.copied.source_start == part.start - part.copied.start


def test_of_two_neighbours_of_a_short_gap_the_smaller_one_is_sent() -> None:
    small = CopiedRange(8 * MIB, 14 * MIB, "a", 0, 1)
    large = CopiedRange(15 * MIB, 40 * MIB, "b", 0, 2)
    assert choose_copies(40 * MIB, [small, large]) == (large,)
    assert choose_copies(40 * MIB, [small]) == (small,)


def test_an_object_of_any_size_has_no_more_parts_than_allowed() -> None:
    for size in (1, PART_BYTES, 60 << 30, 5 << 40):
        parts = cut_into_parts(size)
        assert len(parts) <= MOST_PARTS
        assert (
            max(part.stop - part.start for part in parts) < choose_part_bytes(size) + MIN_PART_BYTES
        )


def test_many_small_copies_give_way_to_fewer_large_ones() -> None:
    sizes = [6 * MIB] * 9000 + [20 * MIB] * 100
    found, at = [], 0
    for size in sizes:
        found.append(CopiedRange(at, at + size, "a", at, 0))
        at += size
    chosen = choose_copies(at, found)
    assert {one.size_bytes for one in chosen} == {20 * MIB}
    assert len(cut_into_parts(at, chosen)) <= MOST_PARTS
