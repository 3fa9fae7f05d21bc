"""Parses `.metadata`, the index that torch.distributed.checkpoint writes beside its data files.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, torch 2.1 to 2.14;
torch/distributed/_shard/sharded_tensor/metadata.py for `TensorProperties` up to torch 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.core.dtypes import BY_NAME, DType, dtype_named
from ckptkit.core.errors import FormatError, UnsafePickleError, UnsupportedError
from ckptkit.formats.dcp.join import Columns, Entries, Ints, Join, TensorRows, Where
from ckptkit.formats.dcp.shortcuts import (
    CHUNK,
    INDEX,
    INFO,
    MAX_DIMENSIONS,
    SIZE,
    FastMachine,
    ShortcutError,
    Values,
)
from ckptkit.formats.pickle.pickles import Global, InertObject, inert_class, parse_pickle, shown

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_STRIDED = Global("torch", "strided")
_MAX_BYTES = 2**63 - 1
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
# dtype, layout, requires_grad, memory_format, pin_memory; since torch 2.15 also stride. The
# stride is that of the tensor in memory; how a chunk is stored is said where it is stored.
_PROPERTIES = range(5, 7)
_OTHER_DTYPES = (  # that torch has and `core.dtypes` has not, to be refused as dtypes
    *("complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
)


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor and where its chunks are; row i of every column is one chunk.

    Chunks without elements are left out. No two chunks begin at the same element.

    Attributes:
        key: The flat key.
        dtype: Type of its elements.
        shape: Of the whole tensor, in elements.
        offsets: int64 of shape [chunks, dimensions], in elements.
        sizes: int64 of shape [chunks, dimensions], in elements; all at least 1.
        file: int32 positions in `DcpMetadata.paths`.
        start: int64, first byte of the stored chunk in its file.
        length: int64, bytes of the stored chunk, its container included.
        transforms: The different lists of names of what chunks were stored through, such as a
            compression; empty in the ordinary case.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    offsets: Ints
    sizes: Ints
    file: np.ndarray[Any, np.dtype[np.int32]]
    start: Ints
    length: Ints
    transforms: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DcpBlob:
    """A pickled python object; `start` and `length` are in bytes, `file` as in `DcpTensor`."""

    key: str
    file: int
    start: int
    length: int
    transforms: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a `.metadata` file says.

    Attributes:
        tensors: By flat key, in the order of the file.
        blobs: Python objects by flat key, in the order of the file.
        paths: Data files as written, relative to the folder of `.metadata`; none is absolute
            or leads upwards.
        planner_data: For each flat key its path in the nested state that was saved: strings for
            dictionary keys, integers for positions in lists. None where nothing was flattened.
        version: The format's version, which torch writes since 2.9.
        writer: The range of torch versions that write such a file, as far as it tells.
        tied_files: The data files in which tensors share bytes, by position in `paths`, and
            where the last bytes end that anything points to.
        has_images: Whether the data files end with a safetensors image of all their tensors, to
            whose start each chunk points, and not with one archive for each chunk.
    """

    tensors: Mapping[str, DcpTensor]
    blobs: Mapping[str, DcpBlob]
    paths: tuple[str, ...]
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    version: str | None
    writer: str
    tied_files: Mapping[int, int]
    has_images: bool = False


def parse_metadata(data: bytes, *, where: str, shortcuts: bool = True) -> DcpMetadata:
    """Parses a `.metadata` file, and proves that its three tables agree.

    Every chunk that has elements has exactly one place in a file, lies inside its tensor, and
    shares no byte with another, unless both are the same. Whether chunks cover their tensor is
    not checked.

    Args:
        data: The whole file.
        where: The file, for messages.
        shortcuts: False to do without the fast path, for tests; the result is the same.

    Returns:
        Columns in place of the objects of the file.
    """
    root, values = _unpickled(data, where) if shortcuts else (None, None)
    if values is None:
        root, values = parse_pickle(data, ALLOWED, where=where), Values()
    return _Reader(root, values, where).metadata()


def _unpickled(data: bytes, where: str) -> tuple[object, Values | None]:
    machine = FastMachine(data, ALLOWED, where=where)
    try:
        return machine.run(), machine.values
    except ShortcutError:
        return None, None


class _Reader:
    """Walks the inert objects of one file, once."""

    def __init__(self, root: object, values: Values, where: str) -> None:
        self.where = Where(where)
        self.fields = fields_of(root, "Metadata", self.where)
        self.values = values
        self.states = self._table("state_dict_metadata")
        self.numbers = {key: number for number, key in enumerate(self.states)}
        self.owners: set[str] = set()  # modules that TensorProperties came from

    def metadata(self) -> DcpMetadata:
        rows = TensorRows(self.values, self.where)
        described = {
            key: self._described(key, state, rows)
            for key, state in self.states.items()
            if not _is_blob(state)
        }
        entries = Entries(self.values, self.numbers, self.where)
        entries.read(self._table("storage_data"))
        self.states.clear()
        self.fields["storage_data"] = None
        planner_data = self._planner_data()
        join = Join(rows, entries, list(self.numbers))
        columns, blobs = join.result()
        return DcpMetadata(
            tensors={
                key: _tensor(key, kind, columns[key], entries) for key, kind in described.items()
            },
            blobs={
                key: DcpBlob(key, *place, entries.transforms_of(key))
                for key, place in blobs.items()
            },
            paths=tuple(entries.paths),
            planner_data=planner_data,
            version=self._version(),
            writer=self._writer(),
            tied_files=join.tied_files,
            has_images=join.is_bare,
        )

    def _table(self, name: str) -> dict[Any, Any]:
        table = self.fields.get(name)
        if not isinstance(table, dict):
            raise self.where.error(f"metadata has no table {name!r}")
        if name == "state_dict_metadata" and not all(type(key) is str for key in table):
            raise self.where.error(f"a key of {name!r} is not a string")
        return table

    def _described(
        self, key: str, state: object, rows: TensorRows
    ) -> tuple[DType, tuple[int, ...]]:
        where = self.where.tensor(key)
        fields = fields_of(state, "TensorStorageMetadata", where)
        shape = fields.get("size")
        dtype = self._dtype(fields.get("properties"), where)
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise where.error("shape is not a tuple of integers")
        if len(shape) > MAX_DIMENSIONS:
            raise where.error(f"tensor has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}")
        if min(shape, default=0) < 0:
            raise where.error(f"a size in shape {list(shape)} is negative")
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_BYTES:
            raise where.error(f"size in bytes of {dtype.name} of shape {list(shape)} overflows")
        rows.add(key, self.numbers[key], shape, dtype.itemsize, fields.get("chunks"))
        return dtype, shape

    def _dtype(self, properties: object, where: Where) -> DType:
        if not isinstance(properties, InertObject) or properties.cls.name != "TensorProperties":
            raise where.error("properties are not TensorProperties")
        self.owners.add(properties.cls.module)
        state = properties.state
        if not isinstance(state, tuple) or len(state) not in _PROPERTIES:
            raise where.error("state of TensorProperties is not a tuple of 5 or 6")
        dtype, layout = state[:2]
        if layout != _STRIDED:
            found = shown(str(layout)) if isinstance(layout, Global) else "not one of torch's"
            raise UnsupportedError(
                f"layout is {found}; only 'torch.strided' is modelled", where=where.text
            )
        if isinstance(dtype, Global):
            return dtype_named(dtype.name, where=where.text)
        if not isinstance(dtype, DType):
            raise where.error("dtype is not one of torch's")
        return dtype

    def _planner_data(self) -> Mapping[str, tuple[str | int, ...]] | None:
        table = self.fields.get("planner_data")
        if not table:
            self._refuse_misspelling()
            return None
        if not isinstance(table, dict):
            raise self.where.error("'planner_data' is not a dictionary")
        for key, path in table.items():
            if type(key) is not str or key not in self.numbers:
                raise self.where.error(f"'planner_data' names {_named(key)}, the index does not")
            if not _leads_to(path, key):
                raise self.where.tensor(key).error(
                    "its path in 'planner_data' does not spell its key"
                )
        for key in self.numbers:
            if key not in table:
                raise self.where.tensor(key).error("it is missing from 'planner_data'")
        return table

    def _refuse_misspelling(self) -> None:
        """Without 'planner_data' names keep their containers, so a damaged one must be seen."""
        unknown = self.fields.keys() - _FIELDS
        if unknown and "planner_data" not in self.fields:
            raise self.where.error(
                f"metadata has no 'planner_data' but a field {_named(min(unknown, key=str))}"
            )

    def _version(self) -> str | None:
        version = self.fields.get("version")
        return version if isinstance(version, str) else None

    def _writer(self) -> str:
        if self._version() is not None:
            return "torch 2.9 or later"
        if self.fields.get("storage_meta") is not None:
            return "torch 2.4 to 2.8"
        if _CHECKPOINT in self.owners:
            return "torch 2.3"
        return "torch 2.1 or 2.2" if self.owners else "torch 2.8 or earlier"


def _tensor(
    key: str, kind: tuple[DType, tuple[int, ...]], columns: Columns, entries: Entries
) -> DcpTensor:
    offsets, sizes, file, start, length = columns
    transforms = entries.transforms_of(key)
    return DcpTensor(key, *kind, offsets, sizes, file, start, length, transforms)


def fields_of(value: object, name: str, where: Where) -> dict[str, Any]:
    """Returns the fields of an inert instance of the dataclass `name`."""
    if not isinstance(value, InertObject) or value.cls.name != name:
        raise where.error(f"there is something else in the place of a {name}")
    if not isinstance(value.state, dict):
        raise where.error(f"a {name} has no fields")
    return value.state


def _is_blob(state: object) -> bool:
    return isinstance(state, InertObject) and state.cls.name == "BytesStorageMetadata"


def _named(key: object) -> str:
    return shown(key) if isinstance(key, str) else f"a {type(key).__name__}"


def _leads_to(path: object, key: str) -> bool:
    """Says whether a path, joined with dots, is the key; does no more work than the key is long."""
    if not isinstance(path, tuple) or not 0 < len(path) <= len(key) + 1:
        return False
    at = 0
    for part in path:
        if type(part) not in {str, int} or (type(part) is int and not 0 <= part <= _MAX_BYTES):
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
        raise UnsafePickleError("torch.Size is not made from a tuple")
    if not all(type(item) is int for item in args[0]):
        raise FormatError("torch.Size has items that are not integers")
    return args[0]


def _layout(*args: object) -> Global:
    if len(args) != 1 or not isinstance(args[0], str) or not args[0].startswith("torch."):
        raise UnsafePickleError("_get_layout is not called with the name of a layout")
    return Global("torch", args[0].removeprefix("torch."))


def _memory_format(*args: object) -> int:
    if len(args) != 1 or type(args[0]) is not int or args[0] not in range(3):
        raise UnsafePickleError("_MEM_FORMAT_ENCODING is not made from 0, 1 or 2")
    return args[0]


def _path(*args: object) -> None:
    if not all(isinstance(part, str) for part in args):
        raise UnsafePickleError("a path is not made from strings")


def _save_plan(*_: object) -> None:
    """Refuses the save plans of all ranks, which Megatron-Core adds to the metadata.

    Source: megatron/core/dist_checkpointing/strategies/torch.py, `all_local_plans`.
    """
    raise UnsupportedError(
        "a Megatron-Core distributed checkpoint ('all_local_plans' holds the save plans of its"
        " ranks) is not yet supported",
        hint="export it to Hugging Face's format by a tool such as Megatron Bridge",
    )


def _allowed() -> dict[tuple[str, str], object]:
    classes = ("Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata")
    named = [Global(_CHECKPOINT, name) for name in (*classes, "TensorProperties")]
    named += [Global(_SHARDED, "TensorProperties"), CHUNK, INDEX, INFO]
    paths = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    return {
        **{(cls.module, cls.name): inert_class(cls.module, cls.name) for cls in named},
        **{("torch", name): dtype for name, dtype in BY_NAME.items()},
        **{("torch", name): Global("torch", name) for name in _OTHER_DTYPES},
        (SIZE.module, SIZE.name): _size,
        ("torch.serialization", "_get_layout"): _layout,
        (_CHECKPOINT, "_MEM_FORMAT_ENCODING"): _memory_format,
        (_SHARDED, "MEM_FORMAT_ENCODING"): _memory_format,
        ("torch.distributed.checkpoint.planner", "SavePlan"): _save_plan,
        **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in paths},
    }


ALLOWED = _allowed()
