"""What a low-rank update is, and its product, bit by bit as torch computes it.

An update adds `scaling * left @ right` to a weight, seen as a matrix. `left` and `right` are
parts of the matrices A and B as an adapter stores them, so that one form serves every kind of
layer, an expert of a fused parameter, and the rows of a fused weight that are a tensor of their
own on disk.

A float32 product depends in its last bits on the order of its sums, and on whether products are
rounded before they are added. This one equals `torch.mm` with MKL, as far as could be measured:
fused, one term after the other, up to 192 terms at a time, or 384 on Intel's processors with
AVX-512 (measured up to 767 terms). Torch on other processors may differ from itself by as much.

Euclidean norms of rows and columns are summed in the order of torch's processor kernels, so that
what is divided by a norm equals PEFT's result. A row has eight partial sums, which are added up
first. The remaining elements follow: the compiler multiplies four at a time before it adds them,
and fuses the multiplication and addition of the others. A column has one sum.

Both compute in memory that a thread keeps from block to block (scratch), since fresh pages cost
more than the arithmetic.

Sources: PEFT 0.21, `tuners/lora/layer.py`, every `get_delta_weight`; torch
`aten/src/ATen/native/cpu/ReduceOpsKernel.cpp`, `norm_kernel_tensor_iterator_impl`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError
from ckptkit.core.index import Key, Span, TensorEntry
from ckptkit.core.threads import processor_words
from ckptkit.plan.plan import Demand, Reading

Axis = Literal["rows", "columns"]


class Stride(Struct, frozen=True):
    """Every `step`-th index of `[start, stop)`."""

    start: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def within(self, start: int, stop: int) -> Stride:
        return Stride(self.start + start * self.step, self.start + stop * self.step, self.step)


class Factor(Struct, frozen=True):
    """A part of a stored matrix.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        dtype: Its element type.
        width: Columns of the stored matrix: what follows a tensor's first axis, flattened.
        rows: Which of its rows are meant.
        columns: Which of its columns are meant.
        transposed: Whether the part is turned round after it was cut out.
    """

    origin: str
    key: Key
    dtype: DType
    width: int
    rows: Stride
    columns: Stride
    transposed: bool = False

    @classmethod
    def whole(cls, origin: str, entry: TensorEntry) -> Factor:
        """Takes a stored tensor, flattened beyond its first axis; a vector is one row."""
        height, width = matrix_shape(entry.shape)
        return cls(origin, entry.key, entry.dtype, width, Stride(0, height), Stride(0, width))

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.rows.count, self.columns.count
        return (shape[1], shape[0]) if self.transposed else shape

    @property
    def t(self) -> Factor:
        return replace(self, transposed=not self.transposed)

    def part(
        self, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> Factor:
        """Cuts out `[start, stop)` of the rows and columns, as `shape` counts them."""
        if self.transposed:
            rows, columns = columns, rows
        return replace(
            self,
            rows=self.rows.within(*rows) if rows else self.rows,
            columns=self.columns.within(*columns) if columns else self.columns,
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor flattened beyond its first axis."""
    rows, *rest = shape if len(shape) > 1 else (1, *shape)
    return rows, math.prod(rest)


class Magnitude(Struct, frozen=True):
    """The magnitudes of DoRA, one for every output feature.

    Attributes:
        vector: As many values as the merged matrix has rows (or columns); any shape.
        of: `rows` for linear and convolution weights, whose rows are output features;
            `columns` for embeddings and for weights stored as `[in, out]`.
    """

    vector: Factor
    of: Axis


class LowRankUpdate(Struct, frozen=True):
    """An update: `weight + scaling * left @ right`, with DoRA then brought to its magnitudes.

    Attributes:
        left: `[rows, r]`, for the tensor or for each of its experts (see `experts`).
        right: `[r, columns]`, likewise.
        scaling: alpha / r, or alpha / sqrt(r), times the adapter's weight.
        held: The type in which PEFT would hold the adapter while it merges: float32 unless
            `autocast_adapter_dtype` is false. Only PEFT's rounding depends on it.
        rounded: Whether PEFT rounds the product to the weight's type before it adds it, as it
            does for embeddings and fused parameters.
        magnitude: The magnitudes, or None without DoRA.
        experts: How many matrices the tensor stacks along its first axis, each with factors of
            its own; 1 for none.
    """

    left: Factor
    right: Factor
    scaling: float
    held: DType
    rounded: bool = False
    magnitude: Magnitude | None = None
    experts: int = 1

    def window(
        self, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> LowRankUpdate:
        """Returns the update of `[start, stop)` of the rows and columns alone.

        For tensors on disk that are parts of the module's weight.
        """
        if self.experts > 1:
            raise ValueError("a window of several experts; take one expert first")
        magnitude = self.magnitude
        if magnitude is not None:
            kept, cut = (rows, columns) if magnitude.of == "rows" else (columns, rows)
            if cut is not None:
                raise ValueError(f"norms of {magnitude.of} need all of the matrix")
            vector = magnitude.vector.part(columns=kept)
            magnitude = replace(magnitude, vector=vector)
        return replace(
            self,
            left=self.left.part(rows=rows),
            right=self.right.part(columns=columns),
            magnitude=magnitude,
        )

    @property
    def turned(self) -> LowRankUpdate:
        """The update of the transposed tensor."""
        magnitude = self.magnitude
        if magnitude is not None:
            axis: Axis = "columns" if magnitude.of == "rows" else "rows"
            magnitude = replace(magnitude, of=axis)
        return replace(self, left=self.right.t, right=self.left.t, magnitude=magnitude)


def linear_update(
    a: Factor,
    b: Factor,
    scaling: float,
    held: DType,
    *,
    magnitude: Factor | None = None,
    fan_in_fan_out: bool = False,
) -> LowRankUpdate:
    """Returns the update of a linear layer or an ungrouped convolution.

    Args:
        a: `lora_A.weight`, `[r, in]`; for a convolution `[r, in, ...]`, flattened.
        b: `lora_B.weight`, `[out, r]`; for a convolution `[out, r, 1, ...]`, flattened.
        scaling: See `LowRankUpdate`.
        held: See `LowRankUpdate`.
        magnitude: `lora_magnitude_vector`, with DoRA.
        fan_in_fan_out: Whether the weight is stored as `[in, out]`.
    """
    vector = None if magnitude is None else Magnitude(magnitude, "rows")
    update = LowRankUpdate(b, a, scaling, held, magnitude=vector)
    return update.turned if fan_in_fan_out else update


def embedding_update(
    a: Factor, b: Factor, scaling: float, held: DType, *, magnitude: Factor | None = None
) -> LowRankUpdate:
    """Returns the update of an embedding, stored as `[vocabulary, features]`.

    Args:
        a: `lora_embedding_A`, `[r, vocabulary]`.
        b: `lora_embedding_B`, `[features, r]`.
        scaling: See `LowRankUpdate`.
        held: See `LowRankUpdate`.
        magnitude: `lora_magnitude_vector`, with DoRA.
    """
    update = linear_update(a, b, scaling, held, magnitude=magnitude, fan_in_fan_out=True)
    return replace(update, rounded=magnitude is None)


def experts_update(
    a: Factor, b: Factor, scaling: float, held: DType, *, count: int, transposed: bool
) -> LowRankUpdate:
    """Returns the update of a parameter that stacks experts.

    With `count` 1 it is that of a parameter without them.

    Args:
        a: `lora_A.weight`, `[count * r, in]`.
        b: `lora_B.weight`, `[out, r * count]`, the experts innermost.
        scaling: See `LowRankUpdate`.
        held: See `LowRankUpdate`.
        count: How many experts there are.
        transposed: Whether the parameter is `[count, in, out]`, not `[count, out, in]`.
    """
    update = LowRankUpdate(b, a, scaling, held, rounded=True, experts=count)
    return update.turned if transposed else update


def select_expert(update: LowRankUpdate, number: int) -> LowRankUpdate:
    left, right = select_expert_factors(update, number)
    return replace(update, left=left, right=right, experts=1)


def select_expert_factors(update: LowRankUpdate, number: int) -> tuple[Factor, Factor]:
    """Returns the factors of one expert, from 0, of an update of `update.experts`."""
    turned = update.left.transposed
    a, b = (update.left.t, update.right.t) if turned else (update.right, update.left)
    count = update.experts
    rank = a.rows.count // count
    a = a.part(rows=(number * rank, (number + 1) * rank))
    b = replace(b, columns=Stride(b.columns.start + number, b.columns.stop, count))
    return (a.t, b.t) if turned else (b, a)


class BiasUpdate(Struct, frozen=True):
    """An update of a bias, or of any vector: `vector + scaling * shift`.

    Attributes:
        shift: `lora_B.bias`, as many values as the tensor has.
        scaling: See `LowRankUpdate`.
        held: See `LowRankUpdate`.
    """

    shift: Factor
    scaling: float
    held: DType


class TokenRowsUpdate(Struct, frozen=True):
    """An update that replaces rows: `weight[tokens] = rows`.

    Attributes:
        rows: `trainable_tokens_delta`, `[len(tokens), columns]`: the rows, in spite of the name.
        tokens: Which rows of the weight they replace; none twice.
    """

    rows: Factor
    tokens: tuple[int, ...]


Update = LowRankUpdate | BiasUpdate | TokenRowsUpdate


Floats = NDArray[np.float32]
_FLOAT32 = BY_NAME["float32"]
# MKL adds up so many terms at a time: with AVX2, and with AVX-512.
_TERMS, _TERMS_AVX512 = 192, 384
# Below, MKL with AVX2 has kernels without fused operations: fewer output features, or fewer inputs.
_FEW_OUT, _FEW_IN = 4, 12
_PAIR = 2  # a product with a single row is left to another routine, with another order


class FactorProduct:
    """`scaling * left @ right`, for a tensor or for each of the experts that it stacks."""

    def __init__(self, update: LowRankUpdate, reading: Reading, held: DType) -> None:
        """Reads the factors.

        Args:
            update: What is multiplied.
            reading: Reads the adapter.
            held: The type in which the factors are held before they are multiplied, which
                matters where it is narrower than the one in which they are stored.
        """
        self._update = update
        self._held = held
        self._rows = update.left.shape[0]
        self._left = _StoredRows(update.left, reading, shared=update.experts > 1)
        self._right = _StoredRows(update.right, reading, shared=update.experts > 1)
        self._scaling = np.float32(update.scaling)
        self._latest = self._prepared(0)

    def rows(self, start: int, stop: int, into: Floats) -> None:
        """Computes rows of the product, those of all experts counted as one matrix.

        Args:
            start: The first row.
            stop: The row behind the last.
            into: Where they go, `[stop - start, columns]`, row-major.
        """
        for number in range(start // self._rows, -(-stop // self._rows)):
            base = number * self._rows
            low, high = max(start - base, 0), min(stop - base, self._rows)
            latest = self._latest  # several threads come here: what is replaced is replaced whole
            if latest[0] != number:
                latest = self._latest = self._prepared(number)
            first = base + low - start
            self._multiply(latest[1], latest[2], (low, high), into[first : first + high - low])

    def _multiply(self, left: Floats, right: Floats, rows: tuple[int, int], into: Floats) -> None:
        low, high = rows
        out, inputs = len(left), right.shape[1]
        if self._update.left.transposed:
            out, inputs = inputs, out
        if (out < _FEW_OUT or inputs < _FEW_IN) and not mkl_has_avx512():
            into[:] = 0
            for term in range(len(right)):
                into += left[low:high, term : term + 1] * right[term]
        elif high - low < _PAIR <= len(left):
            first = min(low, len(left) - _PAIR)
            pair = np.empty((_PAIR, right.shape[1]), np.float32)
            _add_terms(left[first : first + _PAIR], right, pair)
            into[:] = pair[low - first : high - first]
        else:
            _add_terms(left[low:high], right, into)
        narrow = self._held.itemsize < _FLOAT32.itemsize
        if narrow and self._update.experts > 1:
            round_to(into, self._held)
        if self._scaling != 1:
            into *= self._scaling
        if narrow:
            round_to(into, self._held)

    def _prepared(self, number: int) -> tuple[int, Floats, Floats]:
        """Returns the factors of one expert in the layout for which the order was measured."""
        left, right = self._update.left, self._update.right
        if self._update.experts > 1:
            left, right = select_expert_factors(self._update, number)
        return (
            number,
            np.asfortranarray(self._left.part(left, self._held)),
            np.ascontiguousarray(self._right.part(right, self._held)),
        )


class _StoredRows:
    """The rows of a stored matrix that a factor is a part of."""

    def __init__(self, factor: Factor, reading: Reading, *, shared: bool) -> None:
        low, high = factor.rows.start, factor.rows.stop
        demand = Demand(factor.origin, factor.key, Span(low * factor.width, high * factor.width))
        # Who takes some of the columns has neighbours who take the others.
        shared = shared or factor.columns.count < factor.width
        data = reading.read_shared(demand) if shared else reading.read(demand)
        self._data = data.reshape(-1, factor.width)
        self._first = low

    def part(self, factor: Factor, held: DType) -> Floats:
        rows, columns = factor.rows, factor.columns
        part = self._data[
            rows.start - self._first : rows.stop - self._first : rows.step,
            columns.start : columns.stop : columns.step,
        ]
        values = part.astype(np.float32)
        if not np.isfinite(values).all():
            count = values.size - int(np.count_nonzero(np.isfinite(values)))
            raise AdapterError(
                f"{count:,} of {values.size:,} elements are NaN or infinite",
                where=f"adapter tensor {factor.key!r}",
                hint="the training diverged before this adapter was saved; take an earlier one",
            )
        if held.itemsize < factor.dtype.itemsize:
            round_to(values, held)
        return values.T if factor.transposed else values


def read_rows(factor: Factor, reading: Reading, held: DType = _FLOAT32) -> Floats:
    """Reads a factor in float32.

    Args:
        factor: What is read.
        reading: Reads the adapter.
        held: See `FactorProduct`.
    """
    return _StoredRows(factor, reading, shared=False).part(factor, held)


def read_vector(factor: Factor, reading: Reading, held: DType) -> Floats:
    """Reads a factor that is one row, however it is shaped, in float32.

    Args:
        factor: What is read.
        reading: Reads the adapter.
        held: See `FactorProduct`.
    """
    return read_rows(factor, reading, held).reshape(-1)


def round_to(values: Floats, dtype: DType) -> None:
    """Rounds float32 values to those of a narrower type, in place."""
    if dtype == _FLOAT32:
        return
    with np.errstate(all="ignore"):
        values[...] = values.astype(numpy_dtype(dtype))


def _add_terms(left: Floats, right: Floats, into: Floats) -> None:
    """Multiplies at least two rows, as many terms at a time as MKL does."""
    terms = len(right)
    if mkl_has_avx512():
        step = terms if terms <= _TERMS_AVX512 else min(_TERMS_AVX512, -(-terms // 2))
    else:
        step = terms if terms <= _TERMS else min(_TERMS, terms // 2)
    _multiply_rows(left[:, :step], right[:step], into)
    for start in range(step, terms, step):
        more = np.empty_like(into)
        _multiply_rows(left[:, start : start + step], right[start : start + step], more)
        into += more


def _multiply_rows(left: Floats, right: Floats, into: Floats) -> None:
    rows = len(left)
    if not _needs_pairs() or rows == _PAIR:
        np.matmul(left, right, out=into)
        return
    for start in range(0, rows - 1, _PAIR):
        np.matmul(left[start : start + _PAIR], right, out=into[start : start + _PAIR])
    if rows % _PAIR:
        into[-1] = (left[-_PAIR:] @ right)[-1]


@cache
def mkl_has_avx512() -> bool:
    """Says whether torch's MKL uses AVX-512 on this machine: on processors of Intel that have it.

    Measured with torch 2.13 on an Intel Xeon of 2023; the other order on an AMD EPYC.
    """
    return {"GenuineIntel", "avx512f"} <= processor_words()


@cache
def _needs_pairs() -> bool:
    """Says whether numpy keeps the order only where two rows are multiplied at a time.

    So it is with OpenBLAS on processors with AVX2 and without AVX-512, whose kernel for more
    rows adds up every eighth term apart. Pairs take twice the time.
    """
    random = np.random.default_rng(0)
    left = np.asfortranarray(random.standard_normal((48, 16), np.float32))
    right = random.standard_normal((16, 264), np.float32)
    ordered = np.zeros((48, 264), np.float32)
    for term in range(16):  # float64 holds the product of two float32 exactly
        product = left[:, term : term + 1].astype(np.float64) * right[term]
        ordered = (product + ordered).astype(np.float32)
    if (left @ right == ordered).all():
        return False
    return bool((left[:_PAIR] @ right == ordered[:_PAIR]).all())


_thread = threading.local()


def workspace(name: str, elements: int) -> NDArray[np.float32]:
    """Returns uninitialised memory, one-dimensional, until the same thread asks by that name."""
    held: NDArray[np.float32] | None = getattr(_thread, name, None)
    if held is None or held.size < elements:
        held = np.empty(elements, np.float32)
        setattr(_thread, name, held)
    return held[:elements]


_LANES = 8
_QUAD = 4


def compute_row_norms(matrix: Floats) -> Floats:
    """Returns the norm of every row of a float32 matrix."""
    rows, columns = matrix.shape
    whole = columns - columns % _LANES
    squares = workspace("squares", matrix.size).reshape(matrix.shape)
    np.square(matrix, out=squares)
    # numpy adds along the first axis one step after the other, and fast.
    steps = workspace("steps", rows * whole).reshape(-1, rows, _LANES)
    steps[...] = squares[:, :whole].reshape(rows, -1, _LANES).transpose(1, 0, 2)
    lanes: Floats = np.add.reduce(steps, axis=0)
    total: Floats = lanes[:, 0].copy()
    for lane in range(1, _LANES):
        total += lanes[:, lane]
    fused = whole + (columns - whole) // _QUAD * _QUAD
    for column in range(whole, fused):
        total += squares[:, column]
    for column in range(fused, columns):
        # Added with one rounding; float64 holds the square of a float32 exactly.
        total = (np.square(matrix[:, column], dtype=np.float64) + total).astype(np.float32)
    norms: Floats = np.sqrt(total)
    return norms


class ColumnSums:
    """Adds up the squares of the columns of a matrix that comes in blocks of rows.

    Attributes:
        sums: What there is so far.
    """

    def __init__(self, columns: int) -> None:
        self.sums = np.zeros(columns, np.float32)

    def add(self, rows: Floats) -> None:
        """Adds the next rows."""
        shape = len(rows) + 1, rows.shape[1]
        terms = workspace("squares", shape[0] * shape[1]).reshape(shape)
        terms[0] = self.sums
        np.square(rows, out=terms[1:])
        np.add.reduce(terms, axis=0, out=self.sums)

    def norms(self) -> Floats:
        return np.sqrt(self.sums)
