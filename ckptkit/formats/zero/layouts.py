"""How tensor parallelism of DeepSpeed cuts a parameter into the slices of its ranks.

Since 0.19.7 a save of AutoTP has a map of each parameter: blocks, each with the place of its first
element and the strides in the whole and in a slice, and the ranks that have it. Before, it has
patterns only: of parameters that every rank holds whole (all of them since 0.19.4), that are cut
by columns, and that consist of several, each cut by itself; all others are cut by rows.

Source: deepspeed/checkpoint/affine.py (`ParamAffineMap`), deepspeed/module_inject/layers.py
(`collect_autotp_universal_checkpoint_info`), deepspeed/checkpoint/ds_to_universal.py
(`merge_tp_slices`), 0.18.9 to 0.19.8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import FormatError, LimitError, UnsupportedError
from ckptkit.core.geometry import (
    drop_replicas,
    find_defect,
    intersect,
    row_major_strides,
    slabs,
)
from ckptkit.core.index import Box, Chunk, ChunkTable, Shape, Span
from ckptkit.core.text import quote
from ckptkit.formats.base import errors_at
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count
from ckptkit.formats.pickle.torch_archives import PickledDict

INFO = "universal_checkpoint_info"
_MAP, _FORMAT = "affine_map", 1
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_WHOLE = "tp_replicated_parameter_patterns"
_COLUMNS = (
    "parameter_with_row_parallelism_patterns"  # of `[out, in]`: what a row-parallel layer cuts
)
_SEVERAL, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_COMPLETE = (0, 19, 4)  # the first release whose patterns name all that ranks hold whole
_GATHER = (
    "load it where it was trained, and save the gathered state dict of the whole model with"
    " `torch.save`"
)
_SAVE_WHOLE = (
    "load it with the DeepSpeed that wrote it, on as many ranks, with"
    " `engine.load_checkpoint(folder, load_module_only=True)`; then call"
    " `engine._consolidated_16bit_state_dict()` on all ranks, and `torch.save` what rank 0 gets"
)


_MOST_PARTS = 64  # of a fused parameter


class Piece(Struct, frozen=True):
    """A block of a parameter that a rank has."""

    place: Box  # in the whole parameter
    offsets: Shape  # of its first element in the slice
    ranks: frozenset[int]  # that have it


class Layout(Struct, frozen=True):
    """How a parameter is cut.

    Attributes:
        shape: Of the whole parameter.
        slices: The shape of the slice of each rank.
        pieces: What each rank has of it.
    """

    shape: Shape
    slices: tuple[Shape, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def whole(cls, shape: Shape, ranks: int) -> Layout:
        """Returns the layout of a parameter that every rank holds whole."""
        zeros = (0,) * len(shape)
        piece = Piece(Box(zeros, shape), zeros, frozenset(range(ranks)))
        return cls(shape, (shape,) * ranks, ((piece,),) * ranks)

    @classmethod
    def cut(cls, slices: Sequence[Shape], axis: int, widths: Sequence[Sequence[int]]) -> Layout:
        """Returns the layout of a parameter that consists of one or several along an axis.

        `widths` has, for each of these, how much of it each rank holds.
        """
        shape = list(slices[0])
        shape[axis] = sum(map(sum, widths))
        pieces: list[list[Piece]] = [[] for _ in slices]
        held, at = [0] * len(slices), 0
        for each in widths:
            for rank, width in enumerate(each):
                start, own, sizes = [0] * len(shape), [0] * len(shape), list(shape)
                start[axis], own[axis], sizes[axis] = at, held[rank], width
                place = Box((*start,), (*sizes,))
                pieces[rank].append(Piece(place, (*own,), frozenset({rank})))
                at, held[rank] = at + width, held[rank] + width
        layout = cls((*shape,), (*slices,), tuple(map(tuple, pieces)))
        layout.check()
        return layout

    def check(self) -> None:
        """Refuses pieces that do not make up every slice, or not the whole parameter."""
        holders: dict[Box, set[int]] = defaultdict(set)
        for rank, (shape, pieces) in enumerate(zip(self.slices, self.pieces, strict=True)):
            boxes = [Box(piece.offsets, piece.place.sizes) for piece in pieces]
            _check_cover(boxes, shape, f"the slice of rank {rank}")
            for piece in pieces:
                if 0 not in piece.place.sizes:
                    holders[piece.place].add(rank)
        _check_cover(list(holders), self.shape, "the parameter")
        for piece in (piece for pieces in self.pieces for piece in pieces):
            if piece.place in holders and piece.ranks != holders[piece.place]:
                raise FormatError(
                    f"a map says that ranks {sorted(piece.ranks)} hold what is held by"
                    f" {sorted(holders[piece.place])}"
                )

    def place(self, rank: int, span: Span) -> Iterator[tuple[Box, Shape]]:
        """Yields where elements of a slice belong: boxes of the whole, with offsets in the slice.

        Of what several ranks have, it is the first that gives it.
        """
        for box in slabs(span, self.slices[rank]):
            for piece in self.pieces[rank]:
                shared = intersect(box, Box(piece.offsets, piece.place.sizes))
                if shared is None or min(piece.ranks) != rank:
                    continue
                steps = zip(piece.place.offsets, shared.offsets, piece.offsets, strict=True)
                yield Box(tuple(p + s - o for p, s, o in steps), shared.sizes), shared.offsets

    def copies(self) -> Iterator[tuple[int, Shape, int, Shape, Shape]]:
        """Yields each block that a rank has as the first one has it, too.

        That is the first rank and the offsets in its slice, the other and the offsets in that, and
        the sizes.
        """
        first: dict[Box, tuple[int, Shape]] = {}
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if 0 in piece.place.sizes:
                    continue
                before = first.setdefault(piece.place, (rank, piece.offsets))
                if before[0] != rank:
                    yield *before, rank, piece.offsets, piece.place.sizes


def _check_cover(boxes: Sequence[Box], shape: Shape, what: str) -> None:
    chunks = [Chunk(box, 0) for box in boxes if 0 not in box.sizes]
    if 0 not in shape and not chunks:
        raise FormatError(f"a map leaves out elements of {what}")
    defect = find_defect(drop_replicas(ChunkTable.of(chunks, len(shape))), shape)
    is_twice = len(chunks) != len({chunk.place for chunk in chunks})
    if defect is not None or is_twice:
        does = "leaves out" if defect is not None and not defect.copies else "places twice"
        raise FormatError(f"a map {does} elements of {what}, of shape {list(shape)}")


def read_layouts(
    content: PickledDict, slices: Mapping[str, Sequence[Shape]], *, most: int
) -> dict[str, Layout]:
    """Returns the layouts of parameters, by name.

    Args:
        content: Of a file of weights.
        slices: The shapes of the slices of each parameter.
        most: How many pieces a map may have, of any parameter.
    """
    info = content.inner(INFO)
    maps, reasons = _listed_maps(info.inner(_MAP)), info.inner(_UNSUPPORTED).values
    found: dict[str, Layout] = {}
    left = most
    patterns = _Patterns.read(content, info)
    for name, shapes in slices.items():
        pattern = f"^{re.escape(name)}$"
        if pattern in reasons:
            raise UnsupportedError(
                f"the slices of {quote(name)} are not described: {quote(str(reasons[pattern]))}",
                where=info.where,
                hint=_GATHER,
            )
        if pattern in maps.values:
            layout, count = _read_map(maps.inner(pattern), left)
            left -= count
        else:
            layout = patterns.layout(name, shapes)
        if layout.slices != (*shapes,):
            raise info.error(
                f"says that the slices of {quote(name)} have shapes {[*map(list, layout.slices)]},"
                f" and the ranks hold {[*map(list, shapes)]}"
            )
        found[name] = layout
    return found


def read_maps(listed: PickledDict, *, most: int) -> dict[str, Layout]:
    """Returns the layouts of a list of maps by name, of at most so many pieces."""
    maps = _listed_maps(listed)
    found: dict[str, Layout] = {}
    for name in maps.values:
        found[str(name)], count = _read_map(maps.inner(name), most)
        most -= count
    return found


def _listed_maps(listed: PickledDict) -> PickledDict:
    version = listed.count("version")
    if version is not None and version > _FORMAT:
        raise UnsupportedError(
            f"has maps of version {version}, read is {_FORMAT}",
            where=listed.where,
            hint="a later release of ckptkit may read it",
        )
    return listed.inner("params")


def _read_map(entry: PickledDict, most: int) -> tuple[Layout, int]:
    """Returns the layout that a map describes, and how many pieces it has."""
    shape = _sizes(entry, "logical_shape")
    ranks = entry.inner("ranks")
    if [*ranks.values] != [*range(len(ranks.values))]:
        raise ranks.error("does not have one entry for each rank")
    slices: list[Shape] = []
    pieces: list[tuple[Piece, ...]] = []
    count = 0
    for rank in ranks.values:
        held = ranks.inner(rank)
        own = _sizes(held, "shard_shape")
        listed = held.inner_list("pieces") if len(held.sequence("pieces")) <= most else []
        count += len(held.sequence("pieces"))
        count += sum(len(piece.sequence("locations")) for piece in listed)
        if count > most:
            raise LimitError("a map has more pieces than its file can hold", where=held.where)
        slices.append(own)
        pieces.append(tuple(_read_piece(piece, shape, own) for piece in listed))
    layout = Layout(shape, (*slices,), (*pieces,))
    with errors_at(entry.where):
        layout.check()
    return layout, count


def _read_piece(piece: PickledDict, whole: Shape, own: Shape) -> Piece:
    sizes = _sizes(piece, "shape")
    if piece.values.get("scale", 1.0) != 1.0:
        raise UnsupportedError(
            "a map has a scaled piece, whose values are not those of the parameter",
            where=piece.where,
            hint=_GATHER,
        )
    offsets = []
    for key, outer in (("source", whole), ("dest", own)):
        value = piece.values.get(key)
        first, strides = value if isinstance(value, (list, tuple)) and len(value) == 2 else (0, 0)  # noqa: PLR2004
        expected = row_major_strides(outer)
        if (
            not is_count(first)
            or not isinstance(strides, (list, tuple))
            or not len(strides) == len(sizes) == len(outer)
            or any(
                n > 1 and stride != want
                for n, stride, want in zip(sizes, strides, expected, strict=True)
            )
        ):
            raise UnsupportedError(
                f"a piece of a map is no block of its {key}",
                where=piece.where,
                hint=_GATHER,
            )
        at = []
        for size, stride in zip(outer, expected, strict=True):
            at.append(first // max(stride, 1) if size else 0)
            first -= at[-1] * stride
        # An empty piece may begin at the end.
        if 0 in sizes:
            at = [0] * len(sizes)
        elif first or any(a + n > size for a, n, size in zip(at, sizes, outer, strict=True)):
            raise piece.error(f"is outside its {key}, of shape {list(outer)}")
        offsets.append((*at,))
    ranks = piece.sequence("locations")
    if not ranks or not all(map(is_count, ranks)):
        raise piece.error("'locations' is not a list of ranks")
    return Piece(Box(offsets[0], sizes), offsets[1], frozenset(ranks))


def _sizes(entry: PickledDict, key: str) -> Shape:
    sizes = entry.sequence(key)
    if key not in entry.values or len(sizes) > MAX_DIMENSIONS or not all(map(is_count, sizes)):
        raise entry.error(f"{key!r} is not a shape")
    return (*sizes,)


class _Patterns(Struct, frozen=True):
    """What the patterns of a save say of its parameters."""

    info: PickledDict
    is_automatic: bool  # whether AutoTP cut the model, or what trained it did
    are_complete: bool
    whole: frozenset[str]
    columns: frozenset[str]
    several: Mapping[str, PickledDict]

    @classmethod
    def read(cls, content: PickledDict, info: PickledDict) -> _Patterns:
        release = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", content.text("ds_version"))
        settings = content.values.get("ds_config")
        several: dict[str, PickledDict] = {}
        for entry in info.inner_list(_SEVERAL):
            several |= {str(pattern): entry for pattern in entry.sequence("patterns")}
        return cls(
            info,
            isinstance(settings, dict) and "tensor_parallel" in settings,
            bool(info.values)
            and release is not None
            and (*map(int, release.groups()),) >= _COMPLETE,
            frozenset(map(str, info.sequence(_WHOLE))),
            frozenset(map(str, info.sequence(_COLUMNS))),
            several,
        )

    def layout(self, name: str, slices: Sequence[Shape]) -> Layout:
        pattern = f"^{re.escape(name)}$"
        if pattern in self.whole and len({*slices}) == 1:
            return Layout.whole(slices[0], len(slices))
        if not self.are_complete:
            why = (
                "; DeepSpeed before 0.19.4 does not write which parameters every rank holds whole"
                if self.is_automatic
                else ""
            )
            raise UnsupportedError(
                f"nothing shows how {quote(name)} is cut into slices of tensor parallelism:"
                f" {INFO!r} has no map of it{why}",
                where=self.info.where,
                hint=_SAVE_WHOLE if self.is_automatic else _GATHER,
            )
        entry = self.several.get(pattern)
        axis = 1 if pattern in self.columns else 0
        if entry is not None:
            axis = entry.count("partition_dim") or 0
        if any(len(shape) <= axis for shape in slices):
            raise self.info.error(f"says that {quote(name)} is cut along dimension {axis}")
        held = [shape[axis] for shape in slices]
        rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in slices}
        widths = [held] if entry is None else self._widths(entry, pattern, axis, held)
        if len(rest) > 1 or [sum(each) for each in zip(*widths, strict=True)] != held:
            raise self.info.error(
                f"says that {quote(name)} is cut along dimension {axis} otherwise than the ranks"
                " hold it"
            )
        return Layout.cut(slices, axis, widths)

    def _widths(
        self, entry: PickledDict, pattern: str, axis: int, held: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Returns how much of each sub-parameter each rank holds."""
        listed = self.info.inner(_WIDTHS).values.get(pattern)
        if listed is not None:
            if not isinstance(listed, (list, tuple)) or not all(
                isinstance(each, (list, tuple))
                and len(each) == len(held)
                and all(map(is_count, each))
                for each in listed
            ):
                raise self.info.error(f"{_WIDTHS!r} of {quote(pattern)} is not a table of widths")
            return listed
        spec: Any = entry.sequence("shape")[axis : axis + 1]
        total, ranks = sum(held), len(held)
        sizes = spec[0] if spec else None
        if is_count(sizes, _MOST_PARTS) and sizes and total % sizes == 0:
            sizes = [total // sizes] * sizes
        if (
            not isinstance(sizes, (list, tuple))
            or not all(is_count(size) and size % ranks == 0 for size in sizes)
            or sum(sizes) != total
        ):
            raise UnsupportedError(
                f"nothing shows how the parts of {quote(pattern)} are cut: {_SEVERAL!r} has no"
                " widths, and equal ones do not fit",
                where=self.info.where,
                hint=_SAVE_WHOLE,
            )
        return [[size // ranks] * ranks for size in sizes]
