"""The one table of element types: torch, safetensors and numpy names, and sizes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ckptkit.core.errors import UnsupportedError

Kind = Literal["float", "int", "bool", "complex"]


class DType(Struct, frozen=True):
    """One element type.

    Attributes:
        name: torch's spelling without the `torch.` prefix; also ours, in JSON and in options.
        safetensors: The name in a safetensors header, or None where that format has none.
        numpy: The numpy name; types that numpy lacks are ml_dtypes' of the same name.
        itemsize: Bytes per element.
        kind: Its arithmetic. Only `float` is ever cast.
        storage: The class name under which `torch.save` writes a storage of this type, or None
            where torch writes an untyped storage and names the type apart.
    """

    name: str
    safetensors: str | None
    numpy: str
    itemsize: int
    kind: Kind
    storage: str | None = None


# Sources: torch/storage.py (`_storage_type_map`), safetensors `Dtype`, ml_dtypes' README.
_TABLE = (
    DType("float64", "F64", "float64", 8, "float", "DoubleStorage"),
    DType("float32", "F32", "float32", 4, "float", "FloatStorage"),
    DType("float16", "F16", "float16", 2, "float", "HalfStorage"),
    DType("bfloat16", "BF16", "bfloat16", 2, "float", "BFloat16Storage"),
    DType("float8_e4m3fn", "F8_E4M3", "float8_e4m3fn", 1, "float"),
    DType("float8_e5m2", "F8_E5M2", "float8_e5m2", 1, "float"),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", "float8_e4m3fnuz", 1, "float"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", "float8_e5m2fnuz", 1, "float"),
    DType("float8_e8m0fnu", "F8_E8M0", "float8_e8m0fnu", 1, "float"),
    DType("complex128", None, "complex128", 16, "complex", "ComplexDoubleStorage"),
    DType("complex64", "C64", "complex64", 8, "complex", "ComplexFloatStorage"),
    DType("int64", "I64", "int64", 8, "int", "LongStorage"),
    DType("int32", "I32", "int32", 4, "int", "IntStorage"),
    DType("int16", "I16", "int16", 2, "int", "ShortStorage"),
    DType("int8", "I8", "int8", 1, "int", "CharStorage"),
    DType("uint64", "U64", "uint64", 8, "int"),
    DType("uint32", "U32", "uint32", 4, "int"),
    DType("uint16", "U16", "uint16", 2, "int"),
    DType("uint8", "U8", "uint8", 1, "int", "ByteStorage"),
    DType("bool", "BOOL", "bool", 1, "bool", "BoolStorage"),
)
BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE if dtype.storage}


def dtype_named(name: str, *, where: str = "") -> DType:
    """Finds an element type by torch's name for it, with or without `torch.`.

    Returns:
        The type.

    Raises:
        UnsupportedError: If the table has no such type.
    """
    dtype = BY_NAME.get(name.removeprefix("torch."))
    if dtype is None:
        raise UnsupportedError(
            f"dtype {name!r} is not modelled; known are {', '.join(BY_NAME)}", where=where
        )
    return dtype
