"""Traces reshapes, splits and permutations, to know the live element behind each element on disk.

An arrangement starts as a live tensor and goes through the operations of a conversion, which
move elements and compute nothing. It stays exact: an operation whose outcome it cannot express
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.geometry import row_major_strides, slabs
from ckptkit.core.index import Box, Fqn, Shape, Span
from ckptkit.hub_names.disk_tensors import DiskBox, HubTensor

Run = tuple[int, int]
"""So many elements, and the step of the live tensor from one to the next."""
Walk = tuple[Run, ...]
"""How one dimension is walked: runs within runs, the outermost first; empty for one index."""
_MOST_PARTS = 1 << 16
_Value = TypeVar("_Value")


class LiveBox(Struct, frozen=True):
    """A box of an arrangement that is in one live tensor.

    Attributes:
        offsets: Its first corner.
        source: The live tensor.
        start: The element of the live tensor at that corner.
        walks: One per dimension; the product of its counts is the box's size there.
    """

    offsets: Shape
    source: Fqn
    start: int
    walks: tuple[Walk, ...]

    @property
    def sizes(self) -> Shape:
        return tuple(_length(walk) for walk in self.walks)


class Arrangement(Struct, frozen=True):
    """A tensor made of parts of live ones, which do not overlap; all other elements are zero."""

    shape: Shape
    parts: tuple[LiveBox, ...]

    @classmethod
    def of_live(cls, name: Fqn, shape: Shape) -> Arrangement:
        """Returns a live tensor as it is."""
        walks = tuple(
            _plain(size, step) for size, step in zip(shape, row_major_strides(shape), strict=True)
        )
        return cls(shape, (LiveBox((0,) * len(shape), name, 0, walks),))

    def permuted(self, order: Sequence[int]) -> Arrangement:
        """Returns it with dimension `order[i]` in place `i`."""
        parts = (
            replace(
                part,
                offsets=tuple(part.offsets[i] for i in order),
                walks=tuple(part.walks[i] for i in order),
            )
            for part in self.parts
        )
        return Arrangement(tuple(self.shape[i] for i in order), tuple(parts))

    def sliced(self, dim: int, start: int, stop: int) -> Arrangement:
        """Returns the indices from `start` up to `stop` of a dimension."""
        parts = [
            _moved(kept, dim, -start)
            for part in self.parts
            for kept in _between(part, dim, start, stop)
        ]
        return Arrangement(_with(self.shape, dim, stop - start), _few(parts))

    def padded(self, dim: int, size: int) -> Arrangement:
        """Returns it with further indices at the end of a dimension, whose elements are zero."""
        return Arrangement(_with(self.shape, dim, size), self.parts)

    def selected(self, dim: int, index: int) -> Arrangement:
        """Returns one index of a dimension, without the dimension."""
        return self.sliced(dim, index, index + 1).squeezed(dim)

    def squeezed(self, dim: int) -> Arrangement:
        """Returns it without a dimension of one index."""
        parts = (
            replace(p, offsets=_without(p.offsets, dim), walks=_without(p.walks, dim))
            for p in self.parts
        )
        return Arrangement(_without(self.shape, dim), tuple(parts))

    def unsqueezed(self, dim: int) -> Arrangement:
        """Returns it with a further dimension of one index."""
        nothing: Walk = ()
        parts = (
            replace(
                part,
                offsets=(*part.offsets[:dim], 0, *part.offsets[dim:]),
                walks=(*part.walks[:dim], nothing, *part.walks[dim:]),
            )
            for part in self.parts
        )
        return Arrangement((*self.shape[:dim], 1, *self.shape[dim:]), tuple(parts))

    def viewed(self, shape: Shape) -> Arrangement:
        """Returns the same elements in the same row-major order under another shape."""
        if 0 in shape:
            return Arrangement(shape, ())
        size, parts = self.shape, self.parts
        for group in _groups(self.shape, shape):
            at, end = group.at, group.at + group.old
            merged = _few([flat for part in parts for flat in _merged(part, size, at, end)])
            parts = _few([fine for part in merged for fine in _split(part, at, group.new)])
            size = (*size[:at], *group.new, *size[end:])
        return Arrangement(size, parts)

    def to_tensor(self, name: Fqn) -> HubTensor:
        """Returns it as a tensor of a plan."""
        inner = [_inner_of(dim, self.parts) for dim in range(len(self.shape))]
        parts = self.parts
        for dim, counts in enumerate(inner):
            parts = _few([flat for part in parts for flat in _fitted(part, dim, counts)])
        grid = tuple(
            size
            for total, counts in zip(self.shape, inner, strict=True)
            for size in (total // math.prod(counts), *counts)
        )
        return HubTensor(name, self.shape, grid, tuple(_piece(part, inner) for part in parts))


def join(arrangements: Sequence[Arrangement], dim: int) -> Arrangement:
    """Returns arrangements one after the other along a dimension."""
    parts: list[LiveBox] = []
    at = 0
    for arrangement in arrangements:
        parts += [_moved(part, dim, at) for part in arrangement.parts]
        at += arrangement.shape[dim]
    return Arrangement(_with(arrangements[0].shape, dim, at), _few(parts))


def _plain(size: int, step: int) -> Walk:
    return ((size, step),) if size != 1 else ()


def _length(walk: Walk) -> int:
    return math.prod(count for count, _ in walk)


def _moved(part: LiveBox, dim: int, by: int) -> LiveBox:
    return replace(part, offsets=_with(part.offsets, dim, part.offsets[dim] + by))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _without(values: tuple[_Value, ...], dim: int) -> tuple[_Value, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _few(parts: Sequence[LiveBox]) -> tuple[LiveBox, ...]:
    if len(parts) > _MOST_PARTS:
        raise CannotPlanError(
            f"a conversion cuts a tensor into {len(parts):,} pieces; found against at most"
            f" {_MOST_PARTS:,}",
            hint="pass --names live",
        )
    return tuple(parts)


def _between(part: LiveBox, dim: int, start: int, stop: int) -> Iterator[LiveBox]:
    """Yields what a part holds of a range of indices, as parts."""
    offset, walk = part.offsets[dim], part.walks[dim]
    low, high = max(start - offset, 0), min(stop - offset, _length(walk))
    if low >= high:
        return
    for at, first, kept in _range_of(walk, low, high):
        yield LiveBox(
            _with(part.offsets, dim, offset + at),
            part.source,
            part.start + first,
            (*part.walks[:dim], kept, *part.walks[dim + 1 :]),
        )


def _cut(part: LiveBox, dim: int, width: int) -> Iterator[LiveBox]:
    """Yields a part in parts of so many indices of a dimension."""
    low = part.offsets[dim]
    for at in range(low, low + part.sizes[dim], width):
        yield from _between(part, dim, at, at + width)


def _range_of(walk: Walk, low: int, high: int) -> Iterator[tuple[int, int, Walk]]:
    """Cuts indices `[low, high)` out of a walk: `(first index, elements to skip, walk)`."""
    if low == 0 and high == _length(walk):
        yield 0, 0, walk
        return
    (_, step), inner = walk[0], walk[1:]
    width = _length(inner)
    first, last = -(-low // width), high // width
    if first > last:  # within one round of the inner runs
        around = low // width
        for at, skip, kept in _range_of(inner, low - around * width, high - around * width):
            yield around * width + at, around * step + skip, kept
        return
    if low < first * width:
        yield from _shifted(_range_of(inner, low - (first - 1) * width, width), first - 1, walk)
    if first < last:
        yield first * width, first * step, (*_plain(last - first, step), *inner)
    if last * width < high:
        yield from _shifted(_range_of(inner, 0, high - last * width), last, walk)


def _shifted(
    found: Iterator[tuple[int, int, Walk]], around: int, walk: Walk
) -> Iterator[tuple[int, int, Walk]]:
    width = _length(walk[1:])
    for at, skip, kept in found:
        yield around * width + at, around * walk[0][1] + skip, kept


class _Group(Struct, frozen=True):
    """Neighbouring dimensions that become others with as many elements, `at` in the result."""

    at: int
    old: int
    new: Shape


def _groups(old: Shape, new: Shape) -> list[_Group]:
    """Finds the smallest groups of dimensions between two shapes that correspond."""
    found: list[_Group] = []
    i = j = 0
    while i < len(old) or j < len(new):
        begun, at = i, j
        left, right = 1, 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new) and (left > 1 or begun == i):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        if (i - begun, j - at) != (1, 1):
            found.append(_Group(at, i - begun, new[at:j]))
    return found


def _merged(part: LiveBox, shape: Shape, at: int, end: int) -> Iterator[LiveBox]:
    """Yields a part with dimensions `[at, end)` made one."""
    outer, sizes = shape[at:end], part.sizes[at:end]
    strides = row_major_strides(outer)
    axis = next((i for i in range(len(outer)) if sizes[i] > 1), len(outer))
    is_run = sizes[axis + 1 :] == outer[axis + 1 :]
    if not is_run:
        for kept in _cut(part, at + axis, 1):
            yield from _merged(kept, shape, at, end)
        return
    offset = sum(o * s for o, s in zip(part.offsets[at:end], strides, strict=True))
    walk = tuple(run for inner in part.walks[at:end] for run in inner)
    yield replace(
        part,
        offsets=(*part.offsets[:at], offset, *part.offsets[end:]),
        walks=(*part.walks[:at], _simplified(walk), *part.walks[end:]),
    )


def _simplified(walk: Walk) -> Walk:
    """Joins runs that together are one."""
    runs: list[Run] = []
    for count, step in walk:
        if runs and runs[-1][1] == count * step:
            runs[-1] = (runs[-1][0] * count, step)
        else:
            runs.append((count, step))
    return tuple(runs)


def _split(part: LiveBox, dim: int, sizes: Shape) -> Iterator[LiveBox]:
    """Yields a part with one dimension made several."""
    low = part.offsets[dim]
    for box in slabs(Span(low, low + part.sizes[dim]), sizes):
        strides = row_major_strides(sizes)
        start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        for kept in _between(part, dim, start, start + math.prod(box.sizes)):
            if kept.sizes[dim] != math.prod(box.sizes):  # the walk itself had to be cut
                yield from _split(kept, dim, sizes)
                continue
            yield replace(
                kept,
                offsets=(*kept.offsets[:dim], *box.offsets, *kept.offsets[dim + 1 :]),
                walks=(*kept.walks[:dim], *_dealt(kept.walks[dim], box), *kept.walks[dim + 1 :]),
            )


def _dealt(walk: Walk, box: Box) -> list[Walk]:
    """Deals the runs of a walk out to dimensions of the given sizes, the innermost first."""
    runs = list(walk)
    dealt: list[Walk] = []
    for size in reversed(box.sizes):
        mine: list[Run] = []
        left = size
        while left > 1:
            count, step = runs.pop()
            if left % count == 0:
                mine.insert(0, (count, step))
                left //= count
            elif count % left == 0:
                mine.insert(0, (left, step))
                runs.append((count // left, step * left))
                left = 1
            else:
                raise CannotPlanError(
                    "a conversion reshapes a tensor across the joints of its pieces",
                    hint="pass --names live",
                )
        dealt.insert(0, _simplified(tuple(mine)))
    return dealt


def _inner_of(dim: int, parts: Sequence[LiveBox]) -> Shape:
    """Returns the counts of the inner runs that a dimension's parts share; none where they do not.

    With one run for every part a dimension needs no finer grid.
    """
    found = {tuple(count for count, _ in part.walks[dim][1:]) for part in parts}
    found.discard(())
    if len(found) != 1:
        return ()
    (counts,) = found
    width = math.prod(counts)
    fits = all(part.offsets[dim] % width == 0 and part.sizes[dim] % width == 0 for part in parts)
    return counts if fits else ()


def _fitted(part: LiveBox, dim: int, counts: Shape) -> Iterator[LiveBox]:
    """Yields a part so that a dimension has one run within each of the grid's dimensions."""
    walk = part.walks[dim]
    if counts or len(walk) <= 1:
        yield part
        return
    for kept in _cut(part, dim, _length(walk[1:])):
        yield from _fitted(kept, dim, counts)


def _piece(part: LiveBox, inner: Sequence[Shape]) -> DiskBox:
    offsets: list[int] = []
    sizes: list[int] = []
    steps: list[int] = []
    for offset, walk, counts in zip(part.offsets, part.walks, inner, strict=True):
        size = _length(walk)
        box = Box((0,) * (len(counts) + 1), (size // math.prod(counts), *counts))
        offsets += [offset // math.prod(counts), *box.offsets[1:]]
        sizes += box.sizes
        steps += [run[0][1] if run else 0 for run in _dealt(walk, box)]
    return DiskBox(Box(tuple(offsets), tuple(sizes)), part.source, part.start, tuple(steps))
