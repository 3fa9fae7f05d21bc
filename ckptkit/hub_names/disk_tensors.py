"""The tensors that `save_pretrained` writes, described by the live tensors that they come from.

Transformers 5 computes with other tensors than it stores: the experts of a layer are one tensor
in memory and one each on disk. The names that training holds are called live here, those in a
Hub repository's files are called disk names. A disk tensor is described as tiles, whose elements
have regular steps in live tensors, which covers slices, splits, stacks, joins, transpositions
and the reordering of rotary positions; nothing else can be described so, and so nothing else is
taken for it. Of a tensor that a conversion computes, its sources are known.

A merge of adapters needs to know which disk tensors are one box of one live tensor, perhaps with
exchanged axes; see `find_window`. `ckptkit.conversion.names_on_disk` finds the names of a model.
`NamingRequest` and `HubNames` are the request to the program that asks transformers, and its
answer, as JSON values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.geometry import (
    Arrangement,
    Loop,
    Part,
    Tile,
    find_tile,
    join_loops,
    row_major_strides,
)
from ckptkit.core.index import Box, Fqn, Shape


class Computation(Struct, frozen=True):
    """What one conversion makes a tensor from; those with equal sources come from one."""

    dtype: DType  # the element type that the conversion gives it
    sources: tuple[Fqn, ...]  # all live tensors that the conversion is given


class HubTensor(Struct, frozen=True):
    """A tensor as `save_pretrained` writes it; moved, it has the element type of its sources."""

    name: Fqn
    shape: Shape
    # What it has of live tensors; nothing where it is computed. Other elements are zero, as in
    # padding.
    pieces: tuple[Part, ...]
    # How it comes to be where a conversion does more than move elements, or None.
    computed: Computation | None = None

    @classmethod
    def of(cls, name: Fqn, arrangement: Arrangement) -> HubTensor:
        """Returns a tensor that is made by moving elements."""
        return cls(name, arrangement.shape, arrangement.parts)

    @property
    def has_padding(self) -> bool:
        """Whether there are elements in no piece."""
        held = sum(tile.elements for _, tile in self.pieces)
        return self.computed is None and held < math.prod(self.shape)

    @property
    def sources(self) -> tuple[Fqn, ...]:
        """The live tensors that it is made of, each once, in the order of the pieces."""
        if self.computed is not None:
            return self.computed.sources
        return tuple(dict.fromkeys(source for source, _ in self.pieces))


class Window(Struct, frozen=True):
    """A box of a live tensor, read with its axes in another order.

    In numpy's words the disk tensor is `live[box].transpose(rest + axes)[0, 0, …]`, where `rest`
    are the axes that `axes` leaves out; the box has one index along each of them.
    """

    source: Fqn
    box: Box  # the part of it
    axes: tuple[int, ...]  # for each dimension of the disk tensor, the axis of the live tensor


class HubNames(Struct, frozen=True):
    """What `save_pretrained` makes of a model's tensors."""

    library: str  # version of the transformers that says so
    live: Mapping[Fqn, Shape]  # shapes of the live tensors, by live name
    # What is written, by disk name, in the order in which it writes them.
    tensors: Mapping[Fqn, HubTensor]
    unsaved: tuple[Fqn, ...] = ()  # live tensors that the model's class keeps out of its files
    # Live tensors that the model's class does not have; they are renamed as if it had them, as
    # `save_pretrained` does where it is given a state dict.
    unknown: tuple[Fqn, ...] = ()
    # Patterns of live names that its class keeps in float32: in 16 bits of any kind, and in float16
    # alone.
    kept: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    tied: tuple[Fqn, ...] = ()  # live names that it ties to others


def find_run(tensor: HubTensor) -> tuple[Fqn, int] | None:
    """Returns the live tensor in which all elements of a disk tensor follow each other.

    With it comes the number of the first of them.
    """
    if len(tensor.pieces) != 1 or tensor.has_padding:
        return None
    ((source, tile),) = tensor.pieces
    strides = row_major_strides(tensor.shape)
    walks = (loop.walks for loop in tile.loops)
    is_run = all(there == step * strides[axis] for (axis, step), (_, there) in walks)
    return (source, tile.corners[1][0]) if is_run else None


def find_whole(tensor: HubTensor, live: Mapping[Fqn, Shape]) -> Fqn | None:
    """Returns the live tensor that a disk tensor is, element for element, if there is one."""
    size = math.prod(tensor.shape)
    found = find_run(tensor) if size else next(iter(tensor.pieces), None)
    is_whole = found is not None and math.prod(live[found[0]]) == size
    return found[0] if found is not None and is_whole else None


def find_window(tensor: HubTensor, live: Mapping[Fqn, Shape]) -> Window | None:
    """Returns a disk tensor as a box of one live tensor.

    Returns the box and the order of its axes, or None where it consists of several live tensors, or
    where its elements are in another order within an axis.
    """
    found = find_windows(tensor, live)
    return found[0][1] if found is not None and len(found) == 1 else None


def find_windows(
    tensor: HubTensor, live: Mapping[Fqn, Shape]
) -> tuple[tuple[Box, Window], ...] | None:
    """Returns a disk tensor as boxes of live tensors.

    Returns each box of the disk tensor with that of the live one, or None where elements are in
    another order within an axis, or are computed.
    """
    if tensor.computed is not None:
        return None
    found = [_window(source, tile, live[source]) for source, tile in tensor.pieces]
    windows = tuple(window for window in found if window is not None)
    return windows if len(windows) == len(found) else None


def _window(source: Fqn, piece: Tile, live: Shape) -> tuple[Box, Window] | None:
    tile, disk = find_tile(piece, live), len(piece.corners[0])
    if tile is None:
        return None
    found: dict[int, int] = {}  # from axes of the disk tensor to those of the live one
    sizes, disk_sizes = [1] * len(live), [1] * disk
    for loop in join_loops(tile).loops:
        (axis, step), (there, step_there) = loop.walks
        if (step, step_there) != (1, 1) or axis in found or there in found.values():
            return None
        found[axis], sizes[there], disk_sizes[axis] = there, loop.size, loop.size
    free = [axis for axis in range(len(live)) if axis not in found.values()]
    for axis in range(disk):  # dimensions of one index take what is left
        if axis not in found:
            if not free:
                return None
            found[axis] = axis if axis in free else free[0]
            free.remove(found[axis])
    box = Box(tile.corners[1], tuple(sizes))
    window = Window(source, box, tuple(found[axis] for axis in range(disk)))
    return Box(tile.corners[0], tuple(disk_sizes)), window


class NamingRequest(Struct, frozen=True):
    """What the names of a model on disk depend on."""

    config: Mapping[str, Any]  # a parsed `config.json` of a model type that transformers itself has
    # Element types and shapes by live name, or None for those of the model as its class makes it.
    tensors: Mapping[Fqn, tuple[DType, Shape]] | None
    # The disk names of the model that training began from, where they are known. They show which of
    # several forms that it can load the model keeps.
    base: Sequence[Fqn] = ()

    def to_json(self) -> bytes:
        tensors = self.tensors
        listed = (
            None if tensors is None else [[n, d.name, list(s)] for n, (d, s) in tensors.items()]
        )
        document = {"config": self.config, "tensors": listed, "base": list(self.base)}
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NamingRequest:
        """Returns the request that bytes of JSON hold."""
        return cls.from_document(json.loads(data))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> NamingRequest:
        """Returns the request that plain values hold."""
        listed = document["tensors"]
        tensors = (
            None
            if listed is None
            else {Fqn(n): (dtype_named(d), tuple(shape)) for n, d, shape in listed}
        )
        return cls(document["config"], tensors, tuple(map(Fqn, document["base"])))


def names_to_json(names: HubNames) -> dict[str, Any]:
    """Returns names as plain values."""
    number = {name: i for i, name in enumerate(names.live)}
    tensors: list[list[Any]] = []
    for tensor in names.tensors.values():
        if tensor.computed is not None:
            sources = [number[source] for source in tensor.computed.sources]
            computed = [tensor.computed.dtype.name, sources]
            tensors.append([tensor.name, tensor.shape, [], computed])
            continue
        pieces = [
            [
                number[source],
                tile.corners,
                [[loop.size, *loop.walks[0], loop.walks[1][1]] for loop in tile.loops],
            ]
            for source, tile in tensor.pieces
        ]
        tensors.append([tensor.name, tensor.shape, pieces, None])
    return {
        "library": names.library,
        "live": [[name, list(shape)] for name, shape in names.live.items()],
        "tensors": tensors,
        "unsaved": list(names.unsaved),
        "unknown": list(names.unknown),
        "kept": [list(patterns) for patterns in names.kept],
        "tied": list(names.tied),
    }


def names_from_json(document: Mapping[str, Any]) -> HubNames:
    """Returns the names that plain values hold."""
    live = {Fqn(name): tuple(shape) for name, shape in document["live"]}
    reader = _Reader(list(live))
    always, in_float16 = document["kept"]
    return HubNames(
        library=document["library"],
        live=live,
        tensors={Fqn(row[0]): reader.tensor(*row) for row in document["tensors"]},
        unsaved=tuple(map(Fqn, document["unsaved"])),
        unknown=tuple(map(Fqn, document["unknown"])),
        kept=(tuple(map(str, always)), tuple(map(str, in_float16))),
        tied=tuple(map(Fqn, document["tied"])),
    )


class _Reader:
    """Makes tensors; shapes and loops that come again, as those of experts do, are kept once."""

    def __init__(self, live: Sequence[Fqn]) -> None:
        self._live = live
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def tensor(self, name: str, shape: list[int], pieces: Any, computed: Any) -> HubTensor:
        computation = None
        if computed is not None:
            dtype, sources = computed
            computation = Computation(dtype_named(dtype), tuple(self._live[i] for i in sources))
        parts = tuple(self._part(*row) for row in pieces)
        return HubTensor(Fqn(name), self._once(shape), parts, computation)

    def _part(self, source: int, corners: list[list[int]], rows: list[list[int]]) -> Part:
        corner, there = map(self._once, corners)
        loops = [Loop(size, ((axis, step), (0, flat))) for size, axis, step, flat in rows]
        return self._live[source], Tile((corner, there), self._once(loops))

    def _once(self, values: Sequence[Any]) -> tuple[Any, ...]:
        found = tuple(values)
        return self._known.setdefault(found, found)
