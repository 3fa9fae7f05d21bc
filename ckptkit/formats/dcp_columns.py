"""The tables of `.metadata` as numpy columns: one row for each chunk, and for each stored item."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.errors import FormatError, UnsafePathError
from ckptkit.formats.dcp_shortcuts import (
    CHUNK,
    INDEX,
    INFO,
    ChunkRun,
    EntryRun,
    Values,
    is_size,
)
from ckptkit.formats.pickles import Global, InertObject, shown

Ints = NDArray[np.int64]
_MAX_TRANSFORMS = 16
MAX_OFFSET = 2**63 - 1
NO_OFFSET = -1
_CLIMBS = re.compile(r"(?:^|[/\\])\.\.(?:$|[/\\])")
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:")
_HINT = "the file is damaged; take another copy of it"


@dataclass(frozen=True, slots=True)
class Where:
    """The place that errors are about."""

    text: str

    def tensor(self, key: str) -> Where:
        """Returns the place of one key."""
        return Where(f"{self.text}, key {shown(key)}" if self.text else f"key {shown(key)}")

    def error(self, message: str) -> FormatError:
        """Makes the error for a file that contradicts itself."""
        return FormatError(message, where=self.text, hint=_HINT)


class _Lookup(dict[int, int]):
    """Translates positions of texts, each only once."""

    def __init__(self, translate: Callable[[int], int]) -> None:
        super().__init__()
        self.translate = translate

    def __missing__(self, position: int) -> int:
        self[position] = found = self.translate(position)
        return found

    def column(self, positions: Ints) -> bytes:
        return array("i", map(self.__getitem__, positions.tolist())).tobytes()


class TensorRows:
    """The chunks of all tensors, in order; `offset` and `size` are positions in `Values.sizes`."""

    def __init__(self, values: Values, where: Where) -> None:
        self.values = values
        self.where = where
        self.offset = array("i")
        self.size = array("i")
        self.numbers: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.itemsizes: list[int] = []
        self.counts: list[int] = []
        self._seen: set[int] = set()

    def add(
        self, key: str, number: int, shape: tuple[int, ...], itemsize: int, chunks: object
    ) -> None:
        """Adds the chunks of one tensor.

        Raises:
            FormatError: If they are not a list of chunks.
        """
        where = self.where.tensor(key)
        # A list that two tensors shared would be walked once for each of them.
        if not isinstance(chunks, list) or id(chunks) in self._seen:
            raise where.error("chunks are not a list of its own")
        self._seen.add(id(chunks))
        before = len(self.offset)
        for chunk in chunks:
            if isinstance(chunk, ChunkRun):
                self.offset.frombytes(chunk.offsets.astype(np.int32).tobytes())
                self.size.frombytes(chunk.sizes.astype(np.int32).tobytes())
            else:
                self._add_chunk(chunk, where)
        chunks.clear()
        self.numbers.append(number)
        self.shapes.append(shape)
        self.itemsizes.append(itemsize)
        self.counts.append(len(self.offset) - before)

    def _add_chunk(self, chunk: object, where: Where) -> None:
        fields = _fields(chunk, CHUNK, where)
        for column, name in ((self.offset, "offsets"), (self.size, "sizes")):
            column.append(_position(self.values, fields.get(name), where))


class Entries:
    """The items of `storage_data`.

    Columns: `key` numbers of keys, `offset` positions in `Values.sizes` or -1, `file` positions
    in `paths`, `start` and `length` in bytes.
    """

    def __init__(self, values: Values, numbers: dict[str, int], where: Where) -> None:
        self.values = values
        self.numbers = numbers
        self.where = where
        self.paths: dict[str, int] = {}
        self.key, self.offset, self.file = array("i"), array("i"), array("i")
        self.start, self.length = array("q"), array("q")
        self._transforms: dict[int, dict[tuple[str, ...], None]] = {}

    def read(self, table: dict[Any, Any]) -> None:
        """Reads all items.

        Raises:
            FormatError: If one is malformed or names a key that the index does not have.
            UnsafePathError: If a data file lies outside the folder.
        """
        texts = self.values.texts
        keys = _Lookup(lambda position: self._number(texts[position]))
        paths = _Lookup(lambda position: self._file(texts[position]))
        for index, info in table.items():
            if isinstance(index, EntryRun):
                self.key.frombytes(keys.column(index.fqn))
                self.offset.frombytes(index.offset.astype(np.int32).tobytes())
                self.file.frombytes(paths.column(index.path))
                self.start.frombytes(index.start.tobytes())
                self.length.frombytes(index.length.tobytes())
            else:
                self._add(index, info)

    @property
    def transformed(self) -> list[int]:
        """Numbers of the keys that have a transform."""
        return list(self._transforms)

    def transforms_of(self, key: str) -> tuple[tuple[str, ...], ...]:
        """Returns the different lists of transforms among the items of a key."""
        return tuple(self._transforms.get(self.numbers[key], ()))

    def _add(self, index: object, info: object) -> None:
        named = _fields(index, INDEX, self.where)
        number = self._number(named.get("fqn"))
        where = self.where.tensor(named["fqn"])
        if type(named.get("index")) not in {int, type(None)}:
            raise where.error("index hint is not an integer")
        offset = named.get("offset")
        fields = _fields(info, INFO, where)
        for column, name in ((self.start, "offset"), (self.length, "length")):
            value = fields.get(name)
            if type(value) is not int or not -MAX_OFFSET <= value <= MAX_OFFSET:
                raise where.error(f"{name} of its stored bytes is not an integer below 2**63")
            column.append(value)
        self.key.append(number)
        self.offset.append(NO_OFFSET if offset is None else _position(self.values, offset, where))
        self.file.append(self._file(fields.get("relative_path")))
        if fields.get("transform_descriptors"):
            self._add_transforms(number, fields["transform_descriptors"], where)

    def _add_transforms(self, number: int, names: object, where: Where) -> None:
        if not isinstance(names, list | tuple) or len(names) > _MAX_TRANSFORMS:
            raise where.error("transform descriptors are not a short list")
        if not all(isinstance(name, str) for name in names):
            raise where.error("a transform descriptor is not a string")
        self._transforms.setdefault(number, {})[tuple(names)] = None

    def _number(self, key: object) -> int:
        if not isinstance(key, str):
            raise self.where.error("key of a stored item is not a string")
        number = self.numbers.get(key)
        if number is None:
            raise self.where.tensor(key).error("it is stored, but the index does not name it")
        return number

    def _file(self, path: object) -> int:
        if not isinstance(path, str):
            raise self.where.error("relative path of a data file is not a string")
        if path not in self.paths:
            if not path or "\0" in path or _ABSOLUTE.match(path) or _CLIMBS.search(path):
                raise UnsafePathError(
                    f"data file {shown(path)} is not inside the folder of the checkpoint",
                    where=self.where.text,
                    hint="a checkpoint library writes plain file names; do not trust this file",
                )
            self.paths[path] = len(self.paths)
        return self.paths[path]


def _fields(value: object, cls: Global, where: Where) -> dict[str, Any]:
    if not isinstance(value, InertObject) or value.cls != cls or not isinstance(value.state, dict):
        raise where.error(f"there is something else in the place of a {cls.name}")
    return value.state


def _position(values: Values, value: object, where: Where) -> int:
    if not is_size(value):
        raise where.error("offset or size of a chunk is not a short tuple of integers below 2**63")
    values.sizes.append(cast("tuple[int, ...]", value))
    return len(values.sizes) - 1
