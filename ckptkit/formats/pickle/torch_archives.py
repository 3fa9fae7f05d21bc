"""The files that `torch.save` wrote and that an index is made of: opened, parsed, their records.

What a pickle holds may be anything until it is looked at: a `Document` looks, and says where it
found something else.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptkit.core.errors import CkptkitError, FormatError, UnsafePickleError, UnsupportedError
from ckptkit.core.index import FileRef, Record, Shape
from ckptkit.formats.pickle.pickles import InertObject, parse_pickle, shown
from ckptkit.formats.pickle.torch_values import (
    ALLOWED,
    MAX_DIMENSIONS,
    StorageRef,
    TensorRef,
    storage_ref,
)
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.pickle.zip_directory import Read
from ckptkit.formats.torch_files.legacy import HEAD_BYTES, LegacyArchive, is_legacy, open_legacy
from ckptkit.storage.base import Source

_MAX_COUNT = 2**63 - 1
_LOOKED_AT_BYTES = 1 << 20  # of a file in which the pickle's end is not known
# What every pickle of a `torch.nn.Module` has among its state.
_MODULE_MARKS = (b"_parameters", b"_buffers", b"_modules", b"training")


@dataclass(frozen=True, slots=True)
class Document:
    """A dictionary out of a pickle, whose values may be anything until they are looked at.

    Attributes:
        values: The dictionary.
        where: The file, and what of it, for messages.
    """

    values: Mapping[Any, Any]
    where: str

    def inner(self, key: str | int) -> Document:
        """Returns the dictionary under a key; an empty one where there is none."""
        return _document(self.values.get(key), f"{self.where}, {key!r}")

    def inner_list(self, key: str) -> list[Document]:
        """Returns the dictionaries in the list under a key; none where there is no list."""
        where = f"{self.where}, {key!r}"
        return [_document(item, where) for item in self.sequence(key)]

    def sequence(self, key: str) -> Sequence[Any]:
        """Returns the list under a key; an empty one where there is none."""
        found = self.values.get(key)
        if found is None:
            return ()
        if not isinstance(found, (list, tuple)):
            raise self.error(f"{key!r} is not a list")
        return found

    def vectors(self, key: str) -> list[TensorRef]:
        """Returns the one-dimensional tensors in the list under a key."""
        found = self.sequence(key)
        for item in found:
            if not (isinstance(item, TensorRef) and len(item.shape) == 1 and item.row_major):
                raise self.error(f"{key!r} holds something that is not a flat tensor")
        return list(found)

    def count(self, key: str) -> int | None:
        """Returns the natural number under a key, or None where there is none."""
        found = self.values.get(key)
        if found is not None and not _is_count(found):
            raise self.error(f"{key!r} is not a natural number")
        return found

    def text(self, key: str) -> str:
        found = self.values.get(key)
        return found if isinstance(found, str) else ""

    def shapes(self) -> dict[str, Shape]:
        """Returns the dictionary as one of shapes by name."""
        for name, shape in self.values.items():
            whole = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
            if not (isinstance(name, str) and whole and all(map(_is_count, shape))):
                raise self.error("holds something that is not the shape of a parameter")
        return dict(self.values)

    def tensor(self, name: str) -> TensorRef:
        """Returns the tensor of a name."""
        found = self.values.get(name)
        if not isinstance(found, TensorRef):
            raise self.error(f"holds no tensor {shown(name)}")
        return found

    def error(self, message: str) -> FormatError:
        return FormatError(message, where=self.where)


def _document(value: object, where: str) -> Document:
    if value is None:
        return Document({}, where)
    if isinstance(value, dict):
        return Document(value, where)
    if isinstance(value, InertObject) and isinstance(value.state, dict):
        return Document(value.state, where)
    raise FormatError("is not a dictionary", where=where)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


class Extents(Protocol):
    """Tells where the storages of a file lie."""

    @property
    def where(self) -> str:
        """The file, for messages."""
        ...

    def extent(self, storage: StorageRef) -> tuple[int, int, int | None]:
        """Returns the start and the end of a storage, and the checksum stored for it."""
        ...


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """An opened file.

    Attributes:
        path: Its path, relative to the source.
        number: Its position among the files of the index.
        root: What its pickle holds; tensors in it are `TensorRef`s.
        pickle_bytes: How long the pickle is.
        archive: Where its storages lie.
    """

    path: str
    number: int
    root: object
    pickle_bytes: int
    archive: Extents

    @property
    def is_legacy(self) -> bool:
        """Whether it has the layout from before torch 1.6, in which nothing has a checksum."""
        return isinstance(self.archive, LegacyArchive)

    @property
    def where(self) -> str:
        return self.archive.where

    def document(self) -> Document:
        """Returns the dictionary that the file holds."""
        if not isinstance(self.root, dict):
            raise FormatError("holds no dictionary", where=self.where)
        return Document(self.root, self.where)


@dataclass(slots=True)
class ArchiveTable:
    """The files that were opened, and the records of the storages in them that are used."""

    files: list[FileRef] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    _places: dict[tuple[int, str], int] = field(default_factory=dict)

    def open(
        self, source: Source, path: str, allowed: Mapping[tuple[str, str], object] = ALLOWED
    ) -> TorchArchive:
        """Opens a file and parses its pickle.

        Args:
            source: Where it lies.
            path: The file.
            allowed: What the pickle may name, and what stands for it.
        """
        file = source.stat(path)
        where = posixpath.join(source.location, path)

        def read(start: int, stop: int) -> bytes:
            return source.read(path, start, stop)

        root, pickle_bytes, archive = _opened(read, file.size_bytes, allowed, where)
        self.files.append(file)
        return TorchArchive(path, len(self.files) - 1, root, pickle_bytes, archive)

    def record(self, file: TorchArchive, tensor: TensorRef) -> int:
        """Returns the position of the record of a tensor's storage, adding it when new."""
        storage = tensor.storage
        place = file.number, storage.key
        known = self._places.get(place)
        if known is None:
            start, stop, crc32 = file.archive.extent(storage)
            known = self._places[place] = len(self.records)
            self.records.append(Record(file.number, start, stop, crc32=crc32))
        record = self.records[known]
        if record.stop - record.start != storage.size_bytes:
            raise FormatError(
                f"storage {shown(storage.key)} has two different lengths", where=file.where
            )
        return known


# What the pickles of quantized tensors name: storages of torch's own, and classes of torchao.
_QUANTIZED = {
    **dict.fromkeys(
        (
            "torch.QInt8Storage",
            "torch.QUInt8Storage",
            "torch.QInt32Storage",
            "torch.QUInt4x2Storage",
            "torch.QUInt2x4Storage",
            "torch._utils._rebuild_qtensor",
        ),
        "torch",
    ),
    "'torchao.": "torchao",
}


def _opened(
    read: Read, size_bytes: int, allowed: Mapping[tuple[str, str], object], where: str
) -> tuple[object, int, Extents]:
    """Returns what a file holds, how long its pickle is, and where its storages lie."""
    head = read(0, min(HEAD_BYTES, size_bytes))
    try:
        legacy = is_legacy(head)
    except CkptkitError as error:
        raise error.located(where) from error
    if legacy:
        try:
            return open_legacy(read, size_bytes, allowed, where=where)
        except UnsafePickleError as error:
            raise _explained(error, read(0, min(_LOOKED_AT_BYTES, size_bytes))) from error
    archive = open_archive(read, size_bytes, where=where)
    pickle = archive.pickle()
    try:
        root = parse_pickle(pickle, allowed, where=where, persistent=storage_ref)
    except UnsafePickleError as error:
        raise _explained(error, pickle) from error
    return root, len(pickle), archive


def _explained(error: UnsafePickleError, pickle: bytes) -> UnsafePickleError | UnsupportedError:
    """Says what to do about quantized tensors, and about a module that was saved as a whole."""
    kind = next((kind for mark, kind in _QUANTIZED.items() if mark in error.message), "")
    if kind:
        return UnsupportedError(
            f"file holds tensors that {kind} quantized, packed numbers with scales:"
            f" {error.message.partition(', which')[0]}",
            where=error.where,
            hint="load the file with torch, and save `{name: tensor.dequantize() if"
            " tensor.is_quantized else tensor}` of its state dict, or the weights from before",
        )
    if not all(mark in pickle for mark in _MODULE_MARKS):
        return error
    return UnsafePickleError(
        f"file holds a whole module, which needs the code of its classes: {error.message}",
        where=error.where,
        hint="if you trust the file, load it where that code is, with `torch.load(path,"
        " weights_only=False)`, and save the module's `state_dict()` instead",
    )
