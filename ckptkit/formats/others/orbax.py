"""The reader of Orbax checkpoints: a PyTree of JAX arrays, of Flax, MaxText and others.

Each array is a zarr array. Its metadata and its chunks are values under keys, such as
`params.embed.kernel/.zarray` and `params.embed.kernel/0.0`; a chunk is what one shard of the array
held, compressed with zstd or not. The values are files of these names, or, with OCDBT, ranges of
files: `manifest.ocdbt` leads to the root of a B+tree, and its leaves list keys with the file and
the range of each value. Small values are in the leaves themselves; here they are laid over the
source as one file. tensorstore is not needed, and no more than one block of a chunk is in memory.

zarr 3 has a codec that puts many chunks into one value, with a table of their ranges at its end.

Source: google.github.io/tensorstore/kvstore/ocdbt (storage format), and manifests of tensorstore
0.1.84, which say after the UUID whether versions are in further files;
zarr-specs.readthedocs.io, v2, v3 and `sharding_indexed`;
orbax/checkpoint/_src/metadata/tree.py (`_METADATA`), _src/serialization/tensorstore_utils.py,
orbax-checkpoint 0.5 to 0.12.
"""

from __future__ import annotations

import itertools
import math
import posixpath
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32c
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.geometry import row_major_strides
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Container,
    FileRef,
    Fqn,
    Key,
    KeyPath,
    Part,
    Record,
    RunFacts,
    Shape,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.text import join_first, quote
from ckptkit.formats.base import Candidate, FormatReader, errors_at
from ckptkit.formats.dcp.compression import decompress
from ckptkit.formats.parsing import (
    MAX_DIMENSIONS,
    FileTable,
    is_count,
    overflows,
    parse_json,
    read_json_object,
    read_limited,
    stat_or_missing,
    stays_inside,
)
from ckptkit.formats.trees import Membership, join_path, part_of_path
from ckptkit.storage.base import Source
from ckptkit.storage.overlay import MemorySource, OverlaySource

_TREE = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_ARRAYS = (".zarray", "zarr.json")  # of zarr 2 and 3
_ZEROS, _MOST_ITEM_BYTES = "", 16
_INLINE = ".inline"  # behind the manifest's name: the values that are in leaves
_UNFINISHED = ".orbax-checkpoint-tmp"
_OF_TREE = re.compile(
    r"(ocdbt\.process_\d+/)?(d/|manifest\.ocdbt)|array_metadatas/"
    r"|(_METADATA|_sharding|_strings\.json|_CHECKPOINT_METADATA|commit_success\.txt)$"
)
_OF_PROCESS = re.compile(r"(?:^|/)ocdbt\.process_\d+/")
_MAX_NODE_BYTES = 1 << 28
_MAX_NODES = 1 << 20
_MAX_CHUNKS = 1 << 24
_LISTED_NAMES = 3
_ARRAY_TYPES = frozenset({"jax.Array", "np.ndarray", "scalar"})
_RANDOM_STATES = "rngs"
_PARAMETERS = "params"
_OPTIMIZER = re.compile(r"opt(imizer)?(_?states?)?")
_AVERAGES = re.compile(r"ema(_params)?|params_ema|ema_state")
_COPY_AGAIN = "the file was damaged after it was saved; copy it again, or take an earlier step"
_RESTORE = (
    "in Python: import jax, numpy as np, orbax.checkpoint as ocp; from safetensors.numpy import"
    " save_file; c = ocp.PyTreeCheckpointer(); m = c.metadata({path}).item_metadata.tree; t ="
    " c.restore({path}, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray"
    "), m)); save_file({'.'.join(str(getattr(k, 'key', getattr(k, 'idx', None))) for k in p):"
    " np.asarray(a) for p, a in jax.tree_util.tree_leaves_with_path(t)}, 'model.safetensors')"
)


class _Value(Struct, frozen=True):
    """Where a value is: the bytes `[start, stop)` of a file of the checkpoint's folder."""

    path: str
    start: int
    stop: int


class _Cursor:
    """Reads the fields of a node, which are arrays of numbers and of bytes."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.at, self.where = data, 0, where

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) < count:
            raise FormatError("ends in the middle of a field", where=self.where, hint=_COPY_AGAIN)
        self.at += count
        return part

    def number(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  a bit says whether more follow
                return value
            shift += 7
            if shift > 63:  # noqa: PLR2004  no number is longer
                raise FormatError("has a number of too many bytes", where=self.where)

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(self.check(count))]

    def check(self, count: int) -> int:
        if count > len(self.data):  # each takes a byte at least
            raise FormatError(f"claims {count:,} entries in few bytes", where=self.where)
        return count

    def texts(self, count: int, between: int = 0) -> tuple[list[bytes], list[list[int]]]:
        """Reads byte strings, without what each shares with the one before.

        `between`: how many arrays of numbers are between the lengths and the bytes.
        """
        prefixes = [0, *self.numbers(max(count - 1, 0))]
        suffixes = self.numbers(count)
        others = [self.numbers(count) for _ in range(between)]
        texts: list[bytes] = []
        for prefix, suffix in zip(prefixes, suffixes, strict=False):
            before = texts[-1] if texts else b""
            if prefix > len(before):
                raise FormatError("shares more than there is", where=self.where)
            texts.append(before[:prefix] + self.take(suffix))
        return texts, others

    def files(self, above: str) -> list[tuple[str, str]]:
        """Reads a table of files: of each its path, and the folder that paths below it are in."""
        paths, (bases,) = self.texts(self.number(), between=1)
        return [
            (
                above + path.decode("utf-8", "replace"),
                above + path[:base].decode("utf-8", "replace"),
            )
            for path, base in zip(paths, bases, strict=True)
        ]


def _read_node(data: bytes, magic: int, where: str) -> _Cursor:
    """Checks header and checksum of a manifest or a node, and returns its body."""
    if len(data) < 18 or struct.unpack_from(">I", data) != (magic,):  # noqa: PLR2004  of the header
        raise FormatError("is no manifest or node of OCDBT", where=where, hint=_COPY_AGAIN)
    (size,) = struct.unpack_from("<Q", data, 4)
    if size != len(data) or struct.unpack("<I", data[-4:]) != (crc32c(data[:-4]),):
        raise ChecksumError("does not have its length or checksum", where=where, hint=_COPY_AGAIN)
    cursor = _Cursor(data[12:-4], where)
    version, method = cursor.numbers(2)
    if version or method > 1:
        text = f"is of version {version} with compression {method}, not modelled"
        raise UnsupportedError(text, where=where)
    body = cursor.data[cursor.at :]
    if method:
        read = lambda start, stop: body[start:stop]  # noqa: E731
        body = decompress(read, len(body), most_bytes=_MAX_NODE_BYTES, where=where)
    return _Cursor(body, where)


class _Values(Struct):
    """The values of a checkpoint by key, and the bytes of those that are in no file."""

    folder: str
    places: dict[str, _Value]
    inline: bytearray

    def read(self, source: Source, key: str, most_bytes: int) -> bytes:
        value = self.places[key]
        if value.stop - value.start > most_bytes:
            raise LimitError(f"{quote(key)} has {value.stop - value.start:,} bytes")
        return self.read_range(source, value)

    def read_range(self, source: Source, value: _Value) -> bytes:
        if value.path.endswith(_INLINE):
            return bytes(self.inline[value.start : value.stop])
        return source.read(posixpath.join(self.folder, value.path), value.start, value.stop)

    def zeros(self, size_bytes: int) -> _Value:
        """Returns one element of value zero, which stands for all that are in no chunk."""
        at = self.places.get(_ZEROS)
        if at is None:
            first = len(self.inline)
            self.inline += bytes(_MOST_ITEM_BYTES)
            at = self.places[_ZEROS] = _Value(_MANIFEST + _INLINE, first, first)
        return replace(at, stop=at.start + size_bytes)


def _read_database(source: Source, folder: str) -> _Values:
    """Returns the values of the newest version in an OCDBT database."""
    where = posixpath.join(source.location, folder, _MANIFEST)
    data = read_limited(source, posixpath.join(folder, _MANIFEST), _MAX_NODE_BYTES, "manifest")
    cursor = _read_node(data, 0x0CDB3A2A, where)
    cursor.take(16)
    if cursor.number():
        text = "keeps its versions in numbered files, not modelled"
        raise UnsupportedError(text, where=where)
    cursor.numbers(2)
    cursor.take(1)
    if cursor.number():
        cursor.take(4)
    files = cursor.files("")
    count = cursor.number()
    cursor.numbers(count)
    heights = cursor.take(cursor.check(count))
    file, start, size, keys = (cursor.numbers(count) for _ in range(4))
    values = _Values(folder, {}, bytearray())
    if not count or not keys[-1]:
        return values
    nodes = [(file[-1], start[-1], size[-1], heights[-1], b"", files)]
    for _ in range(_MAX_NODES):
        if not nodes:
            return values
        nodes += _read_tree_node(source, values, *nodes.pop(), limit=keys[-1])
    raise LimitError(f"has more than {_MAX_NODES:,} nodes", where=where)


_Node = tuple[int, int, int, int, bytes, list[tuple[str, str]]]


def _read_tree_node(
    source: Source,
    values: _Values,
    number: int,
    start: int,
    size: int,
    height: int,
    prefix: bytes,
    table: list[tuple[str, str]],
    *,
    limit: int,
) -> list[_Node]:
    """Reads a node: adds the values of a leaf, and returns the nodes below another."""
    path, above = _file(table, number, source.location)
    where = f"{posixpath.join(source.location, values.folder, path)}, node at byte {start:,}"
    if size > _MAX_NODE_BYTES:
        raise LimitError(f"has {size:,} bytes", where=where)
    data = source.read(posixpath.join(values.folder, path), start, start + size)
    cursor = _read_node(data, 0x0CDB20DE, where)
    if cursor.take(1)[0] != height:
        raise FormatError("is of another height than above", where=where, hint=_COPY_AGAIN)
    files = cursor.files(above)
    count = cursor.number()
    keys, shared = cursor.texts(count, between=1 if height else 0)
    if height:
        numbers, starts, sizes = (cursor.numbers(count) for _ in range(3))
        below = zip(numbers, starts, sizes, keys, shared[0], strict=True)
        return [(n, a, b, height - 1, prefix + k[:s], files) for n, a, b, k, s in below]
    lengths, kinds = cursor.numbers(count), cursor.numbers(count)
    apart = sum(kind == 1 for kind in kinds)
    places = iter(zip(cursor.numbers(apart), cursor.numbers(apart), strict=True))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        name = (prefix + key).decode("utf-8", "replace")
        if kind == 1:
            at, first = next(places)
            value = _Value(_file(files, at, where)[0], first, first + length)
        else:
            first = len(values.inline)
            values.inline += cursor.take(length)
            value = _Value(_MANIFEST + _INLINE, first, first + length)
        values.places[name] = value
    if len(values.places) > limit:
        raise FormatError(f"has more than the {limit:,} keys that the manifest says", where=where)
    return []


def _file(table: Sequence[tuple[str, str]], number: int, where: str) -> tuple[str, str]:
    if number >= len(table):
        raise FormatError("names a file that is not in its table", where=where, hint=_COPY_AGAIN)
    path, above = table[number]
    if not stays_inside(path):
        text = f"names the file {quote(path)}, which may be outside the checkpoint"
        raise UnsafePathError(text, where=where)
    return path, above


class _Array(Struct, frozen=True):
    """The metadata of a zarr array: what its values are, and how a chunk is stored."""

    shape: Shape
    dtype: DType
    stored: Shape  # the block of elements in one value
    inner: Shape  # of a chunk in it, the same where a value is one chunk
    is_compressed: bool
    prefix: str  # of the keys of values, in front of the position
    separator: str
    is_zero: bool  # whether elements in no value are zeros
    codecs_of_table: int = 0  # the table of ranges behind chunks: none, or with a checksum if 2

    def key(self, position: Sequence[int]) -> str:
        numbers = self.separator.join(map(str, position))
        if self.prefix and numbers:
            return f"{self.prefix}{self.separator}{numbers}"
        return self.prefix or numbers or "0"


_ZARR2 = {f"{kind}{size}": name for kind, size, name in [
    *(("f", size, f"float{8 * size}") for size in (2, 4, 8)),
    *(("i", size, f"int{8 * size}") for size in (1, 2, 4, 8)),
    *(("u", size, f"uint{8 * size}") for size in (1, 2, 4, 8)),
    ("b", 1, "bool"), ("c", 8, "complex64"), ("c", 16, "complex128"),
]}  # fmt: skip


def _parse_array(data: bytes, name: str, where: str) -> _Array:
    """Parses the metadata of an array, `.zarray` or `zarr.json`."""
    document = parse_json(data, where=where)
    if not isinstance(document, dict):
        raise FormatError("is not a JSON object", where=where)
    try:
        array = (_parse_zarr2 if name == _ARRAYS[0] else _parse_zarr3)(document)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise FormatError(f"is no metadata of an array: {error!r}", where=where) from error
    except UnsupportedError as error:
        raise error.located(where) from None
    ranks = {len(array.shape), len(array.stored), len(array.inner)}
    if len(ranks) > 1 or max(ranks) > MAX_DIMENSIONS or overflows(array.shape, array.dtype):
        raise FormatError("has sizes that do not fit one another", where=where)
    if any(s % i for s, i in zip(array.stored, array.inner, strict=True)):
        raise FormatError("has chunks that do not fill what is stored together", where=where)
    return array


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(f"array has {what}, not modelled")


def _sizes(value: Sequence[object], least: int = 0) -> Shape:
    if not isinstance(value, list) or not all(is_count(v) and v >= least for v in value):
        raise TypeError(f"{value!r} are no sizes")
    return tuple(value)


def _dtype(name: str) -> DType:
    dtype = BY_NAME.get(name)
    if dtype is None:
        raise _unsupported(f"elements of type {quote(name)}")
    return dtype


def _parse_zarr2(document: Mapping[str, Any]) -> _Array:
    code, compressor = document["dtype"], document["compressor"]
    if code[:1] == ">":
        raise _unsupported("bytes in big-endian order")
    if document.get("filters") or (document["order"] != "C" and len(document["shape"]) > 1):
        raise _unsupported("filters, or elements in column-major order")
    if compressor is not None and compressor["id"] != "zstd":
        raise _unsupported(f"chunks compressed with {quote(str(compressor['id']))}")
    chunks = _sizes(document["chunks"], 1)
    return _Array(
        _sizes(document["shape"]),
        _dtype(_ZARR2.get(code.lstrip("<|"), code)),
        chunks,
        chunks,
        compressor is not None,
        "",
        document.get("dimension_separator", "."),
        _zero(document["fill_value"]),
    )


def _parse_zarr3(document: Mapping[str, Any]) -> _Array:
    grid, keys = document["chunk_grid"], document["chunk_key_encoding"]
    if grid["name"] != "regular" or keys["name"] not in {"default", "v2"}:
        raise _unsupported("another grid than the regular one")
    stored = inner = _sizes(grid["configuration"]["chunk_shape"], 1)
    codecs = document["codecs"]
    of_table: list[str] = []
    has_table = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if has_table:
        (outer,) = codecs
        settings = outer["configuration"]
        codecs, inner = settings["codecs"], _sizes(settings["chunk_shape"], 1)
        of_table = [codec["name"] for codec in settings["index_codecs"]]
        if (
            of_table not in (["bytes"], ["bytes", "crc32c"])
            or settings.get("index_location", "end") != "end"
        ):
            raise _unsupported(f"a table of chunks in the codecs {of_table}")
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes"], ["bytes", "zstd"]):
        raise _unsupported(f"the codecs {names}")
    if codecs[0].get("configuration", {}).get("endian", "little") != "little":
        raise _unsupported("bytes in big-endian order")
    is_default = keys["name"] == "default"
    return _Array(
        _sizes(document["shape"]),
        _dtype(document["data_type"]),
        stored,
        inner,
        len(names) > 1,
        "c" if is_default else "",
        keys.get("configuration", {}).get("separator", "/" if is_default else "."),
        _zero(document["fill_value"]),
        len(of_table),
    )


def _zero(fill: object) -> bool:
    return not fill and not isinstance(fill, str)


class _Tensors(FileTable):
    """The tensors of a checkpoint, made from its values."""

    def __init__(self, source: Source, values: _Values, *, is_whole: bool) -> None:
        """Takes the values; `is_whole`: whether a value that is absent was lost."""
        super().__init__()
        self._source, self._values, self._is_whole = source, values, is_whole
        self._numbers_of: dict[str, int] = {}

    def place(self, name: str, array: _Array) -> ChunkTable:
        """Returns the chunks of an array."""
        grid = [-(-size // step) for size, step in zip(array.shape, array.stored, strict=True)]
        parts = [step // size for step, size in zip(array.stored, array.inner, strict=True)]
        if math.prod(grid) * math.prod(parts) > _MAX_CHUNKS:
            raise LimitError(f"has {math.prod(grid) * math.prod(parts):,} chunks")
        if self._is_whole and math.prod(grid) > len(self._values.places):
            raise IncompleteCheckpointError(f"{math.prod(grid):,} chunks are more than are there")
        chunks: list[Chunk] = []
        for position in itertools.product(*map(range, grid)):
            value = self._values.places.get(f"{name}/{array.key(position)}")
            inner: Iterator[_Value | None] = itertools.repeat(value)
            if array.codecs_of_table and value is not None:
                inner = iter(self._read_ranges(array, value, math.prod(parts)))
            for within, held in zip(itertools.product(*map(range, parts)), inner, strict=False):
                places = zip(position, array.stored, within, array.inner, strict=True)
                offsets = tuple(p * s + w * i for p, s, w, i in places)
                rooms = zip(array.inner, array.shape, offsets, strict=True)
                sizes = tuple(min(i, n - o) for i, n, o in rooms)
                if min(sizes, default=1) > 0:
                    chunks.append(self._chunk(array, Box(offsets, sizes), held))
        return ChunkTable.of(chunks, len(array.shape))

    def _read_ranges(self, array: _Array, value: _Value, count: int) -> Iterator[_Value | None]:
        """Reads which range of a value each of its chunks has."""
        size = 16 * count + (4 if array.codecs_of_table > 1 else 0)
        if value.stop - value.start < size:
            raise FormatError("is too short for its table of chunks", hint=_COPY_AGAIN)
        table = self._values.read_range(self._source, replace(value, start=value.stop - size))
        if size % 16 and struct.unpack("<I", table[-4:]) != (crc32c(table[:-4]),):
            raise ChecksumError("table of chunks does not have its checksum", hint=_COPY_AGAIN)
        for at in range(0, 16 * count, 16):
            first, length = struct.unpack_from("<QQ", table, at)
            if first == length == 2**64 - 1:
                yield None
                continue
            if first + length > value.stop - value.start:
                raise FormatError("has a chunk behind its end", hint=_COPY_AGAIN)
            yield replace(value, start=value.start + first, stop=value.start + first + length)

    def _chunk(self, array: _Array, box: Box, value: _Value | None) -> Chunk:
        strides = None if box.sizes == array.inner else row_major_strides(array.inner)
        container: Container = "zstd" if array.is_compressed else "raw"
        if value is None:
            if self._is_whole:
                raise IncompleteCheckpointError(f"the chunk at {list(box.offsets)} is not there")
            if not array.is_zero:
                raise _unsupported("a value of its own where chunks are absent")
            value, container = self._values.zeros(array.dtype.itemsize), "raw"
            strides = (0,) * len(box.sizes)
        elif container == "raw":
            needed = math.prod(array.inner) * array.dtype.itemsize
            if value.stop - value.start != needed:
                found = f"{value.stop - value.start:,} bytes are there"
                raise FormatError(f"the chunk at {list(box.offsets)} has {needed:,}, {found}")
        number = self._numbers_of.get(value.path)
        if number is None:
            path = posixpath.join(self._values.folder, value.path)
            is_inline = value.path.endswith(_INLINE)
            file = FileRef(path, 0, "") if is_inline else stat_or_missing(self._source, path)
            number = self._numbers_of[value.path] = self.add_file(file)
        record = self.add_record(Record(number, value.start, value.stop, container))
        return Chunk(box, record, byte_offset=0, strides=strides)

    def lay_inline(self) -> None:
        """Gives the values that are in leaves a file, behind the name of the manifest."""
        number = self._numbers_of.get(_MANIFEST + _INLINE)
        if number is None:
            return
        path = self.files[number].path
        laid = {path: bytes(self._values.inline)}
        if isinstance(self._source, OverlaySource):
            self._source.lay_over(laid)
        self.files[number] = MemorySource(laid).stat(path)


class OrbaxReader(FormatReader):
    """Reads the PyTrees that Orbax writes, with OCDBT or with a folder for each array."""

    name = "orbax"
    order = 5  # its files may have any name
    expected = "'_METADATA' beside 'manifest.ocdbt' or folders with '.zarray' or 'zarr.json'"
    endings = r"(?:^|/)(?:manifest\.ocdbt|\.zarray|zarr\.json)"

    def find_deep_folders(self, paths: Sequence[str]) -> Collection[str]:
        return _find_homes(paths)

    def find(self, paths: Sequence[str]) -> list[Candidate]:
        homes = _find_homes(paths)
        arrays = {posixpath.dirname(path) for path in paths if posixpath.basename(path) in _ARRAYS}
        files: dict[str, list[str]] = {home: [] for home in sorted(homes)}
        for path in paths if homes else ():
            home, array = posixpath.dirname(path), ""
            while home not in homes and home:
                home, array = posixpath.dirname(home), home
            inside = path[len(home) :].lstrip("/")
            if home in homes and (array in arrays or _OF_TREE.match(inside)):
                files[home].append(path)
        ended = {home for home in files if not _is_unfinished(home)}
        return [
            Candidate(self.name, home, tuple(own), homes[home])
            for home, own in files.items()
            if home in ended or not ended
        ]

    def parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        try:
            return self._parse(source, candidate)
        except UnsupportedError as error:
            folder = posixpath.join(source.location, candidate.folder)
            raise error.hinted(_RESTORE.replace("{path}", repr(folder))) from None

    def _parse(self, source: Source, candidate: Candidate) -> TensorIndex:
        folder, there = candidate.folder, frozenset(candidate.files)
        where = posixpath.join(source.location, folder)
        if _is_unfinished(folder or source.location):
            raise IncompleteCheckpointError(
                "is the folder of a save that did not end", hint="take an earlier step"
            )
        tree: Mapping[str, Any] = {}
        if posixpath.join(folder, _TREE) in there:
            path = posixpath.join(folder, _TREE)
            tree = read_json_object(source, path, _MAX_NODE_BYTES, "description of the tree")
        if posixpath.join(folder, _MANIFEST) in there:
            values = _read_database(source, folder)
            is_whole = tree.get("store_array_data_equal_to_fill_value") is True
        elif any(_OF_PROCESS.search(path) for path in there):
            raise IncompleteCheckpointError(
                f"has no {_MANIFEST!r}, into which Orbax merges those of its processes at the end",
                hint="the save did not end; take an earlier step",
            )
        else:
            inside = (path[len(folder) :].lstrip("/") for path in candidate.files)
            sizes = {i: source.stat(posixpath.join(folder, i)).size_bytes for i in inside}
            places = {i: _Value(i, 0, size) for i, size in sizes.items()}
            values, is_whole = _Values(folder, places, bytearray()), True
        tensors = _Tensors(source, values, is_whole=is_whole)
        held: dict[KeyPath, tuple[_Array, ChunkTable]] = {}
        paths = _list_arrays(tree, values, where)
        for name, (key_path, key) in paths.items():
            place = f"{where}: array {quote(name)}"
            with errors_at(place):
                data = values.read(source, f"{name}/{key}", _MAX_NODE_BYTES)
                array = _parse_array(data, key, place)
                held[key_path] = array, tensors.place(name, array)
        tensors.lay_inline()
        used = {file.path for file in tensors.files}
        beside = [source.stat(path) for path in candidate.files if path not in used]
        return tensors.index(self.name, _make_entries(held), *beside, run=RunFacts(writer="Orbax"))


def _find_homes(paths: Sequence[str]) -> dict[str, str]:
    """Returns folders that hold a tree, each with the reason."""
    trees = {posixpath.dirname(path) for path in paths if posixpath.basename(path) == _TREE}
    homes: dict[str, str] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        if name == _MANIFEST:
            home = _OF_PROCESS.split(f"{folder}/")[0].rstrip("/")
            homes[home] = f"{_MANIFEST!r}, which tensorstore writes"
        elif name in _ARRAYS and posixpath.dirname(folder) in trees:
            homes[posixpath.dirname(folder)] = f"{_TREE!r} beside folders with {name!r}"
    return homes


def _is_unfinished(folder: str) -> bool:
    """Returns whether a folder is in one of a save that did not end."""
    return any(_UNFINISHED in name for name in folder.rsplit("/", 2)[-2:])


def _list_arrays(
    tree: Mapping[str, Any], values: _Values, where: str
) -> dict[str, tuple[KeyPath, str]]:
    """Returns the arrays by name, each with its path in the tree and the name of its metadata."""
    stored = {
        folder: name for folder, name in map(posixpath.split, values.places) if name in _ARRAYS
    }
    paths: dict[str, KeyPath] = {}
    described = tree.get("tree_metadata", {})
    try:
        for item in described.values():
            keys = item["key_metadata"]
            path = tuple(int(k["key"]) if k["key_type"] == 1 else str(k["key"]) for k in keys)
            name = join_path(path)
            if name in paths:
                raise FormatError(
                    f"{_TREE!r} lists two arrays called {name!r}; Orbax stores one of them",
                    where=where,
                    hint="rename one of them in the training, and save again",
                )
            paths[name] = path
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{_TREE!r} describes no tree: {error!r}", where=where) from error
    expected = {
        join_path(path)
        for path, item in zip(paths.values(), described.values(), strict=True)
        if (item.get("value_metadata") or {}).get("value_type") in _ARRAY_TYPES
    }
    missing = sorted(expected - stored.keys())
    if missing:
        raise IncompleteCheckpointError(
            f"{_TREE!r} lists {len(expected):,} arrays; missing are"
            f" {join_first(missing, len(missing), _LISTED_NAMES)}",
            hint=_COPY_AGAIN,
        )
    return {
        name: (paths.get(name) or tuple(re.split(r"[./]", name)), key)
        for name, key in sorted(stored.items())
    }


def _make_entries(held: Mapping[KeyPath, tuple[_Array, ChunkTable]]) -> dict[Key, TensorEntry]:
    """Assigns arrays to models, their averages, optimizers, and what is neither.

    Names of a model begin with those of its collections, as Orbax writes them: `params`, and beside
    it `batch_stats` and others, which belong to the model. An average has the model's own names.
    """
    entries: dict[Key, TensorEntry] = {}
    parts = {path: _part_of(path) for path in held}
    has_model = any(part == "model" for _, part, _ in parts.values())
    for path, (array, chunks) in held.items():
        tree, part, name = parts[path]
        if not has_model and array.shape and len(path) == 1:  # a tree without any container
            part = "model"
        member = Membership(join_path(tree), part, Fqn(join_path(name)))
        entry = member.entry(path, array.dtype, array.shape, chunks)
        if entries.setdefault(entry.key, entry) is not entry:
            raise FormatError(f"two arrays are called {entry.key!r}")
    return entries


def _part_of(path: KeyPath) -> tuple[KeyPath, Part, KeyPath]:
    """Returns the container of an array, what it holds, and the array's path in it."""
    if _RANDOM_STATES in path[:-1]:  # of dropout and others; there `params` is a stream of numbers
        return (), "other", path
    for at, step in enumerate(map(str, path[:-1])):
        if _OPTIMIZER.fullmatch(step):
            return path[: at + 1], "optimizer", path[at + 1 :]
        if _AVERAGES.fullmatch(step):
            rest = path[at + 1 :]
            return (
                path[: at + 1],
                "average",
                rest if rest[0] == _PARAMETERS else (_PARAMETERS, *rest),
            )
        if step == _PARAMETERS:
            return path[:at], "model", path[at:]
    part = part_of_path(path[:1])
    if len(path) == 1 or part == "other":
        return (), "other", path
    return (path[:1], "model", path[1:]) if part == "model" else ((), "model", path)
