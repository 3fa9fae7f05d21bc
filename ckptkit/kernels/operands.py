"""What kernels compute with: dense tensors whose elements are stored, or made from stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Key, Span
from ckptkit.planning.plan import Demand


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
