"""A rank's record: a list of what it wrote, which exists only when all of it is durable.

It is a JSON document, by convention at `.ranks/R.json` in the attempt's folder:

    {"rank": R, "world_size": W, "attempt": "...", "step": N,
     "units": {UNIT: {
        "tensors": [{"path": [...], "dtype": "float32", "shape": [...], "aliases": [[...]]}],
        "chunks": [[tensor, [offsets], [sizes], file, start, length], ...],
        "objects": [[[path], file, start, length], ...],
        "data_files": ["__R_0.distcp", ...],
        "expected": [[path], ...]}},
     "dispensable": [{"name": "...", "unit": UNIT, "path": [...], "problem": ""}],
     "values": ["...", ...],
     "replicas": [[UNIT, [path], [offsets], false], ...],
     "replica_sums": [c, ...],
     "files": [{"path": "...", "size_bytes": n, "crc32": c}]}

`tensor` is an index into `tensors` and `file` one into `data_files`; start and length are bytes of
an archive, offsets and sizes elements. `expected` names tensors that the rank holds and another
one writes. What is `dispensable` does not fail the step when it cannot be saved: then `problem`
says why, and nothing below its path is taken from any rank. `values` are entries of the state that
rank 0 alone writes, if it has them. `replica_sums` are the CRC-32 of the first elements of some
tensors that several ranks hold, at these offsets; true stands for a tensor that rank 0 writes for
all of them, as nothing keeps it equal. `crc32` is null for data files of DCP, whose
archives have their own. `in_parts` is true of other data files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, convert

from ckptkit.core.errors import FormatError
from ckptkit.storage.locations import check_relative

RECORDS_FOLDER = ".ranks"

_Count = Annotated[int, Meta(ge=0)]


class Replica(Struct, frozen=True, array_like=True):
    """Names a sample of a tensor that several ranks hold."""

    unit: str  # the DCP directory
    path: tuple[str | int, ...]  # the key path
    offsets: tuple[int, ...]  # where the sample begins
    of_rank_0: bool = False  # whether rank 0 writes its tensor for all ranks


class WrittenFile(Struct, frozen=True):
    """A durable file of an attempt."""

    path: str  # relative to the attempt's folder
    size_bytes: _Count  # its length
    crc32: _Count | None  # of all its bytes, or None for a data file of DCP
    # whether it is read in parts, so that only `verify` compares the checksum
    in_parts: bool = False


class RecordedOptional(Struct, frozen=True):
    """A part of the state that a step may lack."""

    name: str  # the user's name of it
    unit: str  # the DCP directory
    path: tuple[str | int, ...]  # the prefix of all its key paths
    problem: str  # why the rank could not save it; empty if it could


class RankRecord(Struct, frozen=True):
    """A record whose outer structure was checked."""

    rank: _Count  # of the rank that wrote it
    world_size: _Count  # how many ranks there were
    attempt: str  # the attempt that it belongs to
    units: Mapping[str, Mapping[str, Any]]  # the content of each directory; checked when merged
    files: tuple[WrittenFile, ...]  # all files of the rank, without the record itself
    dispensable: tuple[RecordedOptional, ...] = ()  # what the step may lack
    values: tuple[str, ...] = ()  # the names of entries that rank 0 writes for all ranks
    replicas: tuple[Replica, ...] = ()  # samples that several ranks hold
    replica_sums: tuple[_Count, ...] = ()  # the CRC-32 of each of these


def record_bytes(record: Mapping[str, Any], files: Sequence[WrittenFile]) -> bytes:
    listed = [
        {"path": f.path, "size_bytes": f.size_bytes, "crc32": f.crc32}
        | ({"in_parts": True} if f.in_parts else {})
        for f in files
    ]
    return json.dumps({**record, "files": listed}, separators=(",", ":")).encode()


def parse_record(data: bytes, *, where: str) -> RankRecord:
    """Reads a record back."""
    try:
        record = convert(json.loads(data), RankRecord)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a rank's record: {error}", where=where) from error
    if len(record.replicas) != len(record.replica_sums):
        message = "not a rank's record: it has another number of sums than of replicas"
        raise FormatError(message, where=where)
    for path in (*filter(None, record.units), *(file.path for file in record.files)):
        check_relative(path, where)
    return record
