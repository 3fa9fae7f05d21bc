"""A pickle machine that parses whole runs of DCP's small objects in one step.

The `.metadata` of a large job holds millions of `ChunkStorageMetadata` and pairs of
`MetadataIndex` and `_StorageInfo`. Once their classes and field names are in the memo, the pickler
writes each as a fixed sequence of opcodes with a few holes. A regular expression matches runs of
such sequences, and the values in the holes become numpy columns. All other opcodes are executed by
the ordinary machine, so the result is the same, except that a `ChunkRun` or an `EntryRun` replaces
many objects.

Each pattern has one group for every hole whose value is needed, and a last group for all bytes
after the last match, so that the matches that `findall` returns are contiguous.

Source: `save_reduce`, `save_tuple` and `_batch_setitems` in CPython's Lib/pickle.py, protocols 4
and 5; fields in torch/distributed/checkpoint/{metadata,filesystem,planner}.py.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.formats.parsing import MAX_DIMENSIONS
from ckptkit.formats.pickle.machine import ByIdentity, Global, Machine
from ckptkit.formats.pickle.pickles import OPCODES, with_handlers

CHUNK_PARTS = ("ChunkStorageMetadata", "Size", "offsets", "sizes")
ENTRY_PARTS = (
    *("MetadataIndex", "fqn", "index", "offset", "Size"),
    *("_StorageInfo", "relative_path", "length"),
)
# Below, `%(x)b` is the GET opcode that fetches x from the memo.
ITEM_PARTS = (
    *("WriteItem", "index", "type", "tensor_data", "MetadataIndex", "fqn", "offset"),
    *("TensorWriteData", "chunk", "properties", "size", "TensorProperties"),
    *("ChunkStorageMetadata", "Size", "offsets", "sizes"),
)
_OBJECT_PARTS = ("bytes_io_data", "BytesIOWriteData", "nbytes")  # absent in older versions of torch
_GET = rb"h.|j.{4}"
_INT = rb"K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_TUPLE = rb"\)|(?:(?:%b){1,3}[\x85-\x87]|\((?:%b){4,64}t)\x94" % (_INT, _INT)
_SIZE_HOLE = rb"(%%(Size)b(?:%b)\x85\x94R\x94|%b)" % (_TUPLE, _GET)
_TEXT_HOLE = rb"(\x8c.[ -~]{0,255}\x94|%b)" % _GET
_NEW = rb"\)\x81\x94\}\x94\("  # an instance without arguments, and a dictionary for its fields
_END = rb"ub"
_REST = rb"|(.+)"
_CHUNK = b"".join(
    [
        *(rb"%(ChunkStorageMetadata)b", _NEW, rb"%(offsets)b", _SIZE_HOLE),
        *(rb"%(sizes)b", _SIZE_HOLE, _END, _REST),
    ]
)
_ENTRY = b"".join(
    [
        *(rb"%(MetadataIndex)b", _NEW, rb"%(fqn)b", _TEXT_HOLE),
        *(rb"%%(index)b(?:%b|N)" % _INT, rb"%(offset)b", _SIZE_HOLE, _END),
        *(rb"%(_StorageInfo)b", _NEW, rb"%(relative_path)b", _TEXT_HOLE),
        *(rb"%%(offset)b(%b)" % _INT, rb"%%(length)b(%b)" % _INT, _END, _REST),
    ]
)
_ITEM = b"".join(
    [
        *(rb"%(WriteItem)b", _NEW, rb"%(index)b%(MetadataIndex)b", _NEW),
        *(rb"%(fqn)b", _TEXT_HOLE, rb"%%(index)b(?:%b|N)" % _INT),
        *(rb"(?:%(offset)b", _SIZE_HOLE, rb")?", _END, rb"%%(type)b(?:%b)" % _GET),
        rb"%(objects)b%(tensor_data)b(?:N|%(TensorWriteData)b",
        *(_NEW, rb"%%(chunk)b(?:%b|%%(ChunkStorageMetadata)b" % _GET, _NEW),
        *(rb"%(offsets)b", _SIZE_HOLE, rb"%(sizes)b", _SIZE_HOLE, _END, rb")"),
        rb"%%(properties)b(?:%b|%%(TensorProperties)b(\)\x81\x94\()" % _GET,
        rb"(?:%b){2}[\x88\x89](?:%b)[\x88\x89]t\x94b)" % (_GET, _GET),
        *(rb"%(size)b", _SIZE_HOLE, _END, rb")", _END, _REST),
    ]
)

_OBJECT = rb"%%(BytesIOWriteData)b(\)\x81\x94)}\x94%%(nbytes)b(?:%b)sb" % _INT


def compile_pattern(cls: Global, gets: Mapping[str, bytes]) -> re.Pattern[bytes] | None:
    """Compiles the pattern of `CHUNK`, of `INDEX`, the key of an entry, or of `ITEM`.

    None is returned while a GET opcode of its parts is missing. Groups are offsets, sizes and the
    rest for a chunk; fqn, offset, path, start, length and the rest for an entry. For an item: fqn,
    offset, a Python object, offsets and sizes of the chunk, properties, shape of the tensor, and
    the rest; a group is empty where the value is fetched or absent.
    """
    template, parts = _TEMPLATES[cls]
    if not all(part in gets for part in parts):
        return None
    opcodes = {part.encode(): re.escape(get) for part, get in gets.items()}
    if cls == ITEM:
        opcodes[b"objects"] = b"()"
        if "bytes_io_data" in gets:
            is_known = all(part in gets for part in _OBJECT_PARTS)
            literal = _OBJECT % opcodes if is_known else b"()N"
            opcodes[b"objects"] = rb"%b(?:N|%b|%b)" % (opcodes[b"bytes_io_data"], _GET, literal)
    return re.compile(template % opcodes, re.DOTALL)


Ints = NDArray[np.int64]
_MODULE = "torch.distributed.checkpoint.metadata"
CHUNK = Global(_MODULE, "ChunkStorageMetadata")
INDEX = Global(_MODULE, "MetadataIndex")
INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
SIZE = Global("torch", "Size")
PLANNER = "torch.distributed.checkpoint.planner"
ITEM = Global(PLANNER, "WriteItem")
_CLASSES = {
    cls.name: cls
    for cls in (
        *(CHUNK, INDEX, INFO, SIZE, ITEM, Global(_MODULE, "TensorProperties")),
        *(Global(PLANNER, name) for name in ("TensorWriteData", "BytesIOWriteData")),
    )
}
_PARTS = frozenset(
    _CLASSES.get(part, part) for part in (*CHUNK_PARTS, *ENTRY_PARTS, *ITEM_PARTS, *_OBJECT_PARTS)
)
_TEMPLATES = {
    CHUNK: (_CHUNK, CHUNK_PARTS),
    INDEX: (_ENTRY, ENTRY_PARTS),
    ITEM: (_ITEM, ITEM_PARTS),
}
_WINDOW_BYTES = 1 << 15  # pickles are cut into frames of 64 KiB, so runs are never longer
_LEAST_ROWS = 8  # the ordinary machine makes fewer objects faster than numpy makes columns
_CACHED_INTEGERS = 1 << 16
_BINGET_MAX = 255
_WIDTHS = {b"K": 2, b"M": 3, b"J": 5}  # of integers, opcode included; LONG1 has its length
_INT64 = range(-(2**63), 2**63)


class ShortcutError(Exception):
    """The pickle fetches a value inside a run that only the ordinary machine has."""


class _MismatchError(Exception):
    """A match of the pattern is not a run."""


class ChunkRun(ByIdentity, Struct, frozen=True, eq=False):
    """Replaces chunks in a list; columns hold positions in `FastMachine.sizes`."""

    offsets: Ints
    sizes: Ints


class EntryRun(ByIdentity, Struct, frozen=True, eq=False):
    """Replaces entries of `storage_data`, as key and as value.

    Columns hold positions in the lists of the machine, but for `start` and `length`, in bytes.
    """

    fqn: Ints
    offset: Ints
    path: Ints
    start: Ints
    length: Ints


class PlanRun(ByIdentity, Struct, frozen=True, eq=False):
    """Replaces items in a save plan; columns hold positions in the same lists, of tensors only."""

    fqn: Ints
    offset: Ints


class Unread(ByIdentity):
    """Stands for an object inside a run to which a save plan refers; nothing should need it."""

    __slots__ = ()


class _Hole(dict[bytes, int]):
    """Maps the bytes of a literal to 8 * its position in a list of values + memo slots taken.

    A GET is mapped to -1 - slot, since what it fetches may be in the same run.
    """

    def __init__(self, values: list[Any], decode: Callable[[bytes], tuple[Any, int]]) -> None:
        super().__init__()
        self.decoded = values
        self.decode = decode

    def __missing__(self, raw: bytes) -> int:
        if raw[0] in b"hj" and len(raw) in {2, 5}:
            return -1 - int.from_bytes(raw[1:], "little")
        value, slots = self.decode(raw)
        self[raw] = packed = 8 * len(self.decoded) + slots
        self.decoded.append(value)
        return packed


class _Integers(dict[bytes, int]):
    """Decodes integers, and caches them."""

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _CACHED_INTEGERS:
            self.clear()
        self[raw] = value = _integer(raw)
        return value


def _column(cache: dict[bytes, int], raw: tuple[bytes, ...]) -> Ints:
    return np.fromiter(map(cache.__getitem__, raw), np.int64, len(raw))


class _Slots:
    """The memo slots inside runs whose values can be fetched, in ascending order."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.slots = array("q")
        self.positions = array("i")
        self.outside: dict[int, int] = {}  # slots outside runs, and positions of their values

    def record(self, slots: Ints, packed: Ints) -> None:
        """Adds the slots of memoized literals; `slots` is -1 where there is none."""
        kept = slots.ravel() >= 0
        self.slots.frombytes(slots.ravel()[kept].tobytes())
        self.positions.frombytes((packed.ravel()[kept] >> 3).astype(np.int32).tobytes())

    def positions_of(self, packed: Ints, before: Ints, machine: FastMachine) -> Ints:
        """Turns a column of packed holes into positions; row i may fetch slots < before[i]."""
        positions = packed >> 3
        rows = np.flatnonzero(packed < 0)
        if len(rows):
            wanted = -1 - packed[rows]
            if (wanted >= before[rows]).any():
                raise _MismatchError
            positions[rows] = self._find(wanted, machine)
        return positions

    def _find(self, wanted: Ints, machine: FastMachine) -> Ints:
        slots = np.frombuffer(self.slots, np.int64)
        at = np.searchsorted(slots, wanted)
        positions = np.full(len(wanted), -1, np.int64)
        near = np.flatnonzero(at < len(slots))
        near = near[slots[at[near]] == wanted[near]]
        positions[near] = np.frombuffer(self.positions, np.int32)[at[near]]
        for row in np.flatnonzero(positions < 0).tolist():
            slot = int(wanted[row])
            if slot not in self.outside:
                if slot >= machine.next_slot():  # in this run, and not a recorded value
                    raise _MismatchError
                value = machine.fetch(slot)
                is_of_sizes = self.values is machine.sizes
                if not (is_size(value) if is_of_sizes else type(value) is str):
                    raise _MismatchError
                self.outside[slot] = len(self.values)
                self.values.append(value)
            positions[row] = self.outside[slot]
        return positions


class FastMachine(Machine):
    """Interprets the pickle of a `.metadata` file; runs refer to `sizes` and `texts`.

    `run` raises `ShortcutError` if a `Machine` has to interpret the pickle instead.
    """

    __slots__ = (
        *("declined", "gets", "integers", "patterns"),
        *("run_skipped", "run_starts", "run_stops"),
        *("size_hole", "size_slots", "sizes", "text_hole", "text_slots", "texts"),
    )

    def __init__(
        self, data: bytes, allowed: Mapping[tuple[str, str], object], *, where: str
    ) -> None:
        super().__init__(data, allowed, _TABLE, where=where)
        # What the columns of runs refer to by position.
        self.sizes: list[tuple[int, ...]] = []
        self.texts: list[str] = []
        self.gets: dict[str, bytes] = {}  # the GET opcodes of the fixed parts of patterns
        self.patterns: dict[Global, re.Pattern[bytes] | None] = dict.fromkeys(_TEMPLATES)
        # Runs use slots that `memo` does not have: [start, stop), and how many so far.
        self.run_starts = array("q")
        self.run_stops = array("q")
        self.run_skipped = array("q")
        self.declined = 0  # end of the last run that was too short
        self.integers = _Integers()
        self.size_hole = _Hole(self.sizes, self._decode_size)
        self.text_hole = _Hole(self.texts, _decode_text)
        self.size_slots = _Slots(self.sizes)
        self.text_slots = _Slots(self.texts)

    def memoize(self) -> None:
        """Stores the topmost value, and the GET opcode of a fixed part of a pattern."""
        if self.filled == len(self.memo) and len(self.stack) > self.fence:
            self.memo.append(self.stack[-1])  # as the ordinary machine does, in one call
            self.filled += 1
        else:
            super().memoize()
        value = self.stack[-1]
        is_info = type(value) is Global and value.name == INFO.name  # of torch, or derived
        if is_info or (type(value) in {str, Global} and value in _PARTS):
            name = value.name if isinstance(value, Global) else value
            slot = self.next_slot() - 1
            get = b"h%c" % slot if slot <= _BINGET_MAX else b"j" + slot.to_bytes(4, "little")
            if name not in self.gets:
                self.gets[name] = get
                if name in _OBJECT_PARTS and self.patterns:
                    self.patterns[ITEM] = None

    def store(self, slot: int) -> None:
        """Stores the topmost value; numbered slots rule out any further run."""
        if self.run_starts:
            raise ShortcutError
        self.patterns.clear()
        super().store(slot)

    def next_slot(self) -> int:
        return self.filled + (self.run_skipped[-1] if self.run_skipped else 0)

    def fetch(self, slot: int) -> object:
        """Returns the value in a slot, inside a run or not."""
        if not self.run_starts or slot < self.run_starts[0]:
            return super().fetch(slot)
        run = bisect_right(self.run_starts, slot) - 1
        if slot >= self.run_stops[run]:
            return super().fetch(slot - self.run_skipped[run])
        for slots in (self.size_slots, self.text_slots):
            at = bisect_right(slots.slots, slot) - 1
            if at >= 0 and slots.slots[at] == slot:
                return slots.values[slots.positions[at]]
        if ITEM.name in self.gets:  # in plans, whose items refer to chunks of the tables
            return Unread()
        raise ShortcutError

    def skip(self, cls: Global) -> bool:
        """Parses the run that begins at the current opcode; returns False if none does."""
        pattern = self.patterns.get(cls)
        if pattern is None and cls in self.patterns:
            pattern = self.patterns[cls] = compile_pattern(cls, self.gets)
        if pattern is None or self.at < self.declined or not self.fence:
            return False
        if type(self.stack[self.fence - 1]) is not (dict if cls == INDEX else list):
            return False
        stop = min(self.at + _WINDOW_BYTES, len(self.data))
        rows = pattern.findall(self.data, self.at, stop)
        *_, rest = rows[-1]
        if rest:
            rows.pop()
        if len(rows) < _LEAST_ROWS:
            self.declined = stop - len(rest)
            return False
        try:
            columns = tuple(zip(*rows, strict=True))
            if cls == ITEM:
                run = self._items(columns)
            elif cls == CHUNK:
                run = self._chunks(*columns[:2])
            else:
                run = self._entries(columns)
        except _MismatchError:
            self.patterns.clear()
            return False
        self.stack.extend(run)
        self.pos = stop - len(rest)
        return True

    def _reserve(self, widths: Ints) -> None:
        """Reserves the memo slots of a run; `widths` is the number of slots of each row."""
        start = self.next_slot()
        total = int(widths.sum())
        skipped = (self.run_skipped[-1] if self.run_skipped else 0) + total
        self.run_starts.append(start)
        self.run_stops.append(start + total)
        self.run_skipped.append(skipped)

    def _chunks(self, raw_offsets: tuple[bytes, ...], raw_sizes: tuple[bytes, ...]) -> list[Any]:
        offsets = _column(self.size_hole, raw_offsets)
        sizes = _column(self.size_hole, raw_sizes)
        in_offsets, in_sizes = _slots_taken(offsets), _slots_taken(sizes)
        widths = 2 + in_offsets + in_sizes
        first = self.next_slot() + np.cumsum(widths) - widths
        after_offsets = first + 2 + in_offsets
        slots = np.stack(
            [
                np.where(in_offsets > 0, after_offsets - 1, -1),
                np.where(in_sizes > 0, after_offsets + in_sizes - 1, -1),
            ]
        )
        self.size_slots.record(slots.T, np.stack([offsets, sizes]).T)
        run = ChunkRun(
            self.size_slots.positions_of(offsets, first, self),
            self.size_slots.positions_of(sizes, after_offsets, self),
        )
        self._reserve(widths)
        return [run]

    def _entries(self, columns: tuple[tuple[bytes, ...], ...]) -> list[Any]:
        fqn = _column(self.text_hole, columns[0])
        offset = _column(self.size_hole, columns[1])
        path = _column(self.text_hole, columns[2])
        in_fqn, in_offset, in_path = map(_slots_taken, (fqn, offset, path))
        widths = 4 + in_fqn + in_offset + in_path
        first = self.next_slot() + np.cumsum(widths) - widths
        after_fqn = first + 2 + in_fqn
        after_index = after_fqn + in_offset
        texts = [np.where(in_fqn > 0, first + 2, -1), np.where(in_path > 0, after_index + 2, -1)]
        self.text_slots.record(np.stack(texts).T, np.stack([fqn, path]).T)
        self.size_slots.record(np.where(in_offset > 0, after_index - 1, -1), offset)
        run = EntryRun(
            fqn=self.text_slots.positions_of(fqn, first, self),
            offset=self.size_slots.positions_of(offset, after_fqn, self),
            path=self.text_slots.positions_of(path, after_index + 2, self),
            start=_column(self.integers, columns[3]),
            length=_column(self.integers, columns[4]),
        )
        self._reserve(widths)
        return [run, run]

    def _items(self, columns: tuple[tuple[bytes, ...], ...]) -> list[Any]:
        if b"" not in self.size_hole:  # a group of what is absent or fetched
            self.size_hole[b""] = 8 * len(self.sizes)
            self.sizes.append(())
        fqn = _column(self.text_hole, columns[0])
        offset, chunk_offset, chunk_size, shape = (
            _column(self.size_hole, columns[group]) for group in (1, 3, 4, 6)
        )
        is_object, is_chunk, is_described, is_tensor = (
            np.fromiter(map(bool, columns[group]), np.bool_, len(fqn)) for group in (2, 3, 5, 6)
        )
        after_fqn = 4 + _slots_taken(fqn)
        after_offset = after_fqn + _slots_taken(offset)
        chunk = after_offset + 2 * is_object + 2 * is_tensor + 2 * is_chunk
        after_chunk = chunk + _slots_taken(chunk_offset)
        after_sizes = after_chunk + _slots_taken(chunk_size)
        widths = after_sizes + 2 * is_described + _slots_taken(shape)
        first = self.next_slot() + np.cumsum(widths) - widths
        self.text_slots.record(np.where(_slots_taken(fqn) > 0, first + 4, -1), fqn)
        sizes = np.stack([offset, chunk_offset, chunk_size, shape]).T
        stops = first[:, None] + np.stack([after_offset, after_chunk, after_sizes, widths]).T
        self.size_slots.record(np.where(_slots_taken(sizes) > 0, stops - 1, -1), sizes)
        run = PlanRun(
            self.text_slots.positions_of(fqn, first + 4, self)[is_tensor],
            self.size_slots.positions_of(offset, first + after_fqn, self)[is_tensor],
        )
        self._reserve(widths)
        return [run]

    def _decode_size(self, raw: bytes) -> tuple[tuple[int, ...], int]:
        body = raw[len(self.gets["Size"]) : -4]
        if body == b")":
            return (), 2
        marked = body[0] in b"("
        values, at = [], int(marked)
        while at < len(body) - 2:
            width = _WIDTHS.get(body[at : at + 1]) or 2 + body[at + 1]
            values.append(_integer(body[at : at + width]))
            at += width
        if not marked and len(values) != body[-2] - 0x84:
            raise _MismatchError
        return tuple(values), 3


def is_size(value: object) -> bool:
    """Returns whether a value is a tuple of at most 64 integers that fit int64."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and item in _INT64 for item in value)
    )


def flatten(sizes: list[tuple[int, ...]]) -> tuple[Ints, Ints, Ints]:
    """Returns all numbers in one column, and for each tuple its first row and its length."""
    lengths = np.fromiter(map(len, sizes), np.int64, len(sizes))
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(sizes) else 0
    return np.fromiter(chain.from_iterable(sizes), np.int64, total), stops - lengths, lengths


def _slots_taken(packed: Ints) -> Ints:
    return np.where(packed < 0, 0, packed & 7)


def _integer(raw: bytes) -> int:
    if raw[:1] == b"J":
        return int.from_bytes(raw[1:], "little", signed=True)
    if raw[:1] == b"\x8a":
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little")


def _decode_text(raw: bytes) -> tuple[str, int]:
    if len(raw) - 3 != raw[1]:
        raise _MismatchError
    return raw[2:-1].decode("ascii"), 1


def _get(width: int) -> Callable[[Any], None]:
    def handler(machine: FastMachine) -> None:
        raw = machine.data[machine.pos : machine.pos + width]
        machine.pos += width
        if len(raw) < width:
            raise machine.cut_short()
        value = machine.fetch(int.from_bytes(raw, "little"))
        if type(value) is not Global or not machine.skip(value):
            machine.stack.append(value)

    return handler


_TABLE = with_handlers(OPCODES, {b"h": _get(1), b"j": _get(4)})
