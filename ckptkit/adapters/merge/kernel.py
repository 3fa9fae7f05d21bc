"""The kernel that merges adapters into one tensor of the base model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.merge.factor_products import workspace
from ckptkit.adapters.merge.fold import (
    Floats,
    NormOf,
    NormsOf,
    NormsOfColumns,
    NormsUnknownError,
    Rounding,
    RowRange,
    Steps,
    prepare_step,
    take_row_norms,
)
from ckptkit.adapters.merge.low_rank import BiasUpdate, Factor, LowRankUpdate, Update, matrix_shape
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError, OverflowRefusedError, UnsupportedError
from ckptkit.core.index import Key, Span
from ckptkit.engine.casts import Caster, Overflow, overflow_error
from ckptkit.engine.kernels import Operand
from ckptkit.plan.plan import Compute, Demand, Reading, TensorSpec

# A product of this size stays in the processor's cache until it is added and cast. DoRA computes
# in five matrices at a time, and is as fast in smaller ones.
_AT_ONCE = 1 << 18
_AT_ONCE_WITH_NORMS = 1 << 17

_BFLOAT16 = BY_NAME["bfloat16"]
_SIGN = 1 << 31
# Bits of the largest float32 that is finite, and of the largest that is so as bfloat16.
_LARGEST = 0x7F7F_FFFF
_LARGEST_FOR_BFLOAT16 = 0x7F7F_7FFF


@dataclass(frozen=True, slots=True)
class MergeKernel:
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

    def prepare(self, out: TensorSpec, reading: Reading) -> BlockMerge:
        """Reads the factors, and takes norms where they need all of the tensor."""
        if self.base.dtype.kind != "float" or self.base.dtype == BY_NAME["float64"]:
            raise UnsupportedError(
                f"no merge into {self.base.dtype.name}; merges go into float types of up to"
                " 32 bits",
                where=f"tensor {out.name!r}",
            )
        rows, columns = matrix_shape(out.shape)
        if self._stacked:
            rows, columns = rows * out.shape[1], columns // out.shape[1]
        with np.errstate(all="ignore"):  # what overflows is found in the result
            prepared = [
                prepare_step(update, self.base.dtype, reading, self.rounding)
                for update in self.updates
            ]
        steps = Steps(prepared, self.base.dtype, self.rounding, self.norm_of)
        merge = BlockMerge(self.base, steps, rows, columns, take_row_norms)
        if any(u.magnitude and u.magnitude.of == "columns" for u in self._low_ranks()):
            return replace(merge, norms=merge.column_norms(reading))
        return merge

    @property
    def _stacked(self) -> bool:
        return any(update.experts > 1 for update in self._low_ranks())

    def _low_ranks(self) -> Iterator[LowRankUpdate]:
        return (update for update in self.updates if isinstance(update, LowRankUpdate))

    def _factors(self) -> Iterator[Factor]:
        for update in self.updates:
            if isinstance(update, LowRankUpdate):
                yield from (update.left, update.right)
                if update.magnitude is not None:
                    yield update.magnitude.vector
            else:
                yield update.shift if isinstance(update, BiasUpdate) else update.rows


@dataclass(frozen=True, slots=True)
class BlockMerge:
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
        for rows, part in self._cut(span):
            base = values[part.start - span.start : part.stop - span.start]
            low, high = max(part.start, block.start), min(part.stop, block.stop)
            wanted = slice(low - part.start, high - part.start)
            merged = self._merge(rows, base, where)[wanted]
            overflow = caster.cast(merged, target[low - block.start : high - block.start])
            if overflow is not None:
                raise overflow_error(overflow, out.dtype, where=where, block_start=low)
            self._refuse_overflow(base[wanted], merged, out, low)

    def _merge(self, rows: RowRange, base: NDArray[Any], where: str) -> Floats:
        weight = workspace("weight", base.size)
        with np.errstate(all="ignore"):
            weight[:] = base
            try:
                return self.steps.apply(rows, weight, self.norms)
            except AdapterError as error:
                raise error.located(where) from error

    def _refuse_overflow(
        self, base: NDArray[Any], merged: Floats, out: TensorSpec, start: int
    ) -> None:
        """Refuses elements that are finite in the base and would not be in the output."""
        overflow = _find_overflow(base, merged, out.dtype)
        if overflow is None:
            return
        where = f"tensor {out.name!r}"
        if self.steps.may_overflow:
            raise overflow_error(overflow, BY_NAME["float16"], where=where, block_start=start)
        others = f" (with {overflow.count - 1:,} more near it)" if overflow.count > 1 else ""
        raise OverflowRefusedError(
            f"{overflow.value:g} at element {start + overflow.first:,} does not fit"
            f" {out.dtype.name}, where the base has {float(base[overflow.first]):g}{others}",
            where=where,
            hint="the numbers or the scaling of the adapter are too large, as after a training"
            " that diverged; take an earlier checkpoint, and compare its 'lora_alpha' with the run",
        )

    def column_norms(self, reading: Reading) -> NormsOfColumns:
        """Passes over the tensor until all norms are known."""
        norms = NormsOfColumns(self.columns)
        first_rows, first_part = next(self._cut(Span(0, self.rows * self.columns)))
        while not self._try_merge(first_rows, first_part, norms, reading):
            with norms.passing():
                for rows, part in self._cut(Span(0, self.rows * self.columns)):
                    self._try_merge(rows, part, norms, reading)
        return norms

    def _try_merge(
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

    def _cut(self, span: Span) -> Iterator[tuple[RowRange, Span]]:
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


def _find_overflow(base: NDArray[Any], merged: Floats, written: DType) -> Overflow | None:
    """Finds elements that are finite in the base, and not after the merge and its rounding."""
    largest = _LARGEST_FOR_BFLOAT16 if written == _BFLOAT16 else _LARGEST
    # Magnitudes are ordered as their bits are; two maxima cost less than a mask of the block.
    positive = int(merged.view(np.int32).max())
    negative = int(merged.view(np.uint32).max()) - _SIGN
    if max(positive, negative) <= largest:
        return None
    lost = (merged.view(np.uint32) & (_SIGN - 1)) > largest
    lost &= np.isfinite(base)
    first = int(lost.argmax())
    if not lost[first]:
        return None
    return Overflow(int(np.count_nonzero(lost)), first, float(merged[first]))
