"""The shards of nanotron's parameters: one file for each, with the place of its parts in the whole.

The header of a shard has texts: `unsharded_shape`, such as "(np.int64(64), 32)", and
`local_global_slices_pairs`, such as "0,16,None|None,None,None#32,48,None|None,None,None". Each pair
is the slices of the stored tensor, and those of the whole one, along each dimension; pairs are
separated by ";".

Source: nanotron/parallel/parameters.py (`SlicesPair`), nanotron/serialize/metadata.py
(`TensorMetadata`), nanotron/serialize/utils.py (`get_path`), scripts/fix_checkpoint_bad_naming.py.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ckptkit.core.errors import FormatError, LimitError, MissingFileError, UnsupportedError
from ckptkit.core.geometry import find_defect, row_major_strides
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRef,
    Key,
    Record,
    Shape,
    Span,
    TensorEntry,
)
from ckptkit.core.text import quote
from ckptkit.formats.parsing import COPY_BACK, MIXED_SAVES, overflows
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.formats.trees import classify
from ckptkit.storage.base import Source

_TENSOR = "data"
_SLICES = "local_global_slices_pairs"
_MAX_SLICES = 1 << 20  # characters of a header's slices
_FILE = re.compile(
    r"model_(?P<name>[^/]+?)(?:_pp-rank-(?P<pp>\d{1,7})-of-(?P<pps>\d{1,7})"
    r"_tp-rank-(?P<tp>\d{1,7})-of-(?P<tps>\d{1,7})"
    r"(?:_exp-rank-(?P<exp>\d{1,7})-of-(?P<exps>\d{1,7}))?)?\.safetensors"
)
_DOUBLED = re.compile(r"model_(?P<name>.+)\.safetensors")  # in the names of version 1.3
_KINDS = {"pipeline": "pp", "tensor": "tp", "expert": "exp"}
_SLICE = re.compile(r"(None|\d{1,18}),(None|\d{1,18}),(?:None|1)")
_SIZE = re.compile(r"(?:np\.int\d+\((\d{1,18})\)|(\d{1,18}))")


class _Shard(Struct, frozen=True):
    """What one file has of a parameter."""

    path: str
    stored: HeaderTensor
    # by kind of rank, the rank and their number; empty for a whole parameter
    ranks: Mapping[str, tuple[int, int]]
    shape: Shape  # of the whole parameter
    # boxes of the stored tensor, and those of the whole one that they are
    pairs: tuple[tuple[Box, Box], ...]


class ShardTable:
    """The files of all parameters."""

    def __init__(self, source: Source, version: str, sizes: Mapping[str, int]) -> None:
        """Begins with the version of the format, and the sizes that are known."""
        self._source = source
        self._version = version
        self._known = sizes
        self._by_name: dict[str, list[_Shard]] = defaultdict(list)
        self._positions: dict[str, int] = {}
        self.files: list[FileRef] = []
        self.records: list[Record] = []  # the bytes of the one tensor of each file
        # numbers of ranks, by dimension, as the names of files have them
        self.sizes: dict[str, int] = {}

    def add(self, path: str, inside: str) -> None:
        """Reads the header of a file; `inside` is its path in the folder of the step."""
        where = posixpath.join(self._source.location, path)
        name, ranks = _parse_path(inside, where)
        for kind, (rank, size) in ranks.items():
            expected = self.sizes.setdefault(kind, self._known.get(kind, size))
            if size != expected or rank >= size:
                raise FormatError(
                    f"is of {kind} rank {rank} of {size}, in a save with {expected} {kind} ranks",
                    where=where,
                    hint=MIXED_SAVES,
                )
        file = self._source.stat(path)
        header = read_header(self._source, file)
        if [tensor.name for tensor in header.tensors] != [_TENSOR]:
            names = ", ".join(quote(tensor.name) for tensor in header.tensors[:3]) or "none"
            raise FormatError(f"has the tensors {names}, expected {_TENSOR!r} alone", where=where)
        stored = header.tensors[0]
        if ranks:
            version = header.metadata.get("version")
            if version != self._version:
                raise FormatError(
                    f"is of version {version!r}, the checkpoint of {self._version!r}",
                    where=where,
                    hint=MIXED_SAVES,
                )
            shape, pairs = _parse_slices(header.metadata, stored.shape, where)
        else:
            if _SLICES in header.metadata:
                raise FormatError(
                    "has the slices of a shard, but no rank in its name",
                    where=where,
                    hint="give the file the name under which nanotron saved it",
                )
            shape, whole = stored.shape, Box((0,) * len(stored.shape), stored.shape)
            pairs = ((whole, whole),)
        if overflows(shape, stored.dtype):
            raise FormatError(f"size of shape {list(shape)} overflows", where=where)
        self._positions[path] = len(self.files)
        self.records.append(Record(len(self.files), stored.start, stored.stop))
        self.files.append(file)
        self._by_name[name].append(_Shard(path, stored, ranks, shape, pairs))

    def entries(self, where: str) -> dict[Key, TensorEntry]:
        """Returns the parameters, each of whose elements is in one file."""
        names = list(self._by_name)
        entries = {}
        for name, membership in zip(
            names, classify([(name,) for name in names], where=where), strict=True
        ):
            shards = self._by_name[name]
            first = self._check_agreement(name, shards)
            chunks = ChunkTable.of([c for s in shards for c in self._chunks(s)], len(first.shape))
            self._check_coverage(name, shards, chunks)
            entry = membership.entry((name,), first.stored.dtype, first.shape, chunks)
            entries[entry.key] = entry
        return entries

    def _chunks(self, shard: _Shard) -> Iterator[Chunk]:
        strides = row_major_strides(shard.stored.shape)
        itemsize = shard.stored.dtype.itemsize
        tensor_rank = shard.ranks.get("tensor", (0, 1))[0]
        for local, whole in shard.pairs:
            first = sum(at * step for at, step in zip(local.offsets, strides, strict=True))
            is_part = local.sizes[1:] != shard.stored.shape[1:]
            yield Chunk(
                whole,
                self._positions[shard.path],
                byte_offset=first * itemsize,
                strides=strides if is_part else None,
                rank=tensor_rank,
            )

    def _check_agreement(self, name: str, shards: Sequence[_Shard]) -> _Shard:
        """Refuses shards that are not of one tensor; returns the first."""
        first = shards[0]
        for other in shards[1:]:
            facts = [
                (s.ranks.get("pipeline"), s.ranks.keys(), list(s.shape), s.stored.dtype.name)
                for s in (first, other)
            ]
            if facts[0] != facts[1]:
                shown = (
                    f"{posixpath.basename(s.path)!r} ({s.stored.dtype.name} {list(s.shape)})"
                    for s in (first, other)
                )
                raise FormatError(
                    f"{quote(name)} is in files that contradict each other: {', '.join(shown)}",
                    where=posixpath.join(self._source.location, posixpath.dirname(first.path)),
                    hint=MIXED_SAVES,
                )
        return first

    def _check_coverage(self, name: str, shards: Sequence[_Shard], chunks: ChunkTable) -> None:
        shape = shards[0].shape
        defect = find_defect(chunks.take(np.flatnonzero(chunks.elements() > 0)), shape)
        if defect is None:
            return
        where = posixpath.join(self._source.location, posixpath.dirname(shards[0].path))
        if defect.copies:
            raise FormatError(
                f"{quote(name)} of shape {list(shape)} has elements in {defect.copies} of its"
                f" {len(shards):,} files, from {_first_of(defect.place)} on",
                where=where,
                hint="the slices in a header are wrong, or a file is of another rank",
            )
        missing = next(
            (
                f"; no file is of {kind} rank {rank} of {size}"
                for kind, (_, size) in shards[0].ranks.items()
                for rank in range(size)
                if kind != "pipeline" and all(shard.ranks[kind][0] != rank for shard in shards)
            ),
            "",
        )
        raise MissingFileError(
            f"{quote(name)} of shape {list(shape)} has no file for the elements from"
            f" {_first_of(defect.place)} on{missing}",
            where=where,
            hint=COPY_BACK,
        )


def _first_of(place: Box | Span) -> str:
    return str(list(place.offsets)) if isinstance(place, Box) else f"{place.start:,}"


def _parse_path(inside: str, where: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Returns the parameter of a file, and its ranks.

    Folders below `model` are of the name.
    """
    _, *folders, file = inside.split("/")
    match = _FILE.fullmatch(file)
    if match is None:
        raise FormatError(
            f"file name {file!r} is not one of nanotron's: 'model_NAME.safetensors', or"
            " 'model_NAME_pp-rank-P-of-N_tp-rank-R-of-N.safetensors'",
            where=where,
            hint="take the file away",
        )
    name = match["name"]
    doubled = _DOUBLED.fullmatch(name)
    ranks = {
        kind: (int(match[key]), int(match[f"{key}s"]))
        for kind, key in _KINDS.items()
        if match[key] is not None
    }
    return ".".join([*folders, doubled["name"] if doubled and ranks else name]), ranks


def _parse_slices(
    metadata: Mapping[str, str], stored: Shape, where: str
) -> tuple[Shape, tuple[tuple[Box, Box], ...]]:
    """Returns the whole shape, and which boxes of a stored tensor are which of the whole one."""
    whole_shape, slices = (metadata.get(key) for key in ("unsharded_shape", _SLICES))
    if whole_shape is None or slices is None:
        raise UnsupportedError(
            f"header has no 'unsharded_shape' and {_SLICES!r}, which place a shard",
            where=where,
            hint="load the checkpoint with nanotron and save it again, which writes them",
        )
    if max(len(whole_shape), len(slices)) > _MAX_SLICES:
        raise LimitError(f"slices have more than {_MAX_SLICES:,} characters", where=where)
    shape = _parse_shape(whole_shape, where)
    if len(shape) != len(stored):
        raise FormatError(
            f"'unsharded_shape' is {list(shape)}, the tensor has shape {list(stored)}", where=where
        )
    pairs = []
    for text in slices.split(";"):
        local, _, whole = text.partition("#")
        boxes = _parse_box(local, stored, where), _parse_box(whole, shape, where)
        if boxes[0].sizes != boxes[1].sizes:
            raise FormatError(
                f"slices {text[:80]!r} put a box of {list(boxes[0].sizes)} in one of"
                f" {list(boxes[1].sizes)}",
                where=where,
            )
        pairs.append(boxes)
    used = ChunkTable.of([Chunk(local, 0) for local, _ in pairs], len(stored))
    defect = find_defect(used.take(np.flatnonzero(used.elements() > 0)), stored)
    if defect is not None:
        raise FormatError(
            f"slices use the elements of shape {list(stored)} from {_first_of(defect.place)} on"
            f" {defect.copies} times, expected once",
            where=where,
            hint="the header is damaged, or was made by another program; take another copy",
        )
    return shape, tuple(pairs)


def _parse_shape(text: str, where: str) -> Shape:
    inside = text.removeprefix("(").removesuffix(")").rstrip(",")
    sizes = [_SIZE.fullmatch(part.strip()) for part in inside.split(",")] if inside else []
    if not text.startswith("(") or not text.endswith(")") or None in sizes:
        raise FormatError(f"'unsharded_shape' is {text[:80]!r}, not a shape", where=where)
    return tuple(int(size[1] or size[2]) for size in sizes if size is not None)


def _parse_box(text: str, shape: Shape, where: str) -> Box:
    bounds = []
    texts = text.split("|") if shape or text else []
    for part in texts:
        match = _SLICE.fullmatch(part)
        if match is None:
            raise FormatError(f"{part[:80]!r} is not a slice with a step of 1", where=where)
        bounds.append((match[1], match[2]))
    if len(bounds) != len(shape):
        raise FormatError(f"{text[:80]!r} has not one slice for each of {list(shape)}", where=where)
    ends = [
        (0 if low == "None" else int(low), size if high == "None" else int(high))
        for (low, high), size in zip(bounds, shape, strict=True)
    ]
    for (low, high), size in zip(ends, shape, strict=True):
        if not low <= high <= size:
            raise FormatError(f"slice [{low:,}, {high:,}) is not inside of {size:,}", where=where)
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
