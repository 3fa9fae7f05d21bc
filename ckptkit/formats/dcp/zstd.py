"""zstd streams of torch.distributed.checkpoint's compression, decoded from front to back.

A stream tells neither how long its content is nor its checksum: torch compresses while it writes.
How much is decoded is up to the caller; memory is bounded by the window, which is looked at first.

Source: torch/distributed/checkpoint/_extension.py (`ZStandard`), torch 2.7 to 2.13; RFC 8878.

An archive of `torch.save` that can be read from front to back only, because it is compressed.

Where the data begin is told by the local headers and the pickle before them; that this was true,
and which checksum the data have, by the directory at the end. Until then nothing is proven.

Source: torch/serialization.py (`_save`), caffe2/serialize/inline_container.cc: `data.pkl` is the
first record; sizes come in a descriptor after each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError, LimitError
from ckptkit.core.index import Shape
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.pickle.torch_zip import Payload, TensorCache, locate_tensor
from ckptkit.formats.pickle.zip_directory import LOCAL_SIGNATURE, Read

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionReader


MAX_WINDOW_BYTES = 8 << 20
"""What the library's strongest ordinary levels take; torch's level takes 2 MiB."""

_NAME = "stream.zstd"
_MAJOR_VERSION = "1"
_READ_BYTES = 1 << 20
_MOST_HEADER_BYTES = 18


def is_zstd(transforms: Sequence[str]) -> bool:
    """Tells whether transform descriptors of a stored item are those of one zstd stream.

    >>> is_zstd(["stream.zstd/1"]), is_zstd(["stream.zstd/2"]), is_zstd(["mine.crypt/1"])
    (True, False, False)
    """
    if len(transforms) != 1:
        return False
    name, _, version = transforms[0].partition("/")
    return name == _NAME and version.partition(".")[0] == _MAJOR_VERSION


class ZstdContent:
    """The content of one stream, or of several that follow one another; not for two threads."""

    def __init__(self, read: Read, size_bytes: int, *, where: str) -> None:
        """Looks at the header of the first stream.

        Args:
            read: Returns the compressed bytes `[start, stop)`.
            size_bytes: How many there are.
            where: File and tensor, for messages.
        """
        import zstandard

        self._where = where
        head = read(0, min(_MOST_HEADER_BYTES, size_bytes))
        try:
            window = zstandard.get_frame_parameters(head).window_size
        except zstandard.ZstdError as error:
            raise FormatError(f"no zstd stream begins there: {error}", where=where) from error
        if window > MAX_WINDOW_BYTES:
            raise LimitError(
                f"zstd stream asks for a window of {window:,} bytes, at most"
                f" {MAX_WINDOW_BYTES:,} are taken",
                where=where,
                hint="save again with torch's own ZStandard extension, which takes 2 MiB",
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        source = cast("IO[bytes]", _Compressed(read, size_bytes))  # as much of one as is needed
        self._reader: ZstdDecompressionReader = decompressor.stream_reader(
            source, read_size=_READ_BYTES, read_across_frames=True
        )

    def read_into(self, target: memoryview) -> int:
        """Fills `target` with what comes next, as far as there is something.

        Returns:
            How many bytes were there; fewer than asked for at the end alone.
        """
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
                hint="the file was damaged after it was saved; copy it again, or take an earlier"
                " checkpoint",
            ) from error
        return at

    def read(self, count: int) -> bytes:
        """Returns the next `count` bytes, fewer at the end; raises what `read_into` raises."""
        buffer = bytearray(count)
        return bytes(buffer[: self.read_into(memoryview(buffer))])


def decoded(read: Read, size_bytes: int, *, most_bytes: int, where: str) -> bytes:
    """Returns the whole content of something small.

    Args:
        read: Returns the compressed bytes `[start, stop)`.
        size_bytes: How many there are.
        most_bytes: How many decoded ones are taken.
        where: File and object, for messages.
    """
    content = ZstdContent(read, size_bytes, where=where)
    pieces: list[bytes] = []
    found = 0
    while piece := content.read(_READ_BYTES):
        pieces.append(piece)
        found += len(piece)
        if found > most_bytes:
            raise LimitError(
                f"{size_bytes:,} compressed bytes become more than {most_bytes:,}", where=where
            )
    return b"".join(pieces)


class _Compressed:
    """Compressed bytes as the library wants to read them."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        stop = self._size_bytes if count < 0 else min(self._at + count, self._size_bytes)
        start, self._at = self._at, stop
        return self._read(start, stop) if start < stop else b""


HEAD_BYTES = 1 << 17
"""In an archive of one tensor all that comes before its data fits in here by far."""
TAIL_BYTES = 1 << 16
"""And all that comes after them."""

_LOCAL = struct.Struct("<4s2xHH4xIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR_SIGNATURE = b"PK\7\x08"
_DESCRIPTOR_FLAG = 0x0008
_PICKLE = "data.pkl"
_MOST_RECORDS = 64


@dataclass(frozen=True, slots=True)
class Expected:
    """The tensor that an archive should hold.

    Attributes:
        dtype: Its element type.
        sizes: Its shape.
        where: File and tensor, for messages.
    """

    dtype: DType
    sizes: Shape
    where: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the front of an archive tells.

    Attributes:
        start: First byte of the data, from the archive's start.
        stop: First byte after them.
        strides: In elements; None for row-major.
        head: The bytes up to `start`.
    """

    start: int
    stop: int
    strides: Shape | None
    head: bytes


def look_ahead(head: bytes, expected: Expected) -> Ahead:
    """Finds the data of the only tensor of an archive from the bytes before it.

    Args:
        head: The first `HEAD_BYTES` of the archive, or all of a shorter one.
        expected: What it should hold.
    """
    where = expected.where
    records = _records(head)
    name, start, stop = next(records, ("", 0, 0))
    prefix, _, last = name.partition("/")
    if last != _PICKLE:
        raise FormatError(
            f"what is compressed begins with {name or head[:4]!r}, not with 'data.pkl', so torch"
            " did not write it",
            where=where,
        )
    tensor, row_major = TensorCache().tensor(head[start:stop], where=where)
    _check_tensor(tensor, expected)
    wanted = f"{prefix}/data/{tensor.storage.key}"
    for name, start, _ in records:
        if name == wanted:
            size = tensor.storage.size_bytes
            strides = None if row_major else tensor.strides
            return Ahead(start, start + size, strides, head[:start])
    raise FormatError(f"record {wanted!r} is not among the first of the archive", where=where)


def _check_tensor(tensor: TensorRef, expected: Expected) -> None:
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.sizes):
        raise FormatError(
            f"holds {tensor.dtype.name} {list(tensor.shape)} against {expected.dtype.name}"
            f" {list(expected.sizes)} in '.metadata'",
            where=expected.where,
            hint="the file belongs to another save, or was damaged",
        )
    needed = math.prod(tensor.shape) * tensor.dtype.itemsize
    if (tensor.storage.size_bytes, tensor.storage_offset) != (needed, 0):
        raise FormatError(
            f"its storage has {tensor.storage.size_bytes:,} bytes of which it uses"
            f" {needed:,} from element {tensor.storage_offset:,} on; torch saves no more than it"
            " uses",
            where=expected.where,
        )


def prove(ahead: Ahead, tail: bytes, expected: Expected) -> Payload:
    """Compares what the front told with the directory at the end.

    Args:
        ahead: What the front told.
        tail: All bytes from the end of the data on.
        expected: What the archive should hold.

    Returns:
        Where the data lie, with their checksum.
    """

    def read(start: int, stop: int) -> bytes:
        if stop <= len(ahead.head):
            return ahead.head[start:stop]
        if start >= ahead.stop:
            return tail[start - ahead.stop : stop - ahead.stop]
        # Of the data themselves only their last or first bytes are asked for, among others.
        middle = bytes(min(stop, ahead.stop) - max(start, ahead.start))
        before = ahead.head[start:] if start < ahead.start else b""
        return before + middle + tail[: max(0, stop - ahead.stop)]

    payload = locate_tensor(read, ahead.stop + len(tail), where=expected.where)
    if (payload.start, payload.stop) != (ahead.start, ahead.stop):
        raise FormatError(
            f"directory has the data at bytes [{payload.start:,}, {payload.stop:,}), the headers"
            f" before them at [{ahead.start:,}, {ahead.stop:,})",
            where=expected.where,
        )
    return payload


def _records(head: bytes) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and stop of the first records; the stop of the last may be unknown."""
    at = 0
    for _ in range(_MOST_RECORDS):
        if at + _LOCAL.size > len(head) or not head.startswith(LOCAL_SIGNATURE, at):
            return
        _, flags, _, _, _, size, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        name_start = at + _LOCAL.size
        start = name_start + name_bytes + extra_bytes
        name = head[name_start : name_start + name_bytes].decode("utf-8", "replace")
        after = start + size
        if flags & _DESCRIPTOR_FLAG:
            size = _described_bytes(head, start)
            after = start + size + _DESCRIPTOR.size
        yield name, start, start + size
        if size < 0:
            return
        at = after


def _described_bytes(head: bytes, start: int) -> int:
    """Returns the size of a record that its descriptor gives; -1 where that is further away."""
    at = head.find(_DESCRIPTOR_SIGNATURE, start)
    while at >= 0 and at + _DESCRIPTOR.size <= len(head):
        if _DESCRIPTOR.unpack_from(head, at)[3] == at - start:
            return at - start
        at = head.find(_DESCRIPTOR_SIGNATURE, at + 1)
    return -1
