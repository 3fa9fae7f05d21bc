"""Parses `.metadata`, the index of the data files of torch.distributed.checkpoint.

In order: the pickle becomes inert objects and runs of them (`shortcuts.py`); its two large tables
become columns, of chunks and of stored items (`_Tables`); the save plans that Megatron-Core adds
are compared with the chunks (`_compare_plans`); `_Join` finds the one stored item of each chunk.

In the plans of Megatron-Core, each rank has an item for each piece of a tensor that it stores, and
one for each Python object. Rank 0 makes the tables from all plans and keeps the plans, so that a
later save can use them again. A piece that several ranks plan is stored once. Objects, and the
sizes of pieces, are not compared.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner,planner}.py, torch 2.1 to
2.14; torch/distributed/_shard/sharded_tensor/metadata.py for `TensorProperties` up to torch 2.2;
megatron/core/dist_checkpointing/strategies/state_dict_saver.py (`all_local_plans`),
strategies/torch.py (`MCoreSavePlan`, up to core 0.15), Megatron-Core 0.8 to 0.16.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType, dtype_named
from ckptkit.core.errors import FormatError, UnsafePathError, UnsupportedError
from ckptkit.core.frameworks import BARE, PACKAGES, ROW_MAJOR
from ckptkit.core.geometry import distinct
from ckptkit.core.text import quote
from ckptkit.formats.dcp.shortcuts import (
    CHUNK,
    INDEX,
    INFO,
    ITEM,
    PLANNER,
    SIZE,
    ChunkRun,
    EntryRun,
    FastMachine,
    Ints,
    PlanRun,
    ShortcutError,
    Unread,
    flatten,
    is_size,
)
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count, overflows
from ckptkit.formats.pickle.machine import Global, InertObject, Machine
from ckptkit.formats.pickle.pickles import OPCODES
from ckptkit.formats.pickle.torch_values import TensorRef, parse_values

_MAX_TRANSFORMS = 16
MAX_OFFSET = 2**63 - 1
NO_OFFSET = -1
_CLIMBS = re.compile(r"(?:^|[/\\])\.\.(?:$|[/\\])")
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:")
_HINT = "the file is damaged; take another copy of it"
PLANS = (
    Global(PLANNER, "SavePlan"),
    Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
)
_UNKNOWN = -1
_PLANS_HINT = "'.metadata' was changed, or put together from two saves; take another copy of it"
_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_STRIDED = Global("torch", "strided")
_METADATA = Global(_CHECKPOINT, "Metadata")
_MEGATRON_METADATA = Global(PLANS[1].module, "MCoreMetadata")
_TENSOR_STORAGE = Global(_CHECKPOINT, "TensorStorageMetadata")
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_MEGATRON_FIELDS = {"all_local_plans", "mcore_data"}
# dtype, layout, requires_grad, memory_format, pin_memory; since torch 2.15 also stride, which is
# that of the tensor in memory. The archive of a chunk has the strides of its stored bytes.
_PROPERTIES = range(5, 7)
Transforms = tuple[tuple[str, ...], ...]
Columns = tuple[Ints, Ints, NDArray[np.int32], Ints, Ints]  # as in DcpTensor, `offsets` to `length`
StoredRange = tuple[int, int, int]  # file, start, length
_Mask = NDArray[np.bool_]
LEAST_ARCHIVE_BYTES = 1_024
"""All archives of `torch.save` are longer than this, and all padding between two is shorter."""
_BLOCK_CELLS = 1 << 20
_NO_RANK = -1


class DcpTensor(Struct, frozen=True):
    """A tensor and its chunks; row i of every column is one chunk.

    Chunks without elements are left out. No two chunks begin at the same element.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    offsets: Ints  # int64 of shape [chunks, dimensions], in elements
    sizes: Ints  # int64 of shape [chunks, dimensions], in elements; all at least 1
    file: np.ndarray[Any, np.dtype[np.int32]]  # int32 positions in `DcpMetadata.paths`
    start: Ints  # int64, first byte of the stored chunk in its file
    length: Ints  # int64, bytes of the stored chunk, its container included
    # the distinct lists of transforms that chunks were stored through, such as a compression;
    # usually empty
    transforms: Transforms = ()


class DcpBlob(Struct, frozen=True):
    """A pickled Python object; `start` and `length` are in bytes, `file` as in `DcpTensor`."""

    key: str
    file: int
    start: int
    length: int
    transforms: Transforms = ()


class DcpMetadata(Struct, frozen=True):
    """The contents of a `.metadata` file."""

    tensors: Mapping[str, DcpTensor]
    blobs: Mapping[str, DcpBlob]
    # data files as written, relative to the folder of `.metadata`; none is absolute or leads
    # upwards
    paths: tuple[str, ...]
    # for each flat key its path in the nested state that was saved: strings for dictionary keys,
    # integers for positions in lists. None if nothing was flattened.
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    version: str | None  # the format's version, which torch writes since 2.9
    writer: str  # the range of torch versions that write such a file, as far as it is known
    # for each data file in which tensors share bytes, by position in `paths`, the end of the last
    # stored item
    tied_files: Mapping[int, int]
    # whether the data files end with a safetensors image of all their tensors, to whose start
    # each chunk refers, instead of one archive for each chunk
    has_images: bool = False
    is_megatron: bool = False  # whether Megatron-Core wrote it
    library: str = ""  # the library that called torch's, or wrote the file itself; empty for others
    is_raw: bool = False  # whether a stored item is the elements of a chunk, without a container
    # tensors whose stored item is too short for their elements
    short: frozenset[str] = frozenset()


def parse_metadata(data: bytes, *, where: str, shortcuts: bool = True) -> DcpMetadata:
    """Parses a `.metadata` file, and checks that its three tables agree.

    Every chunk with elements has exactly one stored item, is inside its tensor, and shares no byte
    with another chunk, unless their bytes are identical. Whether chunks cover their tensor is not
    checked. If Megatron-Core added the save plans of all ranks, they have the same pieces of
    tensors as the tables. Without shortcuts, which is for tests, the result is the same.
    """
    if shortcuts:
        fast = FastMachine(data, ALLOWED, where=where)
        with suppress(ShortcutError):
            return _join_tables(_Tables(fast, where))
    machine = Machine(data, ALLOWED, OPCODES, where=where)
    return _join_tables(_Tables(machine, where))


def _join_tables(tables: _Tables) -> DcpMetadata:
    tables.read_tensors()
    tables.read_storage()
    is_raw = tables.library in BARE
    if is_raw:
        tables.check_strides(BARE[tables.library])
    plans = tables.fields.pop("all_local_plans", None)
    if plans is not None:
        _compare_plans(plans, tables)
    tables.states.clear()
    tables.fields["storage_data"] = None
    planner_data = tables.read_planner_data()
    join = _Join(tables, is_raw=is_raw)
    columns, blobs = join.run()

    def transforms_of(key: str) -> Transforms:
        return tuple(tables.transforms.get(tables.numbers[key], ()))

    version = tables.fields.get("version")
    return DcpMetadata(
        tensors={
            key: DcpTensor(key, dtype, shape, *columns[key], transforms_of(key))
            for key, dtype, shape in zip(tables.keys, tables.dtypes, tables.shapes, strict=True)
        },
        blobs={key: DcpBlob(key, *stored, transforms_of(key)) for key, stored in blobs.items()},
        paths=tuple(tables.paths),
        planner_data=planner_data,
        version=version if isinstance(version, str) else None,
        writer=tables.name_writer(),
        tied_files=join.tied_files,
        has_images=join.is_bare,
        is_megatron=tables.is_megatron,
        library=tables.library,
        is_raw=is_raw,
        short=frozenset(join.keys[number] for number in join.short),
    )


def _at(where: str, key: str) -> str:
    """Returns where a tensor or an object is, for errors about it."""
    return f"{where}, key {quote(key)}" if where else f"key {quote(key)}"


def _damaged(message: str, where: str) -> FormatError:
    return FormatError(message, where=where, hint=_HINT)


class _Tables:
    """The inert objects of one file, read once into columns.

    Of the chunks of all tensors, `chunk_offset` and `chunk_size` are positions in
    `sizes`; `keys`, `dtypes`, `shapes` and `counts` have a row for each tensor. Of the
    stored items, `key` are numbers of keys, `offset` positions in `sizes` or -1, `file`
    positions in `paths`, `start` and `length` in bytes.
    """

    def __init__(self, machine: Machine, where: str) -> None:
        root = machine.run()
        self.where = where
        is_megatron = isinstance(root, InertObject) and root.cls.name == _MEGATRON_METADATA.name
        self.fields = _fields_of(root, _MEGATRON_METADATA if is_megatron else _METADATA, where)
        packages = {module.partition(".")[0] for module, _ in machine.globals}
        # Libraries have classes of their own for torch's, of the same names and fields.
        self.library = next((PACKAGES[name] for name in PACKAGES if name in packages), "")
        self.is_megatron = is_megatron or not _MEGATRON_FIELDS.isdisjoint(self.fields)
        self.sizes: list[tuple[int, ...]] = []
        self.texts: list[str] = []
        if isinstance(machine, FastMachine):  # runs refer to these
            self.sizes, self.texts = machine.sizes, machine.texts
        self.states = self._table("state_dict_metadata")
        self.numbers = {key: number for number, key in enumerate(self.states)}
        self._owners: set[str] = set()  # the modules of TensorProperties
        self.keys: list[str] = []
        self.dtypes: list[DType] = []
        self.shapes: list[tuple[int, ...]] = []
        self.counts: list[int] = []
        self.chunk_offset, self.chunk_size = array("i"), array("i")
        self.paths: dict[str, int] = {}
        self.key, self.offset, self.file = array("i"), array("i"), array("i")
        self.start, self.length = array("q"), array("q")
        self.transforms: dict[int, dict[tuple[str, ...], None]] = {}

    def read_tensors(self) -> None:
        """Reads `state_dict_metadata`: what each tensor is, and its chunks."""
        seen: set[int] = set()
        for key, state in self.states.items():
            if _is_of_object(state):
                continue
            where = _at(self.where, key)
            fields = _fields_of(state, _TENSOR_STORAGE, where)
            shape, chunks = fields.get("size"), fields.get("chunks")
            dtype = self._dtype(fields.get("properties"), where)
            if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
                raise _damaged("shape is not a tuple of integers", where)
            if len(shape) > MAX_DIMENSIONS:
                raise _damaged(
                    f"tensor has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}", where
                )
            if min(shape, default=0) < 0:
                raise _damaged(f"a size in shape {list(shape)} is negative", where)
            if overflows(shape, dtype):
                raise _damaged(
                    f"size in bytes of {dtype.name} of shape {list(shape)} overflows", where
                )
            # A list that two tensors shared would be walked once for each of them.
            if not isinstance(chunks, list) or id(chunks) in seen:
                raise _damaged("chunks are not a list that only this tensor has", where)
            seen.add(id(chunks))
            before = len(self.chunk_offset)
            for chunk in chunks:
                if isinstance(chunk, ChunkRun):
                    self.chunk_offset.frombytes(chunk.offsets.astype(np.int32).tobytes())
                    self.chunk_size.frombytes(chunk.sizes.astype(np.int32).tobytes())
                else:
                    place = _fields_of(chunk, CHUNK, where)
                    self.chunk_offset.append(self._position(place.get("offsets"), where))
                    self.chunk_size.append(self._position(place.get("sizes"), where))
            chunks.clear()
            self.keys.append(key)
            self.dtypes.append(dtype)
            self.shapes.append(shape)
            self.counts.append(len(self.chunk_offset) - before)

    def read_storage(self) -> None:
        """Reads `storage_data`: the stored items."""
        texts = self.texts
        key_of_text = np.array([self.numbers.get(text, _UNKNOWN) for text in texts], np.int32)
        file_of_text = np.full(len(texts), _UNKNOWN, np.int32)
        for index, info in self._table("storage_data").items():
            if isinstance(index, EntryRun):
                keys = key_of_text[index.fqn]
                if (keys == _UNKNOWN).any():
                    self._number(texts[index.fqn[np.argmax(keys == _UNKNOWN)]])
                for position in distinct(index.path).tolist():
                    file_of_text[position] = self._file(texts[position])
                self.key.frombytes(keys.tobytes())
                self.offset.frombytes(index.offset.astype(np.int32).tobytes())
                self.file.frombytes(file_of_text[index.path].tobytes())
                self.start.frombytes(index.start.tobytes())
                self.length.frombytes(index.length.tobytes())
                continue
            index_fields = _fields_of(index, INDEX, self.where)
            number = self._number(index_fields.get("fqn"))
            where = _at(self.where, index_fields["fqn"])
            if type(index_fields.get("index")) not in {int, type(None)}:
                raise _damaged("index hint is not an integer", where)
            offset = index_fields.get("offset")
            fields = _fields_of(info, INFO, where)
            for column, name in ((self.start, "offset"), (self.length, "length")):
                value = fields.get(name)
                if type(value) is not int or not -MAX_OFFSET <= value <= MAX_OFFSET:
                    raise _damaged(
                        f"{name} of its stored bytes is not an integer below 2**63", where
                    )
                column.append(value)
            self.key.append(number)
            self.offset.append(NO_OFFSET if offset is None else self._position(offset, where))
            self.file.append(self._file(fields.get("relative_path")))
            names = fields.get("transform_descriptors")
            if names:
                if not isinstance(names, list | tuple) or len(names) > _MAX_TRANSFORMS:
                    raise _damaged("transform descriptors are not a short list", where)
                if not all(isinstance(name, str) for name in names):
                    raise _damaged("a transform descriptor is not a string", where)
                self.transforms.setdefault(number, {})[tuple(names)] = None

    def check_strides(self, table: str) -> None:
        """Refuses bare elements in another order than row by row, as ByteCheckpoint may have them.

        Of each chunk its table has the tensor as torch pickles it, without the elements.
        """
        ordered: set[bytes] = set()
        for index, pickled in () if table == ROW_MAJOR else self._table(table).items():
            key = str(_fields_of(index, INDEX, self.where).get("fqn"))
            where = _at(self.where, key)
            if _is_of_object(self.states.get(key)):
                continue
            if not isinstance(pickled, bytes):
                raise _damaged("description of a chunk is not a pickle", where)
            if pickled in ordered:
                continue
            tensor = parse_values(pickled, where=where)
            if not isinstance(tensor, TensorRef) or not tensor.row_major or tensor.storage_offset:
                raise UnsupportedError(
                    "elements of a chunk are not stored row by row, which is not modelled",
                    where=where,
                    hint="make the tensor contiguous before the save",
                )
            ordered.add(pickled)

    def read_planner_data(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """Returns the path of each key; None if nothing was flattened."""
        table = self.fields.get("planner_data")
        if not table:
            # Without a misspelt 'planner_data', names would keep their containers.
            unknown = self.fields.keys() - _FIELDS
            if unknown and "planner_data" not in self.fields:
                name = _describe(min(unknown, key=str))
                raise _damaged(f"metadata has no 'planner_data' but a field {name}", self.where)
            return None
        if not isinstance(table, dict):
            raise _damaged("'planner_data' is not a dictionary", self.where)
        for key, path in table.items():
            if type(key) is not str or key not in self.numbers:
                raise _damaged(
                    f"'planner_data' names {_describe(key)}, the index does not", self.where
                )
            if not _spells(path, key):
                raise _damaged(
                    "its path in 'planner_data' does not spell its key", _at(self.where, key)
                )
        for key in self.numbers:
            if key not in table:
                raise _damaged("it is missing from 'planner_data'", _at(self.where, key))
        return table

    def name_writer(self) -> str:
        """Returns the range of torch versions that write such a file."""
        if isinstance(self.fields.get("version"), str):
            return "torch 2.9 or later"
        if self.fields.get("storage_meta") is not None:
            return "torch 2.4 to 2.8"
        if _CHECKPOINT in self._owners:
            return "torch 2.3"
        return "torch 2.1 or 2.2" if self._owners else "torch 2.8 or earlier"

    def _table(self, name: str) -> dict[Any, Any]:
        table = self.fields.get(name)
        if not isinstance(table, dict):
            raise _damaged(f"metadata has no table {name!r}", self.where)
        if name == "state_dict_metadata" and not all(type(key) is str for key in table):
            raise _damaged(f"a key of {name!r} is not a string", self.where)
        return table

    def _dtype(self, properties: object, where: str) -> DType:
        if not isinstance(properties, InertObject) or properties.cls.name != "TensorProperties":
            raise _damaged("properties are not TensorProperties", where)
        self._owners.add(properties.cls.module)
        state = properties.state
        if not isinstance(state, tuple) or len(state) not in _PROPERTIES:
            raise _damaged("state of TensorProperties is not a tuple of 5 or 6", where)
        dtype, layout = state[:2]
        if layout != _STRIDED:
            name = quote(str(layout)) if isinstance(layout, Global) else "not one of torch's"
            raise UnsupportedError(
                f"layout is {name}; only 'torch.strided' is modelled", where=where
            )
        if isinstance(dtype, Global):
            return dtype_named(dtype.name, where=where)
        if not isinstance(dtype, DType):
            raise _damaged("dtype is not one of torch's", where)
        return dtype

    def _position(self, value: object, where: str) -> int:
        if not is_size(value):
            raise _damaged(
                "offset or size of a chunk is not a short tuple of integers below 2**63", where
            )
        self.sizes.append(cast("tuple[int, ...]", value))
        return len(self.sizes) - 1

    def _number(self, key: object) -> int:
        if not isinstance(key, str):
            raise _damaged("key of a stored item is not a string", self.where)
        number = self.numbers.get(key)
        if number is None:
            raise _damaged("it is stored, but the index does not name it", _at(self.where, key))
        return number

    def _file(self, path: object) -> int:
        if not isinstance(path, str):
            raise _damaged("relative path of a data file is not a string", self.where)
        if path not in self.paths:
            if not path or "\0" in path or _ABSOLUTE.match(path) or _CLIMBS.search(path):
                raise UnsafePathError(
                    f"data file {quote(path)} is not inside the folder of the checkpoint",
                    where=self.where,
                    hint="checkpoint libraries write plain file names; do not trust this file",
                )
            self.paths[path] = len(self.paths)
        return self.paths[path]


def _fields_of(value: object, cls: Global, where: str) -> dict[str, Any]:
    """Returns the fields of an inert instance of a dataclass."""
    if isinstance(value, Unread):
        raise ShortcutError
    if not isinstance(value, InertObject):
        raise _damaged(f"expected a {cls.name}, found something else", where)
    # Libraries have copies of torch's classes, and classes derived from them, of the same names.
    if value.cls.name != cls.name:
        raise UnsupportedError(
            f"has an object of {quote(str(value.cls))} where torch has a {quote(cls.name)}",
            where=where,
            hint="read it with the library of that class, and save it with"
            " torch.distributed.checkpoint",
        )
    if not isinstance(value.state, dict):
        raise _damaged(f"a {cls.name} has no fields", where)
    return value.state


def _is_of_object(state: object) -> bool:
    return isinstance(state, InertObject) and state.cls.name == "BytesStorageMetadata"


def _describe(key: object) -> str:
    return quote(key) if isinstance(key, str) else f"a {type(key).__name__}"


def _spells(path: object, key: str) -> bool:
    """Returns whether a path, joined with dots, is the key, in time linear in the key's length."""
    if not isinstance(path, tuple) or not 0 < len(path) <= len(key) + 1:
        return False
    at = 0
    for part in path:
        if type(part) is not str and not is_count(part):
            return False
        text = str(part)
        if not key.startswith(text, at) or key[at + len(text) : at + len(text) + 1] not in {
            "",
            ".",
        }:
            return False
        at += len(text) + 1
    return at == len(key) + 1


def _compare_plans(plans: object, tables: _Tables) -> None:
    """Refuses save plans that have another piece than the tables, or lack one of theirs.

    Plans and the chunks of the tables are both taken as sets of pieces.
    """
    names, at = _read_plans(plans, tables)
    numbers, texts, sizes = tables.numbers, tables.texts, tables.sizes
    places: dict[tuple[int, ...], int] = {}
    place = np.array([places.setdefault(size, len(places)) for size in sizes], np.int64)
    own = np.array([numbers[key] for key in tables.keys], np.int64)
    keys = np.repeat(own, np.array(tables.counts, np.int64))
    stored = distinct(keys * len(places) + place[np.frombuffer(tables.chunk_offset, np.int32)])
    planned_keys = np.array([numbers.get(text, _UNKNOWN) for text in texts], np.int64)[names]
    if (planned_keys == _UNKNOWN).any():
        name = texts[names[np.argmax(planned_keys == _UNKNOWN)]]
        raise _damaged(
            "a save plan has it, but the index does not name it", _at(tables.where, name)
        )
    planned = distinct(planned_keys * len(places) + place[at])
    differing = np.setxor1d(planned, stored, assume_unique=True)
    if len(differing):
        number, first = divmod(int(differing[0]), len(places))
        there = "the plans only" if np.isin(differing[0], planned) else "the tables only"
        raise FormatError(
            f"the save plans of the ranks have {len(planned):,} pieces of tensors, the tables"
            f" {len(stored):,}; the piece at {list(list(places)[first])} is in {there}",
            where=_at(tables.where, list(numbers)[number]),
            hint=_PLANS_HINT,
        )


def _read_plans(plans: object, tables: _Tables) -> tuple[Ints, Ints]:
    """Returns the planned pieces: positions of their names and offsets in the lists of `tables`."""
    names, offsets, where = array("q"), array("q"), tables.where
    if not isinstance(plans, list):
        raise _damaged("'all_local_plans' is not a list", where)
    seen: set[int] = set()
    for plan in plans:
        is_plan = isinstance(plan, InertObject) and plan.cls.name in {p.name for p in PLANS}
        items = _fields_of(plan, plan.cls if is_plan else PLANS[0], where).get("items")
        # A list that two plans shared would be walked once for each of them.
        if not isinstance(items, list) or id(items) in seen:
            raise _damaged("items are not a list that only this save plan has", where)
        seen.add(id(items))
        for item in items:
            if isinstance(item, PlanRun):
                names.frombytes(item.fqn.tobytes())
                offsets.frombytes(item.offset.tobytes())
                continue
            fields = _fields_of(item, ITEM, where)
            if fields.get("tensor_data") is None:
                continue
            index = _fields_of(fields.get("index"), INDEX, where)
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                raise _damaged("name of a planned piece is not a string", where)
            if not is_size(offset):
                raise _damaged("offset of a planned piece is not a short tuple of integers", where)
            names.append(len(tables.texts))
            tables.texts.append(name)
            offsets.append(len(tables.sizes))
            tables.sizes.append(cast("tuple[int, ...]", offset))
        items.clear()
    return np.frombuffer(names, np.int64), np.frombuffer(offsets, np.int64)


class _Join:
    """Finds the stored bytes of every chunk.

    Blocks of tensors with equally many dimensions are processed, so that temporary arrays stay
    small.
    """

    def __init__(self, tables: _Tables, *, is_raw: bool) -> None:
        self.keys = list(tables.numbers)
        self.is_raw = is_raw  # stored are the elements, without a container
        self.where = tables.where
        self.numbers = np.array([tables.numbers[key] for key in tables.keys], np.int64)
        self.shapes = tables.shapes
        self.itemsizes = np.array([dtype.itemsize for dtype in tables.dtypes], np.int64)
        self.counts = np.array(tables.counts, np.int64)
        self.stops = np.cumsum(self.counts)
        self.chunk_offset = np.frombuffer(tables.chunk_offset, np.int32)
        self.chunk_size = np.frombuffer(tables.chunk_size, np.int32)
        self.values, self.first, self.ranks = flatten([*tables.sizes, ()])
        self.key = np.frombuffer(tables.key, np.int32)
        self.offset = np.frombuffer(tables.offset, np.int32)
        self.file = np.frombuffer(tables.file, np.int32)
        self.start = np.frombuffer(tables.start, np.int64)
        self.length = np.frombuffer(tables.length, np.int64)
        self.transformed = np.array(list(tables.transforms), np.int64)
        self.rank_of_key = np.full(len(self.keys), _NO_RANK, np.int64)
        self.rank_of_key[self.numbers] = [len(shape) for shape in tables.shapes]
        self.by_key = np.argsort(self.key, kind="stable")
        self.bounds = np.searchsorted(self.key[self.by_key], np.arange(len(self.keys) + 1))
        self.tied_files: dict[int, int] = {}  # files with shared bytes: the end of the last chunk
        self.is_bare = True  # no stored item is longer than its elements
        self.short: set[int] = set()  # keys of tensors with items that are shorter

    def run(self) -> tuple[dict[str, Columns], dict[str, StoredRange]]:
        """Returns the columns of each tensor, and the stored bytes of each Python object."""
        objects = self._check_items()
        used = []
        tensors: dict[str, Columns] = {}
        for block in self._blocks():
            columns, entries = self._block(block)
            tensors.update(columns)
            used.append(entries)
        chunks = np.concatenate([objects[:0], *used])
        if self.is_raw and not self.is_bare:
            raise _damaged("chunks do not have the lengths of their elements", self.where)
        self.is_bare &= not self.is_raw
        is_bare = self.is_bare and len(chunks) > 0
        self.is_bare = is_bare and not np.isin(self.key[chunks], self.transformed).any()
        try:
            self._check_overlaps(objects, objects if self.is_bare else np.append(objects, chunks))
        except FormatError as error:
            if self.is_bare or not is_bare:
                raise
            raise UnsupportedError(  # torch writes compressed images wrongly
                "chunks are said to be compressed, and to have the length of their elements:"
                " SerializationFormat.SAFETENSORS together with an extension is not read",
                where=self.where,
                hint="save with one of the two",
            ) from error
        if self.is_bare:
            self._check_images(objects, chunks)
        ranges = {
            self.keys[self.key[row]]: (
                int(self.file[row]),
                int(self.start[row]),
                int(self.length[row]),
            )
            for row in objects.tolist()
        }
        return tensors, ranges

    def _fail(self, number: int | np.integer[Any], message: str) -> FormatError:
        return _damaged(message, _at(self.where, self.keys[number]))

    def _check_items(self) -> Ints:
        """Checks each stored item by itself; returns the rows of Python objects, one for each."""
        ranks = np.where(self.offset == NO_OFFSET, _NO_RANK, self.ranks[self.offset])
        self._refuse(
            (self.start < 0) | (self.length < 0) | (self.start > MAX_OFFSET - self.length),
            self.key,
            "its stored bytes have a negative start or length, or end beyond 2**63",
        )
        self._refuse(
            ranks != self.rank_of_key[self.key],
            self.key,
            "offset of a stored item does not have the dimensions that the tensor has",
        )
        rows = np.flatnonzero(self.rank_of_key[self.key] == _NO_RANK)
        times = np.bincount(self.key[rows], minlength=len(self.keys))
        bad = (times != 1) & (self.rank_of_key == _NO_RANK)
        if bad.any():
            number = np.argmax(bad)
            raise self._fail(number, f"it is an object stored {times[number]:,} times, not once")
        return rows

    def _blocks(self) -> Iterator[list[int]]:
        """Yields positions of tensors with equally many dimensions, a bounded number of rows."""
        by_rank: dict[int, list[int]] = {}
        for tensor, shape in enumerate(self.shapes):
            by_rank.setdefault(len(shape), []).append(tensor)
        for rank, tensors in by_rank.items():
            block: list[int] = []
            cells = 0
            for tensor in tensors:
                block.append(tensor)
                cells += int(self.counts[tensor]) * (rank + 1)
                if cells >= _BLOCK_CELLS:
                    yield block
                    block, cells = [], 0
            if block:
                yield block

    def _block(self, block: list[int]) -> tuple[dict[str, Columns], Ints]:
        """Returns the columns of some tensors, and the stored items that they use."""
        counts = self.counts[block]
        owner = np.repeat(np.arange(len(block)), counts)
        number = self.numbers[block][owner]
        rows = _ranges(self.stops[block] - counts, counts)
        rank = len(self.shapes[block[0]])
        offsets = self._boxes(self.chunk_offset[rows], number, rank)
        sizes = self._boxes(self.chunk_size[rows], number, rank)
        shapes = np.array([self.shapes[tensor] for tensor in block], np.int64)[owner]
        bad = (offsets < 0) | (sizes < 0) | (offsets > shapes) | (sizes > shapes - offsets)
        self._refuse(
            np.logical_or.reduce(bad, axis=1), number, "a chunk lies partly outside of its tensor"
        )
        # No bytes are stored of tensors without elements; their chunks have to reach as far.
        for at, tensor in enumerate(block):
            shape = self.shapes[tensor]
            if 0 in shape and self.counts[tensor]:
                reach = (offsets + sizes)[owner == at].max(axis=0).tolist()
                if reach != list(shape):
                    message = f"its chunks reach to {reach}, its shape is {list(shape)}"
                    raise self._fail(self.numbers[tensor], message)
        full = np.logical_and.reduce(sizes > 0, axis=1)
        first = self.bounds[self.numbers[block]]
        stored = self.bounds[self.numbers[block] + 1] - first
        entry = self._match(number, offsets, full, self.by_key[_ranges(first, stored)])
        offsets, sizes, number, owner = offsets[full], sizes[full], number[full], owner[full]
        size_bytes = sizes.prod(axis=1) * self.itemsizes[block][owner]
        short = (self.length[entry] < size_bytes) & ~np.isin(number, self.transformed)
        self.short.update(distinct(number[short]).tolist())
        self.is_bare &= bool((self.length[entry] == size_bytes).all())
        file, start, length = self.file[entry], self.start[entry], self.length[entry]
        stops = np.cumsum(np.bincount(owner, minlength=len(block))).tolist()
        columns: dict[str, Columns] = {}
        for tensor, *bounds in zip(block, [0, *stops], stops, strict=False):
            own = slice(*bounds)
            key = self.keys[self.numbers[tensor]]
            columns[key] = (offsets[own], sizes[own], file[own], start[own], length[own])
        return columns, entry

    def _boxes(self, positions: NDArray[np.int32], number: Ints, rank: int) -> Ints:
        """Looks up tuples by position, as rows of a matrix."""
        message = f"a chunk does not have the {rank} dimensions that the tensor has"
        self._refuse(self.ranks[positions] != rank, number, message)
        boxes: Ints = self.values[self.first[positions][:, None] + np.arange(rank)]
        return boxes

    def _refuse(self, bad: _Mask, number: NDArray[Any], message: str) -> None:
        if bad.any():
            raise self._fail(number[np.argmax(bad)], message)

    def _match(self, number: Ints, offsets: Ints, full: _Mask, entries: Ints) -> Ints:
        """Returns the stored item of each chunk that has elements.

        Chunks without elements may have none, share one, or have several: the parts of a tensor
        without elements that several ranks hold all have the same offsets.
        """
        rank = offsets.shape[1]
        stored_for = self.key[entries].astype(np.int64)
        keys = np.concatenate([number, stored_for])
        stored = self._boxes(self.offset[entries], stored_for, rank)
        places = np.concatenate([offsets, stored])
        group, examples = _groups(keys, places)
        chunk_group, entry_group = group[: len(number)], group[len(number) :]
        chunks, empty, items = (
            np.bincount(some, minlength=len(examples))
            for some in (chunk_group[full], chunk_group[~full], entry_group)
        )
        for bad, message in (
            (chunks > 1, "two chunks begin at the same element"),
            ((items > 1) & (chunks > 0), "one chunk is stored twice"),
            (chunks > items, "a chunk is stored nowhere"),
            ((items > 0) & (chunks + empty == 0), "something is stored that is none of its chunks"),
        ):
            if bad.any():
                example = examples[np.argmax(bad)]
                raise self._fail(keys[example], f"{message}, at {places[example].tolist()}")
        entry_of_group = np.zeros(len(examples), np.int64)
        entry_of_group[entry_group] = entries
        return entry_of_group[chunk_group[full]]

    def _check_overlaps(self, objects: Ints, rows: Ints) -> None:
        """Refuses items that share bytes, except for tied tensors, whose bytes are identical.

        If one of two equal tensors refers to the other's bytes by mistake, its own bytes are a hole
        to which nothing refers.
        """
        rows = rows[self.length[rows] > 0]
        order = rows[np.lexsort((self.length[rows], self.start[rows], self.file[rows]))]
        file, start = self.file[order], self.start[order]
        stop = start + self.length[order]
        alike = file[1:] == file[:-1]
        tied = alike & (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
        tied &= ~(np.isin(order[1:], objects) | np.isin(order[:-1], objects))
        bad = alike & (start[1:] < stop[:-1]) & ~tied
        if bad.any():
            at = int(np.argmax(bad))
            other = self.keys[self.key[order[at]]]
            raise self._fail(
                self.key[order[at + 1]],
                f"its bytes from {start[at + 1]:,} overlap those of {other[:200]!r}, which end at"
                f" {stop[at]:,} of the same file",
            )
        for number in distinct(file[1:][tied]).tolist():
            self.tied_files[number] = self._check_holes(number)

    def _check_holes(self, number: int) -> int:
        """Refuses bytes of a file that nothing refers to; returns where the last item ends.

        What is stored of tensors without elements counts, though it is read for none of them.
        """
        rows = np.flatnonzero((self.file == number) & (self.length > 0))
        rows = rows[np.argsort(self.start[rows], kind="stable")]
        start = self.start[rows]
        stop = np.maximum.accumulate(start + self.length[rows])
        before = np.concatenate([np.zeros(1, np.int64), stop[:-1]])
        holes = np.flatnonzero(start - before >= LEAST_ARCHIVE_BYTES)
        if len(holes):
            at = int(holes[0])
            raise self._fail(
                self.key[rows[at]],
                f"the {start[at] - before[at]:,} bytes before it belong to nothing,"
                " while others of the file belong to two tensors",
            )
        return int(stop[-1])

    def _check_images(self, objects: Ints, chunks: Ints) -> None:
        """Checks files in which all chunks are in one image after the objects.

        According to `.metadata` each chunk begins where the image does and has its own length; the
        true positions are in the header of the image.
        """
        image = np.full(int(self.file.max()) + 1, -1, np.int64)
        image[self.file[chunks]] = self.start[chunks]
        bad = image[self.file[chunks]] != self.start[chunks]
        self._refuse(
            bad,
            self.key[chunks],
            "it is listed in another image of the same file",
        )
        start = image[self.file[objects]]
        bad = (start >= 0) & (self.start[objects] + self.length[objects] > start)
        self._refuse(bad, self.key[objects], "its bytes overlap those of tensors")


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Returns start, start + 1, … of all ranges in one column."""
    before = np.cumsum(counts) - counts
    rows: Ints = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return rows


def _groups(keys: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Numbers distinct rows; returns the number of each row, and one row of each number."""
    order = np.lexsort((*places.T[::-1], keys))
    changes = np.zeros(len(order), np.bool_)
    changes[:1] = True
    for column in (keys, *places.T):
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(changes) - 1
    return group, order[changes]


def _size(*args: object) -> tuple[int, ...]:
    if len(args) != 1 or not isinstance(args[0], tuple):
        raise FormatError("torch.Size is not made from a tuple")
    if not all(type(item) is int for item in args[0]):
        raise FormatError("torch.Size has items that are not integers")
    return args[0]


def _layout(*args: object) -> Global:
    if len(args) != 1 or not isinstance(args[0], str) or not args[0].startswith("torch."):
        raise FormatError("_get_layout is not called with the name of a layout")
    return Global("torch", args[0].removeprefix("torch."))


ALLOWED: Mapping[tuple[str, str], object] = {
    **{("torch", name): dtype for name, dtype in BY_NAME.items()},
    (SIZE.module, SIZE.name): _size,
    ("torch.serialization", "_get_layout"): _layout,
}
