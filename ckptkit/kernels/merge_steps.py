"""What a merge does to a few rows of a weight: its updates, ready to be applied in order.

Sources: PEFT 0.21 `tuners/lora/layer.py` (`merge`, `unmerge`, `_unmerged_base_weight`),
`tuners/lora/variants.py` (DoRA), `utils/other.py` (trained tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError
from ckptkit.kernels.low_rank import Axis, LowRank, Shift, TokenRows, Update
from ckptkit.kernels.products import Product, read_rows, read_vector, round_to
from ckptkit.kernels.workspace import workspace
from ckptkit.planning.plan import Reading

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
class Rows:
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

    def __init__(self, update: LowRank, base: DType, reading: Reading, rounding: Rounding) -> None:
        """Reads the factors."""
        peft = rounding is Rounding.PEFT
        held = update.held if peft else _FLOAT32
        self._product = Product(update, reading, held)
        self._rounded = base if peft and update.rounded else None
        # torch computes in 16 bits where the weight and the adapter have the same such type.
        self.narrow = base if held == base else None
        self.axis: Axis = "rows"
        self.magnitude: Floats | None = None
        if update.magnitude is not None:
            self.axis = update.magnitude.of
            self.magnitude = read_vector(update.magnitude.vector, reading, held)

    def delta(self, rows: Rows, into: Floats) -> Floats:
        """Computes what is added to whole rows, `[rows, columns]`."""
        self._product.rows(rows.start, rows.stop, into)
        if self._rounded is not None:
            round_to(into, self._rounded)
        return into

    def apply(self, rows: Rows, weight: Floats) -> None:
        """Adds to the elements of a run, in place."""
        shape = rows.stop - rows.start, rows.columns
        into = workspace("delta", shape[0] * shape[1])
        self.delta(rows, into.reshape(shape))
        weight += into[rows.skipped : rows.skipped + weight.size]

    def scale(self, rows: Rows, norms: Floats) -> Floats:
        """Returns DoRA's factors: one for each row, or one for each column.

        Raises:
            AdapterError: If a norm is zero, or infinite.
            ValueError: If it is no update with DoRA.
        """
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

    def _bad_norm(self, rows: Rows, number: int, what: str) -> AdapterError:
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

    def __init__(self, update: Shift, reading: Reading, rounding: Rounding) -> None:
        """Reads the vector."""
        held = update.held if rounding is Rounding.PEFT else _FLOAT32
        self._shift = read_vector(update.shift, reading, held)
        self._shift *= np.float32(update.scaling)
        if held != _FLOAT32:
            round_to(self._shift, held)

    def apply(self, rows: Rows, weight: Floats) -> None:
        """Adds to the elements of a run, in place."""
        weight += self._shift[rows.skipped : rows.skipped + weight.size]


class TokenStep:
    """An update that replaces rows."""

    def __init__(self, update: TokenRows, reading: Reading) -> None:
        """Reads the rows."""
        self._rows = read_rows(update.rows, reading)
        order = np.argsort(np.asarray(update.tokens, np.int64), kind="stable")
        self._order = order
        self._tokens = np.asarray(update.tokens, np.int64)[order]

    def apply(self, rows: Rows, weight: Floats) -> None:
        """Replaces elements of a run, in place."""
        low, high = np.searchsorted(self._tokens, (rows.start, rows.stop))
        for position in range(low, high):
            row = self._rows[self._order[position]]
            first = (int(self._tokens[position]) - rows.start) * rows.columns - rows.skipped
            begin, end = max(first, 0), min(first + rows.columns, weight.size)
            weight[begin:end] = row[begin - first : end - first]


Step = LoraStep | ShiftStep | TokenStep


def prepared_step(update: Update, base: DType, reading: Reading, rounding: Rounding) -> Step:
    """Reads what an update needs for all blocks of a tensor.

    Args:
        update: The update.
        base: The type of the weight.
        reading: Reads the adapter.
        rounding: How often it rounds.
    """
    if isinstance(update, LowRank):
        return LoraStep(update, base, reading, rounding)
    if isinstance(update, Shift):
        return ShiftStep(update, reading, rounding)
    return TokenStep(update, reading)
