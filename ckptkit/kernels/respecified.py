"""Products that another kernel, or a copy, makes already: with fewer rows, or cast once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.index import Shape, Span
from ckptkit.kernels.arrays import numpy_dtype
from ckptkit.kernels.cast_kernel import CastKernel
from ckptkit.kernels.casts import Caster, overflow_error
from ckptkit.planning.plan import (
    Compute,
    Copy,
    Demand,
    Kernel,
    Product,
    TensorSpec,
    kernel_around,
)


def recast(product: Product, dtype: DType) -> Product:
    """Returns a product whose elements are cast to another float type, if they have another."""
    body, spec = product.body, product.spec
    if spec.dtype == dtype:
        return product
    if isinstance(body, Copy):
        kernel: Kernel = CastKernel(body.origin, body.key, spec.dtype, dtype)
        made = Compute(kernel, ((body.origin, body.key),))
    else:
        around = partial(RecastKernel, source=spec.dtype, target=dtype)
        made = Compute(kernel_around(body.kernel, spec, around), body.reads)
    return Product(replace(spec, dtype=dtype), made)


def first_rows(product: Product, shape: Shape) -> Product:
    """Returns a product of which only the first elements are written, in row-major order.

    Args:
        product: The whole.
        shape: What is left of its shape: smaller in its first dimension, or in one behind
            dimensions of size 1.
    """
    body, spec = product.body, product.spec
    if spec.shape == shape:
        return product
    cut = replace(spec, shape=shape)
    if isinstance(body, Copy):  # a copy takes elements from the first on
        return Product(cut, body)
    around = partial(PrefixKernel, whole=spec)
    return Product(cut, Compute(kernel_around(body.kernel, spec, around), body.reads))


@dataclass(frozen=True, slots=True)
class RecastKernel:
    """Casts what another kernel makes, block by block.

    Attributes:
        kernel: The other kernel.
        source: The element type that it makes.
        target: The element type to write.
    """

    kernel: Kernel
    source: DType
    target: DType

    def grain_elements(self, out: TensorSpec) -> int:
        """Blocks may begin where those of the other kernel may."""
        return self.kernel.grain_elements(self._made(out))

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Reads what the other kernel reads."""
        return self.kernel.demands(self._made(out), block)

    def run(
        self, out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block and casts it.

        Raises:
            OverflowRefusedError: If a finite number would become infinite.
        """  # noqa: DOC501  `overflow_error` makes it
        made = np.empty(target.size, numpy_dtype(self.source))
        self.kernel.run(self._made(out), block, inputs, made)
        overflow = Caster(self.source, self.target).cast(made, target)
        if overflow is not None:
            raise overflow_error(
                overflow, self.target, where=f"tensor {out.name!r}", block_start=block.start
            )

    def _made(self, out: TensorSpec) -> TensorSpec:
        return replace(out, dtype=self.source)


@dataclass(frozen=True, slots=True)
class PrefixKernel:
    """Makes the first elements of what another kernel would make.

    Attributes:
        kernel: The other kernel.
        whole: What it makes.
    """

    kernel: Kernel
    whole: TensorSpec

    def grain_elements(self, _out: TensorSpec) -> int:
        """Blocks may begin where those of the whole may."""
        return self.kernel.grain_elements(self.whole)

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Reads what the other kernel reads."""
        return self.kernel.demands(self.whole, block)

    def run(
        self, _out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Makes one block: elements of a prefix have the same numbers as in the whole."""
        self.kernel.run(self.whole, block, inputs, target)
