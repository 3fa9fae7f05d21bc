"""The two encodings of a change, made and read block by block, and their compression.

`xor` is the exclusive or of all bytes before and after. `overwrite` is the number of bytes that
differ, their positions in ascending order, and their new values; numbers and positions are
little-endian uint32. Either is one zstd frame that says how long its content is: SGLang reads no
further frame, and needs the length for `overwrite`.

Source: slime/utils/disk_delta.py (`overwrite_encode`), python/sglang/srt/weight_sync/
local_checkpoint.py of SGLang (`_apply_delta`); RFC 8878.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptkit.core.errors import FormatError
from ckptkit.formats.dcp.compression import ZstdContent
from ckptkit.formats.parsing import Read
from ckptkit.options import Encoding

Bytes = NDArray[np.uint8]
HINT = "the delta is damaged, or of another program; take another copy of it"
MOST_OVERWRITTEN_BYTES = 1 << 32
"""Positions of `overwrite` are uint32."""
_WINDOW_LOG = 17
"""Of the sparse changes that reinforcement learning makes, zstd's level 1 makes frames that are a
fifth smaller with this window than with its own of 512 KiB, in less time; of others, frames that
are at most 4 % larger. Every decoder reads them."""
_COUNT_BYTES = 4
_READ_BYTES = 256 << 10
_SPOOLED_BYTES = 4 << 20


class _Frame:
    """One zstd frame, handed on in pieces of the size in which the library returns them."""

    def __init__(self, size_bytes: int, put: Callable[[bytes], None]) -> None:
        level = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=_WINDOW_LOG, write_content_size=True
        )
        compressor = zstandard.ZstdCompressor(compression_params=level)
        self._object = compressor.compressobj(size=size_bytes)
        self._put = put

    def compress(self, data: Any) -> None:
        piece = self._object.compress(data)
        if piece:
            self._put(piece)

    def finish(self) -> None:
        self._put(self._object.flush())


class _XorEncoder(_Frame):
    def add(self, before: Bytes, after: Bytes) -> None:
        """Adds the next block; `before` is changed, and of no use afterwards."""
        xor_into(before, after)
        self.compress(before)

    def close(self) -> None:
        pass


class _OverwriteEncoder:
    """Collects positions and values, which follow the number of both; large ones on the disk."""

    def __init__(self, put: Callable[[bytes], None], folder: Path | None) -> None:
        self._put = put
        place = None if folder is None else str(folder)
        self._positions = SpooledTemporaryFile(_SPOOLED_BYTES, dir=place)  # noqa: SIM115
        self._values = SpooledTemporaryFile(_SPOOLED_BYTES, dir=place)  # noqa: SIM115
        self._start = self._count = 0

    def add(self, before: Bytes, after: Bytes) -> None:
        changed = np.flatnonzero(before != after)
        self._values.write(after[changed].tobytes())
        changed += self._start
        self._positions.write(changed.astype("<u4").tobytes())
        self._start += len(after)
        self._count += len(changed)

    def finish(self) -> None:
        frame = _Frame(_COUNT_BYTES + 5 * self._count, self._put)
        frame.compress(self._count.to_bytes(_COUNT_BYTES, "little"))
        for file in (self._positions, self._values):
            file.seek(0)
            while block := file.read(_READ_BYTES):
                frame.compress(block)
        frame.finish()

    def close(self) -> None:
        self._positions.close()
        self._values.close()


Encoder = _XorEncoder | _OverwriteEncoder
"""Writes the change of one tensor, whose blocks come in order; `finish` writes the rest."""


def open_encoder(
    encoding: Encoding, size_bytes: int, put: Callable[[bytes], None], folder: Path | None
) -> Encoder:
    """Returns an encoder for the change of one tensor."""
    if encoding == "xor":
        return _XorEncoder(size_bytes, put)
    return _OverwriteEncoder(put, folder)


def xor_into(target: Bytes, other: Bytes) -> None:
    """Replaces bytes by their exclusive or with as many others."""
    whole = len(target) // 8 * 8
    words = target[:whole].view(np.uint64)
    np.bitwise_xor(words, other[:whole].view(np.uint64), out=words)
    np.bitwise_xor(target[whole:], other[whole:], out=target[whole:])


class Change:
    """What becomes of the bytes of a block: `bytes & kept ^ flipped`.

    The exclusive or with a change flips bits, and a byte that is overwritten keeps none. So the
    changes of several deltas in a row make one.

    Attributes:
        flipped: The bits that change; uint8, one element per byte.
        kept: 0 for bytes that are overwritten and 255 for others; None where none is overwritten.
    """

    __slots__ = ("flipped", "kept")

    def __init__(self, size_bytes: int) -> None:
        self.flipped: Bytes = np.zeros(size_bytes, np.uint8)
        self.kept: Bytes | None = None

    def overwrite(self, positions: NDArray[np.int64], values: Bytes) -> None:
        """Has bytes overwritten, whatever they were before."""
        if self.kept is None:
            self.kept = np.full(len(self.flipped), 255, np.uint8)
        self.kept[positions] = 0
        self.flipped[positions] = values

    def apply(self, data: Bytes, start: int) -> None:
        """Changes bytes; `start` is the position of the first one in the block."""
        part = slice(start, start + len(data))
        if self.kept is not None:
            data &= self.kept[part]
        data ^= self.flipped[part]


class _Content:
    """What one frame decompresses to, read from its front; errors say `where` it is."""

    def __init__(self, read: Read, stored_bytes: int, where: str) -> None:
        self._content = ZstdContent(read, stored_bytes, where=where, hint=HINT)
        self._where = where

    def error(self, message: str) -> FormatError:
        return FormatError(message, where=self._where, hint=HINT)

    def read_some(self, block: Bytes) -> int:
        return self._content.read_into(block.data)

    def fill(self, block: Bytes) -> None:
        found = self._content.read_into(block.data)
        if found < len(block):
            raise self.error(
                f"the change ends {len(block) - found:,} bytes or more before the tensor does"
            )

    def refuse_more(self) -> None:
        if self._content.read(1):
            raise self.error("the change goes on after the tensor's end")

    def refuse_other_length(self, size_bytes: int) -> None:
        """Refuses a frame that was cut short, and further frames, which engines do not read."""
        announced = self._content.announced_bytes
        if announced is not None and announced != size_bytes:
            raise self.error(
                f"the zstd frame announces {announced:,} bytes, and {size_bytes:,} were found"
            )


class _XorDecoder:
    def __init__(self, content: _Content) -> None:
        self._content = content
        self._scratch = np.empty(_READ_BYTES, np.uint8)

    def fold(self, _start: int, change: Change) -> None:
        """Adds this change to that of the bytes from where the last one ended."""
        size = len(change.flipped)
        for low in range(0, size, _READ_BYTES):
            block = self._scratch[: min(_READ_BYTES, size - low)]
            self._content.fill(block)
            change.flipped[low : low + len(block)] ^= block

    def finish(self) -> None:
        """Makes sure that nothing follows what the tensor has bytes for."""
        self._content.refuse_more()

    def skim(self) -> int:
        """Reads all of a change from its front, without a tensor."""
        size = 0
        while found := self._content.read_some(self._scratch):
            size += found
        self._content.refuse_other_length(size)
        return size


class _OverwriteDecoder:
    """Reads positions and values at the same time, from two readers of one frame."""

    def __init__(self, positions: _Content, values: _Content, size_bytes: int) -> None:
        self._positions, self._values = positions, values
        head = np.empty(_COUNT_BYTES, np.uint8)
        positions.fill(head)
        self._left = self._count = int(head.view("<u4")[0])
        if self._left > size_bytes:
            raise positions.error(
                f"{self._left:,} bytes are overwritten in a tensor of {size_bytes:,}"
            )
        scratch = np.empty(_READ_BYTES, np.uint8)
        before = _COUNT_BYTES + 4 * self._left
        for low in range(0, before, _READ_BYTES):
            values.fill(scratch[: min(_READ_BYTES, before - low)])
        self._next: NDArray[np.int64] = np.empty(0, np.int64)
        self._last = -1

    def fold(self, start: int, change: Change) -> None:
        stop = start + len(change.flipped)
        while self._refill():
            count = int(np.searchsorted(self._next, stop))
            values = np.empty(count, np.uint8)
            self._values.fill(values)
            change.overwrite(self._next[:count] - start, values)
            self._next = self._next[count:]
            if len(self._next):
                return

    def finish(self) -> None:
        if self._refill():
            raise self._values.error(
                f"byte {int(self._next[0]):,} is overwritten, which is after the tensor's last"
            )
        self._values.refuse_more()

    def skim(self) -> int:
        while self._refill():
            self._values.fill(np.empty(len(self._next), np.uint8))
            self._next = self._next[:0]
        self._values.refuse_more()
        self._values.refuse_other_length(_COUNT_BYTES + 5 * self._count)
        return self._last + 1

    def _refill(self) -> bool:
        """Reads more positions if none is left; returns whether there are any."""
        if not len(self._next) and self._left:
            count = min(self._left, _READ_BYTES // 4)
            raw = np.empty(4 * count, np.uint8)
            self._positions.fill(raw)
            positions = raw.view("<u4").astype(np.int64)
            if positions[0] <= self._last or bool((np.diff(positions) <= 0).any()):
                raise self._positions.error("positions of overwritten bytes do not ascend")
            self._left -= count
            self._last = int(positions[-1])
            self._next = positions
        return len(self._next) > 0


Decoder = _XorDecoder | _OverwriteDecoder
"""Reads the change of one tensor, block by block from the front."""


def open_decoder(
    encoding: Encoding, read: Read, stored_bytes: int, size_bytes: int, *, where: str
) -> Decoder:
    """Returns a decoder for the change of one tensor."""
    content = _Content(read, stored_bytes, where)
    if encoding == "xor":
        return _XorDecoder(content)
    return _OverwriteDecoder(content, _Content(read, stored_bytes, where), size_bytes)


class _Piece:
    """The change of the bytes `[start, stop)`; `left` of them were not changed yet."""

    __slots__ = ("change", "left", "start", "stop")

    def __init__(self, start: int, stop: int, change: Change) -> None:
        self.start, self.stop, self.change = start, stop, change
        self.left = stop - start


class ChangeStream:
    """The change of one tensor by one delta or by several in a row, for all threads together.

    Each change can only be decoded from its front. A thread that needs a later part than is next
    decodes what is before it, and keeps it for the thread that needs that: no thread waits for
    another. So much is kept as the threads are apart.
    """

    def __init__(self, opened: Callable[[], Sequence[Decoder]], size_bytes: int) -> None:
        """Opens nothing yet."""
        self._opened = opened
        self._size_bytes = size_bytes
        self._decoders: Sequence[Decoder] | None = None
        self._lock = threading.Lock()
        self._position = 0
        self._pieces: list[_Piece] = []

    def apply(self, start: int, data: Bytes) -> None:
        """Changes bytes of the tensor from `start` on; each is changed by one call."""
        for piece, low, high in self._take(start, start + len(data)):
            piece.change.apply(data[low - start : high - start], low - piece.start)

    def _take(self, start: int, stop: int) -> list[tuple[_Piece, int, int]]:
        """Returns the pieces with bytes of a range, and which of its bytes each has."""
        with self._lock:
            if self._decoders is None:
                self._decoders = self._opened()
            if self._position < start:
                self._decode(start)
            if self._position < stop:
                self._decode(stop)
            found = [
                (piece, max(start, piece.start), min(stop, piece.stop))
                for piece in self._pieces
                if piece.start < stop and start < piece.stop
            ]
            for piece, low, high in found:
                piece.left -= high - low
            self._pieces = [piece for piece in self._pieces if piece.left]
            return found

    def _decode(self, stop: int) -> None:
        start, change = self._position, Change(stop - self._position)
        for decoder in self._decoders or ():
            decoder.fold(start, change)
        self._pieces.append(_Piece(start, stop, change))
        self._position = stop
        if stop == self._size_bytes:
            for decoder in self._decoders or ():
                decoder.finish()
            self._decoders = ()
