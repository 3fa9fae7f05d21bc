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
all of them, as nothing keeps it equal. `crc32` is null for data files, whose archives
have their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ckptkit.core.errors import FormatError
from ckptkit.storage.locations import check_relative

RECORDS_FOLDER = ".ranks"

Replica = tuple[str, tuple[str | int, ...], tuple[int, ...], bool]
"""The DCP directory, the key path and the offsets of a sample; whether rank 0 writes its tensor."""


class WrittenFile(Struct, frozen=True):
    """A durable file of an attempt."""

    path: str  # relative to the attempt's folder
    size_bytes: int  # its length
    crc32: int | None  # of all its bytes, or None for a data file


class RecordedOptional(Struct, frozen=True):
    """A part of the state that a step may lack."""

    name: str  # the user's name of it
    unit: str  # the DCP directory
    path: tuple[str | int, ...]  # the prefix of all its key paths
    problem: str  # why the rank could not save it; empty if it could


class RankRecord(Struct, frozen=True):
    """A record whose outer structure was checked."""

    rank: int  # of the rank that wrote it
    world_size: int  # how many ranks there were
    attempt: str  # the attempt that it belongs to
    units: Mapping[str, Mapping[str, Any]]  # the content of each directory; checked when merged
    files: tuple[WrittenFile, ...]  # all files of the rank, without the record itself
    dispensable: tuple[RecordedOptional, ...] = ()  # what the step may lack
    values: tuple[str, ...] = ()  # the names of entries that rank 0 writes for all ranks
    # The CRC-32 of samples that several ranks hold
    replicas: Mapping[Replica, int] = field(default_factory=dict)


def record_bytes(record: Mapping[str, Any], files: Sequence[WrittenFile]) -> bytes:
    listed = [{"path": f.path, "size_bytes": f.size_bytes, "crc32": f.crc32} for f in files]
    return json.dumps({**record, "files": listed}, separators=(",", ":")).encode()


def parse_record(data: bytes, *, where: str) -> RankRecord:
    """Reads a record back."""
    try:
        document = json.loads(data)
        record = RankRecord(
            rank=_count(document["rank"]),
            world_size=_count(document["world_size"]),
            attempt=str(document["attempt"]),
            units={str(unit): _table(content) for unit, content in document["units"].items()},
            files=tuple(_file(file, where) for file in document["files"]),
            dispensable=tuple(
                RecordedOptional(
                    str(part["name"]), str(part["unit"]), tuple(part["path"]), str(part["problem"])
                )
                for part in document.get("dispensable", ())
            ),
            values=tuple(map(str, document.get("values", ()))),
            replicas={
                (str(unit), tuple(path), tuple(offsets), any(of_rank_0)): _count(crc)
                for (unit, path, offsets, *of_rank_0), crc in zip(
                    document.get("replicas", ()), document.get("replica_sums", ()), strict=True
                )
            },
        )
    except FormatError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(f"not a rank's record: {reason}", where=where) from error
    for unit in filter(None, record.units):
        check_relative(unit, where)
    return record


def _file(document: Mapping[str, Any], where: str) -> WrittenFile:
    crc = document["crc32"]
    path = str(document["path"])
    check_relative(path, where)
    return WrittenFile(path, _count(document["size_bytes"]), None if crc is None else _count(crc))


def _table(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"expected an object, found a {type(value).__name__}")


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"expected a number, found {value!r:.100}")
