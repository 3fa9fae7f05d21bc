"""The kernel that changes nothing but the element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Key, Span
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.planning.plan import Demand, TensorSpec


@dataclass(frozen=True, slots=True)
class CastKernel:
    """Casts a source tensor, block by block.

    Attributes:
        origin: The source of the tensor.
        key: The tensor.
        source: Its element type.
        target: The element type to write.
    """

    origin: str
    key: Key
    source: DType
    target: DType

    def grain_elements(self, _out: TensorSpec) -> int:
        """Any element may begin a block."""
        return 1

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Reads the same elements of the source tensor."""
        return (Demand(self.origin, self.key, block),)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Casts one block.

        Raises:
            OverflowRefusedError: If a finite number would become infinite.
        """  # noqa: DOC501  `overflow_error` makes it
        overflow = Caster(self.source, self.target).cast(inputs[0], target)
        if overflow is not None:
            raise overflow_error(
                overflow, self.target, where=f"tensor {out.name!r}", block_start=block.start
            )
