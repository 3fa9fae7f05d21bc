"""Checksums of parts against checksums of the whole."""

import random
import zlib
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.checksums import (
    crc32_of_pieces,
    digest_of,
    leaf_digest,
    leaf_ranges,
    tree_digest,
)
from ckptkit.core.crc import crc32_combine
from ckptkit.core.manifest import LEAF_BYTES


@settings(max_examples=100, deadline=None)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_crcs_combine_to_that_of_the_joined_strings(first: bytes, second: bytes) -> None:
    combined = crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1, 4_095, 65_537, LEAF_BYTES, LEAF_BYTES + 3])
def test_long_strings_combine(length: int) -> None:
    rng = random.Random(length)  # noqa: S311
    first, second = rng.randbytes(1_000), rng.randbytes(length)
    combined = crc32_combine(zlib.crc32(first), zlib.crc32(second), length)
    assert combined == zlib.crc32(second, zlib.crc32(first))


def test_an_empty_string_changes_no_crc() -> None:
    crc32 = zlib.crc32(b"weights")
    assert crc32_combine(crc32, zlib.crc32(b""), 0) == crc32
    assert crc32_combine(0, crc32, 7) == crc32


def test_lengths_beyond_32_bits_combine_step_by_step_to_the_same() -> None:
    length = (1 << 33) + 5
    whole = crc32_combine(0x1234_5678, 0, length)
    halved = crc32_combine(crc32_combine(0x1234_5678, 0, 1 << 33), 0, 5)
    doubled = 0x1234_5678
    for _ in range(1 << 10):
        doubled = crc32_combine(doubled, 0, 1 << 23)
    assert whole == halved == crc32_combine(doubled, 0, 5)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=8), mix=st.data())
def test_pieces_in_any_order_give_the_crc_of_the_range(
    data: bytes, cuts: list[int], mix: st.DataObject
) -> None:
    edges = sorted([0, len(data), *(cut % (len(data) + 1) for cut in cuts)])
    pieces = [
        (start, stop - start, zlib.crc32(data[start:stop]))
        for start, stop in mix.draw(st.permutations(list(pairwise(edges))))
    ]
    assert crc32_of_pieces(pieces, len(data)) == zlib.crc32(data)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 4), (5, 3)],
        [(0, 4), (3, 5)],
        [(2, 6)],
        [(0, 4), (0, 4), (4, 4)],
        [(0, 4)],
        [(0, 9)],
        [],
    ],
)
def test_pieces_that_do_not_tile_the_range_are_an_error(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="pieces of 8 bytes lack some, or overlap"):
        crc32_of_pieces([(start, length, 0) for start, length in pieces], 8)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, []),
        (1, [(0, 1)]),
        (LEAF_BYTES, [(0, LEAF_BYTES)]),
        (LEAF_BYTES + 1, [(0, LEAF_BYTES), (LEAF_BYTES, LEAF_BYTES + 1)]),
    ],
)
def test_leaves_are_cut_every_8_mib(size_bytes: int, expected: list[tuple[int, int]]) -> None:
    assert list(leaf_ranges(size_bytes)) == expected


def test_a_digest_can_be_recomputed_from_its_description() -> None:
    data = random.Random(3).randbytes(2 * LEAF_BYTES + 100)  # noqa: S311
    leaves = b"".join(
        xxhash.xxh3_128(data[start : start + 8_388_608]).digest()
        for start in range(0, len(data), 8_388_608)
    )
    expected = "xxh3-128-8MiB:" + xxhash.xxh3_128(leaves).hexdigest()
    assert digest_of(memoryview(data)) == expected
    pieces = [leaf_digest(memoryview(data)[a:b]) for a, b in leaf_ranges(len(data))]
    assert tree_digest(pieces) == expected


def test_digests_never_change() -> None:
    """Published manifests hold them, so these values are part of the contract."""
    assert digest_of(memoryview(b"")) == "xxh3-128-8MiB:99aa06d3014798d86001c324468d497f"
    assert digest_of(memoryview(b"ckptkit")) == "xxh3-128-8MiB:192530280c6d5d23fe1949743c202ccb"


def test_one_flipped_bit_and_a_swap_of_leaves_change_the_digest() -> None:
    data = bytearray(2 * LEAF_BYTES)
    data[5] = 1
    digests = {digest_of(memoryview(data))}
    data[LEAF_BYTES + 9] ^= 0x10
    digests.add(digest_of(memoryview(data)))
    digests.add(digest_of(memoryview(data[LEAF_BYTES:] + data[:LEAF_BYTES])))
    assert len(digests) == 3
