"""The manifest of a torchsnapshot snapshot, checked field by field.

It is JSON since 0.1.0 (YAML before): for every rank the containers, tensors and objects of its
application state, by paths such as `0/model/layers.0.weight`, in which slashes are escaped.

Source: torchsnapshot/manifest.py, flatten.py and io_preparers, 0.1.0 and nightly 2024.7.26.

Plain values as the manifest of a torchsnapshot snapshot writes them down, as texts.

Source: torchsnapshot/manifest.py (`PrimitiveEntry`), 0.1.0 and nightly 2024.7.26.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.index import Box, KeyPath, Shape
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.torch_files.reader import loads_strictly
from ckptkit.storage.base import Source

PRIMITIVES = frozenset({"int", "str", "bool", "bytes", "float"})
_INTEGER = re.compile(r"-?[0-9]{1,4000}")  # python makes no longer ones from a text
_BOOLS = {"True": True, "False": False}
_DOUBLE = struct.Struct("<d")


def plain_value(kind: str, text: object) -> object:
    """Returns the value that a text of a kind among `PRIMITIVES` stands for.

    >>> plain_value("float", "exSuR+F6hD8="), plain_value("bool", "False")
    (0.01, False)
    """
    if not isinstance(text, str):
        raise FormatError(f"value of the kind {shown(kind)} is not a text")
    if kind == "str":
        return text
    if kind == "bool" and text in _BOOLS:
        return _BOOLS[text]
    if kind == "int" and _INTEGER.fullmatch(text):
        return int(text)
    found = _decoded(text) if kind in {"bytes", "float"} else None
    if found is not None and kind == "float":
        found = _DOUBLE.unpack(found)[0] if len(found) == _DOUBLE.size else None
    if found is None:
        raise FormatError(f"text {shown(text)} is no value of the kind {shown(kind)}")
    return found


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


MAX_MANIFEST_BYTES = 2**28
_MAX_NUMBER = 2**62 - 1  # so that sums of two fit where they are kept
_MAX_DEPTH = 32
_MAX_DIMENSIONS = 64
_NUMBER = re.compile(r"-?\d{1,18}")
_VERSION = re.compile(r"0\.1\.\d+.*")
_RAW, _ARCHIVE = "buffer_protocol", "torch_save"
_CONTAINERS = frozenset({"list", "dict", "OrderedDict"})
Share = Literal["own", "replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored block of a tensor.

    Attributes:
        place: Where it belongs, in elements.
        location: Its file, relative to the snapshot's folder.
        dtype: Element type.
        byte_range: Of the file, where it holds more than this block; None for all of it.
        is_archive: Whether `torch.save` wrote it; else the values lie there as they are.
    """

    place: Box
    location: str
    dtype: DType
    byte_range: tuple[int, int] | None
    is_archive: bool


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a rank says of a tensor.

    Attributes:
        share: Whether the tensor is that rank's own, the same on all, or spread over ranks.
        shape: Its shape; None where only the pieces of all ranks together tell.
        pieces: What that rank lists of it.
    """

    share: Share
    shape: Shape | None
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SavedObject:
    """An object that `torch.save` wrote to a file of its own."""

    location: str


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What one rank lists, by path without the rank.

    Attributes:
        tensors: Its tensors.
        values: Other values: plain ones, and `SavedObject`.
        key_paths: The path of keys of each of these, its integers told from texts.
    """

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    key_paths: dict[str, KeyPath] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """A checked manifest.

    Attributes:
        version: Of torchsnapshot.
        ranks: What each rank lists.
    """

    version: str
    ranks: tuple[RankManifest, ...]

    def all_pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yields every block that any rank lists, with its tensor's path."""
        for rank in self.ranks:
            for path, tensor in rank.tensors.items():
                yield from ((path, piece) for piece in tensor.pieces)


def read_manifest(source: Source, path: str) -> SnapshotManifest:
    """Returns what the file at a path says."""
    where = posixpath.join(source.location, path)
    size = source.stat(path).size_bytes
    if size > MAX_MANIFEST_BYTES:
        raise LimitError(
            f"manifest has {size:,} bytes, at most {MAX_MANIFEST_BYTES:,} are read", where=where
        )
    data = source.read(path, 0, size)
    if data.lstrip()[:8].startswith(b"version:"):
        raise UnsupportedError(
            "manifest is YAML, as torchsnapshot wrote it before 0.1.0, where JSON was expected",
            where=where,
            hint="rewrite it as JSON, which YAML readers take as well:"
            " `json.dump(yaml.safe_load(open(path)), ...)`",
        )
    content = loads_strictly(data, where=where)
    if not isinstance(content, dict) or content.keys() != {"version", "world_size", "manifest"}:
        raise FormatError("has other fields than version, world_size and manifest", where=where)
    return _Parser(where).manifest(content)


class _Parser:
    """Checks a manifest that was parsed as JSON."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lists: frozenset[str] = frozenset()
        self._numbers: Mapping[str, frozenset[int]] = {}
        self._makers: Mapping[str, Callable[[Any], SavedTensor]] = {
            "Tensor": self._tensor,
            "ChunkedTensor": self._chunked,
            "ShardedTensor": self._sharded,
            "DTensor": self._sharded,  # its blocks say all: what is replicated is one block
        }

    def manifest(self, content: Mapping[str, Any]) -> SnapshotManifest:
        version, world, entries = (content[k] for k in ("version", "world_size", "manifest"))
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise UnsupportedError(
                f"manifest is of version {shown(str(version))}; read is 0.1", where=self._where
            )
        if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
            raise FormatError("'manifest' is not a map of entries", where=self._where)
        if type(world) is not int or not 0 < world <= max(len(entries), 1):
            raise IncompleteCheckpointError(
                f"'world_size' is {shown(str(world))}, with {len(entries):,} entries of all ranks",
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
        """Sorts one entry in under its rank."""
        first, _, logical = path.partition("/")
        rank = int(first) if re.fullmatch(r"\d{1,9}", first) else -1
        if not logical or not 0 <= rank < len(ranks):
            raise FormatError(
                f"path {shown(path)} is of no rank of a run of {len(ranks)}", where=self._where
            )
        found, kind = ranks[rank], entry.get("type")
        found.key_paths[logical] = self._key_path(path)
        if isinstance(kind, str) and kind in _CONTAINERS:
            return
        try:
            made = self._made(entry, kind)
        except (FormatError, UnsupportedError, UnsafePathError) as error:
            raise error.located(f"{self._where}: {shown(path)}") from None
        if isinstance(made, SavedTensor):
            found.tensors[logical] = made
        else:
            found.values[logical] = made

    def _made(self, entry: Mapping[str, Any], kind: object) -> object:
        """Returns what an entry says: of a tensor, of an object, or a plain value."""
        if kind == "object":
            return SavedObject(_location(entry.get("location")))
        if isinstance(kind, str) and kind in PRIMITIVES:
            return plain_value(kind, entry.get("serialized_value"))
        maker = self._makers.get(kind) if isinstance(kind, str) else None
        if maker is None:
            raise UnsupportedError(f"entry is of the kind {shown(str(kind))}, not modelled")
        return maker(entry)

    def _key_path(self, path: str) -> KeyPath:
        """Returns the keys that a path is made of: integers where the container has such keys."""
        tokens = path.split("/")
        if len(tokens) > _MAX_DEPTH:
            raise FormatError(
                f"containers are nested more than {_MAX_DEPTH} deep", where=self._where
            )
        found: list[str | int] = []
        for depth, token in enumerate(tokens[1:], 1):
            above = "/".join(tokens[:depth])
            number = int(token) if _NUMBER.fullmatch(token) else None
            if number is not None and self._has_number(above, number):
                found.append(number)
            else:
                found.append(_decoded_manifest(token))
        return tuple(found)

    def _has_number(self, container: str, number: int) -> bool:
        return container in self._lists or number in self._numbers.get(container, ())

    def _tensor(self, entry: Mapping[str, Any]) -> SavedTensor:
        shape = _counts(entry.get("shape"))
        piece = _piece(entry, (0,) * len(shape), shape)
        return SavedTensor(_share(entry), shape, (piece,))

    def _chunked(self, entry: Mapping[str, Any]) -> SavedTensor:
        shape = _counts(entry.get("shape"))
        pieces = tuple(_pieces(entry.get("chunks")))
        dtype = _dtype(entry.get("dtype"))
        for piece in pieces:
            place = piece.place
            if piece.dtype != dtype or len(place.sizes) != len(shape):
                raise FormatError(f"a chunk is not of the {dtype.name} {list(shape)} of the tensor")
            if any(o + s > n for o, s, n in zip(place.offsets, place.sizes, shape, strict=True)):
                raise FormatError(f"a chunk lies outside the {list(shape)} of the tensor")
        return SavedTensor(_share(entry), shape, pieces)

    def _sharded(self, entry: Mapping[str, Any]) -> SavedTensor:
        return SavedTensor("sharded", None, tuple(_pieces(entry.get("shards"))))


def _numbers(entry: Mapping[str, Any]) -> frozenset[int]:
    keys = entry["keys"]
    return frozenset(k for k in keys if type(k) is int) if isinstance(keys, list) else frozenset()


def _decoded_manifest(token: str) -> str:
    return token.replace("%2F", "/").replace("%25", "%")


def _share(entry: Mapping[str, Any]) -> Share:
    replicated = entry.get("replicated")
    if not isinstance(replicated, bool):
        raise FormatError("does not tell whether it is replicated")
    return "replicated" if replicated else "own"


def _pieces(shards: object) -> Iterator[Piece]:
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
        yield _piece(inner, offsets, sizes)


def _piece(entry: Mapping[str, Any], offsets: Shape, sizes: Shape) -> Piece:
    serializer, extent = entry.get("serializer"), entry.get("byte_range")
    if serializer not in {_RAW, _ARCHIVE}:
        raise UnsupportedError(
            f"is stored by {shown(str(serializer))}, not modelled",
            hint="tensors are read that are not quantized",
        )
    byte_range = None
    if extent is not None:
        bounds = _counts(extent)
        if len(bounds) != 2 or bounds[0] > bounds[1] or serializer == _ARCHIVE:  # noqa: PLR2004
            raise FormatError(f"has the byte range {list(bounds)}")
        byte_range = bounds[0], bounds[1]
    return Piece(
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
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= _MAX_NUMBER for item in value
    ):
        raise FormatError("has a shape, place or range that is no list of natural numbers")
    if len(value) > _MAX_DIMENSIONS:
        raise FormatError(f"has {len(value):,} dimensions, more than {_MAX_DIMENSIONS}")
    return tuple(value)


def _location(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError("names no file")
    if {"", ".", ".."} & set(value.split("/")) or "\0" in value:
        raise UnsafePathError(f"names the file {shown(value)}, which may lie outside the snapshot")
    return value
