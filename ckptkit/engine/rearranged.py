"""The kernel that puts elements of several tensors into another order, and computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import DType
from ckptkit.core.geometry import cut, flat_offset, intersect, relative, slabs
from ckptkit.core.index import Box, Key, Shape, Span
from ckptkit.engine.kernels import ElementKernel, Operand
from ckptkit.engine.reader import slices_of
from ckptkit.plan.plan import Demand, Kernel, TensorSpec

# Elements between the wanted ones are read with them while all are at most so many times as many:
# fewer reads save more than the bytes cost.
_MOST_READ = 2


class StridedBox(Struct, frozen=True):
    """A box of the output whose elements have regular steps in one operand.

    Attributes:
        box: Where in the output's grid.
        operand: Position of the operand.
        start: The operand's element, counted row-major, at the box's first corner.
        steps: Elements of the operand from one index to the next, per dimension of the grid.
    """

    box: Box
    operand: int
    start: int
    steps: Shape


class _Read(Struct, frozen=True):
    """A range of an operand, and the wanted elements in it.

    Attributes:
        operand: Position of the operand.
        span: The range.
        steps: Between the wanted elements, from the first of the range on.
        slab: Where the output's elements begin that it belongs to, and their shape.
        inner: The box of the slab that it fills.
    """

    operand: int
    span: Span
    steps: Shape
    slab: tuple[int, Shape]
    inner: Box


class RearrangeKernel(ElementKernel, Struct, frozen=True):
    """A tensor whose elements come from boxes of others, maybe with their axes exchanged.

    A block reads at most twice its own elements. Where neighbours in the output are far apart in
    the operand, as in a large transposed matrix, each is a read of its own.

    Attributes:
        grid: The output's shape, with dimensions split where the stretches need that.
        stretches: Boxes of the grid, which do not overlap.
        operands: The tensors that they refer to, all of the output's element type.
        has_padding: Whether there are elements in no box; they are zero.
    """

    grid: Shape
    stretches: tuple[StridedBox, ...]
    operands: tuple[Operand, ...]
    has_padding: bool = False

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        return tuple(dict.fromkeys(read for operand in self.operands for read in operand.reads))

    def demands(self, _out: TensorSpec, block: Span) -> tuple[Demand, ...]:
        """Returns the operands' elements that the block consists of."""
        return tuple(
            demand
            for read in self._reads(block)
            for demand in self.operands[read.operand].demands(read.span)
        )

    def run(
        self, _out: TensorSpec, block: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]
    ) -> None:
        """Puts the elements of one block where they belong."""
        if self.has_padding:
            _bits(target)[:] = 0
        at = 0
        for read in self._reads(block):
            operand = self.operands[read.operand]
            count = len(operand.demands(read.span))
            values = _bits(operand.values(read.span, inputs[at : at + count]))
            at += count
            begin, shape = read.slab
            slab = _bits(target)[begin : begin + math.prod(shape)].reshape(shape)
            steps = [step * values.itemsize for step in read.steps]
            slab[slices_of(read.inner)] = np.lib.stride_tricks.as_strided(
                values, read.inner.sizes, steps, writeable=False
            )

    def _reads(self, block: Span) -> Iterator[_Read]:
        begin = 0
        for slab in slabs(block, self.grid):
            for stretch in self.stretches:
                shared = intersect(slab, stretch.box)
                if shared is not None:
                    inner = relative(shared, slab)
                    start = flat_offset(relative(shared, stretch.box).offsets, stretch.steps)
                    for first, box in _dense(stretch.start + start, inner, stretch.steps):
                        stop = first + _extent(box.sizes, stretch.steps)
                        yield _Read(
                            stretch.operand,
                            Span(first, stop),
                            stretch.steps,
                            (begin, slab.sizes),
                            box,
                        )
            begin += math.prod(slab.sizes)


class ComputedOperand(Struct, frozen=True):
    """The output of a kernel, as an operand of another one.

    Attributes:
        kernel: The kernel; any element may begin its blocks.
        spec: The tensor that it makes.
        reads: The source tensors that it reads.
    """

    kernel: Kernel
    spec: TensorSpec
    reads: tuple[tuple[str, Key], ...]

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return self.kernel.demands(self.spec, span)

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """What the kernel makes of it."""
        values = np.empty(span.stop - span.start, numpy_dtype(self.spec.dtype))
        self.put(span, inputs, values)
        return values

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with what the kernel makes of a range."""
        self.kernel.run(self.spec, span, inputs, target)


def _dense(first: int, box: Box, steps: Shape) -> Iterator[tuple[int, Box]]:
    """Cuts a box until what has to be read for each part is mostly wanted.

    Yields:
        The operand's element at the part's first corner, and the part.
    """
    sizes = box.sizes
    if _extent(sizes, steps) <= _MOST_READ * math.prod(sizes):
        yield first, box
        return
    axis = max((i for i in range(len(sizes)) if sizes[i] > 1), key=lambda i: steps[i])
    for index, part in enumerate(cut(box, axis, 1)):
        yield from _dense(first + index * steps[axis], part, steps)


def _extent(sizes: Shape, steps: Shape) -> int:
    """Returns the number of elements from the first to the last of a box, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    kind = "V" if values.itemsize > np.dtype(np.uint64).itemsize else "u"
    return values.view(f"{kind}{values.itemsize}")
