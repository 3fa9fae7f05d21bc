"""Values that are no tensors: as bytes that a resume restores exactly, and as key paths of DCP.

Every value is parsed back before it is written, as a resume does it, and compared with the original
type by type. A value that would be restored as something else is refused at the save, with its
path in the user's state.

Also the states of the random number generators, under the keys of accelerate and of the Trainer.

Pickles of a checkpoint are not run: the inert parser returns names and arguments, and the values
are created here, for a fixed list of types. Nothing that a checkpoint names is imported.
"""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import fractions
import io
import math
import pathlib
import posixpath
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    FormatError,
    ResumeError,
    SaveError,
    UnsafePickleError,
    UsageError,
)
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind, quote
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.pickle.machine import Global, InertDict, InertObject
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
from ckptkit.training.state.pieces import ObjectValue

_MOST_BYTES = 2**31  # of one object, such as the state of a dataloader
_DEEPEST_PICKLE = 64
_NUMPY_KINDS = frozenset("biufcSU")
_PICKLE_HINT = (
    "ckptkit runs no code from a checkpoint; let the object's state_dict() hold plain values,"
    " tensors and arrays only, or leave the object out of the state and restore it yourself"
)
_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)
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


def object_from_bytes(data: bytes, *, where: str = "", contents: bool = True) -> Any:
    """Returns the value in an archive of `torch.save`; without `contents`, tensors are empty."""
    archive = open_archive(lambda start, stop: data[start:stop], len(data), where=where)
    try:
        inert = parse_pickle(archive.pickle(), _ALLOWED, where=where, persistent=storage_ref)
    except UnsafePickleError as error:
        raise ResumeError(error.message, where=error.where, hint=_PICKLE_HINT) from error
    return _ValueBuilder(archive, contents=contents).value(inert, 0)


def _check_size(size_bytes: int, where: str) -> None:
    if size_bytes > _MOST_BYTES:
        raise FormatError(f"{size_bytes:,} bytes are no small object", where=where)


class _ValueBuilder:
    """Creates values from the parsed pickle of one archive; shared parts stay shared."""

    def __init__(self, archive: ZipArchive, *, contents: bool) -> None:
        self._archive = archive
        self._has_contents = contents
        self._made: dict[int, Any] = {}
        self._kept: list[object] = []  # so that no id is used twice
        self._storages: dict[str, torch.Tensor] = {}

    def value(self, inert: object, depth: int) -> Any:
        if isinstance(inert, _PLAIN_TYPES):
            return inert
        if depth > _DEEPEST_PICKLE:
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
                    raise ResumeError(
                        f"a defaultdict of {name} cannot be restored", hint=_PICKLE_HINT
                    )
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

    def _storage(self, ref: StorageRef) -> torch.Tensor:
        if not self._has_contents:
            return torch.empty(0)
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
            return ResumeError(
                f"tensor is {inert.kind}", where=self._archive.where, hint=_PICKLE_HINT
            )
        name = inert.cls if isinstance(inert, InertObject) else inert
        text = str(name) if isinstance(name, Global) else type(name).__name__
        return ResumeError(
            f"a value of class {quote(text)} was found where plain values were expected",
            where=self._archive.where,
            hint=_PICKLE_HINT,
        )


Maker = Callable[[list[Any], Any], Any]
_BASIC = (list, dict, set, int, float, bool, str, bytes, tuple, frozenset)
FACTORIES: Mapping[str, Callable[[], Any]] = {  # of a `defaultdict`, by the names in pickles
    **{kind.__name__: kind for kind in (*_BASIC, OrderedDict, Counter, deque)},
    "long": int,
    "unicode": str,
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


def _makers(
    modules: Sequence[str], wrap: Callable[[Callable[..., Any]], Maker], **kinds: Callable[..., Any]
) -> dict[tuple[str, str], Maker]:
    return {(module, name): wrap(kind) for module in modules for name, kind in kinds.items()}


_BUILTINS = ("builtins", "__builtin__")
_PATHS = ("Path", "PosixPath", "WindowsPath")
_VALUES = (complex, slice, range, int, float, bool, str)
_CONTAINERS = (set, frozenset, bytearray, list, dict, tuple)
# Python writes `timezone.utc` as a call of its class, and gives the same object back.
_TIMES = (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)
_MAKERS: Mapping[tuple[str, str], Maker] = {
    **_makers(_BUILTINS, _plain, **{kind.__name__: kind for kind in _VALUES}),
    **_makers(_BUILTINS, _plain, xrange=range, long=int, unicode=str),
    **_makers(_BUILTINS, _container, **{kind.__name__: kind for kind in _CONTAINERS}),
    **_makers(("datetime",), _plain, **{kind.__name__: kind for kind in _TIMES}),
    **_makers(("pathlib", "pathlib._local"), _plain, **dict.fromkeys(_PATHS, pathlib.Path)),
    **_makers(("pathlib", "pathlib._local"), _plain, PurePosixPath=pathlib.PurePosixPath),
    ("argparse", "Namespace"): _namespace,
    ("collections", "Counter"): _container(Counter),
    ("decimal", "Decimal"): _plain(decimal.Decimal),
    ("fractions", "Fraction"): _plain(fractions.Fraction),
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


_SCALARS = frozenset((bool, int, float, str, bytes, complex, type(None)))
_PLAIN = _SCALARS - {bytes, complex}
_MOST_INT_BITS = 8_000  # the parser of pickles takes 1,024 bytes
_DEEPEST = 60  # the parser takes 64 levels
_SHOWN_KEY = 60
_SHOWN_PATH = 200
_GENERATOR_ADVICE = (
    "save its get_state(), which set_state() takes, or pass the generator as an entry of the state"
)
_ADVICE = "let its state_dict() return plain values, tensors and arrays, or leave it out"


def torch_archive(value: object) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


def serialise(value: object, where: str) -> bytes:
    """Returns a user's value as `torch.save` writes it, proven to be restored equal."""
    check_nesting(value, where)
    data, problem = _prove(value)
    if problem is None:
        return data
    value, data, problem, where = _innermost(value, data, problem, where)
    hint = _GENERATOR_ADVICE if isinstance(value, torch.Generator) else _ADVICE
    kind = UsageError if data else SaveError
    raise kind(problem, where=where, hint=hint)


def make_object(unit: str, path: KeyPath, value: object, where: str) -> ObjectValue:
    """Returns a value for a DCP directory, proven to be restored equal.

    The value may change once this returns.
    """
    items: Iterable[object] = value if isinstance(value, list | tuple) else (value,)
    if is_plain(value) and all(map(is_sound, items)):
        return ObjectValue(unit, path, value)
    return ObjectValue(unit, path, value, serialise_or_refuse(value, where))


def serialise_or_refuse(value: object, where: str) -> bytes:
    """Does what `serialise` does; every failure is a `UsageError`, for the user to solve."""
    try:
        return serialise(value, where)
    except SaveError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from error


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text or None, or a list or tuple of such."""
    if type(value) in {list, tuple}:
        return all(type(item) in _PLAIN for item in value)  # type: ignore[attr-defined]
    return type(value) in _PLAIN


def is_sound(value: object) -> bool:
    """Whether the parser of pickles accepts a scalar: no huge integer, no lone surrogate."""
    if isinstance(value, int):
        return value.bit_length() <= _MOST_INT_BITS
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def check_nesting(
    value: object, where: str, around: Mapping[int, str] | None = None, done: set[int] | None = None
) -> None:
    """Refuses a value that contains itself, or is nested too deep."""
    around, done = around or {}, set() if done is None else done
    if type(value) in _SCALARS or isinstance(value, torch.Tensor) or id(value) in done:
        return
    if id(value) in around:
        raise UsageError(
            f"{a_kind(value)} was found that contains itself: it is the one at {around[id(value)]}",
            where=where,
            hint="save values that form a tree",
        )
    if len(around) > _DEEPEST:
        raise UsageError(
            f"values are nested more than {_DEEPEST} levels deep",
            where=f"{where[:_SHOWN_PATH]}…",
            hint="save values that are nested less deep",
        )
    if not _holds_scalars(value):
        inside = {**around, id(value): where}
        for step, child in _children(value):
            check_nesting(child, where + step, inside, done)
    done.add(id(value))


def _holds_scalars(value: object) -> bool:
    return type(value) in {list, tuple} and all(type(item) in _SCALARS for item in value)  # type: ignore[attr-defined]


def step_of(key: object) -> str:
    """Returns a key as the end of a path in messages.

    >>> step_of("lr"), step_of(0)
    ("['lr']", '[0]')
    """
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001  of a class of the user's
        text = type(key).__name__
    text = text.encode("ascii", "backslashreplace").decode()
    return f"[{text if len(text) <= _SHOWN_KEY else text[:_SHOWN_KEY] + '…'}]"


def _children(value: object) -> Iterator[tuple[str, Any]]:
    """Yields what a container holds, each with the end of its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield step_of(key), key
            yield step_of(key), item
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((step_of(item), item) for item in value)
    elif isinstance(value, argparse.Namespace):
        yield from ((f".{name}", item) for name, item in vars(value).items())
    elif isinstance(value, slice):
        yield from ((f".{n}", getattr(value, n)) for n in ("start", "stop", "step"))


def _prove(value: object) -> tuple[bytes, str | None]:
    """Returns a value as bytes, empty where it has none, and why it would not be restored equal."""
    try:
        data = torch_archive(value)
    except Exception as error:  # noqa: BLE001  whatever a user's `__reduce__` raises
        return b"", f"{a_kind(value)} cannot be pickled: {error}"
    try:
        restored = object_from_bytes(data, contents=False)
    except CkptkitError as error:
        return data, f"could be saved, but not resumed from: {error.message}"
    if is_same(value, restored, contents=False):
        return data, None
    return data, f"could be saved, but not resumed from: {a_kind(value)} would change"


def _innermost(
    value: object, data: bytes, problem: str, where: str
) -> tuple[object, bytes, str, str]:
    """Returns the innermost value that cannot be restored, its bytes, its problem, and its path."""
    for step, child in _children(value):
        if type(child) in _SCALARS and is_sound(child):
            continue
        of_child, child_problem = _prove(child)
        if child_problem is not None:
            return _innermost(child, of_child, child_problem, where + step)
    return value, data, problem, where


def is_same(value: Any, other: Any, *, contents: bool = True) -> bool:
    """Whether two values are equal in all types, keys, items and their order.

    Neither contains itself. Without `contents`, tensors are compared by type and shape only.
    """
    kind = type(value)
    if kind is not type(other):
        return False
    if kind in _SCALARS and not contents:  # a pickle holds them bit by bit
        return True
    if kind in {list, tuple} and not contents and _holds_scalars(value):  # they may be many
        return list(map(type, value)) == list(map(type, other))
    if isinstance(value, defaultdict) and value.default_factory is not other.default_factory:
        return False
    parts, of_other = _parts(value), _parts(other)
    if parts is not None and of_other is not None:
        return len(parts) == len(of_other) and all(
            is_same(*pair, contents=contents) for pair in zip(parts, of_other, strict=True)
        )
    if isinstance(value, torch.Tensor):
        is_alike = (value.dtype, value.shape) == (other.dtype, other.shape)
        return is_alike and (not contents or _bytes_of(value) == _bytes_of(other))
    if kind is np.ndarray or isinstance(value, np.generic):
        is_alike = value.dtype == other.dtype and value.shape == other.shape
        return bool(is_alike and value.tobytes() == other.tobytes())
    if kind in {set, frozenset}:
        return Counter(map(_spelled, value)) == Counter(map(_spelled, other))
    # Of numbers with their signs, of dates with their zones.
    return bool(value == other) if kind is bytearray else repr(value) == repr(other)


def _parts(value: Any) -> Sequence[Any] | None:
    """Returns what a container holds, in its order; None of any other value."""
    kind = type(value)
    if kind in {list, tuple, torch.Size}:
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        return list(value.items())
    if kind is deque:
        return [value.maxlen, *value]
    if kind is argparse.Namespace:
        return list(vars(value).items())
    return (value.start, value.stop, value.step) if kind is slice else None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _spelled(item: object) -> str:
    """Returns a text that differs between members of a set that differ in type or value."""
    if isinstance(item, tuple | frozenset):
        parts = map(_spelled, item)
        listed = parts if isinstance(item, tuple) else sorted(parts)
        return f"{type(item).__name__}({', '.join(listed)})"
    return f"{type(item).__name__} {item!r}"


_DEEPEST_PATH = 64  # what a save refuses, and only a live value may be


def flatten(
    value: object, path: KeyPath = (), around: frozenset[int] = frozenset()
) -> Iterator[tuple[KeyPath, object]]:
    """Yields the leaves of nested values, each with its path.

    Mappings are always entered, lists only where a tensor or a mapping is somewhere inside,
    tuples never. Empty mappings leave nothing behind, nor does a value inside itself.

    Source: `torch.distributed.checkpoint._traverse.traverse_state_dict` of torch 2.4 and later.

    >>> list(flatten({"a": [1, 2], "b": [{"c": 3}]}))
    [(('a',), [1, 2]), (('b', 0, 'c'), 3)]
    """
    if id(value) in around or len(around) > _DEEPEST_PATH:
        return
    if isinstance(value, Mapping):
        inside = around | {id(value)}
        for key, entry in value.items():
            yield from flatten(entry, (*path, str(key)), inside)
    elif isinstance(value, list) and holds_more(value):
        inside = around | {id(value)}
        for index, entry in enumerate(value):
            yield from flatten(entry, (*path, index), inside)
    else:
        yield path, value


def holds_more(values: list[object], around: frozenset[int] = frozenset()) -> bool:
    """Whether a tensor or a mapping is somewhere inside a list."""
    inside = around | {id(values)}
    return len(around) < _DEEPEST_PATH and any(
        isinstance(value, Mapping | torch.Tensor)
        or (isinstance(value, list) and id(value) not in inside and holds_more(value, inside))
        for value in values
    )


def capture() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators.

    Those of all CUDA devices are among them if the process uses CUDA. They live in host memory,
    so that nothing waits for a device.

    Numpy's numbers are a list, which numpy accepts as well, so that `torch.load` reads them
    without an exception for arrays.

    Source: `accelerate.checkpointing.save_accelerator_state`.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": (kind, np.asarray(keys).tolist(), *rest),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states


_TRAINERS = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}


def under_trainer_keys(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns captured states under the keys that the Trainer gives them.

    Source: `transformers.Trainer._save_rng_state`.
    """
    return {_TRAINERS[key]: value for key, value in states.items()}


def restore(states: Mapping[str, Any]) -> None:
    """Puts the generators back to captured states; those without one stay as they are.

    Of other devices, the states of those that this process has too are taken. Keys may be those of
    the Trainer.
    """
    states = {key: states[alias] for key, alias in _TRAINERS.items() if alias in states} | {
        key: states[key] for key in _TRAINERS if key in states
    }
    if "random_state" in states:
        version, internal, gauss = states["random_state"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        cuda_states = states.get("torch_cuda_manual_seed", ())
        for device, state in zip(devices, cuda_states, strict=False):
            torch.cuda.set_rng_state(state, device)
