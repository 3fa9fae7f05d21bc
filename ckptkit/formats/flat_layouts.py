"""The file that ckptkit's training side writes to tell what flat parameters are made of."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import FileRef, Shape, TensorIndex
from ckptkit.core.manifest import FLAT_LAYOUT, RUN_FACTS
from ckptkit.formats.flat_parameters import (
    FlatMember,
    FlatVector,
    flat_name,
    flat_parameters,
    unflattened,
    with_problems,
)
from ckptkit.formats.pickles import shown
from ckptkit.formats.torch_values import MAX_DIMENSIONS
from ckptkit.storage.base import Source

LAYOUT_VERSION = 1
_MAX_ELEMENTS = 2**62
_MAX_BYTES = 256 << 20


def with_layout_beside(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Puts original parameters in the place of flat ones, if a file beside them tells how.

    Args:
        index: With flat parameters.
        source: Where the checkpoint lies.
        folder: Of the files of the ranks.

    Raises:
        FormatError: If the file is damaged, or is of another model.
        UnsupportedError: If a newer ckptkit wrote it.
        LimitError: If it is larger than that of any model.
    """
    for file in _beside(source, folder):
        where = posixpath.join(source.location, file.path)
        if file.size_bytes > _MAX_BYTES:
            raise LimitError(f"has {file.size_bytes:,} bytes", where=where)
        vectors = parse_layout(source.read(file.path, 0, file.size_bytes), where)
        if vectors:
            return replace(
                unflattened(index, flat_parameters(index), vectors, where),
                files=(*index.files, file),
            )
    return with_problems(index)


def _beside(source: Source, folder: str) -> Iterator[FileRef]:
    """Yields the files that are there, in the folder itself or in the one of the step above."""
    for home in dict.fromkeys((folder, posixpath.dirname(folder))):
        for name in (FLAT_LAYOUT, RUN_FACTS):
            try:
                yield source.stat(posixpath.join(home, name))
            except MissingFileError:
                continue


def parse_layout(data: bytes, where: str) -> list[FlatVector]:
    """Returns what a file says that ckptkit's training side wrote; none where it tells nothing.

    Raises:
        FormatError: If it is damaged.
        ChecksumError: If it does not have its checksum.
        UnsupportedError: If a newer ckptkit wrote it, or a parameter was not flattened row by row.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    units = document.get("flat_parameters") if isinstance(document, dict) else None
    version = document.get("layout_version", LAYOUT_VERSION) if isinstance(document, dict) else 0
    if version != LAYOUT_VERSION:
        raise UnsupportedError(
            f"has the layout version {version!r}, and this ckptkit knows {LAYOUT_VERSION}",
            where=where,
            hint="use a newer ckptkit",
        )
    if not isinstance(units, list):
        return []
    told = document.get("crc32")
    found = crc32(json.dumps(units, sort_keys=True).encode())
    if told is not None and told != found:
        raise ChecksumError(f"has CRC-32 {found:#010x}, {told!r} was stored", where=where)
    try:
        return [_vector(unit, where) for unit in units]
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError("does not describe flat parameters", where=where) from error


def _vector(unit: Mapping[str, Any], where: str) -> FlatVector:
    aliases = unit.get("aliases", {})
    rows = zip(unit["names"], unit["shapes"], unit["starts"], strict=True)
    members = tuple(
        FlatMember((_text(name), *map(_text, aliases.get(name, ()))), _shape(shape), _count(start))
        for name, shape, start in rows
    )
    if any(unit.get("axes", ())):
        raise UnsupportedError("a parameter was not flattened row by row", where=where)
    vector = FlatVector(flat_name(_text(unit["path"], empty=True)), _count(unit["size"]), members)
    at = 0
    for member in members:
        if member.start < at or member.stop > vector.elements:
            raise FormatError(
                f"parameter {shown(member.names[0])} lies over another, or outside its vector",
                where=where,
            )
        at = member.stop
    return vector


def _text(value: object, *, empty: bool = False) -> str:
    if isinstance(value, str) and (value or empty):
        return value
    raise TypeError


def _count(value: object) -> int:
    if type(value) is int and 0 <= value <= _MAX_ELEMENTS:
        return value
    raise TypeError


def _shape(value: Sequence[object]) -> Shape:
    shape = tuple(map(_count, value))
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise ValueError
    return shape
