"""Parts of ranks, however they cut the tensors, make up the files of a plan."""

from __future__ import annotations

import math
import zlib
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.checksums import ChecksumShare, compute_share, is_whole
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.index import Box, Fqn, Shape
from ckptkit.engine.casts import Caster
from ckptkit.plan.plan import TensorSpec
from ckptkit.training.export import export as export_plan
from ckptkit.training.export.export import blocks_of, caster_of, runs_of

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A shape, and boxes that fill it: cuts along several dimensions, one after another."""
    shape = draw(SHAPES)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        axis = draw(st.integers(0, len(shape) - 1))
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        at = draw(st.integers(0, box.sizes[axis]))
        low, high = list(box.sizes), list(box.sizes)
        low[axis], high[axis] = at, box.sizes[axis] - at
        further = list(box.offsets)
        further[axis] += at
        boxes += [Box(box.offsets, tuple(low)), Box(tuple(further), tuple(high))]
    return shape, [box for box in boxes if 0 not in box.sizes]


def part_of(whole: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return whole[index]


@given(tilings())
def test_runs_are_the_elements_of_a_box_in_their_order(tiling: tuple[Shape, list[Box]]) -> None:
    shape, boxes = tiling
    whole = np.arange(math.prod(shape)).reshape(shape)
    for box in boxes:
        length, starts = runs_of(box, shape)
        found = [start + i for start in starts.tolist() for i in range(length)]
        assert found == part_of(whole, box).reshape(-1).tolist()
        assert starts.tolist() == sorted(starts.tolist())


@given(tilings(), st.sampled_from(["float32", "int8"]), st.integers(0, 3), st.data())
def test_blocks_of_all_parts_make_up_the_tensor_and_prove_it(
    tiling: tuple[Shape, list[Box]], dtype: str, pages: int, data: st.DataObject
) -> None:
    shape, boxes = tiling
    spec = TensorSpec(Fqn("x"), BY_NAME[dtype], shape)
    whole = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    written, shares = bytearray(spec.size_bytes), []
    for box in boxes:
        elements = part_of(whole, box).reshape(-1)
        for block in small_blocks(
            box, spec, 64 * pages, data.draw(st.sampled_from([16, 64, 1 << 23]))
        ):
            raw = elements[block.first : block.stop].tobytes()
            sums = np.zeros(len(block.at), np.uint32)
            for number, at in enumerate(block.at.tolist()):
                run = raw[number * block.run_bytes : (number + 1) * block.run_bytes]
                written[at : at + len(run)] = run
                sums[number] = zlib.crc32(run)
            shares.append(compute_share(block.at, block.run_bytes, sums, spec.size_bytes))
    assert bytes(written) == whole.tobytes()
    joined = ChecksumShare()
    for share in reversed(shares):
        joined = joined.joined(share)
    assert is_whole(joined, spec.size_bytes)
    assert joined.crc32 == zlib.crc32(written)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 9), st.randoms())
def test_the_sums_of_many_equal_runs_are_joined_as_one_by_one(
    count: int, length: int, gap: int, random: Random
) -> None:
    data = random.randbytes(count * (length + gap) + 3)
    starts = 2 + np.arange(count, dtype=np.int64) * (length + gap)
    runs = [data[start : start + length] for start in starts.tolist()]
    sums = np.array([zlib.crc32(run) for run in runs], np.uint32)
    one_by_one = ChecksumShare()
    for number in range(count):
        alone = compute_share(
            starts[number : number + 1], length, sums[number : number + 1], len(data)
        )
        one_by_one = one_by_one.joined(alone)
    assert compute_share(starts, length, sums, len(data)) == one_by_one


def small_blocks(box: Box, spec: TensorSpec, start: int, size: int) -> Any:
    """Cuts into blocks of another size, as large tensors are cut."""
    usual = export_plan.BLOCK_BYTES, export_plan._LONG_BYTES
    export_plan.BLOCK_BYTES, export_plan._LONG_BYTES = size, size // 4
    try:
        return list(blocks_of(box, spec, start))
    finally:
        export_plan.BLOCK_BYTES, export_plan._LONG_BYTES = usual


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6), st.integers(0, 18))
def test_a_share_is_whole_only_if_every_byte_was_written_once(
    ranges: list[tuple[int, int]], total: int
) -> None:
    joined, counts = ChecksumShare(), [0] * max([total, *(a + n for a, n in ranges)])
    for start, length in ranges:
        one = compute_share(np.array([start]), length, np.ones(1, np.uint32), total + 20)
        joined = joined.joined(one)
        for at in range(start, start + length):
            counts[at] += 1
    once = counts[:total] == [1] * total and not any(counts[total:])
    assert is_whole(joined, total) == once


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_casts_by_torch_are_those_of_a_consolidation(bits: list[int], target: str) -> None:
    special = [0x7FC0_0000, 0xFFFF_FFFF, 0x7F80_0000, 0xFF80_0000, 0x477F_F000, 0x0000_0001]
    source = np.array([*bits, *special], np.uint32).view(np.uint8)
    out = [np.zeros(2 * (len(bits) + len(special)), np.uint8) for _ in range(2)]
    float32, wanted = BY_NAME["float32"], BY_NAME[target]
    ours = caster_of(float32, wanted)
    assert type(ours) is not Caster
    lost = [ours.cast(source, out[0]), Caster(float32, wanted).cast(source, out[1])]
    assert lost[0] == lost[1]
    assert bytes(out[0]) == bytes(out[1])
