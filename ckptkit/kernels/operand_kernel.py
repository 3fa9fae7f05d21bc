"""The kernel that writes an operand as it is, or in another element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ckptkit.core.index import Span
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.kernels.operands import Operand
from ckptkit.planning.plan import Compute, Demand, TensorSpec


@dataclass(frozen=True, slots=True)
class OperandKernel:
    """Writes the elements of an operand; the output tensor says in which type.

    Attributes:
        operand: The elements.
    """

    operand: Operand

    def compute(self) -> Compute:
        """Returns the body of a product that this kernel makes."""
        return Compute(self, self.operand.reads)

    def grain_elements(self, _out: TensorSpec) -> int:
        """Any element may begin a block."""
        return 1

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Reads what the elements of the block are made from."""
        return self.operand.demands(block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block.

        Raises:
            OverflowRefusedError: If a finite number would become infinite.
        """  # noqa: DOC501  `overflow_error` makes it
        values = self.operand.values(block, inputs)
        if self.operand.dtype == out.dtype:
            target[...] = values
            return
        overflow = Caster(self.operand.dtype, out.dtype).cast(values, target)
        if overflow is not None:
            raise overflow_error(
                overflow, out.dtype, where=f"tensor {out.name!r}", block_start=block.start
            )
