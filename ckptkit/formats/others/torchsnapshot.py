"""The reader of snapshots that torchsnapshot took, at any number of ranks.

The entries of all ranks are merged, so that each tensor has one entry. A sharded tensor consists of
the blocks of all ranks, and a replicated one of those of the first. Tensors that ranks saved as
their own (the buffers of a model that FSDP shards, the state of a random number generator) are
taken from rank 0 if all ranks have the same ones; otherwise, as in a pipeline, each rank has a
state of its own, and the names of its tensors begin with the rank.

The manifest is JSON since 0.1.0 (YAML before): for every rank the containers, tensors and objects
of its application state, by paths such as `0/model/layers.0.weight`, in which slashes are escaped.
Plain values are texts.

Source: torchsnapshot/snapshot.py, manifest_ops.py, batcher.py, manifest.py (`PrimitiveEntry` for
plain values), flatten.py and io_preparers, 0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import base64
import math
import posixpath
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct, field

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.index import Box, Chunk, KeyPath, Problem, Record, RunFacts, Shape, TensorIndex
from ckptkit.core.text import quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.dcp.reader import BlobRef
from ckptkit.formats.parsing import (
    MAX_DIMENSIONS,
    FileTable,
    is_count,
    overflows,
    parse_json,
    read_limited,
    stat_or_missing,
    stays_inside,
)
from ckptkit.formats.trees import Stored, make_entries
from ckptkit.storage.base import Source

PRIMITIVES = frozenset({"int", "str", "bool", "bytes", "float"})
_INTEGER = re.compile(r"-?[0-9]{1,4000}")  # Python refuses to parse longer ones
_BOOLS = {"True": True, "False": False}
_DOUBLE = struct.Struct("<d")


def parse_plain(kind: str, text: object) -> object:
    """Parses the text of a value whose kind is one of `PRIMITIVES`.

    >>> parse_plain("float", "exSuR+F6hD8="), parse_plain("bool", "False")
    (0.01, False)
    """
    if not isinstance(text, str):
        raise FormatError(f"value of the kind {quote(kind)} is not a text")
    if kind == "str":
        return text
    if kind == "bool" and text in _BOOLS:
        return _BOOLS[text]
    if kind == "int" and _INTEGER.fullmatch(text):
        return int(text)
    if kind in {"bytes", "float"}:
        with suppress(ValueError):
            data = base64.b64decode(text, validate=True)
            if kind == "bytes":
                return data
            if len(data) == _DOUBLE.size:
                return _DOUBLE.unpack(data)[0]
    raise FormatError(f"text {quote(text)} is no value of the kind {quote(kind)}")


MAX_MANIFEST_BYTES = 2**28
_MAX_NUMBER = 2**62 - 1  # the sum of two fits int64
_MAX_DEPTH = 32
_NUMBER = re.compile(r"-?\d{1,18}")
_VERSION = re.compile(r"0\.1\.\d+.*")
_RAW, _ARCHIVE = "buffer_protocol", "torch_save"
_CONTAINERS = frozenset({"list", "dict", "OrderedDict"})
Share = Literal["own", "replicated", "sharded"]


class SavedBlock(Struct, frozen=True):
    box: Box
    location: str  # its file, relative to the snapshot's folder
    dtype: DType
    byte_range: tuple[int, int] | None  # of the file, if it holds more than this block
    is_archive: bool  # whether `torch.save` wrote it; else plain values


class SavedTensor(Struct, frozen=True):
    share: Share
    shape: Shape | None  # None if only the blocks of all ranks together determine it
    blocks: tuple[SavedBlock, ...]


class SavedObject(Struct, frozen=True):
    """An object that `torch.save` wrote to a file of its own."""

    location: str


class RankManifest(Struct, frozen=True):
    """The entries of one rank, by path without the rank."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)  # plain ones, and `SavedObject`
    # with integers distinguished from texts
    key_paths: dict[str, KeyPath] = field(default_factory=dict)


def read_manifest(source: Source, path: str) -> tuple[str, Sequence[RankManifest]]:
    """Returns the version of torchsnapshot, and the checked entries of each rank."""
    where = posixpath.join(source.location, path)
    data = read_limited(source, path, MAX_MANIFEST_BYTES, "manifest")
    if data.lstrip()[:8].startswith(b"version:"):
        raise UnsupportedError(
            "manifest is YAML, as torchsnapshot wrote it before 0.1.0, where JSON was expected",
            hint="rewrite it as JSON, which YAML readers accept too:"
            " `json.dump(yaml.safe_load(open(path)), ...)`",
        )
    content = parse_json(data, where=where)
    if not isinstance(content, dict) or content.keys() != {"version", "world_size", "manifest"}:
        raise FormatError("has other fields than version, world_size and manifest")
    version, world, entries = (content[k] for k in ("version", "world_size", "manifest"))
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise UnsupportedError(f"manifest is of version {quote(str(version))}; read is 0.1")
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise FormatError("'manifest' is not a map of entries")
    if type(world) is not int or not 0 < world <= max(len(entries), 1):
        raise IncompleteCheckpointError(
            f"'world_size' is {quote(str(world))}, with {len(entries):,} entries of all ranks"
        )
    ranks = tuple(RankManifest() for _ in range(world))
    has_keys = {n: e for n, e in entries.items() if "keys" in e or e.get("type") == "list"}
    numbers = {name: _numbers(entry) for name, entry in has_keys.items()}
    for name, entry in entries.items():
        first, _, logical = name.partition("/")
        rank = int(first) if re.fullmatch(r"\d{1,9}", first) else -1
        if not logical or not 0 <= rank < world:
            raise FormatError(f"path {quote(name)} is of no rank of a run of {world}")
        ranks[rank].key_paths[logical] = _parse_key_path(name, numbers)
        try:
            value = _parse_entry(entry)
        except (FormatError, UnsupportedError, UnsafePathError) as error:
            raise error.located(f"{where}: {quote(name)}") from None
        if isinstance(value, SavedTensor):
            ranks[rank].tensors[logical] = value
        elif value is not None:
            ranks[rank].values[logical] = value
    bare = next((rank for rank, held in enumerate(ranks) if not held.key_paths), None)
    if bare is not None:
        raise IncompleteCheckpointError(
            f"lists nothing of rank {bare}, where the run had {world} ranks"
        )
    return version, ranks


def _numbers(entry: Mapping[str, Any]) -> frozenset[int] | None:
    """Returns which keys of a container are integers; None for a list, where all are."""
    if entry.get("type") == "list":
        return None
    keys = entry.get("keys")
    return frozenset(k for k in keys if type(k) is int) if isinstance(keys, list) else frozenset()


def _parse_key_path(path: str, numbers: Mapping[str, frozenset[int] | None]) -> KeyPath:
    """Returns the keys of a path: integers where the container has such keys."""
    tokens = path.split("/")
    if len(tokens) > _MAX_DEPTH:
        raise FormatError(f"containers are nested more than {_MAX_DEPTH} deep")
    keys: list[str | int] = []
    for depth, token in enumerate(tokens[1:], 1):
        number = int(token) if _NUMBER.fullmatch(token) else None
        known = numbers.get("/".join(tokens[:depth]), frozenset())
        if number is not None and (known is None or number in known):
            keys.append(number)
        else:
            keys.append(token.replace("%2F", "/").replace("%25", "%"))
    return tuple(keys)


def _parse_entry(entry: Mapping[str, Any]) -> object:
    """Returns a tensor, an object or a plain value; None for a container."""
    kind = entry.get("type")
    if not isinstance(kind, str):
        kind = str(kind)
    elif kind in _CONTAINERS:
        return None
    elif kind == "object":
        return SavedObject(_location(entry.get("location")))
    elif kind in PRIMITIVES:
        return parse_plain(kind, entry.get("serialized_value"))
    elif kind in {"ShardedTensor", "DTensor"}:  # a replicated one has one block
        return SavedTensor("sharded", None, tuple(_parse_blocks(entry.get("shards"))))
    elif kind in {"Tensor", "ChunkedTensor"}:
        shape = _counts(entry.get("shape"))
        if kind == "Tensor":
            blocks: tuple[SavedBlock, ...] = (_parse_block(entry, (0,) * len(shape), shape),)
        else:
            blocks = tuple(_parse_blocks(entry.get("chunks")))
            _check_chunks(blocks, shape, _dtype(entry.get("dtype")))
        replicated = entry.get("replicated")
        if not isinstance(replicated, bool):
            raise FormatError("does not state whether it is replicated")
        return SavedTensor("replicated" if replicated else "own", shape, blocks)
    raise UnsupportedError(f"entry is of the kind {quote(kind)}, not modelled")


def _check_chunks(blocks: Sequence[SavedBlock], shape: Shape, dtype: DType) -> None:
    for block in blocks:
        box = block.box
        if block.dtype != dtype or len(box.sizes) != len(shape):
            raise FormatError(f"a chunk is not of the {dtype.name} {list(shape)} of the tensor")
        if any(o + s > n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)):
            raise FormatError(f"a chunk is outside the {list(shape)} of the tensor")


def _parse_blocks(shards: object) -> Iterator[SavedBlock]:
    if not isinstance(shards, list):
        raise FormatError("has no list of blocks")
    for shard in shards:
        inner = shard.get("tensor") if isinstance(shard, dict) else None
        if not isinstance(inner, dict):
            raise FormatError("has a block without a tensor")
        sizes, shape = _counts(shard.get("sizes")), _counts(inner.get("shape"))
        offsets = _counts(shard.get("offsets"))
        if sizes != shape or len(offsets) != len(sizes):
            raise FormatError(f"has a block of {list(sizes)} that is stored as {list(shape)}")
        yield _parse_block(inner, offsets, sizes)


def _parse_block(entry: Mapping[str, Any], offsets: Shape, sizes: Shape) -> SavedBlock:
    serializer, extent = entry.get("serializer"), entry.get("byte_range")
    if serializer not in (_RAW, _ARCHIVE):  # a file may hold what has no hash
        raise UnsupportedError(
            f"is stored by {quote(str(serializer))}, not modelled",
            hint="save the tensor without quantization",
        )
    byte_range = None
    if extent is not None:
        bounds = _counts(extent)
        if len(bounds) != 2 or bounds[0] > bounds[1] or serializer == _ARCHIVE:  # noqa: PLR2004
            raise FormatError(f"has the byte range {list(bounds)}")
        byte_range = bounds[0], bounds[1]
    return SavedBlock(
        Box(offsets, sizes),
        _location(entry.get("location")),
        _dtype(entry.get("dtype")),
        byte_range,
        serializer == _ARCHIVE,
    )


def _dtype(name: object) -> DType:
    if not isinstance(name, str) or not name.startswith("torch."):
        raise FormatError("has no dtype")
    return dtype_named(name)


def _counts(value: object) -> Shape:
    if not isinstance(value, list) or not all(is_count(item, _MAX_NUMBER) for item in value):
        raise FormatError("has a shape, offsets or a range that is no list of natural numbers")
    if len(value) > MAX_DIMENSIONS:
        raise FormatError(f"has {len(value):,} dimensions, more than {MAX_DIMENSIONS}")
    return tuple(value)


def _location(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError("names no file")
    if not stays_inside(value):
        raise UnsafePathError(f"names the file {quote(value)}, which may be outside the snapshot")
    return value


_LISTED_NAMES = 3  # tensors in a note


class MergedTensor(Struct, frozen=True):
    key: str  # its path in the manifest, with the rank if only that rank has it
    path: KeyPath  # the same as keys
    shape: Shape
    blocks: Sequence[tuple[int, SavedBlock]]  # each with the rank that lists it; at least one


class _State(Struct):
    """The tensors of one object of the application, such as the model."""

    # sharded and replicated tensors, with the ranks that list them
    shared: dict[str, list[tuple[int, SavedTensor]]] = field(default_factory=dict)
    own: dict[int, dict[str, SavedTensor]] = field(default_factory=dict)  # by rank, its own tensors

    def first_difference(self) -> str:
        """Returns a tensor in which the ranks' own tensors differ; usually empty."""
        first, *others = self.own.values()
        for other in others:
            for key in dict.fromkeys([*first, *other]):
                if key not in first or key not in other:
                    return key
                blocks = (*first[key].blocks, *other[key].blocks)
                dtypes = {block.dtype for block in blocks}
                if first[key].shape != other[key].shape or len(dtypes) > 1:
                    return key
        return ""

    def note(self) -> list[str]:
        """Returns a note with the tensors that are taken from one rank, though each has them."""
        keys = list(self.own[min(self.own)])
        if not keys or len(self.own) == 1:
            return []
        names = ", ".join(keys[:_LISTED_NAMES]) + (", …" if len(keys) > _LISTED_NAMES else "")
        count, verb = ("1 tensor", "is") if len(keys) == 1 else (f"{len(keys)} tensors", "are")
        return [f"{count} that each rank saved for itself {verb} rank 0's: {names}"]


def merge_ranks(
    ranks: Sequence[RankManifest],
) -> tuple[list[MergedTensor], dict[KeyPath, object], dict[str, str], list[str]]:
    """Merges the entries of ranks.

    Returns every tensor once; all other values by path, those in which a rank differs below its
    number; by key, why tensors of an incomplete state cannot be read; and notes.
    """
    tensors: list[MergedTensor] = []
    values: dict[KeyPath, object] = {}
    unread: dict[str, str] = {}
    notes: list[str] = []
    for rank, manifest in enumerate(ranks):
        for key, value in manifest.values.items():
            path = manifest.key_paths[key]
            if values.setdefault(path, value) != value:
                values[str(rank), *path] = value
    for name, state in _states(ranks).items():
        for key, parts in state.shared.items():
            if any(key in held for held in state.own.values()):
                raise FormatError(f"ranks disagree on whether {quote(key)} is shared")
            path = ranks[parts[0][0]].key_paths[key]
            tensors.append(_merge_tensor(key, path, parts))
        difference = state.first_difference()
        if difference:
            why = f"is shared by ranks whose own tensors in {name!r} differ, such as {difference!r}"
            unread |= dict.fromkeys(state.shared, why)
            notes.append(f"each rank saved a {name!r} of its own; names begin with the rank")
        else:
            notes += state.note()
        for rank in state.own if difference else [min(state.own)]:
            for key, tensor in state.own[rank].items():
                path, parts = ranks[rank].key_paths[key], [(rank, tensor)]
                if difference:  # each rank has a state of its own
                    own_path = str(rank), *path
                    tensors.append(_merge_tensor(f"{rank}/{key}", own_path, parts))
                else:
                    tensors.append(_merge_tensor(key, path, parts))
    return tensors, values, unread, notes


def _states(ranks: Sequence[RankManifest]) -> dict[str, _State]:
    states: dict[str, _State] = {}
    for rank, manifest in enumerate(ranks):
        for key in manifest.key_paths:
            states.setdefault(key.partition("/")[0], _State()).own.setdefault(rank, {})
        for key, tensor in manifest.tensors.items():
            state = states[key.partition("/")[0]]
            if tensor.share == "own":
                state.own[rank][key] = tensor
            else:
                state.shared.setdefault(key, []).append((rank, tensor))
    return states


def _merge_tensor(
    key: str, path: KeyPath, parts: Sequence[tuple[int, SavedTensor]]
) -> MergedTensor:
    """Merges the blocks of a tensor; a replicated one has those of the first rank."""
    kinds = {tensor.share for _, tensor in parts}
    if len(kinds) > 1 or (kinds != {"sharded"} and any(t != parts[0][1] for _, t in parts)):
        raise FormatError(f"ranks contradict each other about {quote(key)}")
    listing = parts if kinds == {"sharded"} else parts[:1]
    blocks = [(rank, block) for rank, tensor in listing for block in tensor.blocks]
    if not blocks:
        raise IncompleteCheckpointError(f"no rank lists a block of {quote(key)}")
    shape = parts[0][1].shape
    if shape is None:
        boxes = [block.box for _, block in blocks]
        if len({len(box.sizes) for box in boxes}) > 1:
            raise FormatError(f"blocks of {quote(key)} differ in dimensions")
        ends = [map(sum, zip(box.offsets, box.sizes, strict=True)) for box in boxes]
        shape = tuple(max(along) for along in zip(*ends, strict=True))
    return MergedTensor(key, path, shape, blocks)


SNAPSHOT_METADATA = ".snapshot_metadata"
_DATA_FOLDER = re.compile(r"replicated|sharded|batched|\d{1,7}")


class TorchsnapshotReader(FormatReader):
    """Reads what `Snapshot.take` and `Snapshot.async_take` write."""

    name = "torchsnapshot"
    order = 0  # first: its files may have any name
    expected = "'.snapshot_metadata'"
    endings = r"\.snapshot_metadata"
    index_memory = (SNAPSHOT_METADATA, 12)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        """Recognises folders with a manifest, and the files of the snapshot below them."""
        homes = [
            posixpath.dirname(path)
            for path in paths
            if posixpath.basename(path) == SNAPSHOT_METADATA
        ]
        files: dict[str, list[str]] = {home: [] for home in homes}
        for path in paths if homes else ():
            for home in homes:
                is_inside = not home or path.startswith(f"{home}/")
                inside = path[len(home) :].lstrip("/") if is_inside else ""
                first, slash, _ = inside.partition("/")
                if inside == SNAPSHOT_METADATA or (slash and _DATA_FOLDER.fullmatch(first)):
                    files[home].append(path)
                    break
        reason = f"{SNAPSHOT_METADATA!r}, which torchsnapshot writes last"
        return [Candidate(self.name, h, tuple(sorted(f)), reason) for h, f in sorted(files.items())]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        """Parses the manifest; data files are only looked up."""
        path = posixpath.join(candidate.folder, SNAPSHOT_METADATA)
        with errors_at(posixpath.join(source.location, path)):
            version, ranks = read_manifest(source, path)
        where = posixpath.join(source.location, candidate.folder)
        tensors, values, unread, notes = merge_ranks(ranks)
        files = _SnapshotFiles(source, candidate.folder)
        held = {}
        for tensor in tensors:
            with errors_at(f"{where}: tensor {quote(tensor.key)}"):
                held[tensor.path] = _place_blocks(files, tensor)
        # Further copies, which are not read, use bytes of the files too.
        for rank in ranks:
            for name, saved in rank.tensors.items():
                with errors_at(f"{where}: tensor {quote(name)}"):
                    for block in saved.blocks:
                        files.record(block)
        files.check_extents()
        for key, value in values.items():
            if isinstance(value, SavedObject):
                file = files.files[files.number(value.location)]
                values[key] = BlobRef(file.path, 0, max(file.size_bytes, 0))
        return files.index(
            self.name,
            make_entries(held, keys=[tensor.key for tensor in tensors]),
            source.stat(path),
            values=values,
            run=RunFacts(
                world_size=len(ranks), writer="torchsnapshot", version=version, notes=tuple(notes)
            ),
            problems=tuple(Problem(UnsupportedError.code, key, why) for key, why in unread.items()),
        )


def _place_blocks(files: _SnapshotFiles, tensor: MergedTensor) -> Stored:
    shape, dtype = tensor.shape, tensor.blocks[0][1].dtype
    if any(block.dtype != dtype for _, block in tensor.blocks):
        raise FormatError("is stored in several element types")
    if overflows(shape, dtype):
        raise FormatError(f"size of shape {list(shape)} overflows")
    chunks = [
        Chunk(
            # The chunks of a scalar have one dimension.
            block.box if shape else Box((), ()),
            files.record(block),
            byte_offset=None if block.is_archive else 0,
            rank=rank,
        )
        for rank, block in tensor.blocks
    ]
    return dtype, shape, chunks


class _SnapshotFiles(FileTable):
    def __init__(self, source: Source, folder: str) -> None:
        super().__init__()
        self._source = source
        self._folder = folder
        self._positions: dict[str, int] = {}

    def record(self, block: SavedBlock) -> int:
        """Returns the position of the record of a block, which is added if new."""
        needed = math.prod(block.box.sizes) * block.dtype.itemsize
        start, stop = block.byte_range or (0, needed)
        if stop - start != needed and not block.is_archive:
            raise FormatError(
                f"has {needed:,} bytes in {list(block.box.sizes)}, and a range of"
                f" {stop - start:,} in its file: sizes do not add up"
            )
        file = self.number(block.location)
        if block.is_archive:
            record = Record(file, 0, max(self.files[file].size_bytes, 0), "torch_zip")
        else:
            record = Record(file, start, stop)
        return self.add_record(record, (block.location, block.byte_range))

    def number(self, location: str) -> int:
        """Returns the position of a file of the snapshot; a missing one has size -1."""
        number = self._positions.get(location)
        if number is None:
            path = posixpath.join(self._folder, location)
            number = self.add_file(stat_or_missing(self._source, path))
            self._positions[location] = number
        return number

    def check_extents(self) -> None:
        """Checks that every byte of a file is of one tensor; the plan refuses short files."""
        at, of_file = 0, -1
        rows = sorted((r.file, r.start, r.stop) for r in self.records if r.stop > r.start)
        for file, start, stop in [*rows, (-1, 0, 0)]:
            if file != of_file:
                held = self.files[of_file] if of_file >= 0 else None
                if held is not None and held.size_bytes > at:
                    raise FormatError(
                        f"has {held.size_bytes:,} bytes, and the manifest lists {at:,}: sizes"
                        " do not add up",
                        where=posixpath.join(self._source.location, held.path),
                        hint="the file is of another snapshot, or was damaged; take another copy"
                        " of it",
                    )
                at, of_file = 0, file
            if start != at:
                first, last = sorted((start, at))
                raise FormatError(
                    f"bytes [{first:,}, {last:,}) are of {'two tensors' if start < at else 'none'}",
                    where=posixpath.join(self._source.location, self.files[file].path),
                )
            at = stop
