"""Compressed chunks of torch.distributed.checkpoint: zstd streams of `torch.save` archives.

A stream contains neither the length nor a checksum of its content, because torch compresses while
it writes. It is decompressed from front to back, as far as the caller asks; memory is bounded by
the window, whose size is checked first.

In such an archive the local headers and the pickle in front of the data give the data's position.
The directory at the end proves that position and has the checksum; until then nothing is proven.

Source: torch/distributed/checkpoint/_extension.py (`ZStandard`), torch 2.7 to 2.13; RFC 8878;
torch/serialization.py (`_save`), caffe2/serialize/inline_container.cc: `data.pkl` is the first
record; sizes are in a descriptor after each record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, cast

from msgspec import Struct

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import Shape
from ckptkit.formats.parsing import Read
from ckptkit.formats.pickle.torch_zip import LOCAL_SIGNATURE, Payload, TensorCache, locate_tensor

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionReader


MAX_WINDOW_BYTES = 8 << 20
"""The window of the library's strongest ordinary levels; that of torch's level is 2 MiB."""

_NAME = "stream.zstd"
_MAJOR_VERSION = "1"
_READ_BYTES = 1 << 20
_MOST_HEADER_BYTES = 18
_COPY_AGAIN = (
    "the file was damaged after it was saved; copy it again, or take an earlier checkpoint"
)


def is_zstd(transforms: Sequence[str]) -> bool:
    """Returns whether the transform descriptors of a stored item are those of one zstd stream.

    >>> is_zstd(["stream.zstd/1"]), is_zstd(["stream.zstd/2"]), is_zstd(["mine.crypt/1"])
    (True, False, False)
    """
    if len(transforms) != 1:
        return False
    name, _, version = transforms[0].partition("/")
    return name == _NAME and version.partition(".")[0] == _MAJOR_VERSION


class ZstdContent:
    """The content of one stream or of several consecutive ones; not thread-safe.

    `announced_bytes` is how long the first stream says that its content is, or None.
    """

    def __init__(self, read: Read, size_bytes: int, *, where: str, hint: str = "") -> None:
        """Checks the header of the first stream; `hint` says what to do if one is damaged."""
        import zstandard

        self._where = where
        self._hint = hint or _COPY_AGAIN
        head = read(0, min(_MOST_HEADER_BYTES, size_bytes))
        try:
            frame = zstandard.get_frame_parameters(head)
        except zstandard.ZstdError as error:
            raise FormatError(f"no zstd stream begins here: {error}", where=where) from error
        window, announced = frame.window_size, frame.content_size
        self.announced_bytes = None if announced == zstandard.CONTENTSIZE_UNKNOWN else announced
        if window > MAX_WINDOW_BYTES:
            raise LimitError(
                f"zstd stream needs a window of {window:,} bytes, at most"
                f" {MAX_WINDOW_BYTES:,} are allowed",
                where=where,
                hint=hint or "save again with torch's own ZStandard extension, which needs 2 MiB",
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        source = cast("IO[bytes]", _CompressedFile(read, size_bytes))  # has only `read`
        self._reader: ZstdDecompressionReader = decompressor.stream_reader(
            source, read_size=_READ_BYTES, read_across_frames=True
        )

    def read_into(self, target: memoryview) -> int:
        """Fills `target` with the next bytes; returns how many, fewer at the end only."""
        import zstandard

        at = 0
        try:
            while at < len(target):
                count = self._reader.readinto(target[at:])
                if not count:
                    break
                at += count
        except zstandard.ZstdError as error:
            raise FormatError(
                f"zstd stream is damaged: {error}",
                where=self._where,
                hint=self._hint,
            ) from error
        return at

    def read(self, count: int) -> bytes:
        """Returns the next `count` bytes, fewer at the end."""
        buffer = bytearray(count)
        return bytes(buffer[: self.read_into(memoryview(buffer))])


def decompress(read: Read, size_bytes: int, *, most_bytes: int, where: str) -> bytes:
    """Returns the whole content of a small object."""
    content = ZstdContent(read, size_bytes, where=where)
    blocks: list[bytes] = []
    total = 0
    while block := content.read(_READ_BYTES):
        blocks.append(block)
        total += len(block)
        if total > most_bytes:
            raise LimitError(
                f"{size_bytes:,} compressed bytes become more than {most_bytes:,}", where=where
            )
    return b"".join(blocks)


class _CompressedFile:
    """The compressed bytes as the file object that the library reads."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        stop = self._size_bytes if count < 0 else min(self._at + count, self._size_bytes)
        start, self._at = self._at, stop
        return self._read(start, stop) if start < stop else b""


HEAD_BYTES = 1 << 17
"""More than the bytes in front of the data in an archive of one tensor."""
TAIL_BYTES = 1 << 16
"""More than the bytes after the data."""

_LOCAL = struct.Struct("<4s2xHH4xIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR_SIGNATURE = b"PK\7\x08"
_DESCRIPTOR_FLAG = 0x0008
_PICKLE = "data.pkl"
_MOST_RECORDS = 64


class ExpectedTensor(Struct, frozen=True):
    """The tensor that an archive should hold."""

    dtype: DType
    sizes: Shape
    where: str


class ArchiveFront(Struct, frozen=True):
    """The front of an archive, and the position of the data according to it."""

    start: int  # first byte of the data, from the archive's start
    stop: int  # first byte after the data
    strides: Shape | None  # in elements; None for row-major
    head: bytes


def parse_front(head: bytes, expected: ExpectedTensor) -> ArchiveFront:
    """Finds the data of the only tensor of an archive by its first `HEAD_BYTES`."""
    where = expected.where
    records = _records(head)
    name, start, stop = next(records, ("", 0, 0))
    prefix, _, last = name.partition("/")
    if last != _PICKLE:
        raise FormatError(
            f"compressed archive begins with {name or head[:4]!r}, not with 'data.pkl', so torch"
            " did not write it",
            where=where,
        )
    tensor, row_major = TensorCache().tensor(head[start:stop], where=where)
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.sizes):
        raise FormatError(
            f"holds {tensor.dtype.name} {list(tensor.shape)} against {expected.dtype.name}"
            f" {list(expected.sizes)} in '.metadata'",
            where=where,
            hint="the file belongs to another save, or was damaged",
        )
    needed = math.prod(tensor.shape) * tensor.dtype.itemsize
    if (tensor.storage.size_bytes, tensor.storage_offset) != (needed, 0):
        raise FormatError(
            f"it uses {needed:,} bytes from element {tensor.storage_offset:,} on, and its storage"
            f" has {tensor.storage.size_bytes:,}; torch saves no more than a tensor uses",
            where=where,
        )
    record = f"{prefix}/data/{tensor.storage.key}"
    for name, start, _ in records:
        if name == record:
            stop = start + tensor.storage.size_bytes
            strides = None if row_major else tensor.strides
            return ArchiveFront(start, stop, strides, head[:start])
    raise FormatError(f"record {record!r} is not among the first of the archive", where=where)


def check_front(front: ArchiveFront, tail: bytes, expected: ExpectedTensor) -> Payload:
    """Compares the front of an archive with the directory in the bytes after its data."""

    def read(start: int, stop: int) -> bytes:
        if stop <= len(front.head):
            return front.head[start:stop]
        if start >= front.stop:
            return tail[start - front.stop : stop - front.stop]
        # Zeros stand for the data: such a read spans them, and uses only bytes around them.
        middle = bytes(min(stop, front.stop) - max(start, front.start))
        before = front.head[start:] if start < front.start else b""
        return before + middle + tail[: max(0, stop - front.stop)]

    payload = locate_tensor(read, front.stop + len(tail), where=expected.where)
    if (payload.start, payload.stop) != (front.start, front.stop):
        raise FormatError(
            f"directory has the data at bytes [{payload.start:,}, {payload.stop:,}), the headers"
            f" before them at [{front.start:,}, {front.stop:,})",
            where=expected.where,
        )
    return payload


def _records(head: bytes) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and stop of the first records; that of the last may be unknown."""
    at = 0
    for _ in range(_MOST_RECORDS):
        if at + _LOCAL.size > len(head) or not head.startswith(LOCAL_SIGNATURE, at):
            return
        _, flags, _, _, _, size, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        name_start = at + _LOCAL.size
        start = name_start + name_bytes + extra_bytes
        if start > len(head):
            return
        name = head[name_start : name_start + name_bytes].decode("utf-8", "replace")
        after = start + size
        if flags & _DESCRIPTOR_FLAG:
            size = _size_in_descriptor(head, start)
            after = start + size + _DESCRIPTOR.size
        yield name, start, start + size
        if size < 0:
            return
        at = after


def _size_in_descriptor(head: bytes, start: int) -> int:
    """Returns the size in a record's descriptor; -1 if the descriptor is not in `head`."""
    at = head.find(_DESCRIPTOR_SIGNATURE, start)
    while at >= 0 and at + _DESCRIPTOR.size <= len(head):
        if _DESCRIPTOR.unpack_from(head, at)[3] == at - start:
            return at - start
        at = head.find(_DESCRIPTOR_SIGNATURE, at + 1)
    return -1
