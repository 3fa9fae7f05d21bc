"""Unpacking: the elements of weights from packed numbers, their scales and zero points.

A number format is a table of what each byte stands for, one number or several. An element is
`(number - zero) * scale`, computed in float32, in which each product of such numbers is exact or
rounded once, and then rounded to the type that the library of the format returns. Where that is
float16, to which numpy rounds slowly, the sixteen elements that a block can have are rounded, and
each number looks up its own.

`ckptkit.plan.number_formats` says which tensors hold what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import RefusedError
from ckptkit.core.geometry import cut_span, slabs
from ckptkit.core.index import Box, Key, Shape, Span
from ckptkit.engine.casts import copy_rounded
from ckptkit.engine.kernels import StoredOperand
from ckptkit.plan.number_formats import Order
from ckptkit.plan.plan import Demand

Floats = NDArray[np.float32]
Window = tuple[NDArray[Any], int, int]  # stored elements, and the place of the first of them

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTE = 256
# Types of a byte that numpy casts itself.
_SINGLE = {"int8": "int8", "e8m0": "float8_e8m0fnu", "float8_e4m3fn": "float8_e4m3fn"}
ONE_ZERO = "e2m1 with one zero"  # which has no sign
_BITS = {"e2m1": 4, ONE_ZERO: 4, "uint4": 4, "uint2": 2}  # of a number; of others eight
# Where the columns that are wanted are far apart, whole rows up to so many bytes are read.
_MOST_AROUND_BYTES = 32 << 20
_LONG_RUN_BYTES = 4 << 10
_MOST_WIDER = 2  # times the elements of a range that are unpacked with it to have whole rows
_WIDE = {1: np.float32, 2: np.complex64, 4: np.complex128}  # types of so many float32
_MOST_WIDE = max(_WIDE)
# What is computed at once: it fits into the processor's cache, and its memory is not given back to
# the system each time. Transposed, both sides of a tile are in few pages.
_TILE_ELEMENTS, _TILE_WIDTH = 1 << 17, 512
_POSSIBLE = 16  # elements of a block with numbers of four bits
_FEWEST_ROUNDED = 32  # elements of a block whose possible ones are rounded instead
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of its eight numbers


@cache
def make_table(number: str) -> Floats:
    """Returns what each byte stands for, of shape [256, numbers in a byte], the lowest bits first.

    >>> make_table("e2m1")[0x2F].tolist(), make_table("e8m0")[128].tolist()
    ([-6.0, 1.0], [2.0])
    """
    codes = np.arange(_BYTE, dtype=np.uint8)
    single = _SINGLE.get(number)
    if single is not None:
        values: Floats = codes.view(numpy_dtype(BY_NAME[single])).astype(np.float32)
        return values[:, np.newaxis]
    bits = _BITS.get(number, 8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    held = (codes[:, np.newaxis] >> shifts) & np.uint8((1 << bits) - 1)
    if number.startswith("e2m1"):
        zero = 0.0 if number == ONE_ZERO else -0.0
        values = np.array([*_E2M1, zero, *(-value for value in _E2M1[1:])], np.float32)
        return values.take(held)
    numbers: Floats = held.astype(np.float32)
    return numbers


@cache
def _make_lookup(number: str, place: int | None, held: int) -> NDArray[Any]:
    """Returns what one or two bytes stand for, all their numbers as one element.

    `place`: of the only number of each byte that is wanted; None for all. `held`: how many bytes.
    """
    table = make_table(number)
    if place is not None:
        table = table[:, place : place + 1]
    if held > 1:
        first, second = np.tile(table, (_BYTE, 1)), np.repeat(table, _BYTE, axis=0)
        table = np.concatenate([first, second], axis=1)
    lookup: NDArray[Any] = np.ascontiguousarray(table).view(_WIDE[table.shape[1]]).reshape(-1)
    return lookup


def _expand(codes: NDArray[np.uint8], number: str, place: int | None = None) -> NDArray[np.uint8]:
    """Returns the bits of each number of bytes as a byte, those of a row in a row."""
    bits = _BITS.get(number, 8)
    if place is not None:
        return (codes >> np.uint8(place * bits)) & np.uint8((1 << bits) - 1)
    for size in (4, 2):
        if size >= bits:
            pairs = codes.astype("<u2")
            pairs |= pairs << np.uint16(8 - size)
            pairs &= np.uint16(((1 << size) - 1) * 0x101)
            codes = pairs.view(np.uint8)
    return codes


def _look_up(codes: NDArray[np.uint8], number: str, place: int | None = None) -> Floats:
    """Returns the numbers of bytes, those of a row in a row."""
    if number.startswith("uint"):
        return _expand(codes, number, place).astype(np.float32)
    numbers = 1 if place is not None else make_table(number).shape[1]
    held = 1 if codes.shape[-1] % 2 or 2 * numbers > _MOST_WIDE else 2
    lookup = _make_lookup(number, place, held)
    # Clipping lets numpy write without a copy of its own; no index is out of bounds.
    made: Floats = np.take(lookup, codes.view(f"<u{held}"), mode="clip").view(np.float32)
    return made


class Grid(Struct, frozen=True):
    """Stored matrices of numbers, one after the other."""

    stored: StoredOperand
    rows: int  # of numbers in a matrix
    columns: int
    width: int  # stored elements in a row of the stored matrix
    number: str = ""  # the format of the numbers; empty for plain floats and integers
    packs_rows: bool = False
    order: Order = "plain"
    added: int = 0  # what is added to each stored word of 32 bits
    is_shared: bool = False  # whether there is one matrix for all of the weight

    @property
    def held(self) -> int:
        """How many numbers a stored element holds."""
        if not self.number:
            return 1
        return 8 * self.stored.dtype.itemsize // _BITS.get(self.number, 8)

    def _window(self, rows: Span, columns: Span) -> tuple[Span, Span, bool]:
        """Returns the stored rows and columns of a box, and whether whole rows are read."""
        if self.packs_rows:
            rows = Span(rows.start // self.held, -(-rows.stop // self.held))
        else:
            columns = Span(columns.start // self.held, -(-columns.stop // self.held))
        is_whole = rows.stop - rows.start > 1
        if is_whole and columns != Span(0, self.width):
            itemsize = self.stored.dtype.itemsize
            run = (columns.stop - columns.start) * itemsize
            around = (rows.stop - rows.start) * self.width * itemsize
            is_whole = run < _LONG_RUN_BYTES and around <= _MOST_AROUND_BYTES
        return rows, columns, is_whole

    def demands(self, matrix: int, rows: Span, columns: Span) -> tuple[Demand, ...]:
        """Returns what a box of a matrix is read from."""
        rows, columns, is_whole = self._window(rows, columns)
        high = -(-self.rows // self.held) if self.packs_rows else self.rows
        first = 0 if self.is_shared else matrix * high
        if is_whole:
            span = Span((first + rows.start) * self.width, (first + rows.stop) * self.width)
            return self.stored.demands(span)
        starts = ((first + row) * self.width for row in range(rows.start, rows.stop))
        return tuple(
            demand
            for start in starts
            for demand in self.stored.demands(Span(start + columns.start, start + columns.stop))
        )

    def arrange(self, rows: Span, columns: Span, inputs: Sequence[NDArray[Any]]) -> Window:
        """Returns the stored elements of a box."""
        stored, places, is_whole = self._window(rows, columns)
        high, wide = stored.stop - stored.start, places.stop - places.start
        if is_whole:
            held = inputs[0].reshape(high, self.width)[:, places.start : places.stop]
        else:
            held = inputs[0].reshape(1, wide) if high == 1 else np.stack(inputs)
        return held, stored.start, places.start

    def read(
        self,
        window: Window,
        rows: Span,
        columns: Span,
        *,
        is_transposed: bool = False,
        find: Callable[..., NDArray[Any]] = _look_up,
    ) -> NDArray[Any]:
        """Returns the numbers of a box in a window, of shape [rows, columns], or transposed.

        Stored elements are transposed and not numbers, which take up to eight times the memory.
        `find`: makes of bytes what is returned of their numbers.
        """
        held, first_row, first_place = window
        stored, places, _ = self._window(rows, columns)
        held = held[
            stored.start - first_row : stored.stop - first_row,
            places.start - first_place : places.stop - first_place,
        ]
        high, wide = held.shape
        if not self.number:
            return np.ascontiguousarray(held.T if is_transposed else held, np.float32)
        if self.added:
            held = np.ascontiguousarray(held).view(np.uint32) + np.uint32(self.added)
        first = columns.start - places.start * self.held
        wanted = slice(first, first + columns.stop - columns.start)
        if self.packs_rows:
            first = rows.start - stored.start * self.held
            wanted = slice(first, first + rows.stop - rows.start)
            made = find(np.ascontiguousarray(held.T).view(np.uint8), self.number)[:, wanted]
            return made if is_transposed else made.T
        if is_transposed:
            size = self.stored.dtype.itemsize
            codes = np.ascontiguousarray(held.view(np.uint8).T).reshape(wide, size, high)
            order = _AWQ if self.order == "awq" else range(self.held)
            bytes_and_places = (divmod(place, self.held // size) for place in order)
            parts = [find(codes[:, byte], self.number, at) for byte, at in bytes_and_places]
            return np.stack(parts, axis=1).reshape(-1, high)[wanted]
        made = find(np.ascontiguousarray(held).view(np.uint8), self.number)
        if self.order == "awq":
            made = made.reshape(high, wide, self.held)[:, :, _AWQ].reshape(high, -1)
        return made[:, wanted]


class UnpackedOperand(Struct, frozen=True):
    """A packed weight, as the numbers that it stands for."""

    codes: Grid
    scales: Grid
    blocks: tuple[int, int]  # rows and columns of numbers that share a scale
    shape: Shape  # of the weight
    dtype: DType
    where: str  # of the checkpoint, for messages
    zeros: Grid | None = None  # one for each scale
    offset: float = 0.0  # what is subtracted from each number
    total: StoredOperand | None = None
    total_divides: bool = False
    index: StoredOperand | None = None  # the block of each number along `index_axis`
    index_axis: int = 1
    is_transposed: bool = False
    rounds_scales: bool = False  # to the type of the elements

    @property
    def reads(self) -> tuple[tuple[str, Key], ...]:
        grids = (self.codes, self.scales, *([self.zeros] if self.zeros is not None else []))
        others = [one for one in (self.total, self.index) if one is not None]
        return tuple(
            read for one in (*(grid.stored for grid in grids), *others) for read in one.reads
        )

    def demands(self, span: Span) -> tuple[Demand, ...]:
        return tuple(
            demand
            for box in slabs(self._widen(span), self.shape)
            for part in self._parts(box)
            for demand in part
        )

    def _widen(self, span: Span) -> Span:
        """Returns whole rows where each begun row would have the same bytes read once more."""
        row = max(1, self.shape[-1])
        around = Span(span.start // row * row, -(-span.stop // row) * row)
        is_close = around.stop - around.start <= _MOST_WIDER * (span.stop - span.start)
        return around if self.is_transposed and is_close else span

    def values(self, span: Span, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        values = np.empty(span.stop - span.start, numpy_dtype(self.dtype))
        self.put(span, inputs, values)
        return values

    def put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        """Fills an array with the elements of a range."""
        around = self._widen(span)
        if around != span:
            elements = np.empty(around.stop - around.start, target.dtype)
            self._put(around, inputs, elements)
            target[:] = elements[span.start - around.start : span.stop - around.start]
        else:
            self._put(span, inputs, target)

    def _put(self, span: Span, inputs: Sequence[NDArray[Any]], target: NDArray[Any]) -> None:
        at = made = 0
        for box in slabs(span, self.shape):
            given = []
            for part in self._parts(box):
                given.append(inputs[at : at + len(part)])
                at += len(part)
            shape = box.sizes[-2:]
            for _, rows, columns in self._matrices(box):
                stop = made + math.prod(shape)
                # Products may be infinite, or lose bits at the lower end, as in the libraries.
                with np.errstate(over="ignore", under="ignore"):
                    self._unpack(rows, columns, given[:5], target[made:stop].reshape(shape))
                given, made = given[5:], stop

    def _matrices(self, box: Box) -> Iterator[tuple[int, Span, Span]]:
        """Yields the number of each stored matrix in a box, and the rows and columns of it."""
        outer = self.shape[:-2]
        offsets, sizes = box.offsets[-2:], box.sizes[-2:]
        rows, columns = (
            Span(start, start + size) for start, size in zip(offsets, sizes, strict=True)
        )
        if self.is_transposed:
            rows, columns = columns, rows
        if not outer:
            yield 0, rows, columns
            return
        for place in np.ndindex(*box.sizes[:-2]):
            corner = [start + step for start, step in zip(box.offsets, place, strict=False)]
            yield int(np.ravel_multi_index(corner, outer)), rows, columns

    def _parts(self, box: Box) -> Iterator[tuple[Demand, ...]]:
        """Yields what each part of the matrices is read from: five tuples for each matrix."""
        for matrix, rows, columns in self._matrices(box):
            yield self.codes.demands(matrix, rows, columns)
            of_blocks = self._blocks_of(rows, columns)
            yield self.scales.demands(matrix, *of_blocks)
            yield () if self.zeros is None else self.zeros.demands(matrix, *of_blocks)
            yield () if self.total is None else self.total.demands(Span(0, 1))
            along = (rows, columns)[self.index_axis]
            yield () if self.index is None else self.index.demands(along)

    def _blocks_of(
        self, rows: Span, columns: Span, *, is_ordered: bool = False
    ) -> tuple[Span, Span]:
        high, wide = self.blocks
        of_rows = Span(rows.start // high, -(-rows.stop // high))
        of_columns = Span(columns.start // wide, -(-columns.stop // wide))
        if self.index is None or is_ordered:
            return of_rows, of_columns
        if self.index_axis:
            return of_rows, Span(0, self.scales.columns)
        return Span(0, self.scales.rows), of_columns

    def _unpack(
        self,
        rows: Span,
        columns: Span,
        given: Sequence[Sequence[NDArray[Any]]],
        target: NDArray[Any],
    ) -> None:
        """Fills an array with the elements of a box of the stored matrix, tile by tile."""
        codes, scales, zeros, total, index = given
        of_blocks = self._blocks_of(rows, columns)
        numbers = self.codes.arrange(rows, columns, codes)
        factors = self.scales.arrange(*of_blocks, scales)
        points = None if self.zeros is None else self.zeros.arrange(*of_blocks, zeros)
        whole = total[0].astype(np.float32) if total else None
        if whole is not None:
            self._check(whole, self.total or self.scales.stored)
        order = None
        if index and self.index is not None:
            order = self._order(index[0], self.index, (rows, columns)[self.index_axis])
        is_transposed = self.is_transposed
        is_looked_up = (
            self.codes.number == "uint4"
            and self.dtype.name == "float16"
            and math.prod(self.blocks) >= _FEWEST_ROUNDED
        )
        find = _expand if is_looked_up else _look_up
        high, wide = (columns, rows) if is_transposed else (rows, columns)  # of the weight
        for across in cut_span(wide, _TILE_WIDTH if is_transposed else _TILE_ELEMENTS):
            for down in cut_span(high, max(1, _TILE_ELEMENTS // (across.stop - across.start))):
                tile = (across, down) if is_transposed else (down, across)
                values = self.codes.read(numbers, *tile, is_transposed=is_transposed, find=find)
                of_tile = self._blocks_of(*tile, is_ordered=order is None)
                scale = self.scales.read(factors, *of_tile, is_transposed=is_transposed)
                self._check(scale.T if is_transposed else scale, self.scales.stored, of_tile)
                if whole is not None:
                    scale = scale / whole if self.total_divides else scale * whole
                if self.rounds_scales:
                    scale = scale.astype(numpy_dtype(self.dtype)).astype(np.float32)
                part = order
                if order is not None:
                    at, box = tile[self.index_axis], (rows, columns)[self.index_axis]
                    part = order[at.start - box.start : at.stop - box.start]
                zero = None
                if self.zeros is not None and points is not None:
                    zero = self.zeros.read(points, *of_tile, is_transposed=is_transposed)
                if is_looked_up:
                    values = self._find_rounded(values, scale, zero, tile, part)
                else:
                    if self.offset:
                        values -= np.float32(self.offset)
                    if zero is not None:
                        self._apply(np.subtract, values, zero, tile, part)
                    self._apply(np.multiply, values, scale, tile, part)
                lines = target[down.start - high.start : down.stop - high.start]
                copy_rounded(values, lines[:, across.start - wide.start : across.stop - wide.start])

    def _find_rounded(
        self,
        codes: NDArray[np.uint8],
        scale: Floats,
        zero: Floats | None,
        tile: tuple[Span, Span],
        order: NDArray[np.int64] | None,
    ) -> NDArray[Any]:
        """Returns the elements of a tile. A block has at most sixteen different ones."""
        possible = make_table("uint4")[:_POSSIBLE, 0] - np.float32(self.offset)
        made = np.tile(possible, (scale.size, 1))
        if zero is not None:
            made -= zero.reshape(-1, 1)
        made *= scale.reshape(-1, 1)
        rounded = np.empty(made.shape, numpy_dtype(self.dtype))
        copy_rounded(made, rounded)
        places = codes.astype(np.intp)
        blocks = np.arange(scale.size).reshape(scale.shape) * _POSSIBLE
        self._apply(np.add, places, blocks, tile, order)
        elements: NDArray[Any] = np.take(rounded.reshape(-1), places, mode="clip")
        return elements

    def _apply(
        self,
        change: np.ufunc,
        values: NDArray[Any],
        of_blocks: NDArray[Any],
        tile: tuple[Span, Span],
        order: NDArray[np.int64] | None,
    ) -> None:
        """Changes each value in place by that of its block, such as subtracts a zero point.

        `tile`: the rows and columns of the stored matrix that the values are of.
        """
        (high, wide), axis = self.blocks, self.index_axis
        row, column = tile[0].start, tile[1].start
        if self.is_transposed:
            high, wide, row, column, axis = wide, high, column, row, 1 - axis
        if order is not None:
            of_blocks = np.take(of_blocks, order, axis=axis)
            high, wide = (high, 1) if axis else (1, wide)
        if wide > 1 and of_blocks.shape[1] > 1:
            first = column % wide
            of_blocks = np.repeat(of_blocks, wide, axis=1)[:, first : first + values.shape[1]]
        if high == 1 or of_blocks.shape[0] == 1:
            change(values, of_blocks, out=values)
            return
        for number, factors in enumerate(of_blocks, row // high):
            part = values[max(0, number * high - row) : (number + 1) * high - row]
            change(part, factors, out=part)

    def _order(
        self, index: NDArray[Any], stored: StoredOperand, place: Span
    ) -> NDArray[np.int64] | None:
        """Returns the block of each number; None where they are in order."""
        blocks = self.scales.columns if self.index_axis else self.scales.rows
        wrong = (index < 0) | (index >= blocks)
        if wrong.any():
            raise RefusedError(
                f"tensor {stored.key!r} names block {int(index[wrong][0])}, and there are"
                f" {blocks:,}",
                where=self.where,
                hint="the file is damaged: download it again",
            )
        ordered = np.arange(place.start, place.stop) // self.blocks[self.index_axis]
        return None if np.array_equal(index, ordered) else index.astype(np.int64)

    def _check(
        self, scales: Floats, stored: StoredOperand, box: tuple[Span, Span] | None = None
    ) -> None:
        """Refuses scales that no packed weight can have."""
        is_wrong = ~np.isfinite(scales) | (scales == 0)
        if not is_wrong.any():
            return
        place = np.argwhere(is_wrong)[0].tolist()
        found = scales[tuple(place)]
        if box is not None:
            place = [span.start + step for span, step in zip(box, place, strict=True)]
        raise RefusedError(
            f"tensor {stored.key!r} has the scale {found:g} at {place}, with which numbers have no"
            " meaning",
            where=self.where,
            hint="the file is damaged, or was not written whole: download it again",
        )
