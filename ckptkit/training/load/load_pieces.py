"""Fills the live tensors of a rank from a checkpoint, reading only the byte ranges it needs.

The engine reads each range straight into the tensors' memory where both are one run of bytes, and
through a bounded buffer otherwise. Every byte that is read is checked against the checksum stored
for it. A record that a rank reads whole is checked at once. Of other records each rank reports the
checksums of its parts, from which rank 0 computes that of the whole: `pack` and `prove_together`.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypedDict

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import nn

from ckptkit.core.crc import ONE, POLYNOMIAL, crc32_combine
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ChecksumError, ResumeError
from ckptkit.core.geometry import Walk, flat_offset, slices_of
from ckptkit.core.index import Box, Key, Shape, TensorEntry, TensorIndex
from ckptkit.core.text import list_first
from ckptkit.engine.box_reads import plan_chunk_reads, read_chunks
from ckptkit.engine.checksum_tracker import NumberedRecord
from ckptkit.engine.reader import ArrayMemory, BoxMemory, Origin, byte_type
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.storage.base import Source
from ckptkit.training.state.collect import BoundModel
from ckptkit.training.state.dtensors import local_part
from ckptkit.training.state.fsdp import has_flat_parameters
from ckptkit.training.state.memory_changes import count_changes
from ckptkit.training.state.pieces import Piece
from ckptkit.training.step_names import clean_fqn, parallel_prefixes

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
# Of one record; matrices split by columns have thousands of parts, and stay unproven.
MOST_PARTS = 256


class FillReport(Struct, frozen=True):
    """What filling the pieces took, and what was proven of the bytes."""

    bytes_read: int = 0  # from data files, headers and trailers of records included
    bytes_needed: int = 0  # what the pieces hold

    # keys of tensors with bytes that were read and had no checksum stored
    unverified: tuple[Key, ...] = ()
    # by number, the records whose parts, not whole, this rank needed; `cross_check` proves them
    partial: tuple[NumberedRecord, ...] = ()


def load_pieces(
    index: TensorIndex, source: Source, pieces: Sequence[Piece], *, threads: int = 0
) -> FillReport:
    """Fills the live tensors of pieces from a checkpoint.

    A piece without elements only has to be in the checkpoint.
    """
    wanted: list[tuple[TensorEntry, Box, BoxMemory]] = []
    for piece, entry in zip(pieces, match_entries(index, pieces), strict=True):
        if not piece.elements:
            continue
        local = piece.local
        if local.device.type == "meta":
            problem = "is still on the meta device, so there is nothing to load into"
            raise ResumeError(problem, where=piece.key)
        if local.numel() != piece.elements:
            raise ResumeError(
                f"{local.numel():,} elements are on this rank against {piece.elements:,} in its"
                " places",
                where=piece.key,
            )
        for place, elements in piece.boxes():
            wanted.append((entry, place, memory_of(elements.detach().view(place.sizes))))
    origin = Origin("step", source, index, most_pieces=MOST_PARTS)
    try:
        bytes_read, in_part = read_chunks(origin, plan_chunk_reads(wanted), threads=threads)
    finally:
        count_changes(piece.local for piece in pieces)
    return FillReport(
        bytes_read=bytes_read,
        bytes_needed=sum(piece.size_bytes for piece in pieces),
        unverified=tuple(sorted(origin.unverified)),
        partial=in_part,
    )


def memory_of(tensor: torch.Tensor) -> BoxMemory:
    """Returns the memory of a tensor on any device, as that of a box of its shape."""
    # Of a lazily conjugated or negated tensor the bytes are not the values.
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type != "cpu" or lazy:
        return DeviceMemory(tensor)
    # numpy has neither bfloat16 nor the 8-bit floats, so the array is made from the storage.
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    itemsize = tensor.element_size()
    array = np.ndarray(
        tuple(tensor.shape),
        byte_type(itemsize),
        buffer=storage.numpy().data,
        offset=tensor.storage_offset() * itemsize,
        strides=[stride * itemsize for stride in tensor.stride()],
    )
    return ArrayMemory(array)


class DeviceMemory(BoxMemory):
    """A tensor that is not in host memory, or whose bytes are not its values."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def put(self, box: Box, elements: NDArray[Any]) -> None:
        flat = torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))
        values = flat.view(self._tensor.dtype).reshape(box.sizes)
        self._tensor[slices_of(box)].copy_(values)

    def walked(self, start: Shape, walks: Sequence[Walk], sizes: Shape) -> DeviceMemory:
        return DeviceMemory(strided_part(self._tensor, start, walks, sizes))


def strided_part(
    tensor: torch.Tensor, start: Shape, walks: Sequence[Walk], sizes: Shape
) -> torch.Tensor:
    strides = tensor.stride()
    first = tensor.storage_offset() + flat_offset(start, strides)
    steps = [strides[axis] * step if step else 0 for axis, step in walks]
    return tensor.as_strided(sizes, steps, first)


def match_entries(index: TensorIndex, pieces: Sequence[Piece]) -> list[TensorEntry]:
    """Returns the stored tensor of each piece, and checks its shape and element type."""
    stored = index.tensors
    keys = [next((key for key in names_of(piece) if key in stored), None) for piece in pieces]
    missing = [piece.key for piece, key in zip(pieces, keys, strict=True) if key is None]
    if missing:
        raise ResumeError(
            f"{len(missing):,} of {len(pieces):,} tensors are not in the checkpoint: "
            + list_first(missing),
            hint="it was saved from another model or optimizer, or under other names",
        )
    entries = [stored[key] for key in keys if key is not None]
    for piece, entry in zip(pieces, entries, strict=True):
        expected = dtype_named(str(piece.local.dtype), where=piece.key)
        if entry.shape != piece.shape:
            raise unlike(piece, entry)
        if entry.dtype != expected:
            raise ResumeError(
                f"dtype {entry.dtype.name} was found in the checkpoint against {expected.name} in"
                " the model",
                where=piece.key,
                hint=f"build the model in {entry.dtype.name}, or convert the checkpoint with"
                f" `ckptkit convert --dtype {expected.name}`; a resume never casts",
            )
    return entries


def unlike(piece: Piece, entry: TensorEntry) -> ResumeError:
    return ResumeError(
        f"shape {list(entry.shape)} was found in the checkpoint against {list(piece.shape)} in the"
        " model",
        where=piece.key,
        hint="build the model with the configuration that the checkpoint was saved with",
    )


def unexpected_keys(index: TensorIndex, pieces: Sequence[Piece]) -> list[Key]:
    """Returns the stored tensors, sorted, that no piece has under any of its names."""
    wanted = {name for piece in pieces for name in names_of(piece)}
    return sorted(key for key in index.tensors if key not in wanted)


def names_of(piece: Piece) -> Iterator[Key]:
    yield Key(piece.key)
    yield from (Key(".".join(map(str, path))) for path in piece.aliases)


def copied_changes(
    model: BoundModel, pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[Callable[[], object]]:
    """Finds tensors that `state_dict` of a module copies, so that filling them changes nothing.

    Modules of torchmetrics copy their states, and hooks may cast parameters.
    """
    raw_names = () if has_flat_parameters(model.module) else _copied(model.module)
    if not raw_names:
        return
    parallel = parallel_prefixes(model.module)
    filled = {
        (unit, path): piece
        for unit in model.places.units
        for piece in pieces.get(unit, ())
        for path in (piece.key_path, *piece.aliases)
    }
    copies: dict[str, torch.Tensor] = {}
    for raw in raw_names:
        piece = filled.get(model.places.of(clean_fqn(raw, parallel)))
        if piece is not None and piece.local.shape == piece.shape:
            copies[raw] = piece.local
    if copies:
        yield partial(model.module.load_state_dict, copies, strict=False)


def _copied(model: nn.Module) -> list[str]:
    """Returns the names under which a state dict has memory of its own."""
    own = {_memory(tensor) for tensor in chain(model.parameters(), model.buffers())}
    # Other tensors may be a module's own too: then a second state dict has the same memory.
    strange = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if type(value) in _PLAIN and value.numel() and _memory(value) not in own
    }
    strange = {name: v for name, v in strange.items() if name.rpartition(".")[2] != EXTRA_STATE}
    again: Mapping[str, Any] = model.state_dict(keep_vars=True) if strange else {}
    return [
        name
        for name, value in strange.items()
        if type(again.get(name)) in _PLAIN and _memory(again[name]) != _memory(value)
    ]


def _memory(tensor: torch.Tensor) -> int:
    local = local_part(tensor)
    return local.untyped_storage().data_ptr() if type(local) in _PLAIN else 0


Table = NDArray[np.int64]
"""Columns: the record's number, size and stored CRC-32; start, length and CRC-32 of a part."""

# Bounds of what rank 0 gets of all ranks together, and of one of them; records beyond them stay
# unproven. The store takes 4 MiB in one value.
_MOST_ROWS = 2_000_000
_MOST_CHARACTERS = 64 << 20
_MOST_CHARACTERS_OF_A_RANK = 2 << 20
_MOST_ROWS_JOINED_SINGLY = 100_000

_COLUMNS = 6
_NUMBER, _SIZE, _EXPECTED, _START, _LENGTH, _CRC = range(_COLUMNS)


class Packed(TypedDict):
    """What a rank sends to rank 0: a table for each index, and how many records are in none."""

    tables: dict[str, str]
    left_out: int


def pack(partial: Mapping[str, Sequence[NumberedRecord]], *, world_size: int) -> Packed:
    """Returns records as texts that are together small enough for the store."""
    rows = _MOST_ROWS // world_size
    characters = min(_MOST_CHARACTERS // world_size, _MOST_CHARACTERS_OF_A_RANK)
    tables: dict[str, str] = {}
    left_out = 0
    for name, records in partial.items():
        whole = table_of(records)
        # All ranks keep the records of the lowest numbers, so that their tables fit together.
        table = whole[: max(rows, 0)]
        while len(table):
            data = zlib.compress(table.T.astype("<i8").tobytes(), 1)
            text = base64.b64encode(data).decode()
            if len(text) <= characters:
                tables[name] = text
                rows, characters = rows - len(table), characters - len(text)
                break
            table = table[: len(table) // 2]
        left_out += len(np.unique(whole[len(table) :, _NUMBER]))
    return Packed(tables=tables, left_out=left_out)


def table_of(partial: Sequence[NumberedRecord]) -> Table:
    """Returns records as rows, one for each part; a record without parts has an empty one."""
    rows = [
        (number, record.stop - record.start, record.expected, *part)
        for number, record in sorted(partial, key=lambda numbered: numbered[0])
        for part in record.pieces or ((0, 0, 0),)
    ]
    return np.array(rows, np.int64).reshape(len(rows), _COLUMNS)


def unpack(text: str) -> Table:
    data = zlib.decompress(base64.b64decode(text))
    return np.ascontiguousarray(np.frombuffer(data, "<i8").reshape(_COLUMNS, -1).T)


def prove_together(packed: Sequence[Packed], name: Callable[[str, int], str]) -> int:
    """Proves records of which ranks have read parts; returns how many stay unproven.

    `name` tells where a record is, by the name of its table and its number.
    """
    left = max(rank["left_out"] for rank in packed)
    for unit in sorted({unit for rank in packed for unit in rank["tables"]}):
        tables = [unpack(rank["tables"][unit]) for rank in packed if unit in rank["tables"]]
        left += cross_check(tables, partial(name, unit))
    return left


def cross_check(tables: Sequence[Table], name: Callable[[int], str]) -> int:
    """Proves records from the parts that different ranks read.

    Returns how many records stay unproven, because no parts fit together to the whole.
    """
    table = np.concatenate([*tables, np.empty((0, _COLUMNS), np.int64)])
    # By number, start and length, each row once, as replicas read the same parts.
    table = table[np.lexsort([table[:, at] for at in (_CRC, _LENGTH, _START, _NUMBER)])]
    again = np.zeros(len(table), np.bool_)
    again[1:] = (table[1:] == table[:-1]).all(axis=1)
    table = table[~again]
    if not len(table):
        return 0
    starts = _starts(table)
    counts = np.diff(np.append(starts, len(table)))
    # Ranks may not differ in what they report of one record, nor of one part of it.
    first = np.repeat(starts, counts)
    bad = (table[:, [_SIZE, _EXPECTED]] != table[first][:, [_SIZE, _EXPECTED]]).any(axis=1)
    place = [_NUMBER, _START, _LENGTH]
    bad[1:] |= (table[1:, place] == table[:-1, place]).all(axis=1)
    if bad.any():
        _disagree(name(int(table[np.argmax(bad), _NUMBER])))
    # Records whose parts follow one another from the start to the end are checked all at once.
    stops = table[:, _START] + table[:, _LENGTH]
    before = np.roll(stops, 1)
    before[starts] = 0
    last = np.append(starts[1:], len(table)) - 1
    chained = np.logical_and.reduceat(table[:, _START] == before, starts)
    chained &= stops[last] == table[last, _SIZE]
    _check_chained(table[np.repeat(chained, counts)], name)
    return _check_others(table, starts[~chained], counts[~chained], name)


def _starts(table: Table) -> NDArray[np.intp]:
    return np.flatnonzero(np.diff(table[:, _NUMBER], prepend=-1))


def _disagree(where: str) -> None:
    raise ChecksumError("two ranks read different bytes from it", where=where)


def _check_chained(table: Table, name: Callable[[int], str]) -> None:
    """Joins all parts of all records at once: their sum, each moved by what comes after it."""
    if not len(table):
        return
    starts = _starts(table)
    after, places = np.unique(
        table[:, _SIZE] - table[:, _START] - table[:, _LENGTH], return_inverse=True
    )
    # x^(8 n) for each length n: what n further bytes multiply a checksum by.
    powers = np.full(len(after), ONE, np.int64)
    for bit in range(int(after[-1]).bit_length()):
        factor = np.int64(crc32_combine(ONE, 0, 1 << bit))
        has = (after >> bit & 1).astype(np.bool_)
        powers[has] = _products(powers[has], np.full(int(has.sum()), factor))
    moved = _products(table[:, _CRC], powers[places.reshape(-1)])
    crc32s = np.bitwise_xor.reduceat(moved, starts)
    expected = table[starts, _EXPECTED]
    if (crc32s != expected).any():
        at = int(np.argmax(crc32s != expected))
        where = name(int(table[starts[at], _NUMBER]))
        _check_crc32(int(crc32s[at]), int(expected[at]), where=where)


def _check_crc32(crc32: int, expected: int, *, where: str) -> None:
    if crc32 != expected:
        raise ChecksumError(
            f"CRC-32 {crc32:08x} was found against {expected:08x} stored", where=where
        )


def _products(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiplies polynomials modulo CRC-32's, as `ckptkit.core.crc` does singly."""
    product = np.zeros_like(left)
    for bit in range(31, -1, -1):
        product ^= right * (left >> bit & 1)
        right = (right >> 1) ^ (POLYNOMIAL * (right & 1))
    return product


def _check_others(
    table: Table, starts: NDArray[np.intp], counts: NDArray[np.intp], name: Callable[[int], str]
) -> int:
    """Checks records whose parts overlap or leave gaps; returns the number that stays unproven."""
    unproven = 0
    left = _MOST_ROWS_JOINED_SINGLY
    for begin, count in zip(starts.tolist(), counts.tolist(), strict=True):
        left -= count
        number, size, expected = (int(value) for value in table[begin, :_START])
        reached: dict[int, int] = {0: 0}  # how far some parts lead, and their checksum
        for row in table[begin : begin + count].tolist() if left >= 0 else ():
            start, length, crc32 = row[_START:]
            if start in reached:
                joined = crc32_combine(reached[start], crc32, length)
                if reached.setdefault(start + length, joined) != joined:
                    _disagree(name(number))
        if size in reached:
            _check_crc32(reached[size], expected, where=name(number))
        else:
            unproven += 1
    return unproven
