"""What a rank holds of the training state, as plain values: pieces of tensors, objects, files.

A piece says both where its bytes come from in a save and where they go in a resume, so that one
walk over the state serves both. A `ShardLayout` says which elements of a parameter are on this
rank, and thereby which elements of its optimizer state. `select_owned` decides which rank writes
what several ranks hold, on each of them without communication.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
from msgspec import Struct

from ckptkit.core.geometry import slabs
from ckptkit.core.index import Box, KeyPath, Shape, Span
from ckptkit.plan.plan import OutputFile
from ckptkit.writer.messages import Inline

Entry = tuple[str, KeyPath]
"""The DCP directory of a tensor, and its key path there."""


class Replicas(Struct, frozen=True):
    """Which ranks hold the same elements."""

    count: int = 1  # how many ranks hold them
    own: int = 0  # which of these this rank is, from 0
    # whether any of them may write, because training keeps them equal; where it does not (buffers,
    # values outside any wrapper) the first one, rank 0, always writes
    spread: bool = True
    # whether a save compares what the first one writes with what the others have
    compared: bool = False


Watched = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that is on this rank, at one moment.

    It holds tensors of training, so no piece outlives the call that it was made in.
    """

    unit: str  # the DCP directory that it belongs to, relative to the step's; empty for the step's
    # the path of dictionary keys and list positions, as DCP's `planner_data` has it
    key_path: KeyPath
    shape: Shape  # of the full tensor, in elements
    # disjoint boxes of the full tensor; `local` holds the elements of the first in row-major order,
    # then those of the second, and so on. Empty where nothing of the tensor is on this rank.
    places: tuple[Box, ...]
    # the elements, on any device, with any strides. A single box has its shape; several follow one
    # another in a contiguous tensor of one dimension.
    local: torch.Tensor
    replicas: Replicas = Replicas()  # which other ranks hold the same elements
    # further key paths in the same unit under which the same tensor is known (ties)
    aliases: tuple[KeyPath, ...] = ()
    # of weights that are not trained: the tensors whose version counters show whether the elements
    # were changed all the same
    watched: Watched = ()
    # the same object in pieces that differ in their tensors only
    origin: object = field(default_factory=object, init=False, repr=False, compare=False)

    def holding(self, local: torch.Tensor, watched: Watched = ()) -> Piece:
        """Returns the same piece of other tensors, which have the same forms."""
        other = object.__new__(Piece)  # `replace` takes ten times as long
        fields = other.__dict__
        fields.update(self.__dict__)
        fields["local"] = local
        fields["watched"] = watched
        return other

    @property
    def frozen(self) -> bool:
        return bool(self.watched)

    @property
    def entry(self) -> Entry:
        return self.unit, self.key_path

    @property
    def key(self) -> str:
        return ".".join(map(str, self.key_path))

    @property
    def elements(self) -> int:
        return sum(math.prod(place.sizes) for place in self.places)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.local.element_size()

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields each place, with its elements in the shape of the box."""
        if len(self.places) == 1:
            yield self.places[0], self.local
            return
        at = 0
        for box in self.places:
            count = math.prod(box.sizes)
            yield box, self.local.narrow(0, at, count).view(box.sizes)
            at += count


class ObjectValue(Struct, frozen=True):
    """A value that is no tensor, stored in a DCP directory under a key of its own."""

    unit: str
    key_path: KeyPath  # as for a piece
    value: object  # what `torch.save` will be given
    # what it wrote; empty for plain values, whose archive is the same each time
    archive: bytes = b""


class Holdings(Struct, frozen=True):
    # parts of tensors, replicas included, in an order that is the same on every rank that holds the
    # same tensors
    pieces: tuple[Piece, ...]
    # what this rank has to write as objects into DCP directories
    objects: tuple[ObjectValue, ...] = ()
    files: tuple[Inline, ...] = ()  # what this rank has to write as files
    # the entries without which the step is still worth having, optimizers, as JSON: the `name` in
    # messages, the DCP directory (`unit`), what all its key paths begin with (`path`), and why this
    # rank cannot save it (`problem`; empty if it can)
    dispensable: tuple[Mapping[str, Any], ...] = ()
    values: tuple[str, ...] = ()  # the names of the entries that rank 0 writes for all ranks
    # files in the form of another saver, whose `Copy` segments are the pieces, in order
    whole: tuple[OutputFile, ...] = ()


class ShardLayout(Struct, frozen=True):
    """What this rank holds of one parameter, and of every tensor that is cut like it."""

    fqn: str
    shape: Shape  # of the full parameter, in elements
    # as a `Piece` has them; of the parameter with permuted `axes` where there are any
    places: tuple[Box, ...]
    held: Shape  # the shape of this rank's own tensor; a state tensor of this shape is cut alike
    replicas: Replicas  # which other ranks hold the same elements
    values: Replicas  # which ranks hold what there is once per parameter, such as `step`
    # where the elements begin in a `held` of one dimension that holds more than this parameter;
    # None where the tensor holds nothing else
    start: int | None = None
    # the dimensions in order of falling strides, where the elements are in that order instead of
    # row-major (a channels-last parameter that was flattened)
    axes: tuple[int, ...] = ()
    # whether other ranks may hold other elements of the parameter; the same on all ranks, also on
    # one that holds all of them
    sharded: bool = False

    @property
    def elements(self) -> int:
        return sum(math.prod(place.sizes) for place in self.places)

    @property
    def whole(self) -> bool:
        return self.elements == math.prod(self.shape)

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
        """
        # Detached, as torch refuses to swap the content of a tensor that has views.
        local, further = tensor.detach(), tuple(aliases)
        if self.start is not None:
            local = local.narrow(0, self.start, self.elements)
        if not self.axes:
            if len(self.places) == 1 and tuple(local.shape) != self.places[0].sizes:
                local = local.view(self.places[0].sizes)
            yield Piece(unit, path, self.shape, self.places, local, self.replicas, further, watched)
            return
        at = 0
        back = tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))
        for place in self.places:
            count = math.prod(place.sizes)
            block = local.narrow(0, at, count).view(place.sizes).permute(back)
            at += count
            offsets = tuple(place.offsets[axis] for axis in back)
            box = Box(offsets, tuple(place.sizes[axis] for axis in back))
            yield Piece(unit, path, self.shape, (box,), block, self.replicas, further, watched)
        if not self.places:
            yield Piece(unit, path, self.shape, (), local, self.replicas, further, watched)


def whole_places(shape: Shape) -> tuple[Box, ...]:
    return () if 0 in shape else (Box((0,) * len(shape), shape),)


@lru_cache(maxsize=1 << 16)
def span_places(span: Span, shape: Shape, axes: tuple[int, ...] = ()) -> tuple[Box, ...]:
    return tuple(slabs(span, tuple(shape[axis] for axis in axes) if axes else shape))


def whole_layout(
    fqn: str, tensor: torch.Tensor, replicas: Replicas, values: Replicas
) -> ShardLayout:
    shape = tuple(tensor.shape)
    return ShardLayout(fqn, shape, whole_places(shape), shape, replicas, values)


_SAMPLED = 16
_MOST_SAMPLED = 128  # of all groups, so that they fit into the smallest buffer


def sampled_replicas(pieces: Sequence[Piece]) -> Iterator[int]:
    """Yields which pieces a save compares between the ranks that hold them.

    Sixteen of each group at most, the same ones on all of its ranks; see `select_owned`. Frozen
    weights are left out.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        replicas = piece.replicas
        if (replicas.spread or replicas.compared) and replicas.count > 1 and not piece.frozen:
            groups[id(replicas)].append(index)
    sampled = (indices[:: -(-len(indices) // _SAMPLED)] for indices in groups.values())
    held = (index for index in chain.from_iterable(sampled) if pieces[index].elements)
    yield from islice(held, _MOST_SAMPLED)


def select_owned(pieces: Sequence[Piece]) -> tuple[bool, ...]:
    """Returns for each piece whether this rank writes it.

    Pieces that may be spread are dealt out by size, the largest first, each to the replica with the
    fewest bytes so far. All ranks compute the same answer, because only pieces that share one
    `Replicas` object are dealt out together: the pieces on one group of ranks, and only those, have
    the same object. A piece with an object of its own goes to the first replica. Frozen weights are
    dealt out separately, because most saves write only the others. The pieces are in the same order
    on all ranks of a group.
    """
    mine = [bool(piece.places) and piece.replicas.own == 0 for piece in pieces]
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.replicas.spread and piece.replicas.count > 1 and piece.places:
            groups[id(piece.replicas), piece.frozen].append(index)
    for indices in groups.values():
        replicas = pieces[indices[0]].replicas
        loads = [0] * replicas.count
        for index in sorted(indices, key=lambda index: -pieces[index].size_bytes):
            owner = min(range(replicas.count), key=loads.__getitem__)
            loads[owner] += pieces[index].size_bytes
            mine[index] = owner == replicas.own
    return tuple(mine)
