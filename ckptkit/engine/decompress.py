"""Compressed records, decoded once from front to back by all threads of one source together.

A compressed chunk can only be decoded from its start, but several tasks need parts of it, in about
the order of its bytes. So its decoder stays where the last read ended, and the blocks decoded last
are kept for threads that are a little behind. For a thread that is too far behind, the chunk is
decoded again from its start: that is slow, and the result is the same.
"""

from __future__ import annotations

import math
import posixpath
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    InputError,
    LimitError,
    TruncatedFileError,
    UnsupportedError,
)
from ckptkit.core.geometry import row_major_strides
from ckptkit.core.index import COMPRESSED, CONTAINERS, ChunkTable, Shape, TensorEntry, TensorIndex
from ckptkit.engine.locate import Located
from ckptkit.formats.dcp.compression import (
    HEAD_BYTES,
    TAIL_BYTES,
    ArchiveFront,
    ExpectedTensor,
    ZstdContent,
    check_front,
    parse_front,
)
from ckptkit.formats.parsing import read_from
from ckptkit.storage.base import Source

BLOCK_BYTES = 256 << 10
KEPT_BYTES = 40 << 20
"""A task is 8 MiB, and the usual memory limit allows four workers: so far apart are their tasks."""
MOST_DECODERS = 32
"""Each takes its window, 2 MiB as torch writes it, once so much was decoded."""
_DECODER_BYTES = 3 << 20
_MOST_TURNED_BYTES = KEPT_BYTES // 2


def decoding_bytes(index: TensorIndex) -> int:
    """Returns how much memory decoding takes, without that of the workers; 0 if nothing is."""
    kinds = [CONTAINERS.index(kind) for kind in COMPRESSED]
    count = int(np.count_nonzero(np.isin(index.records.container, kinds)))
    content = sum(entry.size_bytes for entry in index.tensors.values()) if count else 0
    return min(KEPT_BYTES, content) + min(MOST_DECODERS, count) * min(_DECODER_BYTES, content)


class DecodedRecords:
    """What threads share: the streams of a source's compressed records, and decoded blocks."""

    def __init__(self, source: Source, index: TensorIndex) -> None:
        self._source = source
        self._index = index
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self._live: OrderedDict[int, _Stream] = OrderedDict()
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._kept_bytes = 0

    def locate(
        self, entry: TensorEntry, chunks: ChunkTable, row: int, unproven: Callable[[], None]
    ) -> Located:
        """Finds the data of a compressed chunk; positions are those in what is decoded.

        `unproven`: is called if it turns out that no checksum is stored for the chunk.
        """
        number = int(chunks.record[row])
        path = self._index.files[self._index.records[number].file].path
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:
                where = f"{posixpath.join(self._source.location, path)}, tensor {entry.key!r}"
                sizes = tuple(chunks.sizes[row].tolist())
                expected = ExpectedTensor(entry.stored_dtype, sizes, where)
                stream = _Stream(self, number, expected, unproven)
                if self._index.records[number].container == "zstd":
                    stream = _BareStream(self, number, expected, unproven, chunks.strides.get(row))
                self._streams[number] = stream
        ahead = stream.ahead()
        if ahead.strides is not None and ahead.stop - ahead.start > _MOST_TURNED_BYTES:
            raise UnsupportedError(
                f"is compressed and not stored row by row, and its {ahead.stop - ahead.start:,}"
                f" bytes are more than the {_MOST_TURNED_BYTES:,} that are kept in memory",
                where=stream.expected.where,
                hint="load it with torch and save it without compression",
            )
        return Located(path, ahead.start, ahead.stop, None, ahead.start, ahead.strides, number)

    def read_into(self, record: int, start: int, target: memoryview) -> None:
        """Fills `target` with decoded bytes of a record that was located, from `start` on."""
        self._streams[record].read_into(start, target)

    def finish(self) -> None:
        """Decodes the rest of every record that was read in part, and proves its checksum."""
        while True:
            with self._lock:
                open_ones = [s for s in self._streams.values() if not s.is_settled]
            if not open_ones:
                return
            open_ones[0].settle()

    def prove(self) -> None:
        """Does the same; a damaged record is an error in every call, and not in the first only."""
        self.finish()
        with self._lock:
            failures = (stream.failure for stream in self._streams.values())
            failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None:
            raise failure

    def content_of(self, stream: _Stream) -> ZstdContent:
        """Opens a record from its start, and closes another if too many are open."""
        record = self._index.records[stream.number]
        read = read_from(self._source, self._index.files[record.file].path, record.start)
        content = ZstdContent(read, record.stop - record.start, where=stream.expected.where)
        with self._lock:
            self._live[stream.number] = stream
            for number, other in list(self._live.items()):
                if len(self._live) <= MOST_DECODERS:
                    break
                if other is not stream and other.let_go():
                    del self._live[number]
        return content

    def touch(self, stream: _Stream) -> None:
        """Marks a decoder as used last."""
        with self._lock:
            if stream.number in self._live:
                self._live.move_to_end(stream.number)

    def no_longer_live(self, stream: _Stream) -> None:
        with self._lock:
            self._live.pop(stream.number, None)

    def kept(self, key: tuple[int, int]) -> bytes | None:
        """Returns a block that was decoded lately, by record and number; None if it is gone."""
        return self._kept.get(key)

    def keep(self, key: tuple[int, int], block: bytes) -> None:
        """Keeps a block, and drops those that were decoded longest ago beyond `KEPT_BYTES`."""
        with self._lock:
            before = self._kept.pop(key, b"")
            self._kept[key] = block
            self._kept_bytes += len(block) - len(before)
            while self._kept_bytes > KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= len(oldest)


class _Decoder(Struct):
    """A decoder whose next block of the data is number `block`."""

    content: ZstdContent
    rest: memoryview
    block: int = 0
    crc: int = 0

    def take(self, count: int) -> bytes:
        """Returns the next bytes of the archive; some may have been decoded before."""
        first = bytes(self.rest[:count])
        self.rest = self.rest[count:]
        return first + self.content.read(count - len(first)) if len(first) < count else first


class _Stream:
    """One compressed record."""

    def __init__(
        self,
        pool: DecodedRecords,
        number: int,
        expected: ExpectedTensor,
        unproven: Callable[[], None],
    ) -> None:
        self.number = number
        self.expected = expected
        self.is_settled = False
        self.failure: InputError | None = None
        self._pool = pool
        self._unproven = unproven
        self._lock = threading.Lock()
        self._ahead: ArchiveFront | None = None
        self._decoder: _Decoder | None = None

    def ahead(self) -> ArchiveFront:
        with self._lock:
            return self._looked_ahead()

    def read_into(self, start: int, target: memoryview) -> None:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            try:
                at = start - self._looked_ahead().start
                self._pool.touch(self)
                done = 0
                while done < len(target):
                    number, low = divmod(at + done, BLOCK_BYTES)
                    block = self._pool.kept((self.number, number)) or self._decoded(number)
                    part = block[low : low + len(target) - done]
                    target[done : done + len(part)] = part
                    done += len(part)
            except InputError as error:
                self.failure, self.is_settled = error, True
                raise

    def settle(self) -> None:
        """Decodes what is left, and proves the whole."""
        with self._lock:
            try:
                if not self.is_settled:
                    ahead = self._looked_ahead()
                    last = max(0, -(-(ahead.stop - ahead.start) // BLOCK_BYTES) - 1)
                    self._decoded(last)
            except InputError as error:
                self.failure = error
                raise
            finally:
                self.is_settled = True
                self._close()

    def let_go(self) -> bool:
        """Drops the decoder, unless a thread is decoding."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._decoder = None
        finally:
            self._lock.release()
        return True

    def _close(self) -> None:
        self._decoder = None
        self._pool.no_longer_live(self)

    def _looked_ahead(self) -> ArchiveFront:
        if self._ahead is None:
            self._open()
        assert self._ahead is not None  # noqa: S101  narrows the type
        return self._ahead

    def _open(self) -> _Decoder:
        content = self._pool.content_of(self)
        head = content.read(HEAD_BYTES)
        if self._ahead is None:
            self._ahead = parse_front(head, self.expected)
        rest = memoryview(head)[self._ahead.start :]
        self._decoder = _Decoder(content, rest)
        return self._decoder

    def _decoded(self, number: int) -> bytes:
        """Decodes up to and including a block of the data, and returns that block."""
        ahead = self._looked_ahead()
        decoder = self._decoder
        if decoder is None or decoder.block > number:
            decoder = self._open()
        size = ahead.stop - ahead.start
        block = b""
        while decoder.block <= number:
            wanted = min(BLOCK_BYTES, size - decoder.block * BLOCK_BYTES)
            block = decoder.take(wanted)
            if len(block) < wanted:
                decoded = decoder.block * BLOCK_BYTES + len(block)
                raise TruncatedFileError(
                    f"zstd stream ends after {decoded:,} of {size:,} bytes of data",
                    where=self.expected.where,
                    hint="the file was cut short or damaged; copy it again, or take an earlier"
                    " checkpoint",
                )
            decoder.crc = crc32(block, decoder.crc)
            self._pool.keep((self.number, decoder.block), block)
            decoder.block += 1
        if decoder.block * BLOCK_BYTES >= size:
            self._prove(decoder, ahead)
        return block

    def _prove(self, decoder: _Decoder, ahead: ArchiveFront) -> None:
        """Reads what follows the data, to the end of the record, and compares the checksum."""
        if not self.is_settled:
            tail = decoder.take(TAIL_BYTES + 1)
            if len(tail) > TAIL_BYTES:
                raise LimitError(
                    f"more than {TAIL_BYTES:,} bytes follow the data, which no archive of one"
                    " tensor has",
                    where=self.expected.where,
                )
            payload = check_front(ahead, tail, self.expected)
            if payload.crc32 is None:
                self._unproven()
            elif payload.crc32 != decoder.crc:
                raise ChecksumError(
                    f"decompressed data have CRC-32 {decoder.crc:08x} against"
                    f" {payload.crc32:08x} stored",
                    where=self.expected.where,
                    hint="the file was damaged after it was saved; copy it again, or take an"
                    " earlier checkpoint",
                )
            self.is_settled = True
            self._ahead = replace(ahead, head=b"")
        self._close()


class _BareStream(_Stream):
    """A compressed record that holds the elements alone, such as a chunk of zarr."""

    def __init__(
        self,
        pool: DecodedRecords,
        number: int,
        expected: ExpectedTensor,
        unproven: Callable[[], None],
        strides: Shape | None,
    ) -> None:
        super().__init__(pool, number, expected, unproven)
        sizes, whole = expected.sizes, strides or row_major_strides(expected.sizes)
        elements = math.prod(sizes) and 1 + sum(
            (size - 1) * step for size, step in zip(sizes, whole, strict=True)
        )
        self._ahead = ArchiveFront(0, elements * expected.dtype.itemsize, strides, b"")

    def _open(self) -> _Decoder:
        self._decoder = _Decoder(self._pool.content_of(self), memoryview(b""))
        return self._decoder

    def _prove(self, decoder: _Decoder, ahead: ArchiveFront) -> None:
        """Checks that the stream ends with the elements; a checksum in it was compared by then."""
        if not self.is_settled:
            if ahead.strides is None and decoder.take(1):
                raise FormatError(
                    f"zstd stream holds more than the {ahead.stop:,} bytes of its chunk",
                    where=self.expected.where,
                )
            self._unproven()
            self.is_settled = True
        self._close()
