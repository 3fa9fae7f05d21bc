"""What a low-rank update is: which parts of an adapter's matrices are multiplied, and how.

An update adds `scaling * left @ right` to a weight, seen as a matrix. `left` and `right` are
parts of the matrices A and B as an adapter stores them, so that one form serves every kind of
layer, an expert of a fused parameter, and the rows of a fused weight that are a tensor of their
own on disk.

Source: PEFT 0.21, `tuners/lora/layer.py`, every `get_delta_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Key, TensorEntry

Axis = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Stride:
    """Every `step`-th index of `[start, stop)`."""

    start: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def within(self, start: int, stop: int) -> Stride:
        return Stride(self.start + start * self.step, self.start + stop * self.step, self.step)


@dataclass(frozen=True, slots=True)
class Factor:
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


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The magnitudes of DoRA, one for every output feature.

    Attributes:
        vector: As many values as the merged matrix has rows (or columns); any shape.
        of: `rows` for linear and convolution weights, whose rows are output features;
            `columns` for embeddings and for weights stored as `[in, out]`.
    """

    vector: Factor
    of: Axis


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
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


@dataclass(frozen=True, slots=True)
class BiasUpdate:
    """An update of a bias, or of any vector: `vector + scaling * shift`.

    Attributes:
        shift: `lora_B.bias`, as many values as the tensor has.
        scaling: See `LowRankUpdate`.
        held: See `LowRankUpdate`.
    """

    shift: Factor
    scaling: float
    held: DType


@dataclass(frozen=True, slots=True)
class TokenRowsUpdate:
    """An update that replaces rows: `weight[tokens] = rows`.

    Attributes:
        rows: `trainable_tokens_delta`, `[len(tokens), columns]`: the rows, in spite of the name.
        tokens: Which rows of the weight they replace; none twice.
    """

    rows: Factor
    tokens: tuple[int, ...]


Update = LowRankUpdate | BiasUpdate | TokenRowsUpdate
