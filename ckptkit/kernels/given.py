"""A tensor whose elements were computed before the plan was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ckptkit.core.index import Span
from ckptkit.planning.plan import Demand, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Hands out what is known; what it was made from stands beside it in the plan.

    Attributes:
        elements: The tensor, one-dimensional, in its element type.
    """

    elements: NDArray[Any]

    def grain_elements(self, _out: TensorSpec) -> int:
        """Any element may begin a block."""
        return 1

    def demands(self, _out: TensorSpec, _block: Span) -> tuple[Demand, ...]:
        """Reads nothing."""
        return ()

    def run(
        self, _out: TensorSpec, block: Span, _inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Copies one block."""
        target[:] = self.elements[block.start : block.stop]
