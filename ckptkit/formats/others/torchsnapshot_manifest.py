"""The manifest of a torchsnapshot snapshot, checked field by field.

It is JSON since 0.1.0 (YAML before): for every rank the containers, tensors and objects of its
application state, by paths such as `0/model/layers.0.weight`, in which slashes are escaped. Plain
values are texts.

Source: torchsnapshot/manifest.py (`PrimitiveEntry` for plain values), flatten.py and io_preparers,
0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import base64
import posixpath
import re
import struct
from collections.abc import Callable, Iterator, Mapping
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
from ckptkit.core.index import Box, KeyPath, Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count, parse_json, read_limited, stays_inside
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
    """A stored block of a tensor."""

    box: Box
    location: str  # its file, relative to the snapshot's folder
    dtype: DType
    byte_range: tuple[int, int] | None  # of the file, if it holds more than this block
    is_archive: bool  # whether `torch.save` wrote it; else plain values


class SavedTensor(Struct, frozen=True):
    """A tensor as a rank lists it."""

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


class SnapshotManifest(Struct, frozen=True):
    """A checked manifest."""

    version: str
    ranks: tuple[RankManifest, ...]


def read_manifest(source: Source, path: str) -> SnapshotManifest:
    where = posixpath.join(source.location, path)
    data = read_limited(source, path, MAX_MANIFEST_BYTES, "manifest")
    if data.lstrip()[:8].startswith(b"version:"):
        raise UnsupportedError(
            "manifest is YAML, as torchsnapshot wrote it before 0.1.0, where JSON was expected",
            where=where,
            hint="rewrite it as JSON, which YAML readers accept too:"
            " `json.dump(yaml.safe_load(open(path)), ...)`",
        )
    content = parse_json(data, where=where)
    if not isinstance(content, dict) or content.keys() != {"version", "world_size", "manifest"}:
        raise FormatError("has other fields than version, world_size and manifest", where=where)
    return _ManifestParser(where).parse(content)


class _ManifestParser:
    """Checks the JSON of a manifest."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lists: frozenset[str] = frozenset()
        self._numbers: Mapping[str, frozenset[int]] = {}
        self._parsers: Mapping[str, Callable[[Any], SavedTensor]] = {
            "Tensor": self._tensor,
            "ChunkedTensor": self._chunked,
            "ShardedTensor": self._sharded,
            "DTensor": self._sharded,  # a replicated one has one block
        }

    def parse(self, content: Mapping[str, Any]) -> SnapshotManifest:
        version, world, entries = (content[k] for k in ("version", "world_size", "manifest"))
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise UnsupportedError(
                f"manifest is of version {quote(str(version))}; read is 0.1", where=self._where
            )
        if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
            raise FormatError("'manifest' is not a map of entries", where=self._where)
        if type(world) is not int or not 0 < world <= max(len(entries), 1):
            raise IncompleteCheckpointError(
                f"'world_size' is {quote(str(world))}, with {len(entries):,} entries of all ranks",
                where=self._where,
            )
        ranks = tuple(RankManifest() for _ in range(world))
        self._lists = frozenset(path for path, e in entries.items() if e.get("type") == "list")
        self._numbers = {path: _numbers(e) for path, e in entries.items() if "keys" in e}
        for path, entry in entries.items():
            self._add(ranks, path, entry)
        bare = next((rank for rank, held in enumerate(ranks) if not held.key_paths), None)
        if bare is not None:
            raise IncompleteCheckpointError(
                f"lists nothing of rank {bare}, where the run had {world} ranks", where=self._where
            )
        return SnapshotManifest(version, ranks)

    def _add(self, ranks: tuple[RankManifest, ...], path: str, entry: Mapping[str, Any]) -> None:
        """Adds one entry to those of its rank."""
        first, _, logical = path.partition("/")
        rank = int(first) if re.fullmatch(r"\d{1,9}", first) else -1
        if not logical or not 0 <= rank < len(ranks):
            raise FormatError(
                f"path {quote(path)} is of no rank of a run of {len(ranks)}", where=self._where
            )
        manifest, kind = ranks[rank], entry.get("type")
        manifest.key_paths[logical] = self._key_path(path)
        if isinstance(kind, str) and kind in _CONTAINERS:
            return
        where = f"{self._where}: {quote(path)}"
        parse = self._parsers.get(kind) if isinstance(kind, str) else None
        is_plain = isinstance(kind, str) and kind in PRIMITIVES
        if kind != "object" and not is_plain and parse is None:
            message = f"entry is of the kind {quote(str(kind))}, not modelled"
            raise UnsupportedError(message, where=where)
        value: object
        try:
            if parse is not None:
                value = parse(entry)
            elif isinstance(kind, str) and is_plain:
                value = parse_plain(kind, entry.get("serialized_value"))
            else:
                value = SavedObject(_location(entry.get("location")))
        except (FormatError, UnsupportedError, UnsafePathError) as error:
            raise error.located(where) from None
        if isinstance(value, SavedTensor):
            manifest.tensors[logical] = value
        else:
            manifest.values[logical] = value

    def _key_path(self, path: str) -> KeyPath:
        """Returns the keys of a path: integers where the container has such keys."""
        tokens = path.split("/")
        if len(tokens) > _MAX_DEPTH:
            raise FormatError(
                f"containers are nested more than {_MAX_DEPTH} deep", where=self._where
            )
        keys: list[str | int] = []
        for depth, token in enumerate(tokens[1:], 1):
            above = "/".join(tokens[:depth])
            number = int(token) if _NUMBER.fullmatch(token) else None
            if number is not None and (
                above in self._lists or number in self._numbers.get(above, ())
            ):
                keys.append(number)
            else:
                keys.append(token.replace("%2F", "/").replace("%25", "%"))
        return tuple(keys)

    def _tensor(self, entry: Mapping[str, Any]) -> SavedTensor:
        shape = _counts(entry.get("shape"))
        block = _parse_block(entry, (0,) * len(shape), shape)
        return SavedTensor(_share(entry), shape, (block,))

    def _chunked(self, entry: Mapping[str, Any]) -> SavedTensor:
        shape = _counts(entry.get("shape"))
        blocks = tuple(_parse_blocks(entry.get("chunks")))
        dtype = _dtype(entry.get("dtype"))
        for block in blocks:
            box = block.box
            if block.dtype != dtype or len(box.sizes) != len(shape):
                raise FormatError(f"a chunk is not of the {dtype.name} {list(shape)} of the tensor")
            if any(o + s > n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)):
                raise FormatError(f"a chunk is outside the {list(shape)} of the tensor")
        return SavedTensor(_share(entry), shape, blocks)

    def _sharded(self, entry: Mapping[str, Any]) -> SavedTensor:
        return SavedTensor("sharded", None, tuple(_parse_blocks(entry.get("shards"))))


def _numbers(entry: Mapping[str, Any]) -> frozenset[int]:
    keys = entry["keys"]
    return frozenset(k for k in keys if type(k) is int) if isinstance(keys, list) else frozenset()


def _share(entry: Mapping[str, Any]) -> Share:
    replicated = entry.get("replicated")
    if not isinstance(replicated, bool):
        raise FormatError("does not state whether it is replicated")
    return "replicated" if replicated else "own"


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
