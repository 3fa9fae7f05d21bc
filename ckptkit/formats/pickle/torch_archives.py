"""Files of `torch.save`: opening them, the tables of their storages, and checks of their contents.

Torch writes a zip archive, and before 1.6 (or when asked to) the legacy layout. In that, five
pickles follow one another: a magic number, the version of the layout, facts about the machine, the
object, and the keys of the storages; then, key by key, a count of elements (int64) and the
elements. It has no checksums.

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch/csrc/serialization.cpp
(`THPStorage_writeFileRaw`), torch 0.4 to 2.14.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import FormatError, LimitError, TruncatedFileError, UnsupportedError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import Box, Chunk, FileRange, Record, Shape, Span
from ckptkit.core.text import quote
from ckptkit.formats.base import errors_at
from ckptkit.formats.parsing import MAX_DIMENSIONS, FileTable, Read, is_count, read_from
from ckptkit.formats.pickle.machine import Global, InertObject
from ckptkit.formats.pickle.pickles import parse_first_pickle, parse_pickle
from ckptkit.formats.pickle.torch_values import ALLOWED, StorageRef, TensorRef, storage_ref
from ckptkit.formats.pickle.torch_zip import MAX_PICKLE_BYTES, ZipArchive, open_archive
from ckptkit.storage.base import Source

_LEAST_VALUES = 1 << 16


class PickledDict(Struct, frozen=True):
    """A dictionary of a pickle, whose values are checked when they are read."""

    values: Mapping[Any, Any]
    where: str  # the file and the keys that lead to the dictionary, for messages

    def inner(self, key: str | int) -> PickledDict:
        """Returns the dictionary under a key; an empty one if the key is absent."""
        return _to_dict(self.values.get(key), f"{self.where}, {key!r}")

    def inner_list(self, key: str) -> list[PickledDict]:
        where = f"{self.where}, {key!r}"
        return [_to_dict(item, where) for item in self.sequence(key)]

    def sequence(self, key: str) -> Sequence[Any]:
        """Returns the list under a key; an empty one if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)):
            raise self.error(f"{key!r} is not a list")
        return value

    def vectors(self, key: str) -> list[TensorRef]:
        items = self.sequence(key)
        for item in items:
            if not (isinstance(item, TensorRef) and len(item.shape) == 1 and item.row_major):
                raise self.error(f"{key!r} holds something that is not a flat tensor")
        return list(items)

    def count(self, key: str) -> int | None:
        """Returns the natural number under a key; None if the key is absent."""
        value = self.values.get(key)
        if value is not None and not is_count(value):
            raise self.error(f"{key!r} is not a natural number")
        return value

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def shapes(self) -> dict[str, Shape]:
        for name, shape in self.values.items():
            is_short = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
            if not (isinstance(name, str) and is_short and all(map(is_count, shape))):
                raise self.error("holds something that is not the shape of a parameter")
        return dict(self.values)

    def tensor(self, name: str) -> TensorRef:
        value = self.values.get(name)
        if not isinstance(value, TensorRef):
            raise self.error(f"holds no tensor {quote(name)}")
        return value

    def error(self, message: str) -> FormatError:
        return FormatError(message, where=self.where)


def _to_dict(value: object, where: str) -> PickledDict:
    if value is None:
        return PickledDict({}, where)
    if isinstance(value, dict):
        return PickledDict(value, where)
    if isinstance(value, InertObject) and isinstance(value.state, dict):
        return PickledDict(value.state, where)
    raise FormatError("is not a dictionary", where=where)


class TorchArchive(Struct, frozen=True):
    path: str
    number: int  # its position among the files of the index
    root: object  # in which tensors are `TensorRef`s
    pickle_bytes: int
    archive: ZipArchive | LegacyArchive

    @property
    def is_legacy(self) -> bool:
        return isinstance(self.archive, LegacyArchive)

    @property
    def most_values(self) -> int:
        """How many values the pickle may unfold into, where some are shared."""
        return max(self.pickle_bytes, _LEAST_VALUES)

    @property
    def where(self) -> str:
        return self.archive.where

    def dictionary(self) -> PickledDict:
        """Returns the value of the pickle, which has to be a dictionary."""
        if not isinstance(self.root, dict):
            raise FormatError("holds no dictionary", where=self.where)
        return PickledDict(self.root, self.where)


class ArchiveTable(FileTable):
    """The opened archives of an index, and the records of the storages that its tensors use."""

    def open(
        self, source: Source, path: str, allowed: Mapping[tuple[str, str], object] = ALLOWED
    ) -> TorchArchive:
        file = source.stat(path)
        where = posixpath.join(source.location, path)
        read, size_bytes = read_from(source, path), file.size_bytes
        archive: ZipArchive | LegacyArchive
        with errors_at(where):
            if is_legacy(read(0, min(HEAD_BYTES, size_bytes))):
                root, pickle_bytes, archive = open_legacy(read, size_bytes, allowed, where=where)
            else:
                archive = open_archive(read, size_bytes, where=where)
                pickle = archive.pickle()
                root = parse_pickle(pickle, allowed, where=where, persistent=storage_ref)
                pickle_bytes = len(pickle)
        return TorchArchive(path, self.add_file(file), root, pickle_bytes, archive)

    def record(self, file: TorchArchive, tensor: TensorRef) -> int:
        """Returns the position of the record of a tensor's storage, which is added if new."""
        storage = tensor.storage
        number = self._numbers.get((file.number, storage.key))
        if number is None:
            start, stop, crc32 = file.archive.extent(storage)
            record = Record(file.number, start, stop, crc32=crc32)
            number = self.add_record(record, (file.number, storage.key))
        record = self.records[number]
        if record.stop - record.start != storage.size_bytes:
            raise FormatError(
                f"storage {quote(storage.key)} has two different lengths", where=file.where
            )
        return number

    def chunk(
        self,
        file: TorchArchive,
        tensor: TensorRef,
        rank: int | None = None,
        place: Box | Span | None = None,
        skipped: int = 0,
    ) -> Chunk:
        """Returns the chunk of a tensor: the whole of it, or what is at a place of a larger one.

        The first of its elements is `skipped` elements after the tensor's first in the storage.
        """
        if isinstance(place, Span):
            is_plain = True
        else:
            place = place or Box((0,) * len(tensor.shape), tensor.shape)
            is_plain = is_row_major(place.sizes, tensor.strides)
        return Chunk(
            place,
            self.record(file, tensor),
            byte_offset=(tensor.storage_offset + skipped) * tensor.dtype.itemsize,
            strides=None if is_plain else tensor.strides,
            rank=rank,
        )


HEAD_BYTES = 512  # enough to distinguish the layouts
_PICKLE = b"\x80"  # the first byte of every pickle of protocol 2 and later
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC_LINE = b"L%dL\n." % _MAGIC_NUMBER  # the same, pickled with protocol 1
_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # the same, pickled
_MAGIC_WITHIN = 32
_TAR, _TAR_AT = b"ustar", 257
_VERSION = 1001
_COUNT_BYTES = 8
_FIRST_WINDOW = 1 << 16
_GROWTH = 4
_SAVE_AGAIN = "save it again: `torch.save(torch.load(path, weights_only=True), path)`"


def is_legacy(head: bytes) -> bool:
    """Returns whether a file has the legacy layout, by its first `HEAD_BYTES`."""
    if head[_TAR_AT:].startswith(_TAR):
        raise UnsupportedError(
            "file is the tar archive that torch wrote before 0.1.10, which is not modelled",
            hint="load it with `torch.load(path, weights_only=False)` if you trust it, and save it"
            " again",
        )
    if not head.startswith(_PICKLE):
        return head.startswith(_MAGIC_LINE)
    if len(head) >= _MAGIC_WITHIN and _MAGIC not in head[:_MAGIC_WITHIN]:
        raise UnsupportedError(
            "file is a plain pickle, not what `torch.save` writes",
            hint="load it with the program that wrote it, and save its tensors with `torch.save`",
        )
    return True


class LegacyArchive(Struct, frozen=True):
    read: Read
    storages: Mapping[str, StorageRef]
    starts: Mapping[str, int]  # the first byte of the elements of each storage
    where: str

    def extent(self, storage: StorageRef) -> tuple[int, int, None]:
        """Returns a storage's first byte and the byte after its last; there is no checksum."""
        first = self.storages[storage.key]
        start = self.starts[storage.key]
        count = int.from_bytes(self.read(start - _COUNT_BYTES, start), "little", signed=True)
        if count != first.elements:
            raise FormatError(
                f"storage {quote(storage.key)} has {count:,} elements, its tensors need"
                f" {first.elements:,}",
                where=self.where,
            )
        return start, start + first.size_bytes, None


def open_legacy(
    read: Read, size_bytes: int, allowed: Mapping[tuple[str, str], object], *, where: str
) -> tuple[object, int, LegacyArchive]:
    at = 0
    collector = _StorageCollector()

    def parse_next(
        allowed: Mapping[tuple[str, str], object], storages: _StorageCollector | None = None
    ) -> object:
        """Parses the next pickle, in windows that grow until it ends inside one."""
        nonlocal at
        window = _FIRST_WINDOW
        place = f"{where}: pickle at byte {at:,}"
        while True:
            stop = min(at + window, size_bytes)
            collector.by_key.clear()  # of a window that was too short
            try:
                value, length = parse_first_pickle(
                    read(at, stop), allowed, where=place, persistent=storages
                )
            except TruncatedFileError:
                if stop == size_bytes:
                    raise
            else:
                at += length
                return value
            if window >= MAX_PICKLE_BYTES:
                raise LimitError(
                    f"pickle has more than {MAX_PICKLE_BYTES:,} bytes, as no real one has"
                )
            window *= _GROWTH

    if parse_next({}) != _MAGIC_NUMBER:
        raise FormatError("does not begin with torch's magic number")
    version, machine = parse_next({}), parse_next({})
    if version != _VERSION:
        actual = f"version {version}" if type(version) is int else "no number for a version"
        raise UnsupportedError(
            f"layout has {actual}, only {_VERSION:,} is modelled", hint=_SAVE_AGAIN
        )
    is_little = machine.get("little_endian") if isinstance(machine, dict) else None
    if is_little is False:
        raise UnsupportedError("numbers are stored big-endian, only little-endian is modelled")
    if is_little is not True:
        raise FormatError("does not state the byte order of its numbers")
    start = at
    root = parse_next(allowed, collector)
    pickle_bytes, storages = at - start, dict(collector.by_key)
    keys = parse_next({})
    starts = _locate_storages(keys, storages, at, size_bytes)
    return root, pickle_bytes, LegacyArchive(read, storages, starts, where)


class _StorageCollector:
    """Resolves persistent ids, and collects the storages that they name."""

    def __init__(self) -> None:
        self.by_key: dict[str, StorageRef] = {}

    def __call__(self, identity: object) -> StorageRef | Global:
        match identity:
            case ("module", Global() as cls, *_):  # of torch.nn, with its source
                return cls
            case ("storage", _, _, _, _, None):
                storage = storage_ref(identity[:-1])
            case ("storage", _, _, _, _, _):
                raise UnsupportedError(
                    "storage is a view of another, as torch wrote them before 0.4; this is not"
                    " modelled",
                    hint=_SAVE_AGAIN,
                )
            case _:
                raise FormatError("persistent id is not that of a storage")
        first = self.by_key.setdefault(storage.key, storage)
        if first.size_bytes != storage.size_bytes:
            raise FormatError(f"storage {quote(storage.key)} has two different lengths")
        return storage


def _locate_storages(
    keys: object, storages: Mapping[str, StorageRef], at: int, size_bytes: int
) -> dict[str, int]:
    """Returns the first element's byte of each storage; they have to fill the rest of the file."""
    if not isinstance(keys, list) or not all(is_count(k) or isinstance(k, str) for k in keys):
        raise FormatError("list of storages is not one of keys")
    keys = [str(key) for key in keys]
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise FormatError(
            f"{len(keys):,} storages are listed, the pickle refers to {len(storages):,} others"
        )
    starts = {}
    for key in keys:
        starts[key] = at + _COUNT_BYTES
        at = starts[key] + storages[key].size_bytes
    if at > size_bytes:
        raise TruncatedFileError(
            f"storages end at byte {at:,}, the file ends at byte {size_bytes:,}"
        )
    if at < size_bytes:
        raise FormatError(f"{size_bytes - at:,} bytes follow the last storage")
    return starts


_COMPARED_BYTES = 256 << 20  # of copies without comparable checksums, in all
_WINDOW_BYTES = 8 << 20
Stored = tuple[TorchArchive, TensorRef]
"""A file, and a tensor in it."""


def find_differing_copies(
    source: Source, table: ArchiveTable, pairs: Sequence[tuple[Stored, Stored]]
) -> tuple[list[int], list[str]]:
    """Compares tensors of equal shapes and element types that files have in common.

    The checksums of storages decide where they can; elsewhere, as where all tensors of a file are
    views of one storage, the bytes are read, up to a limit. Returns the positions of the pairs that
    differ, and a note if pairs were too large to be read.
    """
    differing, unknown = [], []
    for position, (mine, theirs) in enumerate(pairs):
        is_equal = _compare_checksums(table, mine, theirs)
        if is_equal is None:
            unknown.append(position)
        elif not is_equal:
            differing.append(position)
    left, unread = _COMPARED_BYTES, 0
    wanted: list[tuple[int, FileRange, FileRange]] = []
    for position in sorted(unknown, key=lambda position: _size_bytes(pairs[position][0][1])):
        mine, theirs = pairs[position]
        left -= _size_bytes(mine[1])
        if left < 0 or not (mine[1].row_major and theirs[1].row_major):
            unread += 1
        else:
            wanted.append((position, _range_of(table, *mine), _range_of(table, *theirs)))
    source.prefetch([place for _, *places in wanted for place in places])
    differing += [n for n, mine, theirs in wanted if not _have_equal_bytes(source, mine, theirs)]
    notes = [f"{unread:,} copies on other ranks were not compared"] if unread else []
    return sorted(differing), notes


def _size_bytes(tensor: TensorRef) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _compare_checksums(table: ArchiveTable, mine: Stored, theirs: Stored) -> bool | None:
    """Returns whether stored checksums show that two tensors are equal; None if they do not."""
    crcs = [table.records[table.record(*stored)].crc32 for stored in (mine, theirs)]
    a, b = ((t.storage.size_bytes, t.storage_offset, t.strides) for _, t in (mine, theirs))
    if None in crcs or a != b:
        return None
    if crcs[0] == crcs[1]:
        return True
    return False if a[0] == _size_bytes(mine[1]) else None


def _range_of(table: ArchiveTable, archive: TorchArchive, tensor: TensorRef) -> FileRange:
    start = table.records[table.record(archive, tensor)].start
    start += tensor.storage_offset * tensor.dtype.itemsize
    return FileRange(archive.path, start, start + _size_bytes(tensor))


def _have_equal_bytes(source: Source, mine: FileRange, theirs: FileRange) -> bool:
    def read(place: FileRange, at: int) -> bytes:
        start = place.start + at
        return source.read(place.path, start, min(start + _WINDOW_BYTES, place.stop))

    return all(
        read(mine, at) == read(theirs, at) for at in range(0, mine.size_bytes, _WINDOW_BYTES)
    )
