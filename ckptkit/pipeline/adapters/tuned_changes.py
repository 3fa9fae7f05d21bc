"""What training changed in a model, tensor by tensor: read from both sides, never as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import AdapterError, UnsupportedError
from ckptkit.core.index import Fqn, Span, TensorEntry
from ckptkit.execution.events import BytesWritten, Listener
from ckptkit.execution.tensors import Origin, TensorReader
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.kernels.truncated_svd import (
    Factors,
    Matrix,
    squared_distance,
    squared_norm,
    truncated,
)

_FLOAT32 = BY_NAME["float32"]
_AT_ONCE = 1 << 20  # elements of one tensor that are read from each side at a time


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor on both sides, of the same shape."""

    name: Fqn
    tuned: TensorEntry
    base: TensorEntry


@dataclass(frozen=True, slots=True)
class Approximation:
    """The change of one weight as a product of two factors.

    Attributes:
        up: [out, rank], in the element type that is written.
        down: [rank, in], in the same.
        change: Frobenius norm of what training changed.
        missed: Frobenius norm of what the factors miss of it, as they are written.
    """

    up: NDArray[Any]
    down: NDArray[Any]
    change: float
    missed: float

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return len(self.down)

    @property
    def error(self) -> float:
        """What is missed, as a part of the change."""
        return self.missed / self.change

    @property
    def energy(self) -> float:
        """The part of the change's squared norm that is kept."""
        return max(0.0, 1.0 - self.error**2)


class ChangeReader:
    """Reads the difference between two checkpoints. For one thread."""

    def __init__(self, tuned: Origin, base: Origin, listener: Listener) -> None:
        """Takes the two sides.

        Args:
            tuned: The model after training.
            base: The model before it.
            listener: Is told of the bytes that were read of the tuned side.
        """
        self._readers = TensorReader(tuned), TensorReader(base)
        self._listener = listener

    def norm(self, pair: Pair) -> float:
        """Returns the Frobenius norm of what changed; only some of the tensor is in memory.

        Raises:
            UnsupportedError: If one side holds packed numbers.
            AdapterError: If either holds NaN or infinity.
        """
        return math.sqrt(sum(squared_norm(block) for _, block in self._blocks(pair)))

    def matrix(self, pair: Pair) -> Matrix:
        """Returns what changed in a matrix, float32.

        Raises:
            UnsupportedError: If one side holds packed numbers.
            AdapterError: If either holds NaN or infinity.
        """
        whole = np.empty(pair.tuned.elements, np.float32)
        for span, block in self._blocks(pair):
            whole[span.start : span.stop] = block
        return whole.reshape(pair.tuned.shape)

    def _blocks(self, pair: Pair) -> Iterator[tuple[Span, NDArray[Any]]]:
        _refuse_packed(pair)
        kinds = {pair.tuned.dtype.kind, pair.base.dtype.kind}
        # Differences of integers, which are positions and counters, are exact in float64.
        wide = np.float32 if kinds == {"float"} else np.float64
        for start in range(0, pair.tuned.elements, _AT_ONCE):
            span = Span(start, min(start + _AT_ONCE, pair.tuned.elements))
            tuned = self._read(0, pair.tuned, span)
            base = self._read(1, pair.base, span)
            block = _difference(tuned, base, wide)
            if not np.isfinite(block).all():
                raise AdapterError(
                    "NaN or infinity was found, which has no difference to anything",
                    where=f"tensor {pair.name!r}",
                    hint="leave the tensor out with --exclude, or take an earlier step of the run",
                )
            self._listener(BytesWritten((span.stop - span.start) * pair.tuned.dtype.itemsize))
            yield span, block

    def _read(self, side: int, entry: TensorEntry, span: Span) -> NDArray[Any]:
        buffer = memoryview(bytearray((span.stop - span.start) * entry.dtype.itemsize))
        self._readers[side].fill(entry.key, span, buffer)
        return np.frombuffer(buffer, numpy_dtype(entry.dtype))


def _difference(tuned: NDArray[Any], base: NDArray[Any], wide: Any) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # what is not finite is looked for in the result
        if np.float64 in {tuned.dtype.type, base.dtype.type}:
            return (tuned.astype(np.float64) - base.astype(np.float64)).astype(wide)
        difference: NDArray[Any] = tuned.astype(wide) - base.astype(wide)
        return difference


def _refuse_packed(pair: Pair) -> None:
    for side, entry, other in (
        ("tuned", pair.tuned, pair.base),
        ("base", pair.base, pair.tuned),
    ):
        is_float = entry.dtype.kind == "float"
        narrow = is_float and entry.dtype.itemsize == 1
        if (
            narrow
            or entry.dtype.kind == "complex"
            or (other.dtype.kind == "float" and not is_float)
        ):
            raise UnsupportedError(
                f"is {entry.dtype.name} in the {side} model, whose numbers cannot be compared with"
                " weights",
                where=f"tensor {pair.name!r}",
                hint="name a model in a floating type of 16 bits or more, such as one that was"
                " dequantized",
            )


def approximate(change: Matrix, rank: int, dtype: DType, *, where: str) -> Approximation | None:
    """Finds the factors of a change, and measures what they miss.

    Args:
        change: What training changed, [out, in].
        rank: The largest rank; a smaller matrix gets the length of its smaller side.
        dtype: The element type of the factors.
        where: The tensor, for messages.

    Returns:
        The factors, or None where nothing changed.

    Raises:
        OverflowRefusedError: If a factor does not fit the element type.
    """
    norm = math.sqrt(squared_norm(change))
    if norm == 0:
        return None
    exact = truncated(change, min(rank, *change.shape))
    up, down = (_cast(factor, dtype, where) for factor in (exact.up, exact.down))
    written = Factors(up.astype(np.float32), down.astype(np.float32))
    return Approximation(up, down, norm, math.sqrt(squared_distance(change, written)))


def _cast(factor: Matrix, dtype: DType, where: str) -> NDArray[Any]:
    cast = np.empty(factor.shape, numpy_dtype(dtype))
    source = np.ascontiguousarray(factor).reshape(-1)
    overflow = Caster(_FLOAT32, dtype).cast(source, cast.reshape(-1))
    if overflow is not None:
        raise overflow_error(overflow, dtype, where=where)
    return cast
