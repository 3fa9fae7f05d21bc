"""The kernel that merges adapters into one tensor of the base model, a few rows at a time.

An update adds `scaling * left @ right` to a weight, seen as a matrix. `left` and `right` are
parts of the matrices A and B as an adapter stores them, so that one form serves every kind of
layer, an expert of a fused parameter, and the rows of a fused weight that are a tensor of their
own on disk. Updates are applied in order; DoRA scales the rows, or the columns, to magnitudes and
needs norms.

A float32 product depends in its last bits on the order of its sums, and on whether products are
rounded before they are added. This one equals `torch.mm` with MKL, as far as could be measured:
fused, one term after the other, up to 192 terms at a time, or 384 on Intel's processors with
AVX-512 (measured up to 767 terms). Torch on other processors may differ from itself by as much.

Euclidean norms of rows and columns are summed in the order of torch's processor kernels, so that
what is divided by a norm equals PEFT's result. A row has eight partial sums, which are added up
first. The remaining elements follow: the compiler multiplies four at a time before it adds them,
and fuses the multiplication and addition of the others. A column has one sum.

Both compute in memory that a thread keeps from block to block, since fresh pages cost more than
the arithmetic.

Source: PEFT 0.21 `tuners/lora/layer.py` (`merge`, `unmerge`, `_unmerged_base_weight`, every
`get_delta_weight`), `tuners/lora/variants.py` (DoRA), `utils/other.py` (trained tokens); torch
`aten/src/ATen/native/cpu/ReduceOpsKernel.cpp`, `norm_kernel_tensor_iterator_impl`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError, OverflowRefusedError, UnsupportedError
from ckptkit.core.index import Key, Span, TensorEntry
from ckptkit.core.threads import processor_words
from ckptkit.engine.casts import Caster, Overflow, overflow_error
from ckptkit.engine.kernels import Operand
from ckptkit.lora.changes import Form, NormOf
from ckptkit.plan.plan import Compute, Demand, Kernel, Reading, TensorSpec

Axis = Literal["rows", "columns"]
Floats = NDArray[np.float32]
_FLOAT16, _BFLOAT16, _FLOAT32 = (BY_NAME[name] for name in ("float16", "bfloat16", "float32"))


class Factor(Struct, frozen=True):
    """A part of a stored matrix."""

    origin: str
    key: Key
    dtype: DType
    width: int  # columns of the stored matrix: what follows a tensor's first axis, flattened
    rows: range
    columns: range
    transposed: bool = False  # after it was cut out

    @classmethod
    def whole(cls, origin: str, entry: TensorEntry) -> Factor:
        """Takes a stored tensor, flattened beyond its first axis; a vector is one row."""
        height, width = matrix_shape(entry.shape)
        return cls(origin, entry.key, entry.dtype, width, range(height), range(width))

    @property
    def shape(self) -> tuple[int, int]:
        shape = len(self.rows), len(self.columns)
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
            rows=self.rows[slice(*rows)] if rows else self.rows,
            columns=self.columns[slice(*columns)] if columns else self.columns,
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor flattened beyond its first axis."""
    rows, *rest = shape if len(shape) > 1 else (1, *shape)
    return rows, math.prod(rest)


class LowRankUpdate(Struct, frozen=True):
    """An update: `weight + scaling * left @ right`, with DoRA then brought to its magnitudes."""

    left: Factor  # [rows, r], for the tensor or for each of its experts
    right: Factor  # [r, columns], likewise
    scaling: float  # alpha / r, or alpha / sqrt(r), times the adapter's weight
    # PEFT rounds the product to the weight's type: embeddings, fused parameters.
    rounded: bool = False
    experts: int = 1  # matrices that the tensor stacks along its first axis; 1 for none
    # DoRA's, of any shape: a value for each output feature.
    magnitude: Factor | None = None
    outputs: Axis = "rows"  # the output features: `columns` of embeddings and [in, out] weights

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
            kept, cut = (rows, columns) if self.outputs == "rows" else (columns, rows)
            if cut is not None:
                raise ValueError(f"norms of {self.outputs} need all of the matrix")
            magnitude = magnitude.part(columns=kept)
        left, right = self.left.part(rows=rows), self.right.part(columns=columns)
        return replace(self, left=left, right=right, magnitude=magnitude)

    @property
    def turned(self) -> LowRankUpdate:
        """The update of the transposed tensor."""
        axis: Axis = "columns" if self.outputs == "rows" else "rows"
        return replace(self, left=self.right.t, right=self.left.t, outputs=axis)

    def expert(self, number: int) -> LowRankUpdate:
        """Returns the update of one of the experts, from 0."""
        turned = self.left.transposed
        a, b = (self.left.t, self.right.t) if turned else (self.right, self.left)
        rank = len(a.rows) // self.experts
        a = a.part(rows=(number * rank, (number + 1) * rank))
        b = replace(b, columns=b.columns[number :: self.experts])
        left, right = (a.t, b.t) if turned else (b, a)
        return replace(self, left=left, right=right, experts=1)


def make_low_rank(
    a: Factor,
    b: Factor,
    scaling: float,
    form: Form = "linear",
    *,
    magnitude: Factor | None = None,
    experts: int = 1,
) -> LowRankUpdate:
    """Returns the update of factors as an adapter stores them.

    `a` is `lora_A.weight`, [r, in, ...], `b` is `lora_B.weight`, [out, r, ...]; of experts
    [experts * r, in] and [out, r * experts], experts innermost; of an embedding
    `lora_embedding_A`, [r, vocabulary], and `lora_embedding_B`, [features, r].
    """
    is_embedding = form == "embedding"
    rounded = magnitude is None if is_embedding else form not in {"linear", "transposed", "conv"}
    update = LowRankUpdate(b, a, scaling, rounded, experts, magnitude)
    return update.turned if is_embedding or form.endswith("transposed") else update


class BiasUpdate(Struct, frozen=True):
    """An update of a bias, or of any vector: `vector + scaling * shift`."""

    shift: Factor  # `lora_B.bias`
    scaling: float


class TokenRowsUpdate(Struct, frozen=True):
    """An update that replaces rows: `weight[tokens] = rows`."""

    rows: Factor  # `trainable_tokens_delta`: the rows themselves, in spite of the name
    tokens: tuple[int, ...]  # the rows of the weight that they replace; none twice


Update = LowRankUpdate | BiasUpdate | TokenRowsUpdate


# MKL adds up so many terms at a time: with AVX2, and with AVX-512.
_TERMS, _TERMS_AVX512 = 192, 384
# Below, MKL with AVX2 has kernels without fused operations: fewer output features, or fewer inputs.
_FEW_OUT, _FEW_IN = 4, 12
_PAIR = 2  # a product with a single row is left to another routine, with another order


class _StoredRows:
    """The rows of a stored matrix that a factor is a part of."""

    def __init__(self, factor: Factor, reading: Reading, *, shared: bool) -> None:
        low, high = factor.rows.start, factor.rows.stop
        demand = Demand(factor.origin, factor.key, Span(low * factor.width, high * factor.width))
        # Who takes some of the columns has neighbours who take the others.
        shared = shared or len(factor.columns) < factor.width
        data = reading.read_shared(demand) if shared else reading.read(demand)
        self._data = data.reshape(-1, factor.width)
        self._first = low

    def part(self, factor: Factor) -> Floats:
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
        return values.T if factor.transposed else values


def read_rows(factor: Factor, reading: Reading) -> Floats:
    return _StoredRows(factor, reading, shared=False).part(factor)


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


Rounding = Literal["once", "peft"]
"""How often a merge into a 16-bit weight rounds.

`once`: every update is applied in float32, and the sum is cast once. `peft`: as PEFT's
`merge_and_unload` on a processor, which holds adapters in float32: to the weight's type after every
adapter, and where PEFT does so before it adds; where DoRA needs the unmerged weight, it is computed
as in PEFT, by subtracting what was added. For one adapter on a float32 weight the two are the same.
"""


class RowRange(Struct, frozen=True):
    """A run of elements of a weight, seen as a matrix."""

    start: int  # the row of the first element
    stop: int  # the row after that of the last element
    columns: int
    skipped: int = 0  # elements of the first row before the run


class LoraStep:
    """A low-rank update, for a tensor or each of its experts, maybe with the magnitudes of DoRA."""

    def __init__(self, update: LowRankUpdate, reading: Reading, rounded: DType | None) -> None:
        """Reads the factors; `rounded` is the type that PEFT rounds the product to."""
        self._update = update
        self._rounded = rounded
        self._rows = update.left.shape[0]
        self._left = _StoredRows(update.left, reading, shared=update.experts > 1)
        self._right = _StoredRows(update.right, reading, shared=update.experts > 1)
        self._scaling = np.float32(update.scaling)
        self._latest = self._prepare(0)
        self.magnitude: Floats | None = None
        if update.magnitude is not None:
            self.magnitude = read_rows(update.magnitude, reading).reshape(-1)

    def _prepare(self, number: int) -> tuple[int, Floats, Floats]:
        """Returns the factors of one expert in the layout for which the order was measured."""
        update = self._update.expert(number) if self._update.experts > 1 else self._update
        left, right = self._left.part(update.left), self._right.part(update.right)
        return number, np.asfortranarray(left), np.ascontiguousarray(right)

    def delta(self, start: int, stop: int, into: Floats) -> Floats:
        """Computes what is added to whole rows, those of all experts counted as one matrix."""
        for number in range(start // self._rows, -(-stop // self._rows)):
            base = number * self._rows
            low, high = max(start - base, 0), min(stop - base, self._rows)
            latest = self._latest  # several threads come here: what is replaced is replaced whole
            if latest[0] != number:
                latest = self._latest = self._prepare(number)
            first = base + low - start
            self._multiply(latest[1], latest[2], (low, high), into[first : first + high - low])
        if self._rounded is not None:
            round_to(into, self._rounded)
        return into

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
        if self._scaling != 1:
            into *= self._scaling

    def scale(self, start: int, stop: int, norms: Floats) -> Floats:
        """Returns DoRA's factors: one for each row, or one for each column."""
        axis, magnitude = self._update.outputs, self.magnitude
        if magnitude is None:
            raise ValueError("no magnitudes")
        infinite = np.isinf(norms)  # dividing by it would make zeros of the weight
        for wrong, what in ((norms == 0, "zero"), (infinite, "infinite")):
            if wrong.any():
                number = int(wrong.argmax()) + (start if axis == "rows" else 0)
                raise AdapterError(
                    f"DoRA divides by the norm of {axis[:-1]} {number:,} of the weight, which is"
                    f" {what}"
                )
        if axis == "columns":
            return magnitude / norms
        scales: Floats = (magnitude[start:stop] / norms)[:, np.newaxis]
        return scales


Apply = Callable[[RowRange, Floats], None]
"""Changes the elements of a run, in place."""
Step = LoraStep | Apply


def _is_dora(step: Step) -> bool:
    return isinstance(step, LoraStep) and step.magnitude is not None


def _read_step(update: Update, reading: Reading, rounded: DType | None) -> Step:
    if isinstance(update, LowRankUpdate):
        return LoraStep(update, reading, rounded if update.rounded else None)
    if isinstance(update, BiasUpdate):
        shift = read_rows(update.shift, reading).reshape(-1)
        shift *= np.float32(update.scaling)

        def add(rows: RowRange, weight: Floats) -> None:
            weight += shift[rows.skipped : rows.skipped + weight.size]

        return add
    numbers = np.asarray(update.tokens, np.int64)
    order = np.argsort(numbers, kind="stable")
    values, tokens = read_rows(update.rows, reading), numbers[order]

    def put(rows: RowRange, weight: Floats) -> None:
        low, high = np.searchsorted(tokens, (rows.start, rows.stop))
        for position in range(low, high):
            row = values[order[position]]
            first = (int(tokens[position]) - rows.start) * rows.columns - rows.skipped
            begin, end = max(first, 0), min(first + rows.columns, weight.size)
            weight[begin:end] = row[begin - first : end - first]

    return put


class _Fold:
    """The low-rank updates that were merged into a few rows, which DoRA may have to undo."""

    def __init__(self, rows: RowRange, norms: NormsOfColumns | None, between: DType) -> None:
        self._rows = rows
        self._norms = norms
        self._number = 0
        self._between = between
        self.merged: list[tuple[LoraStep, Floats | None]] = []

    def add(self, step: LoraStep, weight: Floats) -> None:
        """Adds a product to the elements of a run, in place."""
        skipped = self._rows.skipped
        weight += self._delta(step).reshape(-1)[skipped : skipped + weight.size]
        self.merged.append((step, None))

    def merge(self, step: LoraStep, weight: Floats, base: Floats) -> Floats:
        """Adds a product to `weight`, and scales the sum to its magnitudes.

        The norms are those of `base` with the product.
        """
        delta = self._delta(step)
        normed = None if base is weight else np.add(base, delta, out=self._memory("normed"))
        # `weight` may be in this memory itself.
        total: Floats = np.add(weight, delta, out=self._memory("total"))
        matrix = total if normed is None else normed
        if self._norms is None:
            norms = compute_row_norms(matrix)
        else:
            norms = self._norms.take(self._number, matrix)
        scale = step.scale(self._rows.start, self._rows.stop, norms)
        self._number += 1
        self.merged.append((step, scale))
        total *= scale
        return total

    def unmerge(self, weight: Floats) -> Floats:
        """Subtracts what was merged, the last update first."""
        for step, scale in reversed(self.merged):
            delta = self._delta(step)
            if scale is None:
                round_to(delta, self._between)
                weight = weight - delta
            else:
                weight = weight / scale - delta
            round_to(weight, self._between)
        return weight

    def merge_again(self, base: Floats) -> Floats:
        """Merges the same updates into the unmerged weight."""
        merged, self.merged = self.merged, []
        weight = base
        for step, scale in merged:
            if scale is None:
                weight = weight + self._delta(step)
                self.merged.append((step, None))
            else:
                weight = self.merge(step, weight, base)
            round_to(weight, self._between)
        return weight

    def _delta(self, step: LoraStep) -> Floats:
        return step.delta(self._rows.start, self._rows.stop, self._memory("delta"))

    def _memory(self, name: str) -> Floats:
        shape = self._rows.stop - self._rows.start, self._rows.columns
        return workspace(name, shape[0] * shape[1]).reshape(shape)


class NormsOfColumns:
    """Norms of columns, which need passes over the whole weight first.

    Every pass finds the next norms; those of a second DoRA update depend on the first ones.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._found_norms: list[Floats] = []
        self._sums: Floats | None = None  # of squares, while a pass is under way

    def take(self, number: int, matrix: Floats) -> Floats:
        """Returns the n-th norms that a merge needs, for the matrix of some of the rows."""
        if number < len(self._found_norms):
            return self._found_norms[number]
        if self._sums is not None:
            shape = len(matrix) + 1, matrix.shape[1]
            terms = workspace("squares", shape[0] * shape[1]).reshape(shape)
            terms[0] = self._sums
            np.square(matrix, out=terms[1:])
            np.add.reduce(terms, axis=0, out=self._sums)
        raise NormsUnknownError

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Sums up the rows that are merged inside the context, all of them in order."""
        sums = self._sums = np.zeros(self._columns, np.float32)
        yield
        self._sums = None
        self._found_norms.append(np.sqrt(sums))


class NormsUnknownError(Exception):
    """A merge needs norms of columns that a pass over the whole weight has to find first."""


# A product of this size stays in the processor's cache until it is added and cast. DoRA computes
# in five matrices at a time, and is as fast in smaller ones.
_AT_ONCE = 1 << 18
_AT_ONCE_WITH_NORMS = 1 << 17

_SIGN = 1 << 31
# Bits of the largest float32 that is finite, and of the largest that is so as bfloat16.
_LARGEST = 0x7F7F_FFFF
_LARGEST_FOR_BFLOAT16 = 0x7F7F_7FFF


class MergeKernel(Kernel, Struct, frozen=True):
    """Merges updates into a tensor, in order.

    The element type written is that of the output tensor. A base element that is NaN stays
    NaN. Where the base is finite and what would be written is not, the merge is refused, and so
    are factors with NaN or infinities.
    """

    base: Operand
    updates: tuple[Update, ...]
    rounding: Rounding = "once"
    norm_of: NormOf = "base"  # what DoRA takes norms of

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        factors: list[Factor | None] = []
        for update in self.updates:
            if isinstance(update, LowRankUpdate):
                factors += (update.left, update.right, update.magnitude)
            else:
                factors.append(update.shift if isinstance(update, BiasUpdate) else update.rows)
        parts = [(factor.origin, factor.key) for factor in factors if factor is not None]
        return (*self.base.reads, *dict.fromkeys(parts))

    def compute(self) -> Compute:
        return Compute(self, self.reads)

    @property
    def is_ready(self) -> bool:
        return False

    def prepare(self, out: TensorSpec, reading: Reading) -> BlockMerge:
        """Reads the factors, and takes norms where they need all of the tensor."""
        if self.base.dtype.kind != "float" or self.base.dtype == BY_NAME["float64"]:
            raise UnsupportedError(
                f"no merge into {self.base.dtype.name}; merges go into float types of up to"
                " 32 bits",
                where=f"tensor {out.name!r}",
            )
        low_ranks = [update for update in self.updates if isinstance(update, LowRankUpdate)]
        rows, columns = matrix_shape(out.shape)
        if any(update.experts > 1 for update in low_ranks):
            rows, columns = rows * out.shape[1], columns // out.shape[1]
        rounded = self.base.dtype if self.rounding == "peft" else None
        with np.errstate(all="ignore"):  # what overflows is found in the result
            steps = [_read_step(update, reading, rounded) for update in self.updates]
        merge = BlockMerge(self.base, steps, self.rounding, self.norm_of, columns)
        if not any(u.magnitude and u.outputs == "columns" for u in low_ranks):
            return merge
        norms = NormsOfColumns(columns)
        parts = list(merge.cut(Span(0, rows * columns)))
        while not merge.try_merge(*parts[0], norms, reading):
            with norms.passing():
                for part in parts:
                    merge.try_merge(*part, norms, reading)
        return replace(merge, norms=norms)


class BlockMerge(Kernel, Struct, frozen=True):
    """A merge kernel that has read its factors."""

    base: Operand
    steps: Sequence[Step]
    rounding: Rounding
    norm_of: NormOf
    columns: int  # of the tensor, seen as a matrix
    norms: NormsOfColumns | None = None  # None for those of rows, which a block has

    @property
    def _needs_whole_rows(self) -> bool:
        return any(map(_is_dora, self.steps))

    @property
    def _between(self) -> DType:
        """The element type to which the weight is rounded after every update."""
        return self.base.dtype if self.rounding == "peft" else _FLOAT32

    def grain_elements(self, _out: TensorSpec) -> int:
        return max(1, self.columns)

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Reads the same elements of the base; where norms are taken, whole rows."""
        return self.base.demands(self._widen(block))

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        span = self._widen(block)
        values = self.base.values(span, inputs)
        caster = Caster(_FLOAT32, out.dtype)
        where = f"tensor {out.name!r}"
        for rows, part in self.cut(span):
            base = values[part.start - span.start : part.stop - span.start]
            low, high = max(part.start, block.start), min(part.stop, block.stop)
            wanted = slice(low - part.start, high - part.start)
            weight = workspace("weight", base.size)
            with np.errstate(all="ignore"):
                weight[:] = base
                try:
                    merged = self._apply(rows, weight, self.norms)[wanted]
                except AdapterError as error:
                    raise error.located(where) from error
            overflow = caster.cast(merged, target[low - block.start : high - block.start])
            if overflow is not None:
                raise overflow_error(overflow, out.dtype, where=where, block_start=low)
            self._refuse_overflow(base[wanted], merged, out, low)

    def _apply(self, rows: RowRange, weight: Floats, norms: NormsOfColumns | None) -> Floats:
        is_onto_base = self.norm_of == "base"
        # Later updates with norms need the unmerged weight.
        remembers = self.rounding == "once" and is_onto_base and any(map(_is_dora, self.steps[1:]))
        fold = _Fold(rows, norms, self._between)
        shape = rows.stop - rows.start, rows.columns
        original = weight.reshape(shape).copy() if remembers else None
        for number, step in enumerate(self.steps):
            if number:
                round_to(weight, self._between)
            if not isinstance(step, LoraStep):
                step(rows, weight)
                continue
            if step.magnitude is None:
                fold.add(step, weight)
                continue
            matrix = weight.reshape(shape)
            base = matrix if original is None else original
            if self.rounding == "peft" and is_onto_base:
                base = fold.unmerge(matrix)
                matrix = fold.merge_again(base)
            weight = fold.merge(step, matrix, base).reshape(-1)
        return weight

    def _refuse_overflow(
        self, base: NDArray[Any], merged: Floats, out: TensorSpec, start: int
    ) -> None:
        """Refuses elements that are finite in the base and would not be in the output."""
        largest = _LARGEST_FOR_BFLOAT16 if out.dtype == _BFLOAT16 else _LARGEST
        # Magnitudes are ordered as their bits are; two maxima cost less than a mask of the block.
        positive = int(merged.view(np.int32).max())
        negative = int(merged.view(np.uint32).max()) - _SIGN
        if max(positive, negative) <= largest:
            return
        lost = (merged.view(np.uint32) & (_SIGN - 1)) > largest
        lost &= np.isfinite(base)
        first, count = int(lost.argmax()), int(np.count_nonzero(lost))
        if not count:
            return
        value, where = float(merged[first]), f"tensor {out.name!r}"
        if self._between == _FLOAT16:
            overflow = Overflow(count, first, value)
            raise overflow_error(overflow, _FLOAT16, where=where, block_start=start)
        others = f" (with {count - 1:,} more near it)" if count > 1 else ""
        raise OverflowRefusedError(
            f"{value:g} at element {start + first:,} does not fit"
            f" {out.dtype.name}, where the base has {float(base[first]):g}{others}",
            where=where,
            hint="the numbers or the scaling of the adapter are too large, as after a training"
            " that diverged; take an earlier checkpoint, and compare its 'lora_alpha' with the run",
        )

    def try_merge(
        self, rows: RowRange, part: Span, norms: NormsOfColumns, reading: Reading
    ) -> bool:
        """Merges until norms are needed that are not known yet; returns whether none were."""
        inputs = [reading.read(demand) for demand in self.base.demands(part)]
        weight = workspace("weight", part.stop - part.start)
        weight[:] = self.base.values(part, inputs)
        try:
            with np.errstate(all="ignore"):
                self._apply(rows, weight, norms)
        except NormsUnknownError:
            return False
        return True

    def _widen(self, block: Span) -> Span:
        if not self._needs_whole_rows or not self.columns:
            return block
        start = block.start // self.columns * self.columns
        return Span(start, -(-block.stop // self.columns) * self.columns)

    def cut(self, span: Span) -> Iterator[tuple[RowRange, Span]]:
        """Cuts a run of elements between rows, each part small enough for a cache."""
        columns = self.columns
        elements = _AT_ONCE_WITH_NORMS if self._needs_whole_rows else _AT_ONCE
        at_once = max(1, elements // columns)
        row = span.start // columns
        while row * columns < span.stop:
            stop = min(row + at_once, -(-span.stop // columns))
            low, high = max(row * columns, span.start), min(stop * columns, span.stop)
            yield RowRange(row, stop, columns, low - row * columns), Span(low, high)
            row = stop
