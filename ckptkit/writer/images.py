"""Writing one file image from the shared buffer, and summing up its blobs on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from ckptkit.core.crc import crc32
from ckptkit.core.errors import SaveError
from ckptkit.storage.syscalls import (
    BLOCK_BYTES,
    Capabilities,
    OpenFile,
    create_file,
    is_refused,
    open_direct,
    open_for_writing,
)
from ckptkit.writer.failures import naming
from ckptkit.writer.messages import Blob, Image
from ckptkit.writer.watching import Tally

STRIDE_BYTES = 8 << 20
"""What is summed up and written at a time: large enough for any device, small beside a file."""

_CRC_BYTES = 4
_SYNC_BYTES = 1 << 30  # cached at most: a last sync of all of a large file would look like a hang


class Behind:
    """A thread that does one thing at a time while its owner prepares the next."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[Exception | None] = SimpleQueue()
        self._busy = False
        self._thread = Thread(target=self._run, name="ckptkit-disk", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the previous job and starts this one; raises what the previous one raised."""
        self.wait()
        self._busy = True
        self._jobs.put(job)

    def wait(self) -> None:
        """Waits for the job under way; raises what it raised."""
        if self._busy:
            error = self._ends.get()
            self._busy = False
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the thread after its job."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  raised again by `wait`
                self._ends.put(error)
            else:
                self._ends.put(None)


class _Output:
    """A file that is being written, past the page cache as long as that is possible."""

    def __init__(self, path: Path, size_bytes: int, capabilities: Capabilities) -> None:
        self._path = path
        self._capabilities = capabilities
        with naming(path):
            create_file(path, size_bytes, capabilities)
            direct = open_direct(path, capabilities)
            self._file: OpenFile = direct or open_for_writing(path, capabilities)
        self.direct = direct is not None
        self._cached_bytes = 0

    def write(self, at: int, data: memoryview) -> None:
        """Writes at a byte of the file; address, place and length are multiples of a block."""
        with naming(self._path):
            try:
                self._file.write_at(at, data)
            except OSError as error:
                if not self.direct or not is_refused(error):
                    raise
                self._file.close()
                self._file = open_for_writing(self._path, self._capabilities)
                self.direct = False
                self._file.write_at(at, data)
            self._cached_bytes += len(data)
            if not self.direct and self._cached_bytes >= _SYNC_BYTES:
                self._file.sync()
                self._cached_bytes = 0

    def end(self, size_bytes: int) -> None:
        """Cuts off the padding and makes the file durable."""
        with naming(self._path):
            self._file.truncate(size_bytes)
            self._file.sync()
        self._file.close()

    def close(self) -> None:
        """Closes the file, if it is still open."""
        self._file.close()


class ImageWriter:
    """Writes images one after another; they are durable when the block is left.

    While one stride of an image is on its way to the disk, the next one is summed up.

    Args:
        capabilities: What the platform offers.
        tally: Is told of every stride.
    """

    def __init__(self, capabilities: Capabilities, tally: Tally) -> None:
        self._capabilities = capabilities
        self._tally = tally
        self._behind = Behind()
        self._outputs: list[_Output] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._behind.wait()
        finally:
            self._behind.close()
            for output in self._outputs:
                output.close()

    @property
    def refused(self) -> bool:
        """Whether a file was written through the page cache."""
        return any(not output.direct for output in self._outputs)

    def write(self, path: Path, image: Image, buffer: memoryview) -> None:
        """Writes an image, and begins to make it durable.

        Args:
            path: Where it goes; nothing lies there yet.
            image: What it holds.
            buffer: The whole shared buffer, writable.

        Raises:
            SaveError: If the image does not fit the buffer.
            OSError: If it cannot be written, or the one before could not.
        """
        stop = _checked(image, len(buffer))
        output = _Output(path, stop - image.start, self._capabilities)
        self._outputs.append(output)
        sums = _Sums(image.blobs, buffer)
        for start in range(image.start, stop, STRIDE_BYTES):
            data = buffer[start : min(start + STRIDE_BYTES, stop)]
            sums.advance(start + len(data))
            self._behind.start(partial(self._put, output, start - image.start, data))
        self._behind.start(partial(output.end, image.size_bytes))

    def _put(self, output: _Output, at: int, data: memoryview) -> None:
        output.write(at, data)
        self._tally.done_bytes += len(data)


class _Sums:
    """Sums up blobs in order, and puts each sum where it belongs."""

    def __init__(self, blobs: tuple[Blob, ...], buffer: memoryview) -> None:
        self._left = iter(blobs)
        self._blob = next(self._left, None)
        self._buffer = buffer
        self._at = self._blob.start if self._blob else 0
        self._crc = 0

    def advance(self, stop: int) -> None:
        """Sums up what lies before `stop`; a sum's places come after its data."""
        while self._blob is not None and self._blob.start < stop:
            end = min(stop, self._blob.stop)
            self._crc = crc32(self._buffer[self._at : end], self._crc)
            self._at = end
            if end < self._blob.stop:
                return
            self._place()

    def _place(self) -> None:
        assert self._blob is not None  # noqa: S101  narrows the type
        for at in self._blob.crc_at:
            self._buffer[at : at + _CRC_BYTES] = self._crc.to_bytes(_CRC_BYTES, "little")
        self._blob = next(self._left, None)
        self._at, self._crc = self._blob.start if self._blob else 0, 0


def _checked(image: Image, buffer_bytes: int) -> int:
    """Returns where the image ends in the buffer, with its padding.

    Raises:
        SaveError: If image or blobs lie where they cannot.
    """
    end = image.start + image.size_bytes
    stop = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    fits = image.start >= 0 and image.size_bytes >= 0 and stop <= buffer_bytes
    at = image.start
    for blob in image.blobs:
        fits &= at <= blob.start <= blob.stop
        fits &= all(blob.stop <= place <= end - _CRC_BYTES for place in blob.crc_at)
        at = blob.stop
    if image.start % BLOCK_BYTES or not fits or at > end:
        raise SaveError(
            f"the image at [{image.start:,}, {end:,}) was found to lie unaligned or outside of the"
            f" buffer of {buffer_bytes:,} bytes, or its blobs outside of it",
            where=image.path,
            hint="this is a fault of ckptkit; please report it with this text",
        )
    return stop
