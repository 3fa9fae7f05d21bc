"""Compares stored checksums of records that no rank reads whole with what all ranks read."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.checksums import crc32_combine
from ckptkit.core.errors import ChecksumError
from ckptkit.engine.checksum_tracker import NumberedRecord

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
# Polynomials over GF(2) with the bits reversed, as in `ckptkit.core.checksums`.
_ONE = 1 << 31
_X_TO_32 = crc32_combine(1 << 7, 0, 1)  # x^24 times x^8


class Packed(TypedDict):
    """What a rank sends to rank 0: a table for each index, and how many records are in none."""

    tables: dict[str, str]
    left_out: int


def pack(partial: Mapping[str, Sequence[NumberedRecord]], *, world_size: int) -> Packed:
    """Returns records as texts that are together small enough for the store.

    Args:
        partial: Records of which a rank read parts, by the index that they belong to.
        world_size: How many ranks send theirs.
    """
    rows = _MOST_ROWS // world_size
    characters = min(_MOST_CHARACTERS // world_size, _MOST_CHARACTERS_OF_A_RANK)
    tables: dict[str, str] = {}
    left_out = 0
    for name, records in partial.items():
        whole = table_of(records)
        # All ranks keep the records of the lowest numbers, so that their tables fit together.
        table = whole[: max(rows, 0)]
        text = _text(table)
        while len(text) > max(characters, 0) and len(table):
            table = table[: len(table) // 2]
            text = _text(table)
        left_out += len(np.unique(whole[len(table) :, _NUMBER]))
        if len(table):
            tables[name] = text
            rows, characters = rows - len(table), characters - len(text)
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


def _text(table: Table) -> str:
    return base64.b64encode(zlib.compress(table.T.astype("<i8").tobytes(), 1)).decode()


def cross_check(tables: Sequence[Table], name: Callable[[int], str]) -> int:
    """Proves records from the parts that different ranks read.

    Args:
        tables: What the ranks report, of one index.
        name: Returns what the record of a number is called in messages.

    Returns:
        How many records stay unproven, because no parts fit together to the whole.
    """
    table = _in_order(np.concatenate([*tables, np.empty((0, _COLUMNS), np.int64)]))
    if not len(table):
        return 0
    starts = _starts(table)
    _check_alike(table, starts, name)
    chained = _chained(table, starts)
    counts = np.diff(np.append(starts, len(table)))
    _check_chained(table[np.repeat(chained, counts)], name)
    return _check_others(table, starts[~chained], counts[~chained], name)


def _in_order(table: Table) -> Table:
    """Returns rows by number, start and length, each once, as replicas read the same parts."""
    table = table[np.lexsort([table[:, at] for at in (_CRC, _LENGTH, _START, _NUMBER)])]
    again = np.zeros(len(table), np.bool_)
    again[1:] = (table[1:] == table[:-1]).all(axis=1)
    distinct: Table = table[~again]
    return distinct


def _starts(table: Table) -> NDArray[np.intp]:
    return np.flatnonzero(np.diff(table[:, _NUMBER], prepend=-1))


def _check_alike(table: Table, starts: NDArray[np.intp], name: Callable[[int], str]) -> None:
    """Compares what the ranks report of one record, and of one part of it."""
    first = np.repeat(starts, np.diff(np.append(starts, len(table))))
    bad = (table[:, [_SIZE, _EXPECTED]] != table[first][:, [_SIZE, _EXPECTED]]).any(axis=1)
    place = [_NUMBER, _START, _LENGTH]
    bad[1:] |= (table[1:, place] == table[:-1, place]).all(axis=1)
    if bad.any():
        _disagree(name(int(table[np.argmax(bad), _NUMBER])))


def _disagree(where: str) -> None:
    raise ChecksumError("two ranks read different bytes from it", where=where)


def _chained(table: Table, starts: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Returns for each record whether its parts follow one another from its start to its end."""
    stops = table[:, _START] + table[:, _LENGTH]
    before = np.roll(stops, 1)
    before[starts] = 0
    last = np.append(starts[1:], len(table)) - 1
    unbroken = np.logical_and.reduceat(table[:, _START] == before, starts)
    is_chained: NDArray[np.bool_] = unbroken & (stops[last] == table[last, _SIZE])
    return is_chained


def _check_chained(table: Table, name: Callable[[int], str]) -> None:
    """Joins all parts of all records at once: their sum, each moved by what comes after it."""
    if not len(table):
        return
    starts = _starts(table)
    after = table[:, _SIZE] - table[:, _START] - table[:, _LENGTH]
    moved = _products(table[:, _CRC], _powers(after))
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


def _powers(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns x^(8 n) for each length: what n further bytes multiply a checksum by."""
    distinct, places = np.unique(lengths, return_inverse=True)
    power = np.full(len(distinct), _ONE, np.int64)
    for bit in range(int(distinct[-1]).bit_length()):
        factor = np.int64(crc32_combine(_ONE, 0, 1 << bit))
        has = (distinct >> bit & 1).astype(np.bool_)
        power[has] = _products(power[has], np.full(int(has.sum()), factor))
    powers: NDArray[np.int64] = power[places.reshape(-1)]
    return powers


def _products(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiplies polynomials modulo CRC-32's, as `ckptkit.core.checksums` does singly."""
    product = np.zeros_like(left)
    for bit in range(31, -1, -1):
        product ^= right * (left >> bit & 1)
        right = (right >> 1) ^ (_X_TO_32 * (right & 1))
    return product


def _check_others(
    table: Table,
    starts: NDArray[np.intp],
    counts: NDArray[np.intp],
    name: Callable[[int], str],
) -> int:
    """Checks records of which ranks read parts that overlap, or not all; returns what is left."""
    unproven = 0
    left = _MOST_ROWS_JOINED_SINGLY
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        left -= count
        rows = table[start : start + count].tolist() if left >= 0 else []
        number = int(table[start, _NUMBER])
        crc32 = _joined(rows, int(table[start, _SIZE]), number, name)
        if crc32 is None:
            unproven += 1
        else:
            _check_crc32(crc32, int(table[start, _EXPECTED]), where=name(number))
    return unproven


def _joined(
    rows: list[list[int]], size_bytes: int, number: int, name: Callable[[int], str]
) -> int | None:
    """Returns the checksum of the whole from parts that follow one another, or None."""
    reached: dict[int, int] = {0: 0}  # how far some parts lead, and their checksum
    for row in rows:
        start, length, crc32 = row[_START:]
        if start in reached:
            joined = crc32_combine(reached[start], crc32, length)
            if reached.setdefault(start + length, joined) != joined:
                _disagree(name(number))
    return reached.get(size_bytes)
