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
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptkit.core.errors import FormatError
from ckptkit.deltas.form import HINT, Encoding
from ckptkit.formats.dcp.compression import ZstdContent
from ckptkit.formats.parsing import Read

Bytes = NDArray[np.uint8]
MOST_OVERWRITTEN_BYTES = 1 << 32
"""Positions of `overwrite` are uint32."""
_WINDOW_LOG = 17
"""Of the sparse changes that reinforcement learning makes, zstd's level 1 makes frames that are a
fifth smaller with this window than with its own of 512 KiB, in less time; of others, frames that
are at most 4 % larger. Every decoder reads them."""
_COUNT_BYTES = 4
_READ_BYTES = 256 << 10
_SPOOLED_BYTES = 4 << 20


class Encoder(Protocol):
    """Writes the change of one tensor; the blocks come in order."""

    def add(self, before: Bytes, after: Bytes) -> None:
        """Adds the next block; `before` is changed, and of no use afterwards."""
        ...

    def finish(self) -> None:
        """Writes the rest."""
        ...

    def close(self) -> None:
        """Frees what it took, finished or not."""
        ...


class _Frame:
    """One zstd frame, handed on in pieces of the size in which the library returns them."""

    def __init__(self, size_bytes: int, put: Callable[[bytes], None]) -> None:
        level = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=_WINDOW_LOG, write_content_size=True
        )
        compressor = zstandard.ZstdCompressor(compression_params=level)
        self._object = compressor.compressobj(size=size_bytes)
        self._put = put

    def add(self, data: Any) -> None:
        piece = self._object.compress(data)
        if piece:
            self._put(piece)

    def finish(self) -> None:
        self._put(self._object.flush())


class _XorEncoder:
    def __init__(self, size_bytes: int, put: Callable[[bytes], None]) -> None:
        self._frame = _Frame(size_bytes, put)

    def add(self, before: Bytes, after: Bytes) -> None:
        xor_into(before, after)
        self._frame.add(before)

    def finish(self) -> None:
        self._frame.finish()

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
        frame.add(self._count.to_bytes(_COUNT_BYTES, "little"))
        for file in (self._positions, self._values):
            file.seek(0)
            while block := file.read(_READ_BYTES):
                frame.add(block)
        frame.finish()

    def close(self) -> None:
        self._positions.close()
        self._values.close()


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


class Decoder(Protocol):
    """Reads the change of one tensor, block by block from the front."""

    def fold(self, start: int, change: Change) -> None:
        """Adds this change to the change of the bytes from `start` on, where the last one ended."""
        ...

    def finish(self) -> None:
        """Makes sure that nothing follows what the tensor has bytes for."""
        ...

    def skim(self) -> int:
        """Reads all of a change from its front, without a tensor."""
        ...


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


class _XorDecoder:
    def __init__(self, content: ZstdContent, where: str) -> None:
        self._content = content
        self._where = where
        self._scratch = np.empty(_READ_BYTES, np.uint8)

    def fold(self, _start: int, change: Change) -> None:
        size = len(change.flipped)
        for low in range(0, size, _READ_BYTES):
            block = self._scratch[: min(_READ_BYTES, size - low)]
            _fill(self._content, block, self._where)
            change.flipped[low : low + len(block)] ^= block

    def finish(self) -> None:
        _refuse_more(self._content, self._where)

    def skim(self) -> int:
        size = 0
        while found := self._content.read_into(self._scratch.data):
            size += found
        _refuse_other_length(self._content, size, self._where)
        return size


class _OverwriteDecoder:
    """Reads positions and values at the same time, from two readers of one frame."""

    def __init__(
        self, positions: ZstdContent, values: ZstdContent, size_bytes: int, where: str
    ) -> None:
        self._positions, self._values = positions, values
        self._where = where
        head = np.empty(_COUNT_BYTES, np.uint8)
        _fill(positions, head, where)
        self._left = self._count = int(head.view("<u4")[0])
        if self._left > size_bytes:
            raise FormatError(
                f"{self._left:,} bytes are overwritten in a tensor of {size_bytes:,}",
                where=where,
                hint=HINT,
            )
        scratch = np.empty(_READ_BYTES, np.uint8)
        before = _COUNT_BYTES + 4 * self._left
        for low in range(0, before, _READ_BYTES):
            _fill(values, scratch[: min(_READ_BYTES, before - low)], where)
        self._next: NDArray[np.int64] = np.empty(0, np.int64)
        self._last = -1

    def fold(self, start: int, change: Change) -> None:
        stop = start + len(change.flipped)
        while self._refill():
            count = int(np.searchsorted(self._next, stop))
            values = np.empty(count, np.uint8)
            _fill(self._values, values, self._where)
            change.overwrite(self._next[:count] - start, values)
            self._next = self._next[count:]
            if len(self._next):
                return

    def finish(self) -> None:
        if self._refill():
            raise FormatError(
                f"byte {int(self._next[0]):,} is overwritten, which is after the tensor's last",
                where=self._where,
                hint=HINT,
            )
        _refuse_more(self._values, self._where)

    def skim(self) -> int:
        while self._refill():
            _fill(self._values, np.empty(len(self._next), np.uint8), self._where)
            self._next = self._next[:0]
        _refuse_more(self._values, self._where)
        _refuse_other_length(self._values, _COUNT_BYTES + 5 * self._count, self._where)
        return self._last + 1

    def _refill(self) -> bool:
        """Reads more positions if none is left; returns whether there are any."""
        if not len(self._next) and self._left:
            count = min(self._left, _READ_BYTES // 4)
            raw = np.empty(4 * count, np.uint8)
            _fill(self._positions, raw, self._where)
            positions = raw.view("<u4").astype(np.int64)
            if positions[0] <= self._last or bool((np.diff(positions) <= 0).any()):
                raise FormatError(
                    "positions of overwritten bytes do not ascend", where=self._where, hint=HINT
                )
            self._left -= count
            self._last = int(positions[-1])
            self._next = positions
        return len(self._next) > 0


def _fill(content: ZstdContent, block: Bytes, where: str) -> None:
    found = content.read_into(block.data)
    if found < len(block):
        raise FormatError(
            f"the change ends {len(block) - found:,} bytes or more before the tensor does",
            where=where,
            hint=HINT,
        )


def _refuse_more(content: ZstdContent, where: str) -> None:
    if content.read(1):
        raise FormatError("the change goes on after the tensor's end", where=where, hint=HINT)


def _refuse_other_length(content: ZstdContent, size_bytes: int, where: str) -> None:
    """Refuses a frame that was cut short, and further frames, which engines do not read."""
    announced = content.announced_bytes
    if announced is not None and announced != size_bytes:
        raise FormatError(
            f"the zstd frame announces {announced:,} bytes, and {size_bytes:,} were found",
            where=where,
            hint=HINT,
        )


def open_decoder(
    encoding: Encoding, read: Read, stored_bytes: int, size_bytes: int, *, where: str
) -> Decoder:
    """Returns a decoder for the change of one tensor."""
    content = ZstdContent(read, stored_bytes, where=where, hint=HINT)
    if encoding == "xor":
        return _XorDecoder(content, where)
    values = ZstdContent(read, stored_bytes, where=where, hint=HINT)
    return _OverwriteDecoder(content, values, size_bytes, where)


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
