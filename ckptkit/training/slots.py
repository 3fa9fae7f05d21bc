"""Where a parameter's elements lie on this rank, which its optimizer state follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ckptkit.core.geometry import slabs
from ckptkit.core.index import Box, KeyPath, Shape, Span
from ckptkit.training.pieces import Piece, Replicas, Watched


@dataclass(frozen=True, slots=True)
class Slot:
    """What this rank holds of one parameter, and of every tensor that is cut like it.

    Attributes:
        fqn: The parameter's clean name.
        shape: Of the full parameter, in elements.
        places: As a `Piece` has them; of the parameter with permuted `axes` where there are any.
        held: The shape of this rank's own tensor; a state tensor of this shape is cut alike.
        replicas: Which other ranks hold the same elements.
        values: Which ranks hold what there is once per parameter, such as `step`.
        start: Where the elements begin in a `held` of one dimension that holds more than this
            parameter; None where the tensor holds nothing else.
        axes: The dimensions in order of falling strides, where the elements lie in that order
            instead of row-major (a channels-last parameter that was flattened).
        sharded: Whether other ranks may hold other elements of the parameter; the same on all
            ranks, also on one that holds all of them.
    """

    fqn: str
    shape: Shape
    places: tuple[Box, ...]
    held: Shape
    replicas: Replicas
    values: Replicas
    start: int | None = None
    axes: tuple[int, ...] = ()
    sharded: bool = False

    @property
    def elements(self) -> int:
        """How many elements lie on this rank."""
        return sum(math.prod(place.sizes) for place in self.places)

    @property
    def whole(self) -> bool:
        """Whether all elements lie on this rank."""
        return self.elements == math.prod(self.shape)

    def follows(self, tensor: torch.Tensor) -> bool:
        """Tells whether a state tensor is cut as the parameter is."""
        return tuple(tensor.shape) == self.held

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.detach() if tensor.requires_grad else tensor
        return local if self.start is None else local.narrow(0, self.start, self.elements)

    def pieces(
        self,
        unit: str,
        path: KeyPath,
        tensor: torch.Tensor,
        aliases: Sequence[KeyPath] = (),
        watched: Watched = (),
    ) -> Iterator[Piece]:
        """Yields this rank's part of the parameter, or of a tensor cut like it.

        That is one piece, and one for each place where the elements are not in row-major order.

        Args:
            unit: The DCP directory.
            path: The key path in it.
            tensor: Of shape `held`.
            aliases: Further key paths of the same tensor.
            watched: As a `Piece` has them.
        """
        local, known = self._own(tensor), tuple(aliases)
        if not self.axes:
            if len(self.places) == 1:
                local = _shaped(local, self.places[0].sizes)
            yield Piece(unit, path, self.shape, self.places, local, self.replicas, known, watched)
            return
        at = 0
        for place in self.places:
            count = math.prod(place.sizes)
            block = local.narrow(0, at, count).view(place.sizes)
            box, at = _unpermuted(place, self.axes), at + count
            yield Piece(
                unit,
                path,
                self.shape,
                (box,),
                block.permute(_inverse(self.axes)),
                self.replicas,
                known,
                watched,
            )
        if not self.places:
            yield Piece(unit, path, self.shape, (), local, self.replicas, known, watched)


def whole_box(shape: Shape) -> Box:
    """Returns the place that holds all of a tensor."""
    return Box((0,) * len(shape), shape)


def whole_places(shape: Shape) -> tuple[Box, ...]:
    """Returns the places of a tensor that lies on this rank as a whole."""
    return () if 0 in shape else (whole_box(shape),)


@lru_cache(maxsize=1 << 16)
def span_places(span: Span, shape: Shape, axes: tuple[int, ...] = ()) -> tuple[Box, ...]:
    """Returns the places that hold a range of elements, in the order of `axes` where given."""
    return tuple(slabs(span, tuple(shape[axis] for axis in axes) if axes else shape))


def whole_slot(fqn: str, tensor: torch.Tensor, replicas: Replicas, values: Replicas) -> Slot:
    """Returns the slot of a tensor that lies on this rank as a whole."""
    shape = tuple(tensor.shape)
    return Slot(fqn, shape, whole_places(shape), shape, replicas, values)


def _shaped(tensor: torch.Tensor, sizes: Shape) -> torch.Tensor:
    return tensor if tuple(tensor.shape) == sizes else tensor.view(sizes)


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _unpermuted(place: Box, axes: tuple[int, ...]) -> Box:
    back = _inverse(axes)
    return Box(
        tuple(place.offsets[axis] for axis in back), tuple(place.sizes[axis] for axis in back)
    )
