"""The copies that a save consists of, and the parts of them by which frozen weights are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ckptkit.core.geometry import slabs
from ckptkit.core.index import Shape, Span

_PARTS = 100  # of a frozen weight, of which a save looks at one
_PART_BYTES = 4096  # at least, but for weights that are smaller


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One copy from a piece to its place in the buffer.

    Attributes:
        piece: Position among the pieces that were planned.
        first: First element, in the row-major order of the piece's `local`.
        stop: First element after it.
        start: First byte in the buffer; the elements lie there in row-major order.
        dtype: Of the elements.
        shape: Of the elements, as a part of `local`.
        whole: Whether these are all elements of `local`.
        prompt: Whether training may change them at any time, as a forward pass changes buffers,
            and not only in an optimizer step.
    """

    piece: int
    first: int
    stop: int
    start: int
    dtype: torch.dtype
    shape: Shape
    whole: bool
    prompt: bool

    @property
    def end(self) -> int:
        """The first byte after the last one in the buffer."""
        return self.start + (self.stop - self.first) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Sample:
    """The elements that a frozen weight has in one wave, cut into about a hundred parts.

    Attributes:
        step: The copy of all of them.
        bounds: Where the parts begin, in elements of the step, and where the last one ends.
    """

    step: CopyStep
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        """Returns how many parts there are."""
        return len(self.bounds) - 1

    def part(self, number: int) -> CopyStep:
        """Returns the copy of one part, to the place that the part has in the whole."""
        if len(self) == 1:
            return self.step
        first, stop = self.bounds[number], self.bounds[number + 1]
        (slab,) = slabs(Span(first, stop), self.step.shape)
        return replace(
            self.step,
            first=self.step.first + first,
            stop=self.step.first + stop,
            start=self.step.start + first * self.step.dtype.itemsize,
            shape=slab.sizes,
            whole=False,
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yields the first byte of each part in the buffer, and the one after its last."""
        places = [self.step.start + at * self.step.dtype.itemsize for at in self.bounds]
        return pairwise(places)


def sample_of(step: CopyStep) -> Sample:
    """Returns a copy, cut into parts."""
    elements, itemsize = step.stop - step.first, step.dtype.itemsize
    most = max(-(-elements // _PARTS), _PART_BYTES // itemsize)
    if elements <= most:
        return Sample(step, (0, elements))
    return Sample(step, (0, *(span.stop for span in slab_spans(step.shape, most))))


def slab_spans(sizes: Shape, most: int) -> Iterator[Span]:
    """Cuts a row-major box into slabs of at most `most` elements each, outer dimensions first."""
    axis, inner = 0, math.prod(sizes[1:])
    while inner > most:
        axis += 1
        inner //= sizes[axis]
    block = sizes[axis] * inner
    step = most // inner * inner
    for outer in range(0, math.prod(sizes), block):
        for start in range(outer, outer + block, step):
            yield Span(start, min(start + step, outer + block))
