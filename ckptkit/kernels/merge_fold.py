"""The order of a merge: several updates in turn, and norms of weights that several have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.kernels.merge_steps import LoraStep, NormOf, Rounding, Rows, Step
from ckptkit.kernels.norms import ColumnSums, row_norms
from ckptkit.kernels.products import round_to
from ckptkit.kernels.workspace import workspace

Floats = NDArray[np.float32]
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

    def apply(self, rows: Rows, weight: Floats, norms: NormsOf) -> Floats:
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

    def __init__(self, rows: Rows, norms: NormsOf, between: DType) -> None:
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


def norms_of_rows(_number: int, matrix: Floats) -> Floats:
    """Takes norms at once: a row is there as a whole."""
    return row_norms(matrix)


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
        """Returns norms that are known.

        Raises:
            NormsUnknownError: If they are not known yet; during a pass the rows are counted.
        """
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
