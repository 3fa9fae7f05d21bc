"""The files that `torch.save` wrote and that an index is made of: opened, parsed, their records.

What a pickle holds may be anything until it is looked at: a `Document` looks, and says where it
found something else.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.index import FileRef, Record, Shape
from ckptkit.formats.pickles import InertObject, parse_pickle, shown
from ckptkit.formats.torch_values import ALLOWED, MAX_DIMENSIONS, TensorRef, storage_ref
from ckptkit.formats.torch_zip import Archive, open_archive
from ckptkit.storage.base import Source

_MAX_COUNT = 2**63 - 1
# Before 1.6, files began with a pickle of this number: 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")


@dataclass(frozen=True, slots=True)
class Document:
    """A dictionary out of a pickle, whose values may be anything until they are looked at.

    Attributes:
        values: The dictionary.
        where: The file, and what of it, for messages.
    """

    values: Mapping[Any, Any]
    where: str

    def inner(self, key: str) -> Document:
        """Returns the dictionary under a key; an empty one where there is none.

        Raises:
            FormatError: If it is something else.
        """
        return _document(self.values.get(key), f"{self.where}, {key!r}")

    def inner_list(self, key: str) -> list[Document]:
        """Returns the dictionaries in the list under a key; none where there is no list.

        Raises:
            FormatError: If it is something else.
        """
        where = f"{self.where}, {key!r}"
        return [_document(item, where) for item in self.sequence(key)]

    def sequence(self, key: str) -> Sequence[Any]:
        """Returns the list under a key; an empty one where there is none.

        Raises:
            FormatError: If it is something else.
        """
        found = self.values.get(key)
        if found is None:
            return ()
        if not isinstance(found, (list, tuple)):
            raise self.error(f"{key!r} is not a list")
        return found

    def vectors(self, key: str) -> list[TensorRef]:
        """Returns the one-dimensional tensors in the list under a key.

        Raises:
            FormatError: If something else is among them.
        """
        found = self.sequence(key)
        for item in found:
            if not (isinstance(item, TensorRef) and len(item.shape) == 1 and item.row_major):
                raise self.error(f"{key!r} holds something that is not a flat tensor")
        return list(found)

    def count(self, key: str) -> int | None:
        """Returns the natural number under a key, or None where there is none.

        Raises:
            FormatError: If it is something else.
        """
        found = self.values.get(key)
        if found is not None and not _is_count(found):
            raise self.error(f"{key!r} is not a natural number")
        return found

    def text(self, key: str) -> str:
        """Returns the text under a key, or an empty one."""
        found = self.values.get(key)
        return found if isinstance(found, str) else ""

    def shapes(self) -> dict[str, Shape]:
        """Returns the dictionary as one of shapes by name.

        Raises:
            FormatError: If it is none.
        """
        for name, shape in self.values.items():
            whole = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
            if not (isinstance(name, str) and whole and all(map(_is_count, shape))):
                raise self.error("holds something that is not the shape of a parameter")
        return dict(self.values)

    def tensor(self, name: str) -> TensorRef:
        """Returns the tensor of a name.

        Raises:
            FormatError: If it is not there, or is something else.
        """
        found = self.values.get(name)
        if not isinstance(found, TensorRef):
            raise self.error(f"holds no tensor {shown(name)}")
        return found

    def error(self, message: str) -> FormatError:
        """Makes the error to raise for what was found wrong here."""
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


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """An opened file.

    Attributes:
        path: Its path, relative to the source.
        number: Its position among the files of the index.
        root: What its pickle holds; tensors in it are `TensorRef`s.
        pickle_bytes: How long the pickle is.
        archive: The zip archive that it is.
    """

    path: str
    number: int
    root: object
    pickle_bytes: int
    archive: Archive

    @property
    def where(self) -> str:
        """The file, for messages."""
        return self.archive.where

    def document(self) -> Document:
        """Returns the dictionary that the file holds.

        Raises:
            FormatError: If it holds something else.
        """
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

        Raises:
            UnsafePickleError: If the pickle names something else.
            UnsupportedError: If torch wrote the file before 1.6, or it holds what is not modelled.
            FormatError: If the file is damaged.
        """
        file = source.stat(path)
        where = posixpath.join(source.location, path)

        def read(start: int, stop: int) -> bytes:
            return source.read(path, start, stop)

        if file.size_bytes >= len(_OLD_MAGIC) and read(0, len(_OLD_MAGIC)) == _OLD_MAGIC:
            raise UnsupportedError(
                "file has the layout that torch wrote before 1.6, which is not modelled",
                where=where,
                hint="save it again: `torch.save(torch.load(path, weights_only=True), path)`",
            )
        archive = open_archive(read, file.size_bytes, where=where)
        pickle = archive.pickle()
        root = parse_pickle(pickle, allowed, where=where, persistent=storage_ref)
        self.files.append(file)
        return TorchArchive(path, len(self.files) - 1, root, len(pickle), archive)

    def record(self, file: TorchArchive, tensor: TensorRef) -> int:
        """Returns the position of the record of a tensor's storage, adding it when new.

        Raises:
            FormatError: If the archive has no such record, or one of another length.
        """
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
