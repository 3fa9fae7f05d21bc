"""Parses `.metadata`, the index of the data files of torch.distributed.checkpoint.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, torch 2.1 to 2.14;
torch/distributed/_shard/sharded_tensor/metadata.py for `TensorProperties` up to torch 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import Struct

from ckptkit.core.dtypes import BY_NAME, DType, dtype_named
from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.text import quote
from ckptkit.formats.dcp.join import (
    Ints,
    Join,
    Location,
    StorageRows,
    TensorRows,
    fields_of,
)
from ckptkit.formats.dcp.save_plans import PLANS, SavePlans
from ckptkit.formats.dcp.shortcuts import (
    INDEX,
    SIZE,
    FastMachine,
    RunValues,
    ShortcutError,
)
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count, overflows
from ckptkit.formats.pickle.machine import Global, InertObject, Machine
from ckptkit.formats.pickle.pickles import OPCODES
from ckptkit.formats.pickle.torch_values import TensorRef, parse_values

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_STRIDED = Global("torch", "strided")
_METADATA = Global(_CHECKPOINT, "Metadata")
_MEGATRON_METADATA = Global(PLANS[1].module, "MCoreMetadata")
_TENSOR_STORAGE = Global(_CHECKPOINT, "TensorStorageMetadata")
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_MEGATRON_FIELDS = {"all_local_plans", "mcore_data"}
# dtype, layout, requires_grad, memory_format, pin_memory; since torch 2.15 also stride, which is
# that of the tensor in memory. The archive of a chunk has the strides of its stored bytes.
_PROPERTIES = range(5, 7)
# Libraries with classes of their own for torch's, of the same names and fields, by their packages.
# ByteCheckpoint stores bare elements.
_LIBRARIES = {"olmo_core": "OLMo-core", "bytecheckpoint": "ByteCheckpoint"}


Transforms = tuple[tuple[str, ...], ...]


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
    # tensors of which an item has fewer bytes than elements of their type need
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
            return _Reader(fast.run(), fast.values, where, fast.globals).metadata()
    machine = Machine(data, ALLOWED, OPCODES, where=where)
    return _Reader(machine.run(), RunValues(), where, machine.globals).metadata()


class _Reader:
    """Reads the inert objects of one file, once."""

    def __init__(
        self, root: object, values: RunValues, where: str, names: Iterable[tuple[str, str]]
    ) -> None:
        self.where = Location(where)
        is_megatron = isinstance(root, InertObject) and root.cls.name == _MEGATRON_METADATA.name
        self.fields = fields_of(root, _MEGATRON_METADATA if is_megatron else _METADATA, self.where)
        packages = {module.partition(".")[0] for module, _ in names}
        self.library = next((_LIBRARIES[name] for name in _LIBRARIES if name in packages), "")
        self.is_megatron = is_megatron or not _MEGATRON_FIELDS.isdisjoint(self.fields)
        self.values = values
        self.states = self._table("state_dict_metadata")
        self.numbers = {key: number for number, key in enumerate(self.states)}
        self.owners: set[str] = set()  # the modules of TensorProperties

    def metadata(self) -> DcpMetadata:
        rows = TensorRows(self.values, self.where)
        kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
        for key, state in self.states.items():
            if _is_of_object(state):
                continue
            where = self.where.tensor(key)
            fields = fields_of(state, _TENSOR_STORAGE, where)
            shape = fields.get("size")
            dtype = self._dtype(fields.get("properties"), where)
            if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
                raise where.error("shape is not a tuple of integers")
            if len(shape) > MAX_DIMENSIONS:
                raise where.error(
                    f"tensor has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}"
                )
            if min(shape, default=0) < 0:
                raise where.error(f"a size in shape {list(shape)} is negative")
            if overflows(shape, dtype):
                raise where.error(f"size in bytes of {dtype.name} of shape {list(shape)} overflows")
            rows.add(key, self.numbers[key], shape, dtype.itemsize, fields.get("chunks"))
            kinds[key] = dtype, shape
        storage = StorageRows(self.values, self.numbers, self.where)
        storage.read(self._table("storage_data"))
        is_raw = self.library == _LIBRARIES["bytecheckpoint"]
        if is_raw:
            self._check_strides()
        plans = self.fields.pop("all_local_plans", None)
        if plans is not None:
            SavePlans(self.values, self.numbers, self.where).compare(plans, rows)
        self.states.clear()
        self.fields["storage_data"] = None
        planner_data = self._planner_data()
        version = self.fields.get("version")
        join = Join(rows, storage, list(self.numbers), is_raw=is_raw)
        columns, blobs = join.run()
        return DcpMetadata(
            tensors={
                key: DcpTensor(key, dtype, shape, *columns[key], storage.transforms_of(key))
                for key, (dtype, shape) in kinds.items()
            },
            blobs={
                key: DcpBlob(key, *stored, storage.transforms_of(key))
                for key, stored in blobs.items()
            },
            paths=tuple(storage.paths),
            planner_data=planner_data,
            version=version if isinstance(version, str) else None,
            writer=self._writer(version),
            tied_files=join.tied_files,
            has_images=join.is_bare,
            is_megatron=self.is_megatron,
            library=self.library,
            is_raw=is_raw,
            short=frozenset(join.keys[number] for number in join.short),
        )

    def _check_strides(self) -> None:
        """Refuses bare elements in another order than row by row, as ByteCheckpoint may have them.

        Of each chunk it keeps the tensor as torch pickles it, without the elements.
        """
        ordered: set[bytes] = set()
        for index, pickled in self._table("all_tensor_metadata").items():
            key = str(fields_of(index, INDEX, self.where).get("fqn"))
            where = self.where.tensor(key)
            if _is_of_object(self.states.get(key)):
                continue
            if not isinstance(pickled, bytes):
                raise where.error("description of a chunk is not a pickle")
            if pickled in ordered:
                continue
            tensor = parse_values(pickled, where=where.text)
            if not isinstance(tensor, TensorRef) or not tensor.row_major or tensor.storage_offset:
                raise UnsupportedError(
                    "elements of a chunk are not stored row by row, which is not modelled",
                    where=where.text,
                    hint="make the tensor contiguous before the save",
                )
            ordered.add(pickled)

    def _table(self, name: str) -> dict[Any, Any]:
        table = self.fields.get(name)
        if not isinstance(table, dict):
            raise self.where.error(f"metadata has no table {name!r}")
        if name == "state_dict_metadata" and not all(type(key) is str for key in table):
            raise self.where.error(f"a key of {name!r} is not a string")
        return table

    def _dtype(self, properties: object, where: Location) -> DType:
        if not isinstance(properties, InertObject) or properties.cls.name != "TensorProperties":
            raise where.error("properties are not TensorProperties")
        self.owners.add(properties.cls.module)
        state = properties.state
        if not isinstance(state, tuple) or len(state) not in _PROPERTIES:
            raise where.error("state of TensorProperties is not a tuple of 5 or 6")
        dtype, layout = state[:2]
        if layout != _STRIDED:
            name = quote(str(layout)) if isinstance(layout, Global) else "not one of torch's"
            raise UnsupportedError(
                f"layout is {name}; only 'torch.strided' is modelled", where=where.text
            )
        if isinstance(dtype, Global):
            return dtype_named(dtype.name, where=where.text)
        if not isinstance(dtype, DType):
            raise where.error("dtype is not one of torch's")
        return dtype

    def _planner_data(self) -> Mapping[str, tuple[str | int, ...]] | None:
        table = self.fields.get("planner_data")
        if not table:
            # Without a misspelt 'planner_data', names would keep their containers.
            unknown = self.fields.keys() - _FIELDS
            if unknown and "planner_data" not in self.fields:
                name = _describe(min(unknown, key=str))
                raise self.where.error(f"metadata has no 'planner_data' but a field {name}")
            return None
        if not isinstance(table, dict):
            raise self.where.error("'planner_data' is not a dictionary")
        for key, path in table.items():
            if type(key) is not str or key not in self.numbers:
                raise self.where.error(f"'planner_data' names {_describe(key)}, the index does not")
            if not _spells(path, key):
                raise self.where.tensor(key).error(
                    "its path in 'planner_data' does not spell its key"
                )
        for key in self.numbers:
            if key not in table:
                raise self.where.tensor(key).error("it is missing from 'planner_data'")
        return table

    def _writer(self, version: object) -> str:
        if isinstance(version, str):
            return "torch 2.9 or later"
        if self.fields.get("storage_meta") is not None:
            return "torch 2.4 to 2.8"
        if _CHECKPOINT in self.owners:
            return "torch 2.3"
        return "torch 2.1 or 2.2" if self.owners else "torch 2.8 or earlier"


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
