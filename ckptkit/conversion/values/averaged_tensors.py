"""Averages of tensors: how much each source counts, and the kernel that computes them.

A plan of each source makes its tensors; `join_product` gives them the origins of a plan that reads
all sources, and `average_products` makes one tensor of those of all sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import UsageError
from ckptkit.core.index import Key, Span
from ckptkit.engine.casts import Caster
from ckptkit.engine.kernels import ElementKernel, Operand, StoredOperand
from ckptkit.engine.rearranged import ComputedOperand
from ckptkit.engine.values import BLOCK_ELEMENTS, wide_dtype, widen
from ckptkit.plan.plan import (
    Compute,
    Copy,
    Demand,
    Kernel,
    Opened,
    Preparable,
    Product,
    Reading,
    TensorSpec,
)

_FEWEST = 2  # sources
_TINIEST = float(np.finfo(np.float32).smallest_subnormal)
_LARGEST = float(np.finfo(np.float32).max)
# What a worker reads of all sources for one block; the usual kernel reads as much of one.
_INPUT_BYTES = 4 << 20
_LEAST_ELEMENTS = 1 << 14
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Weighting:
    """How much each source counts; sources are in order, the oldest first.

    Attributes:
        method: `uniform`, `weights`, or `ema`.
        weights: For `weights`, the factor of each source; their sum is 1.
        decay: For `ema`, how much of the average stays with each newer source.
    """

    method: Literal["uniform", "weights", "ema"] = "uniform"
    weights: tuple[float, ...] = ()
    decay: float = 0.0

    @classmethod
    def from_options(cls, weights: Sequence[float] | None, ema: float | None) -> Weighting:
        """Reads `--weights` and `--ema`; weights are divided by their sum."""
        if weights is not None and ema is not None:
            raise UsageError(
                "cannot be combined with --weights, which says how much each source counts",
                where=f"--ema {ema}",
                hint="leave one of the two out",
            )
        if ema is not None:
            if not 0 < ema < 1:
                raise UsageError(
                    f"{ema!r} is not between 0 and 1",
                    where="--ema",
                    hint="pass the part of the average that each newer step keeps: --ema 0.9",
                )
            return cls("ema", decay=float(ema))
        if weights is None:
            return cls()
        for weight in weights:
            if not math.isfinite(weight) or weight == 0:
                raise UsageError(
                    f"{weight!r} is no weight that changes anything",
                    where="--weights",
                    hint="leave the source out, or give it a weight such as 0.5",
                )
        return cls("weights", weights=_divide_by_sum(weights))

    def check_count(self, sources: int) -> None:
        """Refuses weights for another number of sources, and an average of a single one."""
        if self.method == "weights" and len(self.weights) != sources:
            raise UsageError(
                f"number of weights is {len(self.weights)} against {sources} sources",
                where="--weights",
                hint="pass one weight for each source, in the same order",
            )
        if sources < _FEWEST:
            raise UsageError(
                "one source was found where an average needs two",
                where="SRC",
                hint="name several steps, or the run with --last 5; `ckptkit consolidate` writes"
                " the model of one",
            )

    def share_of(self, number: int, count: int) -> float:
        """Returns how much a source counts in the end."""
        if self.method == "uniform":
            return 1 / count
        if self.method == "weights":
            return self.weights[number]
        return self.decay ** (count - 1 - number) * (1 if number == 0 else 1 - self.decay)

    def combine(self, values: Sequence[Array], total: Array, term: Array) -> None:
        """Fills `total` with the average of some elements, in the type of `total`.

        Each operation is rounded to that type, in the order of the sources: `uniform` adds them and
        divides by their number; `weights` adds the products with the weights, rounded to the type;
        `ema` starts with the first and, for each further `x`, becomes
        `decay * total + (1 - decay) * x`.
        """
        kind = total.dtype.type
        widen(values[0], total)
        if self.method == "weights":
            total *= kind(self.weights[0])
        for number, further in enumerate(values[1:], 1):
            widened = further
            if further.dtype != term.dtype:
                widen(further, term)
                widened = term
            if self.method == "weights":
                widened = np.multiply(widened, kind(self.weights[number]), out=term)
            elif self.method == "ema":
                total *= kind(self.decay)
                widened = np.multiply(widened, kind(1 - self.decay), out=term)
            total += widened
        if self.method == "uniform":
            total /= kind(len(values))


def _divide_by_sum(weights: Sequence[float]) -> tuple[float, ...]:
    hint = "pass weights such as 0.5,0.3,0.2; some can be negative"
    try:
        total = math.fsum(weights)
    except OverflowError:
        total = math.inf
    if not 0 < total < math.inf:
        raise UsageError(
            f"the sum of all weights is {total:g}, by which they are divided; expected more than 0,"
            " and a finite number",
            where="--weights",
            hint=hint,
        )
    shares = tuple(weight / total for weight in weights)
    for weight, share in zip(weights, shares, strict=True):
        if not _TINIEST <= abs(share) <= _LARGEST:
            raise UsageError(
                f"{weight!r}, divided by the sum of all weights, {total:g}, is {share:g}; expected"
                f" from {_TINIEST:g} to {_LARGEST:g}, so that it is a number in float32 too",
                where="--weights",
                hint=hint,
            )
    return shares


@dataclass(frozen=True, slots=True)
class AverageKernel(ElementKernel):
    """Averages tensors of floats, in the widest type that one of them needs, and rounds once.

    Attributes:
        operands: The tensors, in the order of the sources.
        weighting: How much each counts.
    """

    operands: tuple[Operand, ...]
    weighting: Weighting

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns what is read of all sources."""
        return tuple(demand for operand in self.operands for demand in operand.demands(block))

    def run(self, out: TensorSpec, block: Span, inputs: Sequence[Array], target: Array) -> None:
        """Averages one block, in parts that stay in the processor's cache."""
        values, at = [], 0
        for operand in self.operands:
            count = len(operand.demands(block))
            values.append(operand.values(block, inputs[at : at + count]))
            at += count
        types = (wide_dtype(operand.dtype) for operand in self.operands)
        wide = max(types, key=lambda dtype: dtype.itemsize)
        caster = Caster(BY_NAME[wide.name], out.dtype)
        memory = np.empty((2, min(BLOCK_ELEMENTS, target.size)), wide)
        for start in range(0, target.size, BLOCK_ELEMENTS):
            part = slice(start, min(start + BLOCK_ELEMENTS, target.size))
            total, term = memory[:, : part.stop - start]
            with np.errstate(all="ignore"):
                self.weighting.combine([own[part] for own in values], total, term)
            if wide == numpy_dtype(out.dtype):
                # A cast makes one NaN of all; without one, they are as the processor has made them.
                total[np.isnan(total)] = np.nan
            where = f"tensor {out.name!r}"
            caster.cast_all(total, target[part], where=where, block_start=block.start + start)


@dataclass(frozen=True, slots=True)
class _OfSource:
    """A kernel of one source's plan whose origins have the names of the joined plan.

    Attributes:
        kernel: The kernel.
        source: The number of the source.
    """

    kernel: Kernel
    source: int

    def grain_elements(self, out: TensorSpec) -> int:
        return self.kernel.grain_elements(out)

    def demands(self, out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        return tuple(_of_source(d, self.source) for d in self.kernel.demands(out, block))

    def run(self, out: TensorSpec, block: Span, inputs: Sequence[Array], target: Array) -> None:
        self.kernel.run(out, block, inputs, target)


@dataclass(frozen=True, slots=True)
class _PreparableOfSource:
    """The same of a kernel that is prepared first."""

    kernel: Preparable
    source: int

    def prepare(self, out: TensorSpec, reading: Reading) -> Kernel:
        return _OfSource(
            self.kernel.prepare(out, _ReadingOfSource(reading, self.source)), self.source
        )


@dataclass(frozen=True, slots=True)
class _ReadingOfSource:
    """Reads parts of one source's tensors, by their origins in its own plan."""

    reading: Reading
    source: int

    def read(self, demand: Demand) -> Array:
        return self.reading.read(_of_source(demand, self.source))

    def read_shared(self, demand: Demand) -> Array:
        return self.reading.read_shared(_of_source(demand, self.source))

    def open_once(
        self, key: Hashable, opened: Callable[[], AbstractContextManager[Opened]]
    ) -> Opened:
        return self.reading.open_once((self.source, key), opened)


def name_origin(source: int, origin: str) -> str:
    return f"{origin}-{source}"


def _of_source(demand: Demand, source: int) -> Demand:
    return replace(demand, origin=name_origin(source, demand.origin))


def join_product(product: Product, source: int) -> Product:
    """Returns a tensor of one source's plan as the joined plan makes it."""
    body = product.body
    if isinstance(body, Copy):
        return replace(product, body=Copy(name_origin(source, body.origin), body.key))
    reads = tuple((name_origin(source, origin), key) for origin, key in body.reads)
    kernel: Kernel | Preparable
    if isinstance(body.kernel, Preparable):
        kernel = _PreparableOfSource(body.kernel, source)
    else:
        kernel = _OfSource(body.kernel, source)
    return replace(product, body=replace(body, kernel=kernel, reads=reads))


def _operand_of(product: Product, reading: Reading | None = None) -> Operand:
    body, spec = product.body, product.spec
    if isinstance(body, Copy):
        return StoredOperand(body.origin, body.key, spec.dtype)
    kernel = body.kernel
    if isinstance(kernel, Preparable):
        assert reading is not None  # noqa: S101  it is read in `prepare` only
        kernel = kernel.prepare(spec, reading)
    return ComputedOperand(kernel, spec, body.reads)


@dataclass(frozen=True, slots=True)
class _PreparableAverage:
    """An average of tensors; the kernels of some of them are prepared first."""

    products: tuple[Product, ...]
    weighting: Weighting

    def prepare(self, _out: TensorSpec, reading: Reading) -> AverageKernel:
        operands = (_operand_of(product, reading) for product in self.products)
        return AverageKernel(tuple(operands), self.weighting)


def average_products(products: Sequence[Product], weighting: Weighting) -> Compute:
    """Returns how the average of a tensor is made; the memory does not depend on the sources."""
    itemsize = max(product.spec.dtype.itemsize for product in products)
    reads: list[tuple[str, Key]] = []
    is_prepared = False
    for product in products:
        body = product.body
        reads += [(body.origin, body.key)] if isinstance(body, Copy) else body.reads
        is_prepared |= isinstance(body, Compute) and isinstance(body.kernel, Preparable)
    kernel: Kernel | Preparable
    if is_prepared:
        kernel = _PreparableAverage(tuple(products), weighting)
    else:
        kernel = AverageKernel(tuple(map(_operand_of, products)), weighting)
    elements = _INPUT_BYTES // (len(products) * itemsize)
    return Compute(kernel, tuple(dict.fromkeys(reads)), max(_LEAST_ELEMENTS, elements))
