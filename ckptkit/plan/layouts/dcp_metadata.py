"""`.metadata`, the index beside the data files of a DCP directory, written as torch writes it.

The opcodes are those of CPython's pickler, protocol 4, so that every reader's fast path takes
them; equal texts and sizes are written once and fetched from the memo afterwards, which the
gathered objects of torch do not allow. Nothing is held of it but the memo: a large job has
millions of chunks.

Sources: torch/distributed/checkpoint/{metadata,filesystem}.py of 2.13 for classes and fields;
`save_reduce`, `save_tuple` and `_batch_setitems` in CPython's Lib/pickle.py for the opcodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from msgspec import Struct

# Pickles written opcode by opcode. Source: CPython's Lib/pickletools.py, which specifies each.
_PROTOCOL_2 = b"\x80\x02"
_STOP = b"."


def push_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def push_text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def push_int(value: int) -> bytes:
    """Pushes an int; one that is not negative in as few bytes as python's pickler."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    width = value.bit_length() // 8 + 1
    return b"\x8a%c" % width + value.to_bytes(width, "little", signed=True)


def push_scalar(value: object) -> bytes:
    """Pushes a number, a text or None."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return push_int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return push_text(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


def push_list(values: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def push_tuple(values: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(values) + b"t"


def push_call(function: bytes, arguments: bytes) -> bytes:
    return function + arguments + b"R"


def push_dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def make_pickle(value: bytes) -> bytes:
    return _PROTOCOL_2 + value + _STOP


Sizes = tuple[int, ...]
Place = tuple[Sizes, Sizes, str, int, int]
"""Offsets and sizes in elements; file, and start and length in bytes of the archive in it."""

METADATA_NAME = ".metadata"
_Item = TypeVar("_Item")
_Class = tuple[str, str]  # module and name
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CHUNK = (_METADATA, "ChunkStorageMetadata")
_INDEX = (_METADATA, "MetadataIndex")
_INFO = (_FILESYSTEM, "_StorageInfo")
_SIZE = ("torch", "Size")
_VERSION = "1.0.0"
_PROTOCOL_4 = b"\x80\x04"
_FRAME_BYTES = 1 << 16
_BATCH = 1000  # the most items that the pickler sets at once
_BINGET_MAX = 0xFF
_SHORT_TEXT_MAX = 0xFF
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_MARK, _MEMOIZE, _REDUCE, _BUILD = b"(", b"\x94", b"R", b"b"
_NEW_OBJECT = b")\x81"  # without arguments
_TO_LIST, _TO_DICT = (b"a", b"e"), (b"s", b"u")  # one item, and those above a mark


class DcpTensor(Struct, frozen=True):
    """A tensor, and where its chunks are stored."""

    # Of dictionary keys and list positions; joined with dots it is the flat key.
    path: tuple[str | int, ...]
    dtype: str  # torch's name of the element type
    shape: Sizes  # of the whole tensor, in elements
    places: Collection[Place]  # its chunks; gone through twice

    @property
    def key(self) -> str:
        return flat_key(self.path)


class DcpObject(Struct, frozen=True):
    """A python object, and where its archive is stored; `start` and `length` in bytes."""

    path: tuple[str | int, ...]
    file: str
    start: int
    length: int

    @property
    def key(self) -> str:
        return flat_key(self.path)


def flat_key(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def make_metadata(tensors: Sequence[DcpTensor], objects: Sequence[DcpObject]) -> bytes:
    """Returns the content of `.metadata`."""
    parts: list[bytes] = []
    write_metadata(parts.append, tensors, objects)
    return b"".join(parts)


def write_metadata(
    write: Callable[[bytes], object],
    tensors: Sequence[DcpTensor],
    objects: Sequence[DcpObject],
) -> None:
    """Writes `.metadata` piece by piece.

    `write`: takes the pieces, in order. `tensors`: with keys that differ from each other's.
    `objects`: with keys that differ from each other's and the tensors'.
    """
    _Writer(write).metadata(tensors, objects)


class _Writer:
    """Writes one pickle; what is in the memo is kept as the opcodes that fetch it.

    Whatever returns opcodes has counted the memo's slots, so they are put in that same order.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._frame: list[bytes] = []
        self._frame_bytes = 0
        self._slots = 0
        self._texts: dict[str, bytes] = {}
        self._globals: dict[_Class, bytes] = {}
        self._sizes: dict[Sizes, bytes] = {}
        self._constants: dict[_Class, bytes] = {}

    def metadata(self, tensors: Sequence[DcpTensor], objects: Sequence[DcpObject]) -> None:
        """Writes the whole file."""
        self._write(_PROTOCOL_4)
        self._put(self._new((_METADATA, "Metadata")))
        items: list[DcpTensor | DcpObject] = [*tensors, *objects]
        self._put(self._text("state_dict_metadata") + self._memoized(b"}"))
        self._fill(items, len(items), self._describe, _TO_DICT)
        self._put(self._text("planner_data") + self._memoized(b"}"))
        self._fill(items, len(items), self._say_path, _TO_DICT)
        self._put(self._text("storage_data") + self._memoized(b"}"))
        count = len(objects) + sum(len(tensor.places) for tensor in tensors)
        self._fill(_entries(tensors, objects), count, self._say_place, _TO_DICT)
        self._put(self._text("storage_meta") + b"N")
        self._put(self._text("version") + self._text(_VERSION) + b"u" + _BUILD + b".")
        self._flush()

    def _describe(self, item: DcpTensor | DcpObject) -> None:
        if isinstance(item, DcpObject):
            self._put(self._text(item.key) + self._global((_METADATA, "BytesStorageMetadata")))
            self._put(self._memoized(_NEW_OBJECT))
            return
        self._put(self._text(item.key) + self._new((_METADATA, "TensorStorageMetadata")))
        properties = (  # dtype, layout, requires_grad, memory_format and pin_memory
            self._text("properties"),
            self._global((_METADATA, "TensorProperties")) + self._memoized(_NEW_OBJECT),
            _MARK,
            self._global(("torch", item.dtype)),
            self._constant(("torch.serialization", "_get_layout"), "torch.strided"),
            b"\x89",
            self._constant((_METADATA, "_MEM_FORMAT_ENCODING"), 0),
            b"\x89",
            self._memoized(b"t"),
            _BUILD,
        )
        self._put(b"".join(properties))
        self._put(self._text("size") + self._size(item.shape))
        self._put(self._text("chunks") + self._memoized(b"]"))
        self._fill(item.places, len(item.places), self._say_chunk, _TO_LIST)
        self._put(b"u" + _BUILD)

    def _say_chunk(self, place: Place) -> None:
        offsets = self._new(_CHUNK) + self._text("offsets") + self._size(place[0])
        self._put(offsets + self._text("sizes") + self._size(place[1]) + b"ub")

    def _say_path(self, item: DcpTensor | DcpObject) -> None:
        key = self._text(item.key)
        parts = [self._text(p) if isinstance(p, str) else push_int(p) for p in item.path]
        self._put(key + self._tuple(parts))

    def _say_place(self, entry: _Entry) -> None:
        key, number, offsets, file, start, length = entry
        index = [self._new(_INDEX), self._text("fqn"), self._text(key), self._text("index")]
        if offsets is None:
            index.append(b"N")
        else:
            index += (push_int(number), self._text("offset"), self._size(offsets))
        index += b"ub", self._new(_INFO), self._text("relative_path"), self._text(file)
        index += self._text("offset"), push_int(start), self._text("length"), push_int(length)
        self._put(b"".join(index) + b"ub")

    def _fill(
        self,
        items: Iterable[_Item],
        count: int,
        put: Callable[[_Item], None],
        ends: tuple[bytes, bytes],
    ) -> None:
        """Puts items into the container on the stack, in batches as the pickler does."""
        one, many = ends
        left = iter(items)
        if count == 1:
            put(next(left))
            self._put(one)
            return
        while batch := tuple(islice(left, _BATCH)):
            self._put(_MARK)
            for item in batch:
                put(item)
            self._put(many)

    def _new(self, kind: _Class) -> bytes:
        """Pushes an instance, and a dictionary and a mark for its fields."""
        known = self._globals.get(kind) or self._global(kind)
        self._slots += 2
        return known + b")\x81\x94}\x94("

    def _text(self, value: str) -> bytes:
        known = self._texts.get(value)
        if known is not None:
            return known
        data = value.encode()
        short = len(data) <= _SHORT_TEXT_MAX
        head = b"\x8c%c" % len(data) if short else b"X" + len(data).to_bytes(4, "little")
        self._texts[value] = self._next_fetch()
        return self._memoized(head + data)

    def _global(self, kind: _Class) -> bytes:
        known = self._globals.get(kind)
        if known is not None:
            return known
        names = self._text(kind[0]) + self._text(kind[1])
        self._globals[kind] = self._next_fetch()
        return self._memoized(names + b"\x93")

    def _size(self, sizes: Sizes) -> bytes:
        known = self._sizes.get(sizes)
        if known is not None:
            return known
        argument = self._global(_SIZE) + self._tuple([push_int(size) for size in sizes])
        call = self._memoized(argument + b"\x85")
        self._sizes[sizes] = self._next_fetch()
        return self._memoized(call + _REDUCE)

    def _constant(self, function: _Class, argument: str | int) -> bytes:
        """Pushes what a function returns for one argument, always the same."""
        known = self._constants.get(function)
        if known is not None:
            return known
        call = self._global(function)
        call += self._text(argument) if isinstance(argument, str) else push_int(argument)
        call = self._memoized(call + b"\x85")
        self._constants[function] = self._next_fetch()
        return self._memoized(call + _REDUCE)

    def _tuple(self, parts: Sequence[bytes]) -> bytes:
        if not parts:
            return b")"
        if len(parts) < len(_SHORT_TUPLES):
            return self._memoized(b"".join(parts) + _SHORT_TUPLES[len(parts)])
        return self._memoized(_MARK + b"".join(parts) + b"t")

    def _memoized(self, value: bytes) -> bytes:
        self._slots += 1
        return value + _MEMOIZE

    def _next_fetch(self) -> bytes:
        slot = self._slots
        return b"h%c" % slot if slot <= _BINGET_MAX else b"j" + slot.to_bytes(4, "little")

    def _put(self, data: bytes) -> None:
        self._frame.append(data)
        self._frame_bytes += len(data)
        if self._frame_bytes >= _FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        frame = b"".join(self._frame)
        self._write(b"\x95" + len(frame).to_bytes(8, "little"))
        self._write(frame)
        self._frame.clear()
        self._frame_bytes = 0


_Entry = tuple[str, int, Sizes | None, str, int, int]


def _entries(tensors: Sequence[DcpTensor], objects: Sequence[DcpObject]) -> Iterator[_Entry]:
    """Yields key, position among the chunks, offsets, file, start and length."""
    for stored in objects:
        yield stored.key, 0, None, stored.file, stored.start, stored.length
    for tensor in tensors:
        key = tensor.key
        for number, (offsets, _, file, start, length) in enumerate(tensor.places):
            yield key, number, offsets, file, start, length
