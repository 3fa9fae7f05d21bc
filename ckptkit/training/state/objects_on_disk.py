"""Python values out of a checkpoint's pickles, without running the pickles.

The inert parser returns names and arguments. The values are created here, for a fixed list of
types. Nothing that a checkpoint names is imported.
"""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import fractions
import math
import pathlib
import posixpath
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    ResumeError,
    UnsafePickleError,
)
from ckptkit.core.text import quote
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.pickle.machine import (
    Global,
    InertDict,
    InertObject,
)
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.formats.pickle.torch_values import (
    ALLOWED,
    DTypeName,
    InertDefaultDict,
    InertDeque,
    StorageRef,
    TensorRef,
    UnreadTensor,
    storage_ref,
)
from ckptkit.formats.pickle.torch_zip import ZipArchive, open_archive
from ckptkit.storage.base import Source

_MOST_BYTES = 2**31  # of one object, such as the state of a dataloader
_DEEPEST = 64
_NUMPY_KINDS = frozenset("biufcSU")
_HINT = (
    "ckptkit runs no code from a checkpoint; let the object's state_dict() hold plain values,"
    " tensors and arrays only, or leave the object out of the state and restore it yourself"
)
_PLAIN = (type(None), bool, int, float, str, bytes)
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_SIZE = ("torch", "Size")
# A reader of weights takes these for the tensor and the tuple in them.
_ALLOWED = {name: value for name, value in ALLOWED.items() if name not in {_PARAMETER, _SIZE}}


def read_object(source: Source, blob: BlobRef, *, where: str) -> Any:
    """Reads a value that a DCP data file has under a key of its own.

    It is of plain types, tensors on the CPU and numpy arrays.
    """
    place = f"{posixpath.join(source.location, blob.path)}, {where}"
    return object_from_bytes(read_blob(source, blob, where=place), where=place)


def read_blob(source: Source, blob: BlobRef, *, where: str) -> bytes:
    """Returns the archive of a value that a DCP data file has, decompressed where it has to be."""
    _check_size(blob.stop - blob.start, where)
    read, size = open_blob(source, blob, where=where)
    return read(0, size)


def read_torch_file(source: Source, path: str) -> Any:
    """Reads a small file that `torch.save` wrote; as `read_object` does."""
    place = posixpath.join(source.location, path)
    size_bytes = source.stat(path).size_bytes
    _check_size(size_bytes, place)
    return object_from_bytes(source.read(path, 0, size_bytes), where=place)


def is_readable(data: bytes) -> str:
    """Returns why an archive of `torch.save` could never be resumed from; empty if it could.

    The contents of tensors are not read, so that this costs little.
    """
    try:
        object_without_data(data)
    except CkptkitError as error:
        return error.message
    return ""


def object_without_data(data: bytes) -> Any:
    archive, inert = _parsed(data, where="")
    return _TypeBuilder(archive).value(inert, 0)


def object_from_bytes(data: bytes, *, where: str) -> Any:
    archive, inert = _parsed(data, where=where)
    return _ValueBuilder(archive).value(inert, 0)


def _parsed(data: bytes, *, where: str) -> tuple[ZipArchive, object]:
    archive = open_archive(lambda start, stop: data[start:stop], len(data), where=where)
    try:
        return archive, parse_pickle(
            archive.pickle(), _ALLOWED, where=where, persistent=storage_ref
        )
    except UnsafePickleError as error:
        raise ResumeError(error.message, where=error.where, hint=_HINT) from error


def _check_size(size_bytes: int, where: str) -> None:
    if size_bytes > _MOST_BYTES:
        raise FormatError(f"{size_bytes:,} bytes are no small object", where=where)


class _ValueBuilder:
    """Creates values from the parsed pickle of one archive; shared parts stay shared."""

    def __init__(self, archive: ZipArchive) -> None:
        self._archive = archive
        self._made: dict[int, Any] = {}
        self._kept: list[object] = []  # so that no id is used twice
        self._storages: dict[str, torch.Tensor] = {}

    def value(self, inert: object, depth: int) -> Any:
        if isinstance(inert, _PLAIN):
            return inert
        if depth > _DEEPEST:
            raise FormatError("values are nested too deep", where=self._archive.where)
        if id(inert) not in self._made:
            self._kept.append(inert)
            self._made[id(inert)] = self._make(inert, depth + 1)
        return self._made[id(inert)]

    def _make(self, inert: object, depth: int) -> Any:
        match inert:
            case list():
                value = self._list(inert, depth)
            case tuple():
                value = tuple(self.value(item, depth) for item in inert)
            case dict():
                value = self._dictionary(inert, depth)
            case TensorRef():
                value = self._tensor(inert)
            case DTypeName(name):
                value = getattr(torch, name)
            case InertObject():
                value = self._object(inert, depth)
            case _:
                raise self._refused(inert)
        return value

    def _list(self, inert: list[Any], depth: int) -> Any:
        values: Any = deque(maxlen=inert.longest) if isinstance(inert, InertDeque) else []
        self._made[id(inert)] = values
        values.extend([self.value(item, depth) for item in inert])
        return values

    def _dictionary(self, inert: dict[Any, Any], depth: int) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        if isinstance(inert, InertDefaultDict):
            name, factory = inert.factory, None
            if name is not None:
                factory = FACTORIES.get(name.name) if isinstance(name, Global) else None
                if factory is None:
                    raise ResumeError(f"a defaultdict of {name} cannot be restored", hint=_HINT)
            values = defaultdict(factory)
        elif isinstance(inert, InertDict):
            values = OrderedDict()
        self._made[id(inert)] = values
        for key, item in inert.items():
            values[self.value(key, depth)] = self.value(item, depth)
        return values

    def _object(self, inert: InertObject, depth: int) -> Any:
        make = _MAKERS.get((inert.cls.module, inert.cls.name))
        if make is None or inert.items:
            raise self._refused(inert)
        args = [
            item if isinstance(item, Global) else self.value(item, depth) for item in inert.args
        ]
        state = self.value(inert.state, depth)
        try:
            return make(args, state)
        except CkptkitError:
            raise
        except (TypeError, ValueError, OverflowError, ArithmeticError, LookupError) as error:
            raise FormatError(
                f"{quote(str(inert.cls))} is made from what does not make one",
                where=self._archive.where,
            ) from error

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, ref.dtype.name)
        storage = self._storage(ref.storage)
        if not storage.numel() or not math.prod(ref.shape):
            return torch.empty(ref.shape, dtype=dtype)
        whole = storage[: storage.numel() // ref.dtype.itemsize * ref.dtype.itemsize].view(dtype)
        return whole.as_strided(ref.shape, ref.strides, ref.storage_offset)

    def _storage(self, ref: StorageRef, /) -> torch.Tensor:
        if ref.key not in self._storages:
            start, stop, stored = self._archive.extent(ref)
            data = bytearray(self._archive.read(start, stop))
            if stored not in {None, crc := crc32(data)}:
                raise ChecksumError(
                    f"CRC-32 {crc:08x} was found against {stored:08x} stored",
                    where=self._archive.where,
                )
            storage = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            self._storages[ref.key] = storage
        return self._storages[ref.key]

    def _refused(self, inert: object) -> ResumeError:
        if isinstance(inert, UnreadTensor):
            return ResumeError(f"tensor is {inert.kind}", where=self._archive.where, hint=_HINT)
        name = inert.cls if isinstance(inert, InertObject) else inert
        text = str(name) if isinstance(name, Global) else type(name).__name__
        return ResumeError(
            f"a value of class {quote(text)} was found where plain values were expected",
            where=self._archive.where,
            hint=_HINT,
        )


class _TypeBuilder(_ValueBuilder):
    def _storage(self, _: StorageRef, /) -> torch.Tensor:
        return torch.empty(0)


Maker = Callable[[list[Any], Any], Any]
FACTORIES: Mapping[str, Callable[[], Any]] = {  # of a `defaultdict`, by the names in pickles
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "long": int,
    "float": float,
    "bool": bool,
    "str": str,
    "unicode": str,
    "bytes": bytes,
    "tuple": tuple,
    "frozenset": frozenset,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "deque": deque,
}


def _plain(kind: Callable[..., Any]) -> Maker:
    return lambda args, _: kind(*args)


def _container(kind: Callable[..., Any]) -> Maker:
    """Makes a container from another one; from a number, `bytearray` would take any memory."""

    def make(args: list[Any], _: Any) -> Any:
        if len(args) > 1 or not all(isinstance(arg, list | tuple | dict | bytes) for arg in args):
            raise TypeError(args)
        return kind(*args)

    return make


def _parameter(args: list[Any], _: Any) -> torch.nn.Parameter:
    tensor, trained = args[:2]
    return torch.nn.Parameter(tensor, requires_grad=bool(trained))


def _size(args: list[Any], _: Any) -> torch.Size:
    if not all(isinstance(arg, tuple | list) for arg in args):
        raise TypeError(args)
    return torch.Size(*args)


def _namespace(args: list[Any], state: Any) -> argparse.Namespace:
    namespace = argparse.Namespace(*args)
    namespace.__dict__.update(state or {})
    return namespace


def _numpy_dtype(args: list[Any], state: Any) -> np.dtype[Any]:
    dtype = np.dtype(str(args[0]))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(dtype)
    order: Any = None if state is None else state[1]
    return dtype if order is None else dtype.newbyteorder(order)


def _numpy_array(args: list[Any], state: Any) -> np.ndarray[Any, Any]:
    if args[0] != Global("numpy", "ndarray"):
        raise ValueError(args[0])
    _, shape, dtype, in_columns, data = state
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if in_columns else "C").copy()


def _numpy_scalar(args: list[Any], _: Any) -> Any:
    dtype, data = args
    return np.frombuffer(data, dtype)[0]


_BUILTINS: Mapping[str, Callable[..., Any]] = {
    "complex": complex,
    "slice": slice,
    "range": range,
    "xrange": range,
    "int": int,
    "long": int,
    "float": float,
    "bool": bool,
    "str": str,
    "unicode": str,
}
_CONTAINERS: Mapping[str, Callable[..., Any]] = {
    "set": set,
    "frozenset": frozenset,
    "bytearray": bytearray,
    "list": list,
    "dict": dict,
    "tuple": tuple,
}
_MAKERS: Mapping[tuple[str, str], Maker] = {
    **{
        (module, name): _plain(kind)
        for module in ("builtins", "__builtin__")
        for name, kind in _BUILTINS.items()
    },
    **{
        (module, name): _container(kind)
        for module in ("builtins", "__builtin__")
        for name, kind in _CONTAINERS.items()
    },
    ("argparse", "Namespace"): _namespace,
    ("collections", "Counter"): _container(Counter),
    **{
        ("datetime", name): _plain(kind)
        for name, kind in (("date", dt.date), ("datetime", dt.datetime))
    },
    ("datetime", "time"): _plain(dt.time),
    ("datetime", "timedelta"): _plain(dt.timedelta),
    # Python writes `timezone.utc` as this call, and gives the same object back.
    ("datetime", "timezone"): _plain(dt.timezone),
    ("decimal", "Decimal"): _plain(decimal.Decimal),
    ("fractions", "Fraction"): _plain(fractions.Fraction),
    **{
        (module, name): _plain(pathlib.PurePosixPath if name == "PurePosixPath" else pathlib.Path)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")
    },
    ("torch", "device"): _plain(torch.device),
    _SIZE: _size,
    _PARAMETER: _parameter,
    ("numpy", "dtype"): _numpy_dtype,
    **{
        (f"numpy.{core}.multiarray", name): make
        for core in ("core", "_core")
        for name, make in (("_reconstruct", _numpy_array), ("scalar", _numpy_scalar))
    },
}
