"""zstd streams of torch.distributed.checkpoint's compression, decoded from front to back.

A stream tells neither how long its content is nor its checksum: torch compresses while it writes.
How much is decoded is up to the caller; memory is bounded by the window, which is looked at first.

Source: torch/distributed/checkpoint/_extension.py (`ZStandard`), torch 2.7 to 2.13; RFC 8878.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, cast

from ckptkit.core.errors import FormatError, LimitError
from ckptkit.formats.zip_directory import Read

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

        Raises:
            FormatError: If no stream begins there.
            LimitError: If decoding it would take too much memory.
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

        Raises:
            FormatError: If the stream is damaged.
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

    Raises:
        FormatError: If the stream is damaged.
        LimitError: If there are more bytes, or decoding takes too much memory.
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
