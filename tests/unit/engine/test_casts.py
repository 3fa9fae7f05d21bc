"""Casts against torch, bit for bit, and what torch leaves open."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import OverflowRefusedError, UnsupportedError
from ckptkit.engine.casts import BLOCK_ELEMENTS, Caster, Overflow, copy_rounded, overflow_error
from tests.sampled import sampled


def names_of(pair: tuple[DType, DType]) -> str:
    return "-".join(dtype.name for dtype in pair)


FLOATS = [dtype for dtype in BY_NAME.values() if dtype.kind == "float"]
TARGETS = [dtype for dtype in FLOATS if dtype.name != "float8_e8m0fnu"]
PAIRS = [(given, wanted) for given in FLOATS for wanted in TARGETS if given != wanted]
# Of each type to float16 or from it, and what users ask for.
QUICK_PAIRS = [
    pair
    for pair in PAIRS
    if "float16" in names_of(pair).split("-") or names_of(pair) == "float32-bfloat16"
]
NARROW = [d for d in TARGETS if d.name == "float16" or d.itemsize == 1]
NANS = {
    "float64": 0x7FF8_0000_0000_0000,
    "float32": 0x7FC0_0000,
    "bfloat16": 0x7FC0,
    "float16": 0x7E00,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
}


def bits_of(dtype: DType) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def patterns(dtype: DType) -> NDArray[Any]:
    """All bit patterns of a small type; for others, random ones and those near rounding edges."""
    if dtype.itemsize <= 2:
        return np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32).astype(bits_of(dtype))
    rng = np.random.default_rng(7)
    count = 2_000_000 if dtype.name == "float32" else 500_000
    wild = rng.integers(0, 1 << (8 * dtype.itemsize), count, bits_of(dtype))
    weights = (rng.standard_normal(count) * 0.02).astype(dtype.numpy).view(bits_of(dtype))
    # Every float16 and bfloat16, each midpoint above it, and both neighbours of the midpoint.
    with np.errstate(all="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    edges = []
    for exact, midpoint in (
        (halves.view(np.uint32), 1 << 12),
        (np.arange(1 << 16, dtype=np.uint32) << 16, 1 << 15),
    ):
        edges += [exact, exact + midpoint - 1, exact + midpoint, exact + midpoint + 1]
    # float16's subnormals and the step to infinity, more finely.
    edges.append(np.linspace(0, 2**-13, 200_000, dtype=np.float32).view(np.uint32))
    edges.append(np.linspace(65_400, 65_600, 100_000, dtype=np.float32).view(np.uint32))
    near = np.concatenate(edges)
    if dtype.itemsize == 8:
        with np.errstate(all="ignore"):
            wide = near.view(np.float32).astype(np.float64)
        # One unit of float64 beside a tie tells one rounding from two.
        near = np.concatenate([wide, np.nextafter(wide, np.inf), np.nextafter(wide, -np.inf)])
    return np.concatenate([wild, weights, near.view(bits_of(dtype))])


def by_torch(source: NDArray[Any], given: DType, wanted: DType) -> NDArray[Any]:
    tensor = torch.from_numpy(source.view(np.uint8)).view(getattr(torch, given.name))
    result = tensor.to(getattr(torch, wanted.name))
    return result.view(torch.uint8).numpy().view(bits_of(wanted))


def is_nan(bits: NDArray[Any], dtype: DType) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        result: NDArray[np.bool_] = np.isnan(bits.view(numpy_dtype(dtype)))
    return result


def infinite_in(bits: NDArray[Any], dtype: DType) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        result: NDArray[np.bool_] = ~np.isfinite(bits.view(numpy_dtype(dtype)).astype(np.float64))
    return result


@pytest.mark.parametrize("pair", sampled(PAIRS, QUICK_PAIRS), ids=names_of)
def test_a_cast_is_what_torch_makes_of_every_value_that_is_not_nan(
    pair: tuple[DType, DType],
) -> None:
    given, wanted = pair
    source = patterns(given)
    nan = is_nan(source, given)
    target = np.zeros(source.size, bits_of(wanted))
    overflow = Caster(given, wanted).cast(source, target)
    expected = by_torch(source, given, wanted)

    # torch saturates e4m3fn; there, and only there, its result is a number where ours is refused.
    lost = np.zeros(source.size, np.bool_)
    if wanted in NARROW:
        given_infinite = infinite_in(source, given) & ~nan
        lost = infinite_in(target, wanted) & ~nan
        if wanted.name in {"float16", "float8_e5m2"}:
            lost &= ~given_infinite
    assert (overflow is not None) == lost.any()
    if overflow is not None:
        assert overflow.count == int(np.count_nonzero(lost))
        assert overflow.first == int(lost.argmax())
    saturated = lost if wanted.name == "float8_e4m3fn" else np.zeros_like(lost)
    compared = ~nan & ~saturated
    np.testing.assert_array_equal(target[compared], expected[compared])
    assert compared.any()


@pytest.mark.parametrize("pair", sampled(PAIRS, QUICK_PAIRS), ids=names_of)
def test_every_nan_becomes_the_one_of_its_type(pair: tuple[DType, DType]) -> None:
    given, wanted = pair
    source = patterns(given)
    source = source[is_nan(source, given)]
    target = np.zeros(source.size, bits_of(wanted))
    assert source.size
    assert Caster(given, wanted).cast(source, target) is None
    assert set(target.tolist()) == {NANS[wanted.name]}


@pytest.mark.parametrize("position", [0, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 150_000])
def test_one_nan_among_many_numbers_is_found(position: int) -> None:
    source = np.full(150_001, -1.5, np.float32)
    source.view(np.uint32)[position] = 0xFFC0_1234
    for name, number in (("bfloat16", 0xBFC0), ("float16", 0xBE00)):
        target = np.zeros(source.size, np.uint16)
        assert Caster(BY_NAME["float32"], BY_NAME[name]).cast(source, target) is None
        assert target[position] == NANS[name]
        assert (np.delete(target, position) == number).all()


def test_equal_types_keep_the_bits_of_a_nan() -> None:
    source = np.array([0x7F80_0001, 0xFFFF_FFFF, 0x8000_0000], np.uint32)
    target = np.zeros(3, np.uint32)
    assert Caster(BY_NAME["float32"], BY_NAME["float32"]).cast(source, target) is None
    assert target.tolist() == source.tolist()


@pytest.mark.parametrize("largest_lost", [65_520.0, -65_520.0, 3e38])
def test_the_first_overflow_is_found_and_all_are_counted(largest_lost: float) -> None:
    source = np.full(200_000, 65_519.99, np.float32)
    source[[5, 190_000]] = np.inf, -np.inf
    source[[70_000, 70_001, 199_999]] = largest_lost
    target = np.zeros(source.size, np.float16)
    overflow = Caster(BY_NAME["float32"], BY_NAME["float16"]).cast(source, target)
    assert overflow == Overflow(count=3, first=70_000, value=float(np.float32(largest_lost)))
    assert target[0] == 65_504


def test_an_overflow_is_worded_for_people() -> None:
    overflow = Overflow(count=3, first=12, value=-70_000.0)
    error = overflow_error(overflow, BY_NAME["float16"], where="tensor 'a.b'", block_start=4_096)
    assert isinstance(error, OverflowRefusedError)
    assert error.exit_status == 4
    assert str(error) == (
        "tensor 'a.b': value -70,000 at element 4,108 does not fit float16, whose largest is "
        "65,504 (with 2 more near it)"
    )
    assert error.hint == "pass --dtype bfloat16, or keep this tensor as it is with --keep-dtype"
    alone = overflow_error(Overflow(1, 0, 7e4), BY_NAME["float16"], where="x")
    assert "more near it" not in str(alone)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("int64", "float32"), ("float32", "int8"), ("float32", "float8_e8m0fnu"), ("bool", "float16")],
)
def test_what_is_no_float_is_not_cast(given: str, wanted: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^no cast from {given} to {wanted}; "):
        Caster(BY_NAME[given], BY_NAME[wanted])


def test_source_and_target_must_have_equally_many_elements() -> None:
    caster = Caster(BY_NAME["float32"], BY_NAME["bfloat16"])
    with pytest.raises(ValueError, match=r"^source has 1 elements but target has 2$"):
        caster.cast(np.zeros(1, np.float32), np.zeros(2, np.uint16))


def test_ml_dtypes_is_imported_only_for_types_that_numpy_lacks() -> None:
    code = (
        "import sys; from ckptkit.core.dtypes import BY_NAME; "
        "from ckptkit.engine.casts import Caster; "
        "Caster(BY_NAME['float32'], BY_NAME['float16']); before = 'ml_dtypes' in sys.modules; "
        "Caster(BY_NAME['float32'], BY_NAME['bfloat16']); "
        "print(before, 'ml_dtypes' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True False\n"


@pytest.mark.parametrize("least", [0, 2.0**-14], ids=["with subnormals", "normal and zero"])
def test_copies_to_float16_round_as_numpy_does(least: float) -> None:
    """Each number of the type, those around the middle of two, and what rounds to infinity."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    bits = halves[np.isfinite(halves)].astype(np.float32).view(np.uint32)
    steps = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    values = (bits[:, np.newaxis] + steps).view(np.float32)
    is_taken = (values == 0) | (np.abs(values) >= least)
    if least:
        is_taken &= np.abs(values) < 65_520
    values = values[is_taken]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
        target = np.zeros((len(values), 2), np.float16)
        copy_rounded(values, target[:, 0])
    assert np.array_equal(target[:, 0].view(np.uint16), expected.view(np.uint16))
