"""Storages and tensors in a `torch.save` pickle, as plain values.

Source: torch/_utils.py (`_rebuild_tensor_v2` and similar functions), torch/serialization.py
(`persistent_id` in `_save`), torch/_tensor.py (`_reduce_ex_internal`), torch 1.6 to 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.dtypes import BY_NAME, BY_STORAGE, DType, dtype_named
from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MAX_BYTES, MAX_DIMENSIONS, is_count, overflows
from ckptkit.formats.pickle.machine import Global, InertDict, InertObject
from ckptkit.formats.pickle.pickles import Builder, ordered_dict, parse_pickle

_BYTE = BY_NAME["uint8"]
# dtypes of torch that `core.dtypes` does not have; the refusal has to name the dtype.
_OTHER_DTYPES = (
    "complex32",
    "bits8",
    "bits16",
    "qint8",
    "quint8",
    "qint32",
    "float4_e2m1fn_x2",
)


@dataclass(frozen=True, slots=True)
class DTypeName:
    """The dtype `torch.<name>`, not yet looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageClass:
    """The class of a storage; `dtype` is None for an untyped storage."""

    name: str
    dtype: DType | None


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to.

    Attributes:
        key: Its record is `data/<key>`.
        dtype: Element type, or None for an untyped storage.
        elements: Number of elements; of bytes for an untyped storage.
    """

    key: str
    dtype: DType | None
    elements: int

    @property
    def size_bytes(self) -> int:
        return self.elements * (self.dtype or _BYTE).itemsize


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view on a storage; sizes, strides and the offset are in elements."""

    storage: StorageRef
    dtype: DType
    shape: Shape
    strides: Shape
    storage_offset: int

    @property
    def row_major(self) -> bool:
        """Whether its elements are stored contiguously in row-major order."""
        return is_row_major(self.shape, self.strides)


def storage_ref(identity: object) -> StorageRef:
    """Returns the storage of a persistent id, `('storage', class, key, location, elements)`."""
    match identity:
        case ("storage", StorageClass(dtype=dtype), str(key), str(), int(elements)) if (
            is_count(elements) and key
        ):
            return StorageRef(key, dtype, elements)
    raise FormatError("persistent id is not that of a storage in memory")


def rebuild_tensor_v2(*args: object) -> TensorRef:
    """Returns a tensor for `_rebuild_tensor_v2(storage, offset, size, stride, …[, metadata])`."""
    match args:
        case (StorageRef() as storage, offset, shape, strides, _, _, *metadata):
            _refuse_lazy(*metadata or (None,))
            return _view(storage, storage.dtype or _BYTE, offset, shape, strides)
    raise FormatError(f"tensor is rebuilt from {len(args)} arguments that do not describe one")


def rebuild_tensor_v3(*args: object) -> TensorRef:
    """Returns a tensor for `_rebuild_tensor_v3(storage, offset, size, stride, …, dtype, …)`."""
    match args:
        case (
            StorageRef() as storage,
            offset,
            shape,
            strides,
            _,
            _,
            DTypeName(name),
            *metadata,
        ):
            dtype = dtype_named(name)
            if storage.dtype not in {None, dtype}:
                raise FormatError(f"storage does not hold the {dtype.name} that the tensor claims")
            _refuse_lazy(*metadata or (None,))
            return _view(storage, dtype, offset, shape, strides)
    raise FormatError(f"tensor is rebuilt from {len(args)} arguments that do not describe one")


def rebuild_parameter(*args: object) -> TensorRef:
    """Returns the tensor for `_rebuild_parameter(tensor, grad, hooks[, state])`."""
    match args:
        case (TensorRef() as tensor, _, _) | (TensorRef() as tensor, _, _, _):
            return tensor
    raise FormatError("parameter is rebuilt from something that is not a tensor")


def _refuse_lazy(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise FormatError("tensor metadata is not a dictionary")
    marks = [mark for mark in ("conj", "neg") if metadata.get(mark)]
    if marks or any(metadata.values()):
        raise UnsupportedError(
            f"tensor is marked {' and '.join(marks) or 'otherwise'}, so its bytes are not its "
            "values",
            hint="save it again after `resolve_conj()` and `resolve_neg()`",
        )


def _view(storage: StorageRef, dtype: DType, offset: object, shape: Any, strides: Any) -> TensorRef:
    """Returns a view after a check that it is inside its storage."""
    is_tuple = isinstance(shape, tuple) and isinstance(strides, tuple)
    numbers = (offset, *shape, *strides) if is_tuple else (None,)
    if not is_count(offset) or not all(map(is_count, numbers)) or len(shape) != len(strides):
        raise FormatError("tensor has sizes, strides or an offset that are not natural numbers")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"tensor has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}")
    if overflows(shape, dtype) or max(strides, default=0) * dtype.itemsize > MAX_BYTES:
        raise FormatError(f"size of a tensor of shape {list(shape)} overflows")
    if 0 in shape:
        return TensorRef(storage, dtype, shape, strides, 0)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if last * dtype.itemsize > storage.size_bytes:
        raise FormatError(
            f"tensor of shape {list(shape)} and strides {list(strides)} reaches byte "
            f"{last * dtype.itemsize:,} of storage {quote(storage.key)}, which has "
            f"{storage.size_bytes:,}"
        )
    return TensorRef(storage, dtype, shape, strides, offset)


def _size(*args: object) -> tuple[object, ...]:
    match args:
        case ():
            return ()
        case (tuple(items) | list(items),):
            return tuple(items)
    raise FormatError("'torch.Size' is made from something that is not one tuple")


def _encoded(*args: object) -> bytes:
    # Python's form of bytes below protocol 3; torch.save uses protocol 2.
    match args:
        case (str(text), "latin1"):
            return text.encode("latin1")
    raise FormatError("bytes are not encoded as 'latin1'")


def _no_bytes(*args: object) -> bytes:
    # Python's form of b"" below protocol 3.
    if args:
        raise FormatError("'bytes' is made from something")
    return b""


class InertDefaultDict(InertDict):
    """A `defaultdict`; `factory` is the global that makes its new values."""

    __slots__ = ("factory",)

    def __init__(self, factory: object) -> None:
        super().__init__()
        self.factory = factory


def _default_dict(*args: object) -> InertDefaultDict:
    if len(args) > 1:
        raise FormatError(f"'defaultdict' is made from {len(args)} arguments, not from one")
    return InertDefaultDict(args[0] if args else None)


class InertDeque(list[Any]):
    """A `deque`, whose items are set afterwards; `longest` is its limit, or None."""

    __slots__ = ("longest",)

    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.longest = longest


def _deque(*args: object) -> InertDeque:
    match args:
        case () | ([] | (),):
            return InertDeque(None)
        case ([] | (), longest):
            if longest is None or is_count(longest):
                return InertDeque(longest)
    raise FormatError("'deque' is made from something that is not its limit")


def inert_value(module: str, name: str) -> Builder:
    """Returns a builder that keeps a class's name and any arguments."""
    cls = Global(module, name)

    def build(*args: object) -> InertObject:
        return InertObject(cls, args)

    return build


# Classes and functions without side effects that are common in training states. Below protocol 3
# (torch.save uses 2) `int` is called `long`, and `str` `unicode`.
_KEPT = (
    *(("__builtin__", n) for n in ("set", "frozenset", "bytearray", "complex", "slice")),
    *(("__builtin__", n) for n in ("xrange", "list", "dict", "tuple", "int", "float", "str")),
    *(("__builtin__", n) for n in ("long", "unicode", "bool")),
    *(("builtins", n) for n in ("set", "frozenset", "bytearray", "complex", "slice", "range")),
    *(("builtins", n) for n in ("list", "dict", "tuple", "int", "float", "str", "bool")),
    ("argparse", "Namespace"),
    ("collections", "Counter"),
    *(("datetime", n) for n in ("date", "datetime", "time", "timedelta", "timezone")),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    *(("pathlib", n) for n in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")),
    *(("pathlib._local", n) for n in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{core}.multiarray", n)
        for core in ("core", "_core")
        for n in ("scalar", "_reconstruct")
    ),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
)
_TENSOR_GLOBALS: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter,
    ("torch.storage", "UntypedStorage"): StorageClass("UntypedStorage", None),
    **{("torch", name): StorageClass(name, dtype) for name, dtype in BY_STORAGE.items()},
    **{("torch", name): DTypeName(name) for name in (*BY_NAME, *_OTHER_DTYPES)},
    ("collections", "OrderedDict"): ordered_dict,
}
ALLOWED: Mapping[tuple[str, str], object] = {
    **_TENSOR_GLOBALS,
    **{name: inert_value(*name) for name in _KEPT},
    ("collections", "defaultdict"): _default_dict,
    ("collections", "deque"): _deque,
    ("torch", "Size"): _size,
    ("_codecs", "encode"): _encoded,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
}


def parse_values(pickle: bytes, *, where: str) -> object:
    """Parses a `data.pkl`; tensors in the result are `TensorRef`s, storages `StorageRef`s."""
    return parse_pickle(pickle, ALLOWED, where=where, persistent=storage_ref)
