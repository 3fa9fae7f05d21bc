"""What kernels compute with: dense tensors whose elements are stored, or made from stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import OverflowRefusedError
from ckptkit.core.index import Key, Span
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.planning.plan import Demand

_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80  # bits of bfloat16


class Operand(Protocol):
    """The elements of one dense tensor, wherever they come from.

    An operand is a frozen value: it says what has to be read for a range of elements, and turns
    what was read into them. So a kernel merges into a stored weight and into a packed one alike.
    """

    @property
    def dtype(self) -> DType:
        """The element type of `values`."""
        ...

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The source tensors that any of it may look at, as `(origin, key)`."""
        ...

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """Returns what the elements of a row-major range are made from."""
        ...

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Returns the elements of the range, one-dimensional; maybe one of the inputs itself.

        Args:
            span: The range.
            inputs: One array for each of `demands(span)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        dtype: Its element type.
    """

    origin: str
    key: Key
    dtype: DType

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """The tensor itself."""
        return ((self.origin, self.key),)

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """The range itself."""
        return (Demand(self.origin, self.key, span),)

    def values(self, _span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """What was read."""
        return inputs[0]


@dataclass(frozen=True, slots=True)
class Cast:
    """Another tensor in another float type.

    Attributes:
        operand: The other tensor.
        dtype: The type that its elements are cast to.
    """

    operand: Operand
    dtype: DType

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        """What the other one reads."""
        return self.operand.reads

    def demands(self, span: Span) -> tuple[Demand, ...]:
        """What the other one is made from."""
        return self.operand.demands(span)

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The other one's elements, cast.

        Raises:
            OverflowRefusedError: If a finite number would become infinite.
        """  # noqa: DOC501  `overflow_error` makes it
        found = self.operand.values(span, inputs)
        made = np.empty(found.size, numpy_dtype(self.dtype))
        overflow = Caster(self.operand.dtype, self.dtype).cast(found, made)
        if overflow is not None:
            where = f"tensor {self.reads[0][1]!r}"
            raise overflow_error(overflow, self.dtype, where=where, block_start=span.start)
        if self.dtype == BY_NAME["bfloat16"]:
            self._refuse_infinite(found, made, span)
        return made

    def _refuse_infinite(self, found: NDArray[Any], made: NDArray[Any], span: Span) -> None:
        """Refuses what bfloat16 rounds to infinity, which casts of whole models let pass."""
        infinite = made.view(np.uint16) & _MAGNITUDE == _INFINITE
        if not infinite.any():
            return
        infinite &= np.isfinite(found)
        first = int(infinite.argmax())
        if infinite[first]:
            raise OverflowRefusedError(
                f"value {float(found[first]):g} at element {span.start + first:,} does not fit"
                f" {self.dtype.name}",
                where=f"tensor {self.reads[0][1]!r}",
                hint="pass --dtype float32, or take an earlier checkpoint if training diverged",
            )
