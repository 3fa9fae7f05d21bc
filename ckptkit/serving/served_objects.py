"""The objects of the bucket, and listings of them: values only, no I/O.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html for the order of
keys, common prefixes and truncation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from operator import itemgetter

import xxhash
from msgspec import Struct

from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.plan.plan import Compute, OutputFile, cut_into_tasks

BUCKET = "ckptkit"
BLOCK_BYTES = LEAF_BYTES // 2
"""The size of a buffer; a leaf of a computed tensor takes two."""
MOST_KEYS = 1000
_LAST = "\U0010ffff"  # sorts behind all that follows a common prefix


class ServedObject(Struct, frozen=True):
    """A planned file as an object.

    Attributes:
        key: Its key in the bucket.
        etag: Its version, with the quotes; not an MD5, which a hyphen shows.
        modified: When it was planned. Other options, or an older source, may give other bytes of
            the same size: who compares times has to see a newer one.
        file: The planned file.
        tasks: The byte ranges in which it would be written, and whether each is computed.
        crc32: The CRC-32 of its bytes where they are known without reading tensors, else None.
    """

    key: str
    etag: str
    modified: datetime
    file: OutputFile
    tasks: tuple[tuple[int, int, bool], ...]
    crc32: int | None = None

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes


def make_etag(content: str, size_bytes: int) -> str:
    """Returns the ETag of an object whose bytes follow from `content`.

    It has the form of an object that was uploaded in parts, which no client takes for an MD5.

    >>> make_etag("a", 10)
    '"a96faf705af16834e6c632b61e964e1f-1"'
    """
    parts = max(1, -(-size_bytes // LEAF_BYTES))
    return f'"{xxhash.xxh3_128_hexdigest(content.encode())}-{parts}"'


class ReadUnit(Struct, frozen=True):
    """Bytes `[start, stop)` of a file that one thread reads in one step, into as many buffers."""

    start: int
    stop: int
    blocks: int


def list_tasks(file: OutputFile) -> tuple[tuple[int, int, bool], ...]:
    """Returns the tasks of a file, in order and without gaps; see `ServedObject`."""
    return tuple(
        (
            task.start,
            task.stop,
            any(isinstance(part.segment.body, Compute) for part in task.parts),
        )
        for task in cut_into_tasks(0, file)
    )


def cut_into_units(entry: ServedObject, start: int, stop: int) -> Iterator[ReadUnit]:
    """Cuts a range of an object.

    What is computed is computed leaf by leaf, so that no leaf is divided if the range has it whole.
    """
    first = max(bisect_right(entry.tasks, start, key=itemgetter(0)) - 1, 0)
    for begin, end_of_task, is_computed in islice(entry.tasks, first, None):
        if begin >= stop:
            return
        low, high = max(start, begin), min(stop, end_of_task)
        step = high - low if is_computed else BLOCK_BYTES
        for at in range(low, high, step):
            end = min(at + step, high)
            yield ReadUnit(at, end, -(-(end - at) // BLOCK_BYTES))


class ListRequest(Struct, frozen=True):
    """What a listing asks for.

    Attributes:
        prefix: Of the keys.
        delimiter: Keys that have it after the prefix are joined into common prefixes; or empty.
        after: Only what comes after this key or common prefix is listed.
        most: Keys and common prefixes together.
    """

    prefix: str = ""
    delimiter: str = ""
    after: str = ""
    most: int = MOST_KEYS


class ListedPage(Struct, frozen=True):
    """A part of a listing.

    Attributes:
        objects: In the order of their keys.
        prefixes: The common prefixes.
        last: The last key or common prefix, after which the listing continues; empty if it does
            not.
    """

    objects: tuple[ServedObject, ...]
    prefixes: tuple[str, ...]
    last: str


def list_page(objects: Sequence[ServedObject], request: ListRequest) -> ListedPage:
    """Lists objects, which are in the order of their keys.

    Args:
        objects: All objects of the bucket.
        request: What to list.
    """
    keys = [entry.key for entry in objects]
    found: list[ServedObject] = []
    prefixes: list[str] = []
    last, at = "", bisect_right(keys, request.after)
    while at < len(keys) and request.most:
        key = keys[at]
        if not key.startswith(request.prefix):
            if key > request.prefix:
                break
            at = max(at + 1, bisect_right(keys, request.prefix, at) - 1)
            continue
        rest = key[len(request.prefix) :]
        head, delimiter, _ = rest.partition(request.delimiter) if request.delimiter else (rest,) * 3
        is_joined = bool(request.delimiter and delimiter)
        name = f"{request.prefix}{head}{delimiter}" if is_joined else key
        after = bisect_right(keys, name + _LAST, at) if is_joined else at + 1
        if not (is_joined and name == request.after):
            if len(found) + len(prefixes) == request.most:
                return ListedPage(tuple(found), tuple(prefixes), last)
            last = name
            if is_joined:
                prefixes.append(name)
            else:
                found.append(objects[at])
        at = after
    return ListedPage(tuple(found), tuple(prefixes), "")
