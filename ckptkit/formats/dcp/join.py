"""The tables of `.metadata` as numpy columns, joined: each chunk has exactly one stored item."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.errors import FormatError, UnsafePathError, UnsupportedError
from ckptkit.core.geometry import distinct
from ckptkit.core.text import quote
from ckptkit.formats.dcp.shortcuts import (
    CHUNK,
    INDEX,
    INFO,
    ChunkRun,
    EntryRun,
    RunValues,
    ShortcutError,
    Unread,
    flatten,
    is_size,
)
from ckptkit.formats.pickle.machine import Global, InertObject

Ints = NDArray[np.int64]
_MAX_TRANSFORMS = 16
MAX_OFFSET = 2**63 - 1
NO_OFFSET = -1
_CLIMBS = re.compile(r"(?:^|[/\\])\.\.(?:$|[/\\])")
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:")
_HINT = "the file is damaged; take another copy of it"


class Location(Struct, frozen=True):
    """The file, or a tensor in it, that errors are about."""

    text: str

    def tensor(self, key: str) -> Location:
        return Location(f"{self.text}, key {quote(key)}" if self.text else f"key {quote(key)}")

    def error(self, message: str) -> FormatError:
        return FormatError(message, where=self.text, hint=_HINT)


class _Lookup(dict[int, int]):
    """Caches the translation of positions of texts to numbers."""

    def __init__(self, translate: Callable[[int], int]) -> None:
        super().__init__()
        self.translate = translate

    def __missing__(self, position: int) -> int:
        self[position] = number = self.translate(position)
        return number

    def column(self, positions: Ints) -> bytes:
        return array("i", map(self.__getitem__, positions.tolist())).tobytes()


class TensorRows:
    """The chunks of all tensors; `offset` and `size` are positions in `RunValues.sizes`."""

    def __init__(self, values: RunValues, where: Location) -> None:
        self.values = values
        self.where = where
        self.offset = array("i")
        self.size = array("i")
        self.numbers: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.itemsizes: list[int] = []
        self.counts: list[int] = []
        self._seen: set[int] = set()

    def add(
        self, key: str, number: int, shape: tuple[int, ...], itemsize: int, chunks: object
    ) -> None:
        """Adds the chunks of one tensor."""
        where = self.where.tensor(key)
        # A list that two tensors shared would be walked once for each of them.
        if not isinstance(chunks, list) or id(chunks) in self._seen:
            raise where.error("chunks are not a list that only this tensor has")
        self._seen.add(id(chunks))
        before = len(self.offset)
        for chunk in chunks:
            if isinstance(chunk, ChunkRun):
                self.offset.frombytes(chunk.offsets.astype(np.int32).tobytes())
                self.size.frombytes(chunk.sizes.astype(np.int32).tobytes())
            else:
                fields = fields_of(chunk, CHUNK, where)
                self.offset.append(_position(self.values, fields.get("offsets"), where))
                self.size.append(_position(self.values, fields.get("sizes"), where))
        chunks.clear()
        self.numbers.append(number)
        self.shapes.append(shape)
        self.itemsizes.append(itemsize)
        self.counts.append(len(self.offset) - before)


class StorageRows:
    """The stored items, from `storage_data`.

    Columns: `key` numbers of keys, `offset` positions in `RunValues.sizes` or -1, `file` positions
    in `paths`, `start` and `length` in bytes.
    """

    def __init__(self, values: RunValues, numbers: dict[str, int], where: Location) -> None:
        self.values = values
        self.numbers = numbers
        self.where = where
        self.paths: dict[str, int] = {}
        self.key, self.offset, self.file = array("i"), array("i"), array("i")
        self.start, self.length = array("q"), array("q")
        self._transforms: dict[int, dict[tuple[str, ...], None]] = {}

    def read(self, table: dict[Any, Any]) -> None:
        """Adds all items."""
        texts = self.values.texts
        keys = _Lookup(lambda position: self._number(texts[position]))
        paths = _Lookup(lambda position: self._file(texts[position]))
        for index, info in table.items():
            if isinstance(index, EntryRun):
                self.key.frombytes(keys.column(index.fqn))
                self.offset.frombytes(index.offset.astype(np.int32).tobytes())
                self.file.frombytes(paths.column(index.path))
                self.start.frombytes(index.start.tobytes())
                self.length.frombytes(index.length.tobytes())
            else:
                self._add(index, info)

    @property
    def transformed(self) -> list[int]:
        return list(self._transforms)

    def transforms_of(self, key: str) -> tuple[tuple[str, ...], ...]:
        return tuple(self._transforms.get(self.numbers[key], ()))

    def _add(self, index: object, info: object) -> None:
        index_fields = fields_of(index, INDEX, self.where)
        number = self._number(index_fields.get("fqn"))
        where = self.where.tensor(index_fields["fqn"])
        if type(index_fields.get("index")) not in {int, type(None)}:
            raise where.error("index hint is not an integer")
        offset = index_fields.get("offset")
        fields = fields_of(info, INFO, where)
        for column, name in ((self.start, "offset"), (self.length, "length")):
            value = fields.get(name)
            if type(value) is not int or not -MAX_OFFSET <= value <= MAX_OFFSET:
                raise where.error(f"{name} of its stored bytes is not an integer below 2**63")
            column.append(value)
        self.key.append(number)
        self.offset.append(NO_OFFSET if offset is None else _position(self.values, offset, where))
        self.file.append(self._file(fields.get("relative_path")))
        names = fields.get("transform_descriptors")
        if names:
            if not isinstance(names, list | tuple) or len(names) > _MAX_TRANSFORMS:
                raise where.error("transform descriptors are not a short list")
            if not all(isinstance(name, str) for name in names):
                raise where.error("a transform descriptor is not a string")
            self._transforms.setdefault(number, {})[tuple(names)] = None

    def _number(self, key: object) -> int:
        if not isinstance(key, str):
            raise self.where.error("key of a stored item is not a string")
        number = self.numbers.get(key)
        if number is None:
            raise self.where.tensor(key).error("it is stored, but the index does not name it")
        return number

    def _file(self, path: object) -> int:
        if not isinstance(path, str):
            raise self.where.error("relative path of a data file is not a string")
        if path not in self.paths:
            if not path or "\0" in path or _ABSOLUTE.match(path) or _CLIMBS.search(path):
                raise UnsafePathError(
                    f"data file {quote(path)} is not inside the folder of the checkpoint",
                    where=self.where.text,
                    hint="checkpoint libraries write plain file names; do not trust this file",
                )
            self.paths[path] = len(self.paths)
        return self.paths[path]


def fields_of(value: object, cls: Global, where: Location) -> dict[str, Any]:
    """Returns the fields of an inert instance of a dataclass."""
    if isinstance(value, Unread):
        raise ShortcutError
    if not isinstance(value, InertObject):
        raise where.error(f"expected a {cls.name}, found something else")
    # Libraries have copies of torch's classes, and classes derived from them, of the same names.
    if value.cls.name != cls.name:
        raise UnsupportedError(
            f"has an object of {quote(str(value.cls))} where torch has a {quote(cls.name)}",
            where=where.text,
            hint="read it with the library of that class, and save it with"
            " torch.distributed.checkpoint",
        )
    if not isinstance(value.state, dict):
        raise where.error(f"a {cls.name} has no fields")
    return value.state


def _position(values: RunValues, value: object, where: Location) -> int:
    if not is_size(value):
        raise where.error("offset or size of a chunk is not a short tuple of integers below 2**63")
    values.sizes.append(cast("tuple[int, ...]", value))
    return len(values.sizes) - 1


Columns = tuple[Ints, Ints, NDArray[np.int32], Ints, Ints]  # as in DcpTensor, `offsets` to `length`
StoredRange = tuple[int, int, int]  # file, start, length
_Mask = NDArray[np.bool_]
LEAST_ARCHIVE_BYTES = 1_024
"""All archives of `torch.save` are longer than this, and all padding between two is shorter."""

_BLOCK_CELLS = 1 << 20
_NO_RANK = -1


class Join:
    """Finds the stored bytes of every chunk.

    Blocks of tensors with equally many dimensions are processed, so that temporary arrays stay
    small.
    """

    def __init__(
        self, rows: TensorRows, entries: StorageRows, keys: list[str], *, is_raw: bool = False
    ) -> None:
        self.keys = keys
        self.is_raw = is_raw  # stored are the elements, without a container
        self.where = rows.where
        self.numbers = np.array(rows.numbers, np.int64)
        self.shapes = rows.shapes
        self.itemsizes = np.array(rows.itemsizes, np.int64)
        self.counts = np.array(rows.counts, np.int64)
        self.stops = np.cumsum(self.counts)
        self.chunk_offset = np.frombuffer(rows.offset, np.int32)
        self.chunk_size = np.frombuffer(rows.size, np.int32)
        self.values, self.first, self.ranks = flatten([*rows.values.sizes, ()])
        self.key = np.frombuffer(entries.key, np.int32)
        self.offset = np.frombuffer(entries.offset, np.int32)
        self.file = np.frombuffer(entries.file, np.int32)
        self.start = np.frombuffer(entries.start, np.int64)
        self.length = np.frombuffer(entries.length, np.int64)
        self.transformed = np.array(entries.transformed, np.int64)
        self.rank_of_key = np.full(len(keys), _NO_RANK, np.int64)
        self.rank_of_key[self.numbers] = [len(shape) for shape in rows.shapes]
        self.by_key = np.argsort(self.key, kind="stable")
        self.bounds = np.searchsorted(self.key[self.by_key], np.arange(len(keys) + 1))
        self.tied_files: dict[int, int] = {}  # files with shared bytes: the end of the last chunk
        self.is_bare = True  # no stored item is longer than its elements
        self.short: set[int] = set()  # keys of tensors with items that are shorter

    def run(self) -> tuple[dict[str, Columns], dict[str, StoredRange]]:
        """Returns the columns of each tensor, and the stored bytes of each Python object."""
        self._check_entries()
        objects = self._objects()
        used = []
        tensors: dict[str, Columns] = {}
        for block in self._blocks():
            columns, entries = self._block(block)
            tensors.update(columns)
            used.append(entries)
        chunks = np.concatenate([objects[:0], *used])
        if self.is_raw and not self.is_bare:
            raise self.where.error("chunks do not have the lengths of their elements")
        self.is_bare &= not self.is_raw
        is_bare = self.is_bare and len(chunks) > 0
        self.is_bare = is_bare and not np.isin(self.key[chunks], self.transformed).any()
        try:
            self._check_overlaps(objects, objects if self.is_bare else np.append(objects, chunks))
        except FormatError as error:
            if self.is_bare or not is_bare:
                raise
            raise UnsupportedError(  # torch writes compressed images wrongly
                "chunks are said to be compressed, and to have the length of their elements:"
                " SerializationFormat.SAFETENSORS together with an extension is not read",
                where=self.where.text,
                hint="save with one of the two",
            ) from error
        if self.is_bare:
            self._check_images(objects, chunks)
        ranges = {
            self.keys[self.key[row]]: (
                int(self.file[row]),
                int(self.start[row]),
                int(self.length[row]),
            )
            for row in objects.tolist()
        }
        return tensors, ranges

    def _fail(self, number: int | np.integer[Any], message: str) -> FormatError:
        return self.where.tensor(self.keys[number]).error(message)

    def _check_entries(self) -> None:
        """Checks each stored item by itself."""
        ranks = np.where(self.offset == NO_OFFSET, _NO_RANK, self.ranks[self.offset])
        for bad, message in (
            (
                (self.start < 0) | (self.length < 0) | (self.start > MAX_OFFSET - self.length),
                "its stored bytes have a negative start or length, or end beyond 2**63",
            ),
            (
                ranks != self.rank_of_key[self.key],
                "offset of a stored item does not have the dimensions that the tensor has",
            ),
        ):
            if bad.any():
                raise self._fail(self.key[np.argmax(bad)], message)

    def _objects(self) -> Ints:
        """Returns the rows of Python objects, one for each."""
        rows = np.flatnonzero(self.rank_of_key[self.key] == _NO_RANK)
        times = np.bincount(self.key[rows], minlength=len(self.keys))
        bad = (times != 1) & (self.rank_of_key == _NO_RANK)
        if bad.any():
            number = np.argmax(bad)
            raise self._fail(number, f"it is an object stored {times[number]:,} times, not once")
        return rows

    def _blocks(self) -> Iterator[list[int]]:
        """Yields positions of tensors with equally many dimensions, a bounded number of rows."""
        by_rank: dict[int, list[int]] = {}
        for tensor, shape in enumerate(self.shapes):
            by_rank.setdefault(len(shape), []).append(tensor)
        for rank, tensors in by_rank.items():
            block: list[int] = []
            cells = 0
            for tensor in tensors:
                block.append(tensor)
                cells += int(self.counts[tensor]) * (rank + 1)
                if cells >= _BLOCK_CELLS:
                    yield block
                    block, cells = [], 0
            if block:
                yield block

    def _block(self, block: list[int]) -> tuple[dict[str, Columns], Ints]:
        """Returns the columns of some tensors, and the stored items that they use."""
        counts = self.counts[block]
        owner = np.repeat(np.arange(len(block)), counts)
        number = self.numbers[block][owner]
        rows = _ranges(self.stops[block] - counts, counts)
        rank = len(self.shapes[block[0]])
        offsets = self._boxes(self.chunk_offset[rows], number, rank)
        sizes = self._boxes(self.chunk_size[rows], number, rank)
        shapes = np.array([self.shapes[tensor] for tensor in block], np.int64)[owner]
        bad = (offsets < 0) | (sizes < 0) | (offsets > shapes) | (sizes > shapes - offsets)
        self._refuse(
            np.logical_or.reduce(bad, axis=1), number, "a chunk lies partly outside of its tensor"
        )
        # No bytes are stored of tensors without elements; their chunks have to reach as far.
        for at, tensor in enumerate(block):
            shape = self.shapes[tensor]
            if 0 in shape and self.counts[tensor]:
                reach = (offsets + sizes)[owner == at].max(axis=0).tolist()
                if reach != list(shape):
                    message = f"its chunks reach to {reach}, its shape is {list(shape)}"
                    raise self._fail(self.numbers[tensor], message)
        full = np.logical_and.reduce(sizes > 0, axis=1)
        first = self.bounds[self.numbers[block]]
        stored = self.bounds[self.numbers[block] + 1] - first
        entry = self._match(number, offsets, full, self.by_key[_ranges(first, stored)])
        offsets, sizes, number, owner = offsets[full], sizes[full], number[full], owner[full]
        size_bytes = sizes.prod(axis=1) * self.itemsizes[block][owner]
        short = (self.length[entry] < size_bytes) & ~np.isin(number, self.transformed)
        self.short.update(distinct(number[short]).tolist())
        self.is_bare &= bool((self.length[entry] == size_bytes).all())
        file, start, length = self.file[entry], self.start[entry], self.length[entry]
        stops = np.cumsum(np.bincount(owner, minlength=len(block))).tolist()
        columns: dict[str, Columns] = {}
        for tensor, *bounds in zip(block, [0, *stops], stops, strict=False):
            own = slice(*bounds)
            key = self.keys[self.numbers[tensor]]
            columns[key] = (offsets[own], sizes[own], file[own], start[own], length[own])
        return columns, entry

    def _boxes(self, positions: NDArray[np.int32], number: Ints, rank: int) -> Ints:
        """Looks up tuples by position, as rows of a matrix."""
        message = f"a chunk does not have the {rank} dimensions that the tensor has"
        self._refuse(self.ranks[positions] != rank, number, message)
        boxes: Ints = self.values[self.first[positions][:, None] + np.arange(rank)]
        return boxes

    def _refuse(self, bad: _Mask, number: Ints, message: str) -> None:
        if bad.any():
            raise self._fail(number[np.argmax(bad)], message)

    def _match(self, number: Ints, offsets: Ints, full: _Mask, entries: Ints) -> Ints:
        """Returns the stored item of each chunk that has elements.

        Chunks without elements may have none, share one, or have several: the parts of a tensor
        without elements that several ranks hold all have the same offsets.
        """
        rank = offsets.shape[1]
        stored_for = self.key[entries].astype(np.int64)
        keys = np.concatenate([number, stored_for])
        stored = self._boxes(self.offset[entries], stored_for, rank)
        places = np.concatenate([offsets, stored])
        group, examples = _groups(keys, places)
        chunk_group, entry_group = group[: len(number)], group[len(number) :]
        chunks, empty, items = (
            np.bincount(some, minlength=len(examples))
            for some in (chunk_group[full], chunk_group[~full], entry_group)
        )
        for bad, message in (
            (chunks > 1, "two chunks begin at the same element"),
            ((items > 1) & (chunks > 0), "one chunk is stored twice"),
            (chunks > items, "a chunk is stored nowhere"),
            ((items > 0) & (chunks + empty == 0), "something is stored that is none of its chunks"),
        ):
            if bad.any():
                example = examples[np.argmax(bad)]
                raise self._fail(keys[example], f"{message}, at {places[example].tolist()}")
        entry_of_group = np.zeros(len(examples), np.int64)
        entry_of_group[entry_group] = entries
        return entry_of_group[chunk_group[full]]

    def _check_overlaps(self, objects: Ints, rows: Ints) -> None:
        """Refuses items that share bytes, except for tied tensors, whose bytes are identical.

        If one of two equal tensors refers to the other's bytes by mistake, its own bytes are a hole
        to which nothing refers.
        """
        rows = rows[self.length[rows] > 0]
        order = rows[np.lexsort((self.length[rows], self.start[rows], self.file[rows]))]
        file, start = self.file[order], self.start[order]
        stop = start + self.length[order]
        alike = file[1:] == file[:-1]
        tied = alike & (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
        tied &= ~(np.isin(order[1:], objects) | np.isin(order[:-1], objects))
        bad = alike & (start[1:] < stop[:-1]) & ~tied
        if bad.any():
            at = int(np.argmax(bad))
            other = self.keys[self.key[order[at]]]
            raise self._fail(
                self.key[order[at + 1]],
                f"its bytes from {start[at + 1]:,} overlap those of {other[:200]!r}, which end at"
                f" {stop[at]:,} of the same file",
            )
        for number in distinct(file[1:][tied]).tolist():
            self.tied_files[number] = self._check_holes(number)

    def _check_holes(self, number: int) -> int:
        """Refuses bytes of a file that nothing refers to; returns where the last item ends.

        What is stored of tensors without elements counts, though it is read for none of them.
        """
        rows = np.flatnonzero((self.file == number) & (self.length > 0))
        rows = rows[np.argsort(self.start[rows], kind="stable")]
        start = self.start[rows]
        stop = np.maximum.accumulate(start + self.length[rows])
        before = np.concatenate([np.zeros(1, np.int64), stop[:-1]])
        holes = np.flatnonzero(start - before >= LEAST_ARCHIVE_BYTES)
        if len(holes):
            at = int(holes[0])
            raise self._fail(
                self.key[rows[at]],
                f"the {start[at] - before[at]:,} bytes before it belong to nothing,"
                " while others of the file belong to two tensors",
            )
        return int(stop[-1])

    def _check_images(self, objects: Ints, chunks: Ints) -> None:
        """Checks files in which all chunks are in one image after the objects.

        According to `.metadata` each chunk begins where the image does and has its own length; the
        true positions are in the header of the image.
        """
        image = np.full(int(self.file.max()) + 1, -1, np.int64)
        image[self.file[chunks]] = self.start[chunks]
        bad = image[self.file[chunks]] != self.start[chunks]
        self._refuse(
            bad,
            self.key[chunks].astype(np.int64),
            "it is listed in another image of the same file",
        )
        start = image[self.file[objects]]
        bad = (start >= 0) & (self.start[objects] + self.length[objects] > start)
        self._refuse(bad, self.key[objects].astype(np.int64), "its bytes overlap those of tensors")


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Returns start, start + 1, … of all ranges in one column."""
    before = np.cumsum(counts) - counts
    rows: Ints = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return rows


def _groups(keys: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Numbers distinct rows; returns the number of each row, and one row of each number."""
    order = np.lexsort((*places.T[::-1], keys))
    changes = np.zeros(len(order), np.bool_)
    changes[:1] = True
    for column in (keys, *places.T):
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(changes) - 1
    return group, order[changes]
