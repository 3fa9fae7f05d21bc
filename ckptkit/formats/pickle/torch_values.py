"""Storages and tensors in a `torch.save` pickle, as plain values.

A tensor whose elements are not in one plain storage becomes an `UnreadTensor`, which readers refuse
where they need its elements: it may as well be in an object beside the weights.

Source: torch/_utils.py (`_rebuild_tensor_v2` and similar functions), torch/serialization.py
(`persistent_id` in `_save`), torch/_tensor.py (`_reduce_ex_internal`, `_rebuild_from_type_v2`),
torch 1.6 to 2.14; torchao/float8/fsdp_utils.py, torchao 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ckptkit.core.dtypes import BY_NAME, BY_STORAGE, DType, dtype_named
from ckptkit.core.errors import CkptkitError, FormatError, UnsupportedError
from ckptkit.core.geometry import is_row_major
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.parsing import MAX_BYTES, MAX_DIMENSIONS, is_count, overflows
from ckptkit.formats.pickle.machine import ByIdentity, Global, InertDict, InertObject, class_of
from ckptkit.formats.pickle.pickles import Builder, ordered_dict, parse_pickle

_BYTE = BY_NAME["uint8"]
# Storages of numbers that torch quantized, with the type that has their size.
_QUANTIZED_STORAGES = {
    **dict.fromkeys(("QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), _BYTE),
    "QInt8Storage": BY_NAME["int8"],
    "QInt32Storage": BY_NAME["int32"],
}
# dtypes of torch that `core.dtypes` does not have; the refusal has to name the dtype.
_OTHER_DTYPES = ("complex32", "bits8", "bits16", "qint8", "quint8", "qint32", "float4_e2m1fn_x2")


class DTypeName(Struct, frozen=True):
    """The dtype `torch.<name>`, not yet looked up."""

    name: str


class StorageClass(Struct, frozen=True):
    """The class of a storage; `dtype` is None for an untyped storage."""

    name: str
    dtype: DType | None


class StorageRef(Struct, frozen=True):
    key: str  # its record is `data/<key>`
    dtype: DType | None  # None for an untyped storage
    elements: int  # bytes for an untyped storage

    @property
    def size_bytes(self) -> int:
        return self.elements * (self.dtype or _BYTE).itemsize


class TensorRef(Struct, frozen=True):
    """A tensor as a view on a storage; sizes, strides and the offset are in elements."""

    storage: StorageRef
    dtype: DType
    shape: Shape
    strides: Shape
    storage_offset: int

    @property
    def row_major(self) -> bool:
        return is_row_major(self.shape, self.strides)


class UnreadTensor(ByIdentity, Struct, frozen=True, eq=False):
    """A tensor whose elements are not those of one plain storage."""

    kind: str  # to follow "tensor is"
    hint: str  # how to get one that can be read
    dtype: DType | None = None  # that it has for its users; None where it is not known
    shape: Shape = ()  # empty where it is not known

    def error(self, where: str = "") -> UnsupportedError:
        return UnsupportedError(f"tensor is {self.kind}", where=where, hint=self.hint)


def storage_ref(identity: object) -> StorageRef:
    """Returns the storage of a persistent id, `('storage', class, key, location, elements)`.

    Programs that make archives without torch, such as LitGPT, number the storages.
    """
    match identity:
        case ("storage", StorageClass(dtype=dtype), str() | int() as key, str(), int(elements)) if (
            is_count(elements) and (is_count(key) or (isinstance(key, str) and key))
        ):
            return StorageRef(str(key), dtype, elements)
        case ("storage", Global() as cls, *_):
            raise UnsupportedError(f"storage is a {quote(str(cls))}, which is not modelled")
    raise FormatError("persistent id is not that of a storage in memory")


def rebuild_tensor_v2(*args: object) -> TensorRef | UnreadTensor:
    """Returns a tensor for `_rebuild_tensor_v2(storage, offset, size, stride, …[, metadata])`."""
    match args:
        case (StorageRef() as storage, offset, shape, strides, _, _, *metadata):
            view = _view(storage, storage.dtype or _BYTE, offset, shape, strides)
            return _find_marks(*metadata or (None,)) or view
    raise FormatError(f"tensor is rebuilt from {len(args)} arguments that do not describe one")


def rebuild_tensor_v3(*args: object) -> TensorRef | UnreadTensor:
    """Returns a tensor for `_rebuild_tensor_v3(storage, offset, size, stride, …, dtype, …)`."""
    match args:
        case (StorageRef() as storage, offset, shape, strides, _, _, DTypeName(name), *metadata):
            try:
                dtype = dtype_named(name)
            except UnsupportedError:
                return UnreadTensor(f"of dtype {quote(name)}, which is not modelled", _PLAIN)
            if storage.dtype not in {None, dtype}:
                raise FormatError(f"storage does not hold the {dtype.name} that the tensor claims")
            view = _view(storage, dtype, offset, shape, strides)
            return _find_marks(*metadata or (None,)) or view
    raise FormatError(f"tensor is rebuilt from {len(args)} arguments that do not describe one")


def rebuild_parameter(*args: object) -> TensorRef | UnreadTensor | InertObject:
    """Returns the tensor for `_rebuild_parameter(tensor, grad, hooks[, state])`."""
    match args:
        case (TensorRef() | UnreadTensor() | InertObject() as tensor, _, _, *_):
            return tensor
    raise FormatError("parameter is rebuilt from something that is not a tensor")


def _find_marks(metadata: object) -> UnreadTensor | None:
    """Returns what a tensor is whose bytes are not its values; None for any other."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise FormatError("tensor metadata is not a dictionary")
    marks = [mark for mark in ("conj", "neg") if metadata.get(mark)]
    if not marks and not any(metadata.values()):
        return None
    return UnreadTensor(
        f"marked {' and '.join(marks) or 'otherwise'}, so its bytes are not its values",
        "save it again after `resolve_conj()` and `resolve_neg()`",
    )


_PLAIN = "save it again as a plain tensor on the CPU"
_DEQUANTIZE = (  # classes of packed numbers say how; a plain DTensor would only refuse
    "load it where it was saved, and save `{name: tensor.dequantize() if tensor.is_quantized or"
    " type(tensor).dequantize is not torch.Tensor.dequantize else tensor for name, tensor in"
    " model.state_dict().items()}`"
)
# torchao's 4-bit classes say nothing, and the order of their numbers is that of a kernel.
_MULTIPLY = (
    "load it on a processor of the kind that packed it, and save `torch.nn.functional.linear("
    "torch.eye(tensor.shape[1], dtype=tensor.dtype, device=tensor.device), tensor).T.contiguous()`"
    " of each such tensor"
)
# Tensors of a package's own classes: what they are, and what to do about them.
_PACKAGES = {
    "torchao": (
        "one of the tensors that torchao quantized, packed numbers with scales",
        _DEQUANTIZE,
    ),
    "transformer_engine": (
        "a weight in eight bits or fewer, with scales",
        "save with weights in bfloat16, in Megatron-Core without --fp8-param-gather",
    ),
    "torch": (
        "which is not modelled",
        "save `tensor.full_tensor()` of a DTensor; of others `tensor.data`, as a plain tensor",
    ),
}
_OTHERS = ("which is not modelled", f"{_DEQUANTIZE}, or as its class has it")
_TENSOR_CLASSES = {
    Global("torch", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
    Global("torch.nn.parameter", "Buffer"),
}
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
# Classes that hold a plain tensor of the same values, and the attribute that it is.
_WRAPPED = {Global("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): "_tensor"}
_OTHER_TENSORS = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "on the device 'meta', without values",
    "_rebuild_device_tensor_from_numpy": "of another device, stored through numpy",
}


def tensor_of_class(cls: Global, dtype: DType | None = None, shape: Shape = ()) -> UnreadTensor:
    package = cls.module.partition(".")[0]
    what, hint = _PACKAGES.get(package, _OTHERS)
    if package == "torchao" and cls.name.startswith("Int4"):
        hint = _MULTIPLY
    return UnreadTensor(f"a {quote(str(cls))}, {what}", hint, dtype, shape)


def rebuild_from_type(*args: object) -> object:
    """Returns the tensor for `_rebuild_from_type_v2(function, class, arguments, state)`.

    It is torch's form of a tensor with attributes, and of tensors of other classes.
    """
    match args:
        case (Global("torch._utils", name), Global() as cls, tuple(inner), _) if (
            name in _REBUILDERS and cls in _TENSOR_CLASSES
        ):
            return _REBUILDERS[name](*inner)
        case (Global() as function, Global() as cls, tuple(inner), state) if function == _WRAPPER:
            try:
                shape, dtype = shape_and_dtype(inner)
            except UnsupportedError:
                return tensor_of_class(cls)
            held = state.get(_WRAPPED[cls]) if isinstance(state, dict) and cls in _WRAPPED else None
            if isinstance(held, TensorRef) and (held.shape, held.dtype) == (shape, dtype):
                return held
            return tensor_of_class(cls, dtype, shape)
        case (_, Global() as cls, _, _):
            return tensor_of_class(cls)
    raise FormatError("tensor with attributes is rebuilt from something that does not describe one")


def shape_and_dtype(inner: tuple[object, ...]) -> tuple[Shape, DType]:
    """Returns the shape and element type in the arguments of `_rebuild_wrapper_subclass`."""
    match inner:
        case (Global(), DTypeName(name), tuple(shape), *_):
            dtype = dtype_named(name)
        case _:
            raise FormatError(
                "tensor subclass is rebuilt from something that does not describe one"
            )
    if len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise FormatError("tensor has sizes that are not natural numbers")
    sizes = tuple(size for size in shape if isinstance(size, int))
    if overflows(sizes, dtype):
        raise FormatError(f"size of a tensor of shape {list(sizes)} overflows")
    return sizes, dtype


def _rebuild_quantized(*args: object) -> UnreadTensor:
    match args:
        case (StorageRef(), _, tuple(shape), *_) if len(shape) <= MAX_DIMENSIONS and all(
            map(is_count, shape)
        ):
            sizes = tuple(size for size in shape if isinstance(size, int))
            if overflows(sizes, BY_NAME["float32"]):
                raise FormatError(f"size of a tensor of shape {list(sizes)} overflows")
            kind = "one of the tensors that torch quantized, packed numbers with scales"
            return UnreadTensor(kind, _DEQUANTIZE, None, sizes)
    raise FormatError("quantized tensor is rebuilt from something that does not describe one")


def _unread(kind: str) -> Builder:
    return lambda *_args: UnreadTensor(f"{kind}, which is not modelled", _PLAIN)


def explain_value(value: object, where: str) -> CkptkitError:
    if isinstance(value, UnreadTensor):
        return value.error(where)
    if isinstance(value, InertObject):
        return tensor_of_class(class_of(value)).error(where)
    return FormatError("archive does not hold one tensor", where=where)


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
        case (tuple(items),):
            return items
        case (list(items),) if len(items) <= MAX_DIMENSIONS:
            return tuple(items)
    raise FormatError("'torch.Size' is made from something that is not one tuple")


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


def _default_dict(*args: object) -> InertDefaultDict | InertObject:
    if len(args) > 1:
        return InertObject(Global("collections", "defaultdict"), args)
    return InertDefaultDict(args[0] if args else None)


class InertDeque(list[Any]):
    """A `deque`, whose items are set afterwards; `longest` is its limit, or None."""

    __slots__ = ("longest",)

    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.longest = longest


def _deque(*args: object) -> InertDeque | InertObject:
    match args:
        case () | ([] | (),):
            return InertDeque(None)
        case ([] | (), longest):
            if longest is None or is_count(longest):
                return InertDeque(longest)
    return InertObject(Global("collections", "deque"), args)


# Classes and functions whose instances are values, and no objects of other code. Below protocol 3
# (torch.save uses 2) `int` is called `long`, and `str` `unicode`.
_TYPES = "set frozenset bytearray complex slice list dict tuple int float str bool object type"
_PATHS = "Path PosixPath WindowsPath PurePosixPath PureWindowsPath"
VALUE_CLASSES = frozenset(
    (module, name)
    for modules, names in (
        ("builtins __builtin__", _TYPES),
        ("builtins", "range"),
        ("__builtin__", "xrange long unicode"),
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("collections", "Counter"),
        ("datetime", "date datetime time timedelta timezone"),
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
        ("pathlib pathlib._local", _PATHS),
        ("numpy", "dtype ndarray"),
        ("numpy.core.multiarray numpy._core.multiarray", "scalar _reconstruct"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch.torch_version", "TorchVersion"),
        ("omegaconf.dictconfig", "DictConfig"),
        ("omegaconf.listconfig", "ListConfig"),
        ("_io", "BytesIO"),
        ("signal", "Signals"),
        ("uuid", "UUID SafeUUID"),
    )
    for module in modules.split()
    for name in names.split()
)
_TENSOR_GLOBALS: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter,
    ("torch._utils", "_rebuild_qtensor"): _rebuild_quantized,
    ("torch._tensor", "_rebuild_from_type_v2"): rebuild_from_type,
    **{("torch._utils", name): _unread(kind) for name, kind in _OTHER_TENSORS.items()},
    ("torch.storage", "UntypedStorage"): StorageClass("UntypedStorage", None),
    **{
        ("torch", name): StorageClass(name, dtype)
        for name, dtype in {**BY_STORAGE, **_QUANTIZED_STORAGES}.items()
    },
    **{("torch", name): DTypeName(name) for name in (*BY_NAME, *_OTHER_DTYPES)},
    ("collections", "OrderedDict"): ordered_dict,
}
_REBUILDERS = {"_rebuild_tensor_v2": rebuild_tensor_v2, "_rebuild_tensor_v3": rebuild_tensor_v3}
ALLOWED: Mapping[tuple[str, str], object] = {
    **_TENSOR_GLOBALS,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "deque"): _deque,
    ("torch", "Size"): _size,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
}


def parse_values(pickle: bytes, *, where: str) -> object:
    """Parses a `data.pkl`; tensors in the result are `TensorRef`s, storages `StorageRef`s."""
    return parse_pickle(pickle, ALLOWED, where=where, persistent=storage_ref)
