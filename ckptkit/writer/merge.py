"""Merges the records of all ranks into one index, and proves that nothing is missing.

A job of 512 ranks has a million chunks, so chunks are kept in columns, 40 bytes each. Few of
their sizes are distinct; each is kept once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from operator import add, index, le
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.core.manifest import DIGESTS
from ckptkit.plan.layouts.dcp_metadata import DcpObject, DcpTensor, Place, Sizes, flat_key
from ckptkit.storage.locations import check_relative
from ckptkit.writer.record import RankRecord, RecordedOptional, Replica

Extents = tuple[int, ...]
Box = tuple[Extents, Extents]
_FEW = 32  # boxes that are compared pairwise


def is_tiling(shape: Extents, boxes: Sequence[Box]) -> bool:
    """Returns whether boxes cover every element of a tensor once; False if two of them overlap.

    None is empty, none leaves the tensor, no two start at the same element, and together they have
    as many elements as the tensor.

    Boxes that are no grid are split recursively between planes. Those that planes separate, as a
    mesh cuts tensors one dimension after the other, cost little more than sorting; others cost one
    comparison for each pair of boxes that a plane meets.

    >>> is_tiling((4,), [((0,), (2,)), ((2,), (2,))]), is_tiling((4,), [((0,), (2,)), ((1,), (2,))])
    (True, False)
    """
    if _fill_grid(shape, boxes):
        return True
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        if len(group) <= _FEW:
            if any(_overlap(*pair) for pair in combinations(group, 2)):
                return False
            continue
        for axis in range(len(group[0][0])):
            parts = list(_cut(group, axis))
            if len(parts) > 1:
                groups += parts
                break
        else:
            if not _pass_by(group):
                return False
    return True


def _fill_grid(shape: Extents, boxes: Sequence[Box]) -> bool:
    """Returns whether the boxes are the cells of a grid, as with sharded dimensions."""
    cells = 1
    for axis, size in enumerate(shape):
        intervals = sorted({(offsets[axis], sizes[axis]) for offsets, sizes in boxes})
        at = 0
        for start, length in intervals:
            if start != at:
                return False
            at += length
        if at != size:
            return False
        cells *= len(intervals)
    return cells == len(boxes)


def _cut(boxes: list[Box], axis: int) -> Iterator[list[Box]]:
    """Yields groups of boxes that planes across the axis separate."""
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    first = end = 0
    for number, (offsets, sizes) in enumerate(ordered):
        if number and offsets[axis] >= end:
            yield ordered[first:number]
            first = number
        end = max(end, offsets[axis] + sizes[axis])
    yield ordered[first:]


def _pass_by(boxes: list[Box]) -> bool:
    """Returns whether no two boxes overlap, with a sweep along the axis with the most cuts."""
    axis = max(
        range(len(boxes[0][0])), key=lambda axis: len({offsets[axis] for offsets, _ in boxes})
    )
    met: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        start = box[0][axis]
        met = [other for other in met if other[0][axis] + other[1][axis] > start]
        if any(_overlap(box, other) for other in met):
            return False
        met.append(box)
    return True


def _overlap(first: Box, second: Box) -> bool:
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))


KeyPath = tuple[str | int, ...]
_COLUMNS = 5  # offsets, sizes, file, start, length; the first three are indices into tables
_HINT = (
    "pass the same models on all ranks, and use one directory for each job; otherwise this is a bug"
    " of ckptkit; the next save is not affected"
)
_PARTS_HINT = (
    "if ranks hold different parts of a model, as stages of a pipeline, give the parts different"
    " names, and wrap each in fully_shard or DDP on its own ranks"
)


class MergedUnit(Struct, frozen=True):
    """The merged content of one DCP directory."""

    tensors: tuple[DcpTensor, ...]
    objects: tuple[DcpObject, ...]


class Merged(NamedTuple):
    """All records in one."""

    units: Mapping[str, MergedUnit]  # the content of each DCP directory
    # What was left out because it is incomplete, by the user's name, with the reason
    lost: Mapping[str, str]
    empty: tuple[str, ...]  # directories whose whole content was left out
    notes: tuple[str, ...] = ()  # what everyone who reads the step should know
    digests: Mapping[str, str] = MappingProxyType({})  # of data files without sums of their own


def with_findings(
    source: Mapping[str, Any],
    lost: Mapping[str, str],
    notes: Sequence[str],
    digests: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the `source` of a step's manifest with what the merge of its records has found."""
    found = {"lost": dict(lost), "notes": list(notes), DIGESTS: dict(digests)}
    return {**source, **{name: value for name, value in found.items() if value}}


class Merger:
    """Merges records one after another."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._units: dict[str, _UnitMerger] = {}
        self._values: dict[str, int] = {}  # the lowest rank that has each
        self._replicas: dict[Replica, dict[int, int]] = {}  # the lowest rank that has each sum

    def add(self, record: RankRecord, *, where: str) -> None:
        """Adds the record of a rank."""
        if record.world_size != self._world_size:
            raise FormatError(
                f"expected a record of {self._world_size} ranks, found one of {record.world_size}",
                where=where,
                hint=_HINT,
            )
        sizes = {file.path: file.size_bytes for file in record.files}
        for value in record.values:
            self._values[value] = min(record.rank, self._values.get(value, record.rank))
        for replica, crc in zip(record.replicas, record.replica_sums, strict=True):
            ranks = self._replicas.setdefault(replica, {})
            ranks[crc] = min(record.rank, ranks.get(crc, record.rank))
        for part in record.dispensable:
            unit = self._units.setdefault(part.unit, _UnitMerger(part.unit))
            unit.may_lack(part, f"rank {record.rank}: {part.problem}" if part.problem else "")
        for name, content in record.units.items():
            unit = self._units.setdefault(name, _UnitMerger(name))
            try:
                unit.add(content, sizes, where)
            except FormatError:
                raise
            except (
                *(AttributeError, LookupError, OverflowError, TypeError, ValueError),
                RecursionError,
            ) as error:
                message = f"garbled entry of unit {name!r}: {type(error).__name__}: {error}"
                raise FormatError(message, where=where) from error

    def result(self) -> Merged:
        """Proves that everything was written once, and returns it by directory.

        A dispensable part without that proof is left out as a whole.
        """
        units = {name: unit.result() for name, unit in self._units.items()}
        lost = {k: v for unit in self._units.values() for k, v in unit.lost.items()}
        for value, rank in sorted(self._values.items()):
            if rank > 0:
                lost[value] = f"rank {rank} passed it, and rank 0, which writes it, did not"
        empty = tuple(
            name
            for name, unit in units.items()
            if self._units[name].lost and not (unit.tensors or unit.objects)
        )
        kept = {k: v for k, v in units.items() if k not in empty}
        return Merged(kept, lost, empty, tuple(self._differences()))

    def _differences(self) -> Iterator[str]:
        """Yields notes if ranks hold other values of what is stored once for all of them."""
        for of_rank_0, what in _DIFFERING.items():
            compared = {
                key: sums for key, sums in self._replicas.items() if key.of_rank_0 is of_rank_0
            }
            differing = {key: sums for key, sums in compared.items() if len(sums) > 1}
            if differing:
                replica, sums = next(iter(differing.items()))
                first, second, *_more = sorted(sums.values())
                yield (
                    f"ranks {first} and {second} held different values of {flat_key(replica.path)}"
                    f" ({len(differing)} of {len(compared)} compared tensors differ): {what}"
                )


_DIFFERING = {  # by whether rank 0 writes them for all ranks
    False: "the step has some tensors of one rank and some of another; save right after an"
    " averaging, or let DDP or FSDP keep the ranks equal",
    True: "the step has those of rank 0, which a resume gives to all ranks; nothing keeps buffers"
    " and tensors outside of wrappers equal, so let rank 0 broadcast them",
}


class _Tensor:
    """One tensor under all its names; `rows` has `_COLUMNS` numbers for each chunk."""

    __slots__ = ("aliases", "dtype", "paths", "rows", "shape")

    def __init__(self, path: KeyPath, dtype: str, shape: list[int]) -> None:
        self.paths = [path]
        self.dtype = dtype
        self.shape = shape
        self.aliases: list[Any] = []
        self.rows = array("q")


class _Places:
    """The chunks of a tensor, created during iteration."""

    __slots__ = ("_files", "_rows", "_sizes")

    def __init__(self, rows: array[int], sizes: Sequence[Sizes], files: Sequence[str]) -> None:
        self._rows = rows
        self._sizes = sizes
        self._files = files

    def __len__(self) -> int:
        return len(self._rows) // _COLUMNS

    def __iter__(self) -> Iterator[Place]:
        offsets, sizes, file, start, length = (self._rows[i::_COLUMNS] for i in range(_COLUMNS))
        size_of, file_of = self._sizes.__getitem__, self._files.__getitem__
        return zip(
            map(size_of, offsets),
            map(size_of, sizes),
            map(file_of, file),
            start,
            length,
            strict=True,
        )

    def __contains__(self, place: object) -> bool:
        return place in list(self)


class _UnitMerger:
    """Merges the records of one directory."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[KeyPath, _Tensor] = {}
        self._objects: dict[str, DcpObject] = {}
        self._expected: dict[KeyPath, str] = {}
        self._sizes: dict[Sizes, int] = {}
        self._files: dict[str, int] = {}
        self._dispensable: dict[KeyPath, str] = {}
        self._lost: dict[KeyPath, str] = {}

    def may_lack(self, part: RecordedOptional, problem: str) -> None:
        """Adds a part that the directory may lack, and what is wrong with it, if anything."""
        self._dispensable[part.path] = part.name
        if problem:
            self._lost.setdefault(part.path, problem)

    @property
    def lost(self) -> dict[str, str]:
        return {self._dispensable[path]: problem for path, problem in self._lost.items()}

    def add(self, content: Mapping[str, Any], file_sizes: Mapping[str, int], where: str) -> None:
        tensors = [self._tensor(claim, where) for claim in content["tensors"]]
        names: list[str] = []
        ends: list[int] = []
        for name in content["data_files"]:
            if not isinstance(name, str):
                raise ValueError(f"expected a name, found {name!r:.100}")  # noqa: TRY004  garbled
            check_relative(name, where)
            path = f"{self._name}/{name}" if self._name else name
            if path not in file_sizes:
                raise FormatError("a data file is not among the files", where=f"{where}: {path}")
            names.append(name)
            ends.append(file_sizes[path])
        files = [self._files.setdefault(name, len(self._files)) for name in names]
        numbers = self._sizes
        for number, offsets, sizes, file, start, length in content["chunks"]:
            first, second = tuple(offsets), tuple(sizes)
            if not 0 <= start <= start + length <= ends[file]:
                raise _outside(names[file], start, length, ends[file], where)
            pair = numbers.get(first, -1), numbers.get(second, -1)
            if min(pair) < 0:
                pair = self._number_of(first), self._number_of(second)
            tensors[number].rows.extend((*pair, files[file], start, length))
        for path, file, start, length in content["objects"]:
            if not 0 <= start <= start + length <= ends[file]:
                raise _outside(names[file], start, length, ends[file], where)
            stored = DcpObject(_key_path(path), names[file], index(start), index(length))
            self._add_object(stored, where)
        for path in content["expected"]:
            self._expected.setdefault(_key_path(path), where)

    def result(self) -> MergedUnit:
        sizes, files = list(self._sizes), list(self._files)
        places = {path: _Places(t.rows, sizes, files) for path, t in self._tensors.items()}
        for path, tensor in self._tensors.items():
            with self._sparing(path):
                self._prove(tensor, tuple(tensor.shape), places[path])
        keys = {flat_key(path) for tensor in self._tensors.values() for path in tensor.paths}
        for path, where in self._expected.items():
            key = flat_key(path)
            if key not in keys and key not in self._objects:
                with self._sparing(path):
                    raise self._error(
                        IncompleteCheckpointError,
                        key,
                        f"no rank wrote it, though {where} expects it of another rank",
                        hint=_PARTS_HINT,
                    )
        kept = {path: tensor for path, tensor in self._tensors.items() if not self._is_lost(path)}
        objects = [stored for stored in self._objects.values() if not self._is_lost(stored.path)]
        names = [stored.key for stored in objects]
        names += [flat_key(path) for tensor in kept.values() for path in tensor.paths]
        keys = set()
        for key in names:
            if key in keys:
                raise self._error(FormatError, key, "two values have this key")
            keys.add(key)
        stored = [
            DcpTensor(path, tensor.dtype, tuple(tensor.shape), places[first])
            for first, tensor in kept.items()
            for path in tensor.paths
        ]
        return MergedUnit(tuple(stored), tuple(objects))

    def _is_lost(self, path: KeyPath) -> bool:
        return bool(self._lost) and any(path[: len(start)] == start for start in self._lost)

    @contextmanager
    def _sparing(self, path: KeyPath) -> Iterator[None]:
        """Turns an error of a dispensable part into the loss of that part."""
        try:
            yield
        except (FormatError, IncompleteCheckpointError) as error:
            starts = (start for start in self._dispensable if path[: len(start)] == start)
            start = next(starts, None)
            if start is None:
                raise
            self._lost.setdefault(start, str(error))

    def _tensor(self, claim: Mapping[str, Any], where: str) -> _Tensor:
        path, dtype, shape = tuple(claim["path"]), claim["dtype"], claim["shape"]
        tensor = self._tensors.get(path)
        if tensor is None:
            _key_path(path)
            if dtype not in BY_NAME:
                raise ValueError(f"expected a dtype, found {dtype!r:.100}")
            self._number_of(tuple(shape))
            tensor = self._tensors[path] = _Tensor(path, dtype, shape)
        elif tensor.dtype != dtype or tensor.shape != shape:
            with self._sparing(path):
                raise FormatError(
                    f"expected {tensor.dtype} of shape {tensor.shape}, which another rank wrote,"
                    f" found {dtype} of shape {shape}",
                    where=f"{where}: {self._shown(flat_key(path))}",
                    hint=f"save the same model on all ranks; {_PARTS_HINT}",
                )
        aliases = claim.get("aliases", ())
        if aliases != tensor.aliases:
            new = [alias for alias in aliases if alias not in tensor.aliases]
            tensor.aliases += new
            tensor.paths += map(_key_path, new)
        return tensor

    def _add_object(self, stored: DcpObject, where: str) -> None:
        if stored.key in self._objects:
            other = self._objects[stored.key].file
            with self._sparing(stored.path):
                raise FormatError(
                    f"it was written to both {other} and {stored.file}",
                    where=f"{where}: {self._shown(stored.key)}",
                    hint=_HINT,
                )
        self._objects[stored.key] = stored

    def _number_of(self, sizes: Sizes) -> int:
        """Returns the index of sizes in the table; new ones are checked."""
        number = self._sizes.get(sizes)
        if number is None:
            if not all(type(size) is int and size >= 0 for size in sizes):
                raise ValueError(f"expected sizes, found {sizes!r:.100}")
            number = self._sizes[sizes] = len(self._sizes)
        return number

    def _prove(self, tensor: _Tensor, shape: Sizes, places: _Places) -> None:
        """Proves that the chunks are inside the tensor and cover each element once."""
        boxes: list[tuple[Sizes, Sizes]] = []
        total, elements = 0, math.prod(shape)
        key = flat_key(tensor.paths[0])
        for offsets, sizes, *_ in places:
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self._error(
                    FormatError,
                    key,
                    f"expected chunks of {len(shape)} dimensions, found one of {len(sizes)}",
                )
            if not all(map(le, map(add, offsets, sizes), shape)):
                raise self._error(
                    FormatError,
                    key,
                    f"the chunk at {list(offsets)} of sizes {list(sizes)} is outside of the shape"
                    f" {list(shape)}",
                )
            volume = math.prod(sizes)
            if volume:
                boxes.append((offsets, sizes))
                total += volume
        if total < elements:
            raise self._error(
                IncompleteCheckpointError, key, f"{total:,} of {elements:,} elements were written"
            )
        distinct = len({offsets for offsets, _ in boxes}) == len(boxes)
        if total > elements or not distinct or not is_tiling(shape, boxes):
            raise self._error(
                FormatError,
                key,
                f"{total:,} elements were written of {elements:,}, and some chunks overlap",
                hint=_PARTS_HINT,
            )

    def _error(
        self,
        kind: type[FormatError | IncompleteCheckpointError],
        key: str,
        message: str,
        *,
        hint: str = _HINT,
    ) -> FormatError | IncompleteCheckpointError:
        return kind(message, where=self._shown(key), hint=hint)

    def _shown(self, key: str) -> str:
        return f"{self._name or '.'}: {key}"


def _key_path(path: Sequence[Any]) -> KeyPath:
    if isinstance(path, str) or not path:
        raise ValueError(f"expected a path of keys, found {path!r:.100}")
    if not all(isinstance(part, str) or (type(part) is int and part >= 0) for part in path):
        raise ValueError(f"expected a path of keys, found {path!r:.100}")
    return tuple(path)


def _outside(name: str, start: int, length: int, end: int, where: str) -> FormatError:
    return FormatError(
        f"bytes [{start}, {start + length}) are outside of {name}, which has {end} bytes",
        where=where,
    )
