"""What the readers share to parse headers that may be damaged or hostile."""

from __future__ import annotations

import json
import math
import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeGuard

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError, LimitError, MissingFileError
from ckptkit.core.index import FileRef, Shape
from ckptkit.storage.base import Source

Read = Callable[[int, int], bytes]
"""Returns the bytes `[start, stop)` of a file, or of an archive inside a file."""
MAX_DIMENSIONS = 64  # torch's limit
MAX_BYTES = 2**63 - 1


def read_from(source: Source, path: str, first: int = 0) -> Read:
    """Returns a function that reads a file; its positions are counted from byte `first`."""

    def read(start: int, stop: int) -> bytes:
        return source.read(path, first + start, first + stop)

    return read


def read_limited(source: Source, path: str, max_bytes: int, what: str) -> bytes:
    """Returns a whole file, after a check of its size.

    Args:
        source: The source of the file.
        path: The file.
        max_bytes: The largest size that is accepted.
        what: What the file is, for the message.
    """
    size = source.stat(path).size_bytes
    if size > max_bytes:
        raise LimitError(
            f"{what} has {size:,} bytes, at most {max_bytes:,} are read",
            where=posixpath.join(source.location, path),
        )
    return source.read(path, 0, size)


def stat_or_missing(source: Source, path: str) -> FileRef:
    """Returns the size and identity of a file; the size is -1 where it does not exist."""
    try:
        return source.stat(path)
    except MissingFileError:
        return FileRef(path, -1, "")


def group_by_folder(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the sorted paths in each folder, in the order of the folders' names."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        folders[posixpath.dirname(path)].append(path)
    return dict(sorted(folders.items()))


def stays_inside(path: str) -> bool:
    """Returns whether a path that a header names cannot lead out of the checkpoint's folder."""
    return not ({"", ".", ".."} & set(path.split("/")) or "\0" in path)


def is_count(value: object, most: int = MAX_BYTES) -> TypeGuard[int]:
    """Returns whether a parsed value is an integer from 0 to `most`; a bool is not."""
    return type(value) is int and 0 <= value <= most


def overflows(shape: Shape, dtype: DType) -> bool:
    """Returns whether a size in bytes exceeds int64, sizes of 0 counted as 1."""
    return math.prod(size or 1 for size in shape) * dtype.itemsize > MAX_BYTES


def list_first(items: Iterable[str], count: int, most: int) -> str:
    """Returns the first items of a list for a message, and how many more there are."""
    more = f" and {count - most:,} more" if count > most else ""
    return ", ".join(islice(items, most)) + more


def parse_json(data: bytes, *, where: str) -> object:
    """Parses JSON strictly: no name occurs twice in an object, and numbers are finite."""
    try:
        content: object = json.loads(
            data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
        if b"\\u" in data:  # half of a surrogate pair is not text and cannot be printed
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FormatError("JSON is nested too deeply", where=where) from error
    except FormatError as error:
        raise error.located(where) from error
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", where=where) from error
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise FormatError(f"name {twice!r} occurs twice in one object")
    return result


def _refuse_constant(name: str) -> object:
    raise FormatError(f"{name} is not JSON")
