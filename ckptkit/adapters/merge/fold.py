"""What a merge does to a few rows of a weight: its updates, ready to be applied in order.

Sources: PEFT 0.21 `tuners/lora/layer.py` (`merge`, `unmerge`, `_unmerged_base_weight`),
`tuners/lora/variants.py` (DoRA), `utils/other.py` (trained tokens).

The order of a merge: several updates in turn, and norms of weights that several have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptkit.adapters.merge.factor_products import (
    ColumnSums,
    FactorProduct,
    compute_row_norms,
    read_rows,
    read_vector,
    round_to,
    workspace,
)
from ckptkit.adapters.merge.low_rank import Axis, BiasUpdate, LowRankUpdate, TokenRowsUpdate, Update
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError
from ckptkit.plan.plan import Reading

Floats = NDArray[np.float32]
_FLOAT32 = BY_NAME["float32"]


class Rounding(Enum):
    """How often a merge into a 16-bit weight rounds.

    `ONCE`: every update is applied in float32, and the sum is cast once. `PEFT`: as PEFT's
    `merge_and_unload` on a processor: to the weight's type after every adapter, and to the type
    of the adapter, or of the weight, where PEFT does so before it adds; and where DoRA needs
    the unmerged weight, PEFT's way to it, which takes off again what was added. For one adapter
    that is held in float32, on a float32 weight, the two are the same.
    """

    ONCE = "once"
    PEFT = "peft"


class NormOf(Enum):
    """Of which weight DoRA takes the norms when several adapters are merged in turn.

    `BASE`: of the unmerged weight with the adapter's own product (PEFT from 0.21 on).
    `RUNNING`: of the weight with all earlier adapters merged (before).
    """

    BASE = "base"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class RowRange:
    """A run of elements of a weight, seen as a matrix.

    Attributes:
        start: The row of the first element.
        stop: The row behind that of the last.
        columns: Columns of the matrix.
        skipped: Elements of the first row that lie before the run.
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
        """Reads the factors."""
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
        norms = self.narrowed(norms.copy())
        infinite = np.isinf(norms)
        if infinite.any():  # dividing by it would make zeros of the weight
            raise self._bad_norm(rows, int(infinite.argmax()), "infinite")
        if self.axis == "columns":
            return self.narrowed(self.magnitude / norms)
        return self.narrowed(self.magnitude[rows.start : rows.stop] / norms)[:, np.newaxis]

    def _bad_norm(self, rows: RowRange, number: int, what: str) -> AdapterError:
        number += rows.start if self.axis == "rows" else 0
        return AdapterError(
            f"DoRA divides by the norm of {self.axis[:-1]} {number:,} of the weight, which is"
            f" {what}"
        )

    def narrowed(self, values: Floats) -> Floats:
        """Rounds a result where torch would have computed it in 16 bits."""
        if self.narrow is not None and self.narrow != _FLOAT32:
            round_to(values, self.narrow)
        return values


class ShiftStep:
    """An update of a vector."""

    def __init__(self, update: BiasUpdate, reading: Reading, rounding: Rounding) -> None:
        """Reads the vector."""
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
        """Reads the rows."""
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


def prepare_step(update: Update, base: DType, reading: Reading, rounding: Rounding) -> Step:
    """Reads what an update needs for all blocks of a tensor.

    Args:
        update: The update.
        base: The type of the weight.
        reading: Reads the adapter.
        rounding: How often it rounds.
    """
    if isinstance(update, LowRankUpdate):
        return LoraStep(update, base, reading, rounding)
    if isinstance(update, BiasUpdate):
        return ShiftStep(update, reading, rounding)
    return TokenStep(update, reading)


NormsOf = Callable[[int, Floats], Floats]
"""Returns what is asked for as the n-th norms of a block, of a matrix of its rows."""


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
            rows: Where the run lies.
            weight: The elements of the base, one-dimensional; they may be overwritten.
            norms: Takes norms.

        Returns:
            The merged elements; what is left is to round them to the weight's type.
        """
        fold = _Fold(rows, norms, self._between)
        shape = rows.stop - rows.start, rows.columns
        original = weight.reshape(shape).copy() if self._remembers else None
        for number, step in enumerate(self._steps):
            if number:
                round_to(weight, self._between)
            if not _is_dora(step):
                step.apply(rows, weight)
                fold.note(step)
                continue
            matrix = weight.reshape(shape)
            base = matrix if original is None else original
            if self._unmerges:
                base = fold.unmerged(matrix)
                matrix = fold.merged_again(base)
            weight = fold.brought(step, matrix, base).reshape(-1)
        return weight


class _Fold:
    """What has been merged into a few whole rows, as far as DoRA has to know it."""

    def __init__(self, rows: RowRange, norms: NormsOf, between: DType) -> None:
        self._rows = rows
        self._norms = norms
        self._asked = 0
        self._between = between
        self._merged: list[tuple[LoraStep, Floats | None]] = []

    def note(self, step: Step) -> None:
        """Remembers what was merged without DoRA."""
        if isinstance(step, LoraStep):
            self._merged.append((step, None))

    def brought(self, step: LoraStep, weight: Floats, base: Floats) -> Floats:
        """Adds a product, and brings the sum to its magnitudes.

        Args:
            step: The update.
            weight: What the product is added to.
            base: What it is added to before norms are taken.
        """
        delta = self._delta(step)
        looked_at = base
        if base is not weight:
            looked_at = step.narrowed(np.add(base, delta, out=self._memory("looked_at")))
        # From here on `weight` may lie in this memory itself.
        total = step.narrowed(np.add(weight, delta, out=self._memory("total")))
        if base is weight:
            looked_at = total
        scale = step.scale(self._rows, self._norms(self._asked, looked_at))
        self._asked += 1
        self._merged.append((step, scale))
        total *= scale
        return step.narrowed(total)

    def unmerged(self, weight: Floats) -> Floats:
        """Takes off again, last things first, what was merged."""
        for step, scale in reversed(self._merged):
            delta = self._delta(step)
            if scale is None:
                round_to(delta, self._between)
                weight = weight - delta
            else:
                weight = step.narrowed(step.narrowed(weight / scale) - delta)
            round_to(weight, self._between)
        return weight

    def merged_again(self, base: Floats) -> Floats:
        """Merges once more, into the weight from which all was taken off."""
        merged, self._merged = self._merged, []
        weight = base
        for step, scale in merged:
            if scale is None:
                weight = weight + self._delta(step)
                self._merged.append((step, None))
            else:
                weight = self.brought(step, weight, base)
            round_to(weight, self._between)
        return weight

    def _delta(self, step: LoraStep) -> Floats:
        return step.delta(self._rows, self._memory("delta"))

    def _memory(self, name: str) -> Floats:
        shape = self._rows.stop - self._rows.start, self._rows.columns
        return workspace(name, shape[0] * shape[1]).reshape(shape)


def _is_dora(step: Step) -> TypeGuard[LoraStep]:
    return isinstance(step, LoraStep) and step.magnitude is not None


def take_row_norms(_number: int, matrix: Floats) -> Floats:
    """Takes norms at once: a row is there as a whole."""
    return compute_row_norms(matrix)


class NormsOfColumns:
    """Norms of columns, for which the whole weight has to be passed over first.

    Every pass finds the norms that are asked for next; those after DoRA is done once depend on
    them.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._known: list[Floats] = []
        self._sums: ColumnSums | None = None

    def __call__(self, number: int, matrix: Floats) -> Floats:
        """Returns norms that are known."""
        if number < len(self._known):
            return self._known[number]
        if self._sums is not None:
            self._sums.add(matrix)
        raise NormsUnknownError

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Counts the rows that are merged within, all of them in order."""
        sums = self._sums = ColumnSums(self._columns)
        yield
        self._sums = None
        self._known.append(sums.norms())


class NormsUnknownError(Exception):
    """A merge cannot go on before all of the weight was passed over."""
