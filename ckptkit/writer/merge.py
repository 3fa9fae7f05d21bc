"""The records of all ranks become one index: what lies where, and the proof that nothing lacks.

A job of 512 ranks has a million chunks, so chunks are kept in columns, 40 bytes each, and their
sizes, which are few, once.

Whether boxes fill a tensor: the ways in which training cuts tensors are told apart quickly.
"""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add, index, le, mul
from typing import Any, NamedTuple

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, IncompleteCheckpointError
from ckptkit.plan.layouts.dcp_metadata import Place, Sizes, StoredObject, StoredTensor, flat_key
from ckptkit.storage.local.names import check_relative
from ckptkit.writer.record import Dispensable, RankRecord

Extents = tuple[int, ...]
Box = tuple[Extents, Extents]
_FEW = 32  # boxes that are quickly compared with each other


def is_tiling(shape: Extents, boxes: Sequence[Box]) -> bool:
    """Says whether boxes hold every element of a tensor once.

    Args:
        shape: Of the tensor, in elements.
        boxes: Offsets and sizes; none is empty, none leaves the tensor, no two begin at the same
            element, and together they have as many elements as the tensor.

    Returns:
        False if two boxes overlap.

    >>> is_tiling((4,), [((0,), (2,)), ((2,), (2,))])
    True
    >>> is_tiling((4,), [((0,), (2,)), ((1,), (2,))])
    False
    """
    if _fill_grid(shape, boxes):
        return True
    runs = _runs(shape, boxes)
    if runs is not None:
        return all(before[1] <= after[0] for before, after in pairwise(sorted(runs)))
    return _are_apart(boxes)


def _fill_grid(shape: Extents, boxes: Sequence[Box]) -> bool:
    """Says whether the boxes are all cells of a grid, as those of sharded dimensions are."""
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


def _runs(shape: Extents, boxes: Sequence[Box]) -> list[tuple[int, int]] | None:
    """Returns the row-major elements of each box, as flat parameters cut them; None if not so."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    runs = []
    for offsets, sizes in boxes:
        axis = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
        if sizes[axis + 1 :] != shape[axis + 1 :]:
            return None
        start = sum(map(mul, offsets, strides))
        runs.append((start, start + math.prod(sizes)))
    return runs


def _are_apart(boxes: Sequence[Box]) -> bool:
    """Says whether no two boxes overlap, by cutting the space between them again and again.

    What is cut from side to side, as a mesh cuts tensors one dimension after the other, takes
    little more than sorting; anything else as many comparisons as boxes lie side by side.
    """
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


def _cut(boxes: list[Box], axis: int) -> Iterator[list[Box]]:
    """Yields the groups of boxes between which a plane across the axis meets no box."""
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    first = end = 0
    for number, (offsets, sizes) in enumerate(ordered):
        if number and offsets[axis] >= end:
            yield ordered[first:number]
            first = number
        end = max(end, offsets[axis] + sizes[axis])
    yield ordered[first:]


def _pass_by(boxes: list[Box]) -> bool:
    """Says whether no two boxes overlap, moving a plane along the axis with the most cuts."""
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
_COLUMNS = 5  # offsets, sizes, file, start, length; the first three are positions in tables
_HINT = "this is a fault of ckptkit or of two jobs in one directory; the next save is not affected"
_PARTS_HINT = (
    "where ranks hold different parts of a model, as stages of a pipeline do, the parts need"
    " different names, and fully_shard or DDP around each, on its own ranks"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What one DCP directory holds."""

    tensors: tuple[StoredTensor, ...]
    objects: tuple[StoredObject, ...]


class Merged(NamedTuple):
    """All records in one.

    Attributes:
        units: What each DCP directory holds.
        lost: What was left out, since not all of it is there, by the user's name, and why.
        empty: Directories that hold nothing, since all in them was left out.
    """

    units: Mapping[str, Unit]
    lost: Mapping[str, str]
    empty: tuple[str, ...]


@contextmanager
def few_collections() -> Iterator[None]:
    """Keeps the garbage collector away from millions of objects that are no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Merger:
    """Takes records one after another, and gives the units at the end."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._units: dict[str, _UnitMerger] = {}

    def add(self, record: RankRecord, *, where: str) -> None:
        """Takes in a record.

        Args:
            record: Of a rank that was not taken in before.
            where: Its file, for messages.
        """
        if record.world_size != self._world_size:
            raise FormatError(
                f"a world of {record.world_size} ranks was found where {self._world_size} took"
                " part",
                where=where,
                hint=_HINT,
            )
        sizes = {file.path: file.size_bytes for file in record.files}
        for one in record.dispensable:
            unit = self._units.setdefault(one.unit, _UnitMerger(one.unit))
            unit.may_lack(one, f"rank {record.rank}: {one.problem}" if one.problem else "")
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

        What is dispensable is left out as a whole where that cannot be proven.
        """
        units = {name: unit.result() for name, unit in self._units.items()}
        lost = {k: v for unit in self._units.values() for k, v in unit.lost.items()}
        empty = tuple(
            name
            for name, unit in units.items()
            if self._units[name].lost and not (unit.tensors or unit.objects)
        )
        return Merged({k: v for k, v in units.items() if k not in empty}, lost, empty)


class _Tensor:
    """One tensor so far, under all its names; `rows` holds five numbers for each chunk."""

    __slots__ = ("aliases", "dtype", "paths", "rows", "shape")

    def __init__(self, path: KeyPath, dtype: str, shape: list[int]) -> None:
        self.paths = [path]
        self.dtype = dtype
        self.shape = shape
        self.aliases: list[Any] = []
        self.rows = array("q")


class _Places:
    """The chunks of a tensor, made as they are asked for."""

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
    """Merges what the ranks say of one directory."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[KeyPath, _Tensor] = {}
        self._objects: dict[str, StoredObject] = {}
        self._expected: dict[KeyPath, str] = {}
        self._sizes: dict[Sizes, int] = {}
        self._files: dict[str, int] = {}
        self._dispensable: dict[KeyPath, str] = {}
        self._lost: dict[KeyPath, str] = {}

    def may_lack(self, one: Dispensable, problem: str) -> None:
        """Notes what the directory may do without, and what is wrong with it, if anything."""
        self._dispensable[one.path] = one.name
        if problem:
            self._lost.setdefault(one.path, problem)

    @property
    def lost(self) -> dict[str, str]:
        return {self._dispensable[path]: problem for path, problem in self._lost.items()}

    def add(self, content: Mapping[str, Any], file_sizes: Mapping[str, int], where: str) -> None:
        tensors = [self._tensor(claim, where) for claim in content["tensors"]]
        names = [_text(name) for name in content["data_files"]]
        ends = [self._end_of(name, file_sizes, where) for name in names]
        files = [self._files.setdefault(name, len(self._files)) for name in names]
        numbers = self._sizes
        for number, offsets, sizes, file, start, length in content["chunks"]:
            first, second = tuple(offsets), tuple(sizes)
            if not 0 <= start <= start + length <= ends[file]:
                raise _outside(names[file], start, length, ends[file], where)
            known = numbers.get(first, -1), numbers.get(second, -1)
            if min(known) < 0:
                known = self._number_of(first), self._number_of(second)
            tensors[number].rows.extend((*known, files[file], start, length))
        for path, file, start, length in content["objects"]:
            if not 0 <= start <= start + length <= ends[file]:
                raise _outside(names[file], start, length, ends[file], where)
            stored = StoredObject(_key_path(path), names[file], index(start), index(length))
            self._add_object(stored, where)
        for path in content["expected"]:
            self._expected.setdefault(_key_path(path), where)

    def result(self) -> Unit:
        sizes, files = list(self._sizes), list(self._files)
        places = {path: _Places(t.rows, sizes, files) for path, t in self._tensors.items()}
        for path, tensor in self._tensors.items():
            with self._sparing(path):
                self._prove(tensor, tuple(tensor.shape), places[path])
        self._check_expected()
        keys: dict[str, None] = {}
        kept = {path: one for path, one in self._tensors.items() if not self._is_lost(path)}
        objects = [one for one in self._objects.values() if not self._is_lost(one.path)]
        names = [one.key for one in objects]
        names += [flat_key(path) for tensor in kept.values() for path in tensor.paths]
        for key in names:
            if key in keys:
                raise self._error(FormatError, key, "two values were found under one key")
            keys[key] = None
        stored = [
            StoredTensor(path, tensor.dtype, tuple(tensor.shape), places[first])
            for first, tensor in kept.items()
            for path in tensor.paths
        ]
        return Unit(tuple(stored), tuple(objects))

    def _check_expected(self) -> None:
        keys = {flat_key(path) for tensor in self._tensors.values() for path in tensor.paths}
        for path, where in self._expected.items():
            key = flat_key(path)
            if key not in keys and key not in self._objects:
                with self._sparing(path):
                    raise self._error(
                        IncompleteCheckpointError,
                        key,
                        f"no rank wrote it, though {where} says that another one has to",
                        hint=_PARTS_HINT,
                    )

    def _is_lost(self, path: KeyPath) -> bool:
        return bool(self._lost) and any(path[: len(start)] == start for start in self._lost)

    @contextmanager
    def _sparing(self, path: KeyPath) -> Iterator[None]:
        """Makes an error of what is dispensable cost only that."""
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
                raise ValueError(f"{dtype!r:.100} was found where a dtype was expected")
            self._number_of(tuple(shape))
            tensor = self._tensors[path] = _Tensor(path, dtype, shape)
        elif tensor.dtype != dtype or tensor.shape != shape:
            with self._sparing(path):
                raise FormatError(
                    f"{dtype} of shape {shape} was found where another rank wrote {tensor.dtype} of"
                    f" shape {tensor.shape}",
                    where=f"{where}: {self._shown(flat_key(path))}",
                    hint=f"all ranks have to save the same model; {_PARTS_HINT}",
                )
        aliases = claim.get("aliases", ())
        if aliases != tensor.aliases:
            new = [alias for alias in aliases if alias not in tensor.aliases]
            tensor.aliases += new
            tensor.paths += map(_key_path, new)
        return tensor

    def _end_of(self, name: str, file_sizes: Mapping[str, int], where: str) -> int:
        check_relative(name, where)
        path = f"{self._name}/{name}" if self._name else name
        if path not in file_sizes:
            raise FormatError("a data file is not among the files", where=f"{where}: {path}")
        return file_sizes[path]

    def _add_object(self, stored: StoredObject, where: str) -> None:
        if stored.key in self._objects:
            other = self._objects[stored.key].file
            with self._sparing(stored.path):
                raise FormatError(
                    f"it was written to {other} and to {stored.file}, and can only be stored once",
                    where=f"{where}: {self._shown(stored.key)}",
                    hint=_HINT,
                )
        self._objects[stored.key] = stored

    def _number_of(self, sizes: Sizes) -> int:
        """Returns the position of sizes in the table; each is looked at when it comes first."""
        number = self._sizes.get(sizes)
        if number is None:
            if not all(type(size) is int and size >= 0 for size in sizes):
                raise ValueError(f"{sizes!r:.100} was found where sizes were expected")
            number = self._sizes[sizes] = len(self._sizes)
        return number

    def _prove(self, tensor: _Tensor, shape: Sizes, places: _Places) -> None:
        """Proves that the chunks lie inside the tensor, apart, and have all of its elements."""
        boxes: list[tuple[Sizes, Sizes]] = []
        total = 0
        for offsets, sizes, *_ in places:
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self._error(
                    FormatError,
                    flat_key(tensor.paths[0]),
                    f"a chunk of {len(sizes)} dimensions was found in a tensor of {len(shape)}",
                )
            if not all(map(le, map(add, offsets, sizes), shape)):
                raise self._error(
                    FormatError,
                    flat_key(tensor.paths[0]),
                    f"the chunk at {list(offsets)} of sizes {list(sizes)} was found to leave the"
                    f" shape {list(shape)}",
                )
            volume = math.prod(sizes)
            if volume:
                boxes.append((offsets, sizes))
                total += volume
        self._judge(tensor, total, shape, boxes)

    def _judge(
        self, tensor: _Tensor, total: int, shape: Sizes, boxes: Sequence[tuple[Sizes, Sizes]]
    ) -> None:
        key, elements = flat_key(tensor.paths[0]), math.prod(shape)
        if total < elements:
            raise self._error(
                IncompleteCheckpointError, key, f"{total:,} of {elements:,} elements were written"
            )
        distinct = len({offsets for offsets, _ in boxes}) == len(boxes)
        if total > elements or not distinct or not is_tiling(shape, boxes):
            raise self._error(
                FormatError,
                key,
                f"{total:,} elements were written of {elements:,}, some of them at the place of"
                " another chunk",
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
        raise ValueError(f"{path!r:.100} was found where a path of keys was expected")
    if not all(isinstance(part, str) or (type(part) is int and part >= 0) for part in path):
        raise ValueError(f"{path!r:.100} was found where a path of keys was expected")
    return tuple(path)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r:.100} was found where a name was expected")


def _outside(name: str, start: int, length: int, end: int, where: str) -> FormatError:
    return FormatError(
        f"bytes [{start}, {start + length}) were found to be claimed of {name}, which has {end}",
        where=where,
    )
