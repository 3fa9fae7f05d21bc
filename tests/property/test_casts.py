"""Casts of any size, at any address, in any division into calls."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME
from ckptkit.engine.casts import BLOCK_ELEMENTS, Caster
from tests.property.examples import examples

GUARD = 64
NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e5m2"]
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([1, 2, 3]).flatmap(
        lambda n: st.integers(n * BLOCK_ELEMENTS - 2, n * BLOCK_ELEMENTS + 2)
    ),
)


def at_address(array: NDArray[Any], offset: int) -> NDArray[np.uint8]:
    """Copies the bytes of an array to an address that is `offset` bytes past an aligned one."""
    room = np.zeros(array.nbytes + 64 + offset, np.uint8)
    start = -room.ctypes.data % 64 + offset
    view = room[start : start + array.nbytes]
    view[:] = array.view(np.uint8)
    return view


@settings(max_examples=examples(60), deadline=None)
@given(
    size=SIZES,
    names=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    offsets=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    seed=st.integers(0, 2**32 - 1),
)
def test_size_and_address_change_nothing_and_nothing_beside_is_touched(
    size: int, names: tuple[str, str], offsets: tuple[int, int], seed: int
) -> None:
    source_type, target_type = (BY_NAME[name] for name in names)
    values = (np.random.default_rng(seed).standard_normal(size) * 8).astype(
        numpy_dtype(source_type)
    )
    source = at_address(values, offsets[0])
    around = np.full(size * target_type.itemsize + 2 * GUARD + offsets[1], 0xA5, np.uint8)
    target = around[GUARD + offsets[1] :][: size * target_type.itemsize]
    assert Caster(source_type, target_type).cast(source, target) is None

    via = values.astype(np.float32) if source_type.itemsize > target_type.itemsize else values
    assert target.tobytes() == via.astype(numpy_dtype(target_type)).tobytes()
    assert (around[: GUARD + offsets[1]] == 0xA5).all()
    assert (around[GUARD + offsets[1] + target.size :] == 0xA5).all()
    assert source.tobytes() == values.tobytes()


@settings(max_examples=examples(60), deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_dividing_a_tensor_into_calls_changes_neither_result_nor_count(
    bits: list[int], cuts: list[int]
) -> None:
    source = np.array(bits, np.uint32).view(np.float32)
    whole = np.zeros(len(bits), np.uint16)
    caster = Caster(BY_NAME["float32"], BY_NAME["float16"])
    overflow = caster.cast(source, whole)
    expected = 0 if overflow is None else overflow.count
    pieces = np.zeros(len(bits), np.uint16)
    edges = sorted({0, len(bits), *(min(cut, len(bits)) for cut in cuts)})
    counted = 0
    for start, stop in pairwise(edges):
        found = caster.cast(source[start:stop], pieces[start:stop])
        counted += 0 if found is None else found.count
    assert pieces.tobytes() == whole.tobytes()
    assert counted == expected
