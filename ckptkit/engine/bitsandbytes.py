"""Weights of four and eight bits as bitsandbytes packs them: unpacking, and proof of the original.

Four bits: an element is a code and a scale. The code selects one of sixteen numbers between -1 and
1, and each block of elements shares one scale, the largest magnitude in it. The first of two
elements is in the upper half of a byte. The dtype under which the bytes are stored has no meaning.
bitsandbytes multiplies in float32 and rounds once, to the dtype of the weight before it was
quantized; so does this. Its kernels disagree about the sign of fp4's second zero; here it is +0, as
in the table that it saves.

Eight bits (LLM.int8): each row of a matrix has one scale, its largest magnitude in float16. An
element is `code * scale / 127`, with the division written as a multiplication.

The proof that a given weight is the one that was packed: quantizing takes the nearest of sixteen
numbers, so each code is checked to be the number nearest to its element. That is the same as
quantizing and comparing bytes, and faster. The two zeros of fp4 count as one, since devices differ.

Source: bitsandbytes 0.50, `functional.py` (`get_4bit_type`, `dequantize_4bit`),
`backends/default/ops.py` (`_dequantize_4bit_compute`, `quantize_4bit`, `int8_vectorwise_dequant`,
`int8_vectorwise_quant`), `nn/modules.py` (`Int8Params._quantize`), `csrc/kernels.cu`
(`kDequantizeBlockwise`, `dQuantizeNF4`, `dQuantizeFP4`).

FSDP loses the scales in most configurations, but they follow from the original model: a scale is
the largest magnitude in its block, and double quantization is arithmetic on the scales. Nothing is
kept: the scales of a block are computed when the block is needed, from its original elements. With
them the numbers that training computed with are known too: an element is the nearest of sixteen
numbers, or of 255, times its scale.

Double quantization first subtracts the mean of all scales of a weight. It is a sum in float32,
whose last bit depends on the order of its terms. Scales are then rounded to the nearest of 256
numbers by a table of 65,536. Both follow bitsandbytes and torch on a processor with AVX2. On a GPU
the mean may be rounded up instead of down, one scale in a thousand to its other neighbour, and an
element midway between two numbers to the other one.

Source: bitsandbytes 0.50, `functional.py` (`quantize_4bit`, `create_dynamic_map`),
`csrc/cpu_ops.cpp` (`build_quantize_lut`, `quantize_cpu_impl`), `backends/default/ops.py`
(`quantize_4bit`, `int8_vectorwise_quant`); torch 2.13, `aten/src/ATen/native/cpu/SumKernel.cpp`
(`vectorized_inner_sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError, RefusedError
from ckptkit.core.index import Key, Shape, Span, TensorEntry
from ckptkit.engine.casts import copy_rounded
from ckptkit.engine.kernels import Operand, StoredOperand, WrappingOperand
from ckptkit.lora.quantized import (
    MAX_STATE_BYTES,
    SCALES_OF_ROWS,
    FourBitState,
    FourBitType,
    PackedWeight,
)
from ckptkit.plan.plan import Demand

Floats = NDArray[np.float32]

# Numbers and scales of a piece fit the second-level cache together.
_PIECE = 1 << 16
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


_MAGNITUDES = np.array(_FP4, np.float32) / np.float32(12)
CODES: dict[FourBitType, Floats] = {
    "nf4": np.array(_NF4, np.float32),
    # Zero minus, and not minus: the second zero has no sign.
    "fp4": np.concatenate([_MAGNITUDES, np.float32(0) - _MAGNITUDES]),
}


def make_pairs(table: Floats) -> Floats:
    """Returns what each byte stands for, given what each code does; of shape [256, 2].

    >>> make_pairs(CODES["nf4"])[0x70].tolist()
    [0.0, -1.0]
    """
    return np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)


# The two numbers of a byte as one element, which is taken faster than two.
_PAIRS = {name: make_pairs(table).view(np.complex64)[:, 0] for name, table in CODES.items()}


class StoredScales(WrappingOperand, frozen=True):
    """Scales as they are stored, one number for each block."""

    where: str = ""  # of the checkpoint, for messages

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        scales: Floats = self.operand.values(span, inputs).astype(np.float32, copy=False)
        return _check(scales, span, self)


class NestedScales(Struct, frozen=True):
    """Scales that were quantized themselves ("double quantization"): a byte for each block."""

    absmax: StoredOperand  # a byte for each block
    nested_absmax: StoredOperand  # the scales of the scales
    nested_map: StoredOperand  # the 256 numbers that a byte picks from
    blocksize: int  # scales that share a scale
    offset: float  # taken off the scales before, and put back
    where: str = ""  # of the checkpoint, for messages

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return (*self.absmax.reads, *self.nested_absmax.reads, *self.nested_map.reads)

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        """The bytes of the blocks, the scales that they share, and all of the map."""
        groups = Span(blocks.start // self.blocksize, -(-blocks.stop // self.blocksize))
        return (
            *self.absmax.demands(blocks),
            *self.nested_absmax.demands(groups),
            *self.nested_map.demands(Span(0, 256)),
        )

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Multiplies and adds in float32, as bitsandbytes does."""
        codes, shared, table = inputs
        first = blocks.start % self.blocksize
        scales: Floats = table[codes.view(np.uint8)].astype(np.float32, copy=False)
        scales *= np.repeat(shared, self.blocksize)[first : first + scales.size]
        scales += np.float32(self.offset)
        return _check(scales, blocks, self)


def _check(scales: Floats, blocks: Span, holder: StoredScales | NestedScales) -> Floats:
    """Refuses scales that are no finite numbers; a block of zeros has the scale 0."""
    is_wrong = ~np.isfinite(scales)
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise RefusedError(
            f"tensor {holder.reads[0][1]!r} has the scale {scales[first]:g} in block"
            f" {blocks.start + first:,}, with which numbers have no meaning",
            where=holder.where,
            hint="the file is damaged, or was not written whole: download it again",
        )
    return scales


class _PackedWeight(Struct, frozen=True):
    packed: StoredOperand  # codes, of whatever type
    scales: Scales

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return (*self.packed.reads, *self.scales.reads)

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        raise NotImplementedError

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with the elements of a range."""
        target[:] = self.values(span, inputs)


class FourBitWeight(_PackedWeight, frozen=True):
    """A weight of four bits, as the numbers that it stands for."""

    quant_type: FourBitType
    blocksize: int  # elements that share a scale, even
    elements: int
    dtype: DType  # the one before they were quantized

    def demands(self, span: Span) -> tuple[Demand, ...]:
        blocks = _count_off(span, self.blocksize)
        held = 2 * self.packed.dtype.itemsize  # codes in one stored element
        last = min(blocks.stop * self.blocksize, self.elements)
        codes = Span(blocks.start * self.blocksize // held, -(-last // held))
        return (*self.packed.demands(codes), *self.scales.demands(blocks))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        blocks = _count_off(span, self.blocksize)
        scales = self.scales.values(blocks, inputs[1:])
        codes = inputs[0].view(np.uint8)
        found = np.empty(len(scales) * self.blocksize, numpy_dtype(self.dtype))
        step = max(1, _PIECE // self.blocksize)
        table = _PAIRS[self.quant_type]
        for low in range(0, len(scales), step):
            held = scales[low : low + step]
            start, stop = low * self.blocksize, (low + len(held)) * self.blocksize
            numbers = table.take(codes[start // 2 : stop // 2], mode="clip").view(np.float32)
            if numbers.size < stop - start:  # the last block is short
                numbers = np.pad(numbers, (0, stop - start - numbers.size))
            blockwise = numbers.reshape(len(held), self.blocksize)
            blockwise *= held[:, np.newaxis]
            with np.errstate(over="ignore"):
                copy_rounded(blockwise.reshape(-1), found[start:stop])
        first = span.start - blocks.start * self.blocksize
        return found[first : first + span.stop - span.start]


def _count_off(span: Span, size: int) -> Span:
    """Returns the blocks of so many elements that a range touches."""
    return Span(span.start // size, -(-span.stop // size))


STEP = np.float32(7.874015718698502e-3)
"""1 / 127, with the digits that bitsandbytes has."""
_FLOAT16, _FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]


class EightBitWeight(_PackedWeight, frozen=True):
    """A weight of eight bits, as the float32 numbers that it stands for."""

    columns: int  # elements of a row

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    def demands(self, span: Span) -> tuple[Demand, ...]:
        rows = _count_off(span, self.columns)
        return (*self.packed.demands(span), *self.scales.demands(rows))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Multiplies by the scale first and by 1/127 then, in float32."""
        rows = _count_off(span, self.columns)
        scales = self.scales.values(rows, inputs[1:])
        first = span.start - rows.start * self.columns
        numbers: Floats = inputs[0].view(np.int8).astype(np.float32)
        numbers *= np.repeat(scales, self.columns)[first : first + numbers.size]
        numbers *= STEP
        return numbers


def read_state(
    entry: TensorEntry, read: Callable[[TensorEntry], bytes], location: str
) -> FourBitState:
    where = f"{location}, tensor {entry.name!r}"
    if entry.size_bytes > MAX_STATE_BYTES:
        raise FormatError(f"has {entry.size_bytes:,} bytes, too many for a state", where=where)
    return FourBitState.parse(read(entry), where=where)


def make_four_bits(packed: StoredOperand, scales: Scales, state: FourBitState) -> FourBitWeight:
    return FourBitWeight(
        *(packed, scales, state.quant_type, state.blocksize, state.elements),
        dtype=BY_NAME[state.dtype],
    )


def unpack_by_companions(
    weight: PackedWeight, read: Callable[[TensorEntry], bytes], *, origin: str, location: str
) -> tuple[FourBitWeight | EightBitWeight, Shape, FourBitState | None]:
    """Unpacks a weight by the scales that are stored with it; returns its shape and state, too.

    `read` returns the bytes of a small tensor. `origin` is the source of the tensors.
    """

    def take(kind: str, elements: int) -> StoredOperand:
        entry = weight.companions.get(kind)
        if entry is None:
            raise FormatError(
                f"{weight.name!r} is doubly quantized, but {kind!r} was not stored with it",
                where=location,
            )
        if entry.elements != elements:
            raise FormatError(
                f"{entry.name!r} has {entry.elements:,} elements, expected {elements:,} for its"
                " weight",
                where=location,
            )
        if kind == "absmax" and len(entry.shape) > 1:
            # bitsandbytes 0.50 puts the codes back into their order to save them, not the scales.
            raise FormatError(
                f"{entry.name!r} has shape {entry.shape}, expected ({elements},): it was saved"
                f" after a forward on a CPU, in another order than {weight.name!r}",
                where=location,
                hint="take a copy that was saved before the model computed anything, or load the"
                " original, pack it again and save it at once",
            )
        return StoredOperand(origin, entry.key, entry.dtype)

    def check_type(entry: TensorEntry, *, are_bytes: bool = False) -> None:
        if (entry.dtype.itemsize != 1) if are_bytes else (entry.dtype.kind != "float"):
            expected = "bytes of double quantization" if are_bytes else "floating numbers"
            raise FormatError(
                f"{entry.name!r} has element type {entry.dtype.name}, expected scales as"
                f" {expected}",
                where=location,
            )

    packed = StoredOperand(origin, weight.packed.key, weight.packed.dtype)
    if weight.state is None:
        rows, columns = weight.packed.shape
        order = weight.companions.get("weight_format")
        if order is not None and any(read(order)):
            raise FormatError(
                f"{order.name!r} is not 0: the rows of {weight.name!r} are not stored one after the"
                " other, but in an order that bitsandbytes no longer loads",
                where=location,
                hint="take another copy of the model, or the one before it was packed",
            )
        scales: Scales = StoredScales(take(SCALES_OF_ROWS, rows), location)
        check_type(weight.companions[SCALES_OF_ROWS])
        return EightBitWeight(packed, scales, columns), weight.packed.shape, None
    state = read_state(weight.state, read, location)
    if weight.packed.size_bytes != -(-state.elements // 2):
        raise FormatError(
            f"{weight.packed.name!r} has {weight.packed.size_bytes:,} bytes, but its state is"
            f" that of a weight of shape {state.shape}",
            where=location,
        )
    blocks, nested = -(-state.elements // state.blocksize), state.nested_blocksize
    absmax = take("absmax", blocks)
    scales = StoredScales(absmax, location)
    if nested:
        shared = take("nested_absmax", -(-blocks // nested))
        table = take("nested_quant_map", 256)
        scales = NestedScales(absmax, shared, table, nested, state.nested_offset, location)
        check_type(weight.companions["nested_absmax"])
        check_type(weight.companions["nested_quant_map"])
    check_type(weight.companions["absmax"], are_bytes=bool(nested))
    return make_four_bits(packed, scales, state), state.shape, state


def count_row_mismatches(
    codes: NDArray[np.int8], rows: Floats, scales: Floats
) -> NDArray[np.int64]:
    """Counts the elements of each row that would be packed differently; see `encode_rows`."""
    counts: NDArray[np.int64] = np.count_nonzero(encode_rows(rows, scales) != codes, axis=1)
    return counts


def encode_rows(rows: Floats, scales: Floats) -> Floats:
    """Returns the codes that rows are packed into, as float32.

    `rows` have the numbers of float16, in float32; a scale is the largest magnitude of a row.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        # The reciprocal is rounded before it is multiplied by 127.
        codes: Floats = np.rint(rows * (np.float32(1) / scales * np.float32(127))[:, np.newaxis])
    codes[scales == 0] = 0
    return codes


_SMALLEST = np.float32(1e-38)  # bitsandbytes divides by no less


def count_mismatches(
    codes: NDArray[np.uint8],
    blocks: Floats,
    scales: Floats,
    quant_type: FourBitType,
    *,
    elements: int,
) -> NDArray[np.int64]:
    """Counts the elements of each block that would be packed differently.

    Codes begin with the first element of the first block; for the others see `scale_blocks`.
    """
    lower, upper = _intervals(quant_type)
    scaled = scale_blocks(blocks, scales, elements).reshape(-1)[:elements]
    held = codes[: -(-elements // 2)]
    wrong = np.zeros(blocks.shape, np.bool_)
    flat = wrong.reshape(-1)[:elements]
    np.less_equal(scaled, lower[held].reshape(-1)[:elements], out=flat)
    flat |= scaled > upper[held].reshape(-1)[:elements]
    counts: NDArray[np.int64] = np.count_nonzero(wrong, axis=1)
    return counts


def scale_blocks(blocks: Floats, scales: Floats, elements: int) -> Floats:
    """Returns elements between -1 and 1, rounded as the quantizer rounds them.

    Blocks are [blocks, blocksize]; `elements` is less than that where the last one is short.
    """
    divisors = np.maximum(scales, _SMALLEST)
    scaled = blocks * (np.float32(1) / divisors).astype(np.float32)[:, np.newaxis]
    if elements < blocks.size:
        # A short block is divided, where whole ones are multiplied by the reciprocal.
        scaled[-1] = blocks[-1] / divisors[-1]
    return np.clip(scaled, -1, 1, out=scaled)


@cache
def _intervals(quant_type: FourBitType) -> tuple[Floats, Floats]:
    """Returns what elements of each byte's codes are larger than, and what they are no more than.

    Both are of shape [256, 2], as `make_pairs` makes them.
    """
    table = CODES[quant_type]
    numbers = np.unique(table)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    edges = np.concatenate([[-np.inf], middles, [np.inf]]).astype(np.float32)
    at = np.searchsorted(numbers, table)
    return make_pairs(edges[at]), make_pairs(edges[at + 1])


NESTED_BLOCKSIZE = 256
_BINS = 65_536
_LANES, _ROWS, _LEVELS = 8, 4, 4  # of a vector of AVX2; vectors added side by side; carries


def find_block_maxima(
    elements: NDArray[Any], dtype: DType, blocksize: int
) -> tuple[Floats, Floats]:
    """Returns elements in the type that was quantized, and the largest magnitude of each block.

    Elements begin with a block; only a weight's last block may be short. They come back as float32,
    [blocks, blocksize], with zeros after the last.
    """
    blocks = np.zeros((-(-elements.size // blocksize), blocksize), np.float32)
    with np.errstate(over="ignore"):
        cast = elements.astype(numpy_dtype(dtype), copy=False)
    blocks.reshape(-1)[: elements.size] = cast
    return blocks, np.maximum(np.abs(blocks.max(axis=1)), np.abs(blocks.min(axis=1)))


class _Derived(Struct, frozen=True):
    """What follows from the elements of the original weight, block by block."""

    original: Operand
    dtype: DType  # to which it was cast before it was quantized
    blocksize: int  # elements that share a scale
    elements: int
    # The mean of all scales, where they were quantized too; None where they were not.
    offset: float | None = None

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.original.reads

    def _widen(self, blocks: Span) -> Span:
        """Returns the elements of blocks, and of those that share scales of scales with them."""
        group = 1 if self.offset is None else NESTED_BLOCKSIZE
        groups = _count_off(blocks, group)
        size = group * self.blocksize
        return Span(groups.start * size, min(groups.stop * size, self.elements))

    def _divide(self, around: Span, inputs: Sequence[NDArray[Any]]) -> tuple[Floats, Floats]:
        """Returns the elements of whole blocks, and the largest magnitude of each."""
        return find_block_maxima(self.original.values(around, inputs), self.dtype, self.blocksize)

    def _scale(self, maxima: Floats) -> Floats:
        return maxima if self.offset is None else requantize_scales(maxima, self.offset)


class DerivedScales(_Derived, frozen=True):
    """Scales taken from the elements of the original weight."""

    def demands(self, blocks: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._widen(blocks))

    def values(self, blocks: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        around = self._widen(blocks)
        scales = self._scale(self._divide(around, inputs)[1])
        first = blocks.start - around.start // self.blocksize
        return scales[first : first + blocks.stop - blocks.start]


Scales = StoredScales | NestedScales | DerivedScales
"""The scales of the blocks of one weight, wherever they come from."""


def requantize_scales(maxima: Floats, offset: float) -> Floats:
    """Quantizes scales, from the first of a group of 256 on, and turns them back.

    `offset` is their mean over the whole weight.
    """
    codes, shared = quantize_scales(maxima - np.float32(offset))
    scales: Floats = make_dynamic_map()[codes]
    scales *= np.repeat(shared, NESTED_BLOCKSIZE)[: scales.size]
    scales += np.float32(offset)
    return scales


def quantize_scales(centred: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Quantizes scales, their mean taken off, to a byte each; with the scale of each group."""
    blocks = np.zeros((-(-centred.size // NESTED_BLOCKSIZE), NESTED_BLOCKSIZE), np.float32)
    blocks.reshape(-1)[: centred.size] = centred
    shared = np.abs(blocks).max(axis=1)
    one = np.float32(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        blocks *= (one / shared)[:, np.newaxis]
    blocks[shared == 0] = -1  # a group without any magnitude has the code 0
    bins = (np.clip(blocks, -1, 1) + one) * np.float32(0.5) * np.float32(_BINS - 1)
    bins += np.float32(0.5)
    return _codes_of_bins()[bins.astype(np.uint16)].reshape(-1)[: centred.size], shared


@cache
def make_dynamic_map() -> Floats:
    """Returns the 256 numbers that a byte picks from, in order.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        scaled = (np.float32(10.0 ** (exponent - 6)) * means).tolist()
        numbers += [*scaled, *(-number for number in scaled)]
    return np.array(sorted(numbers), np.float32)


def _linspace(steps: int) -> Floats:
    """Returns numbers from 0.1 to 1, counted from both ends and rounded once, as in torch."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(steps - 1))
    at = np.arange(steps)
    up, down = first + step * at, last - step * (steps - 1 - at)
    return np.where(at < steps // 2, up, down).astype(np.float32)


@cache
def _codes_of_bins() -> NDArray[np.uint8]:
    """Returns the code of each of the bins that numbers from -1 to 1 fall into."""
    table = make_dynamic_map()
    middles = np.float32(0.5) * (table[:-1] + table[1:])
    centres = np.float32(-1) + np.float32(2) * np.arange(_BINS, dtype=np.float32) / np.float32(
        _BINS - 1
    )
    return np.searchsorted(middles, centres, side="left").astype(np.uint8)


def compute_float32_mean(numbers: Floats) -> np.float32:
    """Returns the mean that torch computes of one thread's worth of contiguous numbers.

    Vectors are added in four rows side by side, and each row in steps whose sums are carried to
    the next level, so that numbers of one size meet.
    """
    lanes = _LANES if numbers.size >= _LANES else 1
    vectors = numbers[: numbers.size // lanes * lanes].reshape(-1, lanes)
    deep = len(vectors) // _ROWS
    rows = _carried(vectors[: deep * _ROWS].reshape(deep, _ROWS, lanes))
    total = rows[0]
    for vector in (*vectors[deep * _ROWS :], *rows[1:]):
        total = total + vector
    scalar = np.float32(0)
    for number in (*numbers[vectors.size :], *total):
        scalar = scalar + number
    return np.float32(scalar / np.float32(numbers.size))


def _carried(terms: Floats) -> Floats:
    """Adds along the first axis, level by level."""
    power = max(4, (max(1, len(terms)) - 1).bit_length() // _LEVELS)
    step, rests = 1 << power, []
    for _ in range(_LEVELS - 1):
        whole = len(terms) // step * step
        rests.append(_in_order(terms[whole:]))
        terms = _in_order(terms[:whole].reshape(-1, step, *terms.shape[1:]).swapaxes(0, 1))
    rests.append(_in_order(terms))
    return _in_order(np.stack(rests))


def _in_order(terms: Floats) -> Floats:
    """Adds along the first axis, one after the other; numpy would add in pairs."""
    total: Floats = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


class RequantizedFourBit(_Derived, frozen=True, kw_only=True):
    """A weight as four bits would hold it."""

    quant_type: FourBitType

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._widen(_count_off(span, self.blocksize)))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        around = self._widen(_count_off(span, self.blocksize))
        blocks, maxima = self._divide(around, inputs)
        blocks = scale_blocks(blocks, maxima, around.stop - around.start)
        numbers, middles = _grid(self.quant_type)
        made = numbers[np.searchsorted(middles, blocks, side="left")]
        made *= self._scale(maxima)[:, np.newaxis]
        with np.errstate(over="ignore"):
            found: NDArray[Any] = made.reshape(-1).astype(numpy_dtype(self.dtype))
        first = span.start - around.start
        return found[first : first + span.stop - span.start]

    def packed(
        self, span: Span, inputs: Sequence[NDArray[Any]], *, on_gpu: bool = False
    ) -> NDArray[np.uint8]:
        """Returns the bytes that hold a range of whole blocks, from a group with shared scales on.

        With `on_gpu` fp4's second zero stands for what lies below zero, as GPUs write it;
        processors write it for what lies above.
        """
        blocks, maxima = self._divide(span, inputs)
        blocks = scale_blocks(blocks, maxima, span.stop - span.start)
        # The first code of each number.
        table = np.unique(CODES[self.quant_type], return_index=True)[1].astype(np.uint8)
        codes = table[np.searchsorted(_grid(self.quant_type)[1], blocks, side="left")]
        if self.quant_type == "fp4":
            is_second = blocks < 0 if on_gpu else blocks > 0
            codes[(codes == 0) & is_second] = len(CODES[self.quant_type]) // 2
        flat = codes.reshape(-1)[: span.stop - span.start]
        if flat.size % 2:  # a byte that is half full holds a zero
            flat = np.append(flat, np.uint8(CODES[self.quant_type].tolist().index(0.0)))
        made: NDArray[np.uint8] = (flat[::2] << np.uint8(4)) | flat[1::2]
        return made

    def maxima(self, span: Span, inputs: Sequence[NDArray[Any]]) -> Floats:
        """Returns the scales of a range of whole blocks, before they are quantized themselves."""
        return self._divide(span, inputs)[1]


class RequantizedEightBit(Struct, frozen=True):
    """A weight as LLM.int8 would hold it, as the float32 numbers that it stands for."""

    original: Operand
    columns: int  # elements of a row

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return self.original.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.original.demands(self._widen(span))

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        around = self._widen(span)
        elements = self.original.values(around, inputs)
        rows, scales = find_block_maxima(elements, _FLOAT16, self.columns)
        made = encode_rows(rows, scales)
        made += np.float32(0)  # whole numbers have no zero below zero
        made *= scales[:, np.newaxis]
        made *= STEP
        first = span.start - around.start
        return made.reshape(-1)[first : first + span.stop - span.start]

    def _widen(self, span: Span) -> Span:
        rows = _count_off(span, self.columns)
        return Span(rows.start * self.columns, rows.stop * self.columns)


@cache
def _grid(quant_type: FourBitType) -> tuple[Floats, Floats]:
    numbers = np.unique(CODES[quant_type])
    return numbers, ((numbers[:-1] + numbers[1:]) / np.float32(2)).astype(np.float32)
