"""The kernel that merges adapters into one tensor of the base model, a few rows at a time.

Updates are applied in order; DoRA scales the rows, or the columns, to magnitudes and needs norms.

Sources: PEFT 0.21 `tuners/lora/layer.py` (`merge`, `unmerge`, `_unmerged_base_weight`),
`tuners/lora/variants.py` (DoRA), `utils/other.py` (trained tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeGuard

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.adapters.merge.low_rank import (
    Axis,
    BiasUpdate,
    ColumnSums,
    Factor,
    FactorProduct,
    LowRankUpdate,
    TokenRowsUpdate,
    Update,
    compute_row_norms,
    matrix_shape,
    read_rows,
    read_vector,
    round_to,
    workspace,
)
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError, OverflowRefusedError, UnsupportedError
from ckptkit.core.index import Key, Span
from ckptkit.engine.casts import Caster, Overflow, overflow_error
from ckptkit.engine.kernels import Operand
from ckptkit.plan.plan import Compute, Demand, Kernel, Reading, TensorSpec

Floats = NDArray[np.float32]
_FLOAT32 = BY_NAME["float32"]


class Rounding(Enum):
    """How often a merge into a 16-bit weight rounds.

    `ONCE`: every update is applied in float32, and the sum is cast once. `PEFT`: as PEFT's
    `merge_and_unload` on a processor: to the weight's type after every adapter, and to the type of
    the adapter, or of the weight, where PEFT does so before it adds; where DoRA needs the unmerged
    weight, it is computed as in PEFT, by subtracting what was added. For one adapter that is held
    in float32, on a float32 weight, the two are the same.
    """

    ONCE = "once"
    PEFT = "peft"


class NormOf(Enum):
    """The weight whose norms DoRA takes when several adapters are merged in turn.

    `BASE`: of the unmerged weight with the adapter's own product (PEFT from 0.21 on).
    `RUNNING`: of the weight with all earlier adapters merged (before).
    """

    BASE = "base"
    RUNNING = "running"


class RowRange(Struct, frozen=True):
    """A run of elements of a weight, seen as a matrix.

    Attributes:
        start: The row of the first element.
        stop: The row after that of the last element.
        columns: Columns of the matrix.
        skipped: Elements of the first row before the run.
    """

    start: int
    stop: int
    columns: int
    skipped: int = 0


class LoraStep:
    """A low-rank update, without or with the magnitudes of DoRA."""

    def __init__(
        self, update: LowRankUpdate, base: DType, reading: Reading, rounding: Rounding
    ) -> None:
        peft = rounding is Rounding.PEFT
        held = update.held if peft else _FLOAT32
        self._product = FactorProduct(update, reading, held)
        self._rounded = base if peft and update.rounded else None
        # torch computes in 16 bits where the weight and the adapter have the same such type.
        self.narrow = base if held == base else None
        self.axis: Axis = "rows"
        self.magnitude: Floats | None = None
        if update.magnitude is not None:
            self.axis = update.magnitude.of
            self.magnitude = read_vector(update.magnitude.vector, reading, held)

    def delta(self, rows: RowRange, into: Floats) -> Floats:
        """Computes what is added to whole rows, `[rows, columns]`."""
        self._product.rows(rows.start, rows.stop, into)
        if self._rounded is not None:
            round_to(into, self._rounded)
        return into

    def apply(self, rows: RowRange, weight: Floats) -> None:
        """Adds to the elements of a run, in place."""
        shape = rows.stop - rows.start, rows.columns
        into = workspace("delta", shape[0] * shape[1])
        self.delta(rows, into.reshape(shape))
        weight += into[rows.skipped : rows.skipped + weight.size]

    def scale(self, rows: RowRange, norms: Floats) -> Floats:
        """Returns DoRA's factors: one for each row, or one for each column."""
        if self.magnitude is None:
            raise ValueError("no magnitudes")
        if not norms.all():
            raise self._bad_norm(rows, int(norms.argmin()), "zero")
        norms = self.narrow_to(norms.copy())
        infinite = np.isinf(norms)
        if infinite.any():  # dividing by it would make zeros of the weight
            raise self._bad_norm(rows, int(infinite.argmax()), "infinite")
        if self.axis == "columns":
            return self.narrow_to(self.magnitude / norms)
        return self.narrow_to(self.magnitude[rows.start : rows.stop] / norms)[:, np.newaxis]

    def _bad_norm(self, rows: RowRange, number: int, what: str) -> AdapterError:
        number += rows.start if self.axis == "rows" else 0
        return AdapterError(
            f"DoRA divides by the norm of {self.axis[:-1]} {number:,} of the weight, which is"
            f" {what}"
        )

    def narrow_to(self, values: Floats) -> Floats:
        """Rounds a result where torch would have computed it in 16 bits."""
        if self.narrow is not None and self.narrow != _FLOAT32:
            round_to(values, self.narrow)
        return values


class ShiftStep:
    """An update of a vector."""

    def __init__(self, update: BiasUpdate, reading: Reading, rounding: Rounding) -> None:
        held = update.held if rounding is Rounding.PEFT else _FLOAT32
        self._shift = read_vector(update.shift, reading, held)
        self._shift *= np.float32(update.scaling)
        if held != _FLOAT32:
            round_to(self._shift, held)

    def apply(self, rows: RowRange, weight: Floats) -> None:
        weight += self._shift[rows.skipped : rows.skipped + weight.size]


class TokenStep:
    """An update that replaces rows."""

    def __init__(self, update: TokenRowsUpdate, reading: Reading) -> None:
        self._rows = read_rows(update.rows, reading)
        order = np.argsort(np.asarray(update.tokens, np.int64), kind="stable")
        self._order = order
        self._tokens = np.asarray(update.tokens, np.int64)[order]

    def apply(self, rows: RowRange, weight: Floats) -> None:
        """Replaces elements of a run, in place."""
        low, high = np.searchsorted(self._tokens, (rows.start, rows.stop))
        for position in range(low, high):
            row = self._rows[self._order[position]]
            first = (int(self._tokens[position]) - rows.start) * rows.columns - rows.skipped
            begin, end = max(first, 0), min(first + rows.columns, weight.size)
            weight[begin:end] = row[begin - first : end - first]


Step = LoraStep | ShiftStep | TokenStep


NormsOf = Callable[[int, Floats], Floats]
"""Returns the n-th norms that a block needs, for the matrix of its rows."""


class Steps:
    """The updates of a weight, to be applied to any of its rows.

    Attributes:
        whole_rows: Whether only whole rows can be merged.
        may_overflow: Whether numbers are rounded to float16 on the way.
    """

    def __init__(
        self, steps: Sequence[Step], base: DType, rounding: Rounding, norm_of: NormOf
    ) -> None:
        self._steps = steps
        self._norm_of = norm_of
        self._between = base if rounding is Rounding.PEFT else BY_NAME["float32"]
        self._unmerges = rounding is Rounding.PEFT and norm_of is NormOf.BASE
        self._remembers = (
            rounding is Rounding.ONCE and norm_of is NormOf.BASE and any(map(_is_dora, steps[1:]))
        )
        self.whole_rows = any(map(_is_dora, steps))
        self.may_overflow = self._between.name == "float16"

    def apply(self, rows: RowRange, weight: Floats, norms: NormsOf) -> Floats:
        """Merges into a run of elements.

        Args:
            rows: The position of the run.
            weight: The elements of the base, one-dimensional; they may be overwritten.
            norms: Takes norms.

        Returns:
            The merged elements, not yet rounded to the weight's type.
        """
        fold = _Fold(rows, norms, self._between)
        shape = rows.stop - rows.start, rows.columns
        original = weight.reshape(shape).copy() if self._remembers else None
        for number, step in enumerate(self._steps):
            if number:
                round_to(weight, self._between)
            if not _is_dora(step):
                step.apply(rows, weight)
                if isinstance(step, LoraStep):
                    fold.merged.append((step, None))
                continue
            matrix = weight.reshape(shape)
            base = matrix if original is None else original
            if self._unmerges:
                base = fold.unmerge(matrix)
                matrix = fold.merge_again(base)
            weight = fold.merge(step, matrix, base).reshape(-1)
        return weight


class _Fold:
    """The updates that were merged into a few whole rows, which DoRA may have to undo."""

    def __init__(self, rows: RowRange, norms: NormsOf, between: DType) -> None:
        self._rows = rows
        self._norms = norms
        self._number = 0
        self._between = between
        self.merged: list[tuple[LoraStep, Floats | None]] = []

    def merge(self, step: LoraStep, weight: Floats, base: Floats) -> Floats:
        """Adds a product to `weight`, and scales the sum to its magnitudes.

        The norms are those of `base` with the product.
        """
        delta = self._delta(step)
        normed = base
        if base is not weight:
            normed = step.narrow_to(np.add(base, delta, out=self._memory("normed")))
        # `weight` may be in this memory itself.
        total = step.narrow_to(np.add(weight, delta, out=self._memory("total")))
        if base is weight:
            normed = total
        scale = step.scale(self._rows, self._norms(self._number, normed))
        self._number += 1
        self.merged.append((step, scale))
        total *= scale
        return step.narrow_to(total)

    def unmerge(self, weight: Floats) -> Floats:
        """Subtracts what was merged, the last update first."""
        for step, scale in reversed(self.merged):
            delta = self._delta(step)
            if scale is None:
                round_to(delta, self._between)
                weight = weight - delta
            else:
                weight = step.narrow_to(step.narrow_to(weight / scale) - delta)
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
        return step.delta(self._rows, self._memory("delta"))

    def _memory(self, name: str) -> Floats:
        shape = self._rows.stop - self._rows.start, self._rows.columns
        return workspace(name, shape[0] * shape[1]).reshape(shape)


def _is_dora(step: Step) -> TypeGuard[LoraStep]:
    return isinstance(step, LoraStep) and step.magnitude is not None


def _take_row_norms(_number: int, matrix: Floats) -> Floats:
    return compute_row_norms(matrix)


class NormsOfColumns:
    """Norms of columns, which need passes over the whole weight first.

    Every pass finds the next norms; those of a second DoRA update depend on the first ones.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._found_norms: list[Floats] = []
        self._sums: ColumnSums | None = None

    def __call__(self, number: int, matrix: Floats) -> Floats:
        if number < len(self._found_norms):
            return self._found_norms[number]
        if self._sums is not None:
            self._sums.add(matrix)
        raise NormsUnknownError

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Sums up the rows that are merged inside the context, all of them in order."""
        sums = self._sums = ColumnSums(self._columns)
        yield
        self._sums = None
        self._found_norms.append(sums.norms())


class NormsUnknownError(Exception):
    """A merge needs norms of columns that a pass over the whole weight has to find first."""


# A product of this size stays in the processor's cache until it is added and cast. DoRA computes
# in five matrices at a time, and is as fast in smaller ones.
_AT_ONCE = 1 << 18
_AT_ONCE_WITH_NORMS = 1 << 17

_BFLOAT16 = BY_NAME["bfloat16"]
_SIGN = 1 << 31
# Bits of the largest float32 that is finite, and of the largest that is so as bfloat16.
_LARGEST = 0x7F7F_FFFF
_LARGEST_FOR_BFLOAT16 = 0x7F7F_7FFF


class MergeKernel(Kernel, Struct, frozen=True):
    """Merges updates into a tensor, in order.

    The element type written is that of the output tensor. A base element that is NaN stays
    NaN. Where the base is finite and what would be written is not, the merge is refused, and so
    are factors with NaN or infinities.

    Attributes:
        base: The tensor of the base model.
        updates: What is merged, in order; at least one.
        rounding: How often it rounds.
        norm_of: What DoRA takes norms of.
    """

    base: Operand
    updates: tuple[Update, ...]
    rounding: Rounding = Rounding.ONCE
    norm_of: NormOf = NormOf.BASE

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        parts = [(factor.origin, factor.key) for factor in self._factors()]
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
        prepared: list[Step] = []
        for update in self.updates:
            with np.errstate(all="ignore"):  # what overflows is found in the result
                if isinstance(update, LowRankUpdate):
                    prepared.append(LoraStep(update, self.base.dtype, reading, self.rounding))
                elif isinstance(update, BiasUpdate):
                    prepared.append(ShiftStep(update, reading, self.rounding))
                else:
                    prepared.append(TokenStep(update, reading))
        steps = Steps(prepared, self.base.dtype, self.rounding, self.norm_of)
        merge = BlockMerge(self.base, steps, rows, columns, _take_row_norms)
        if not any(u.magnitude and u.magnitude.of == "columns" for u in low_ranks):
            return merge
        norms = NormsOfColumns(columns)
        parts = list(merge.cut(Span(0, rows * columns)))
        while not merge.try_merge(*parts[0], norms, reading):
            with norms.passing():
                for part in parts:
                    merge.try_merge(*part, norms, reading)
        return replace(merge, norms=norms)

    def _factors(self) -> Iterator[Factor]:
        for update in self.updates:
            if isinstance(update, LowRankUpdate):
                yield from (update.left, update.right)
                if update.magnitude is not None:
                    yield update.magnitude.vector
            else:
                yield update.shift if isinstance(update, BiasUpdate) else update.rows


class BlockMerge(Kernel, Struct, frozen=True):
    """A merge kernel that has read its factors.

    Attributes:
        base: The tensor of the base model.
        steps: What is merged into it.
        rows: Rows of the tensor, seen as a matrix.
        columns: Its columns.
        norms: Takes norms.
    """

    base: Operand
    steps: Steps
    rows: int
    columns: int
    norms: NormsOf

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
        caster = Caster(BY_NAME["float32"], out.dtype)
        where = f"tensor {out.name!r}"
        for rows, part in self.cut(span):
            base = values[part.start - span.start : part.stop - span.start]
            low, high = max(part.start, block.start), min(part.stop, block.stop)
            wanted = slice(low - part.start, high - part.start)
            weight = workspace("weight", base.size)
            with np.errstate(all="ignore"):
                weight[:] = base
                try:
                    merged = self.steps.apply(rows, weight, self.norms)[wanted]
                except AdapterError as error:
                    raise error.located(where) from error
            overflow = caster.cast(merged, target[low - block.start : high - block.start])
            if overflow is not None:
                raise overflow_error(overflow, out.dtype, where=where, block_start=low)
            self._refuse_overflow(base[wanted], merged, out, low)

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
        if self.steps.may_overflow:
            overflow = Overflow(count, first, value)
            raise overflow_error(overflow, BY_NAME["float16"], where=where, block_start=start)
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
                self.steps.apply(rows, weight, norms)
        except NormsUnknownError:
            return False
        return True

    def _widen(self, block: Span) -> Span:
        if not self.steps.whole_rows or not self.columns:
            return block
        start = block.start // self.columns * self.columns
        return Span(start, -(-block.stop // self.columns) * self.columns)

    def cut(self, span: Span) -> Iterator[tuple[RowRange, Span]]:
        """Cuts a run of elements between rows, each part small enough for a cache."""
        columns = self.columns
        elements = _AT_ONCE_WITH_NORMS if self.steps.whole_rows else _AT_ONCE
        at_once = max(1, elements // columns)
        row = span.start // columns
        while row * columns < span.stop:
            stop = min(row + at_once, -(-span.stop // columns))
            low, high = max(row * columns, span.start), min(stop * columns, span.stop)
            yield RowRange(row, stop, columns, low - row * columns), Span(low, high)
            row = stop
