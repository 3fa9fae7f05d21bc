"""Kernels around kernels: fewer rows of what another one makes, or another element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import OverflowRefusedError
from ckptkit.core.index import Fqn, Key, Shape, Span
from ckptkit.engine.kernels import first_rows, recast
from ckptkit.plan.plan import Compute, Copy, Demand, Kernel, Product, TensorSpec

FLOAT32, HALF = dtype_named("float32"), dtype_named("float16")


@dataclass(frozen=True)
class Rows(Kernel):
    """Makes whole rows of 4, each element its own number in the whole."""

    def grain_elements(self, out: TensorSpec) -> int:
        assert (out.shape, out.dtype) == ((3, 4), FLOAT32)
        return 4

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        assert (out.shape, out.dtype) == ((3, 4), FLOAT32)
        return (Demand("source", Key("w"), block),)

    def run(
        self, out: TensorSpec, _block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        assert (out.shape, out.dtype) == ((3, 4), FLOAT32)
        target[:] = inputs[0]


def product(shape: Shape = (3, 4)) -> Product:
    body = Compute(Rows(), (("source", Key("w")),))
    return Product(TensorSpec(Fqn("w"), FLOAT32, shape), body)


def test_rows_of_a_computed_tensor_are_cut_and_then_cast() -> None:
    made = recast(first_rows(product(), (2, 4)), HALF)
    assert made.spec == TensorSpec(Fqn("w"), HALF, (2, 4))
    assert isinstance(made.body, Compute)
    assert made.body.reads == (("source", "w"),)
    assert made.body.kernel.is_ready
    kernel, block = made.body.kernel, Span(4, 8)
    assert kernel.grain_elements(made.spec) == 4
    assert kernel.demands(made.spec, block) == (Demand("source", Key("w"), block),)
    target = np.zeros(4, np.float16)
    kernel.run(made.spec, block, [np.arange(4, 8, dtype=np.float32)], target)
    assert target.tolist() == [4, 5, 6, 7]
    with pytest.raises(OverflowRefusedError, match=r"1e\+09 at element 5"):
        kernel.run(made.spec, block, [np.array([0, 1e9, 0, 0], np.float32)], target)


def test_what_is_as_asked_for_already_stays_as_it_is() -> None:
    same = product()
    assert first_rows(same, (3, 4)) is same
    assert recast(same, FLOAT32) is same


def test_a_copy_stays_a_copy_of_fewer_rows() -> None:
    copy = Product(TensorSpec(Fqn("w"), FLOAT32, (3, 4)), Copy("source", Key("w")))
    assert first_rows(copy, (1, 4)).body == copy.body
    assert first_rows(copy, (1, 4)).spec.shape == (1, 4)
