"""One object that is being written to S3: invisible until its upload is completed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptkit.core.crc import crc32, crc32_combine
from ckptkit.core.errors import ChecksumError, OutputError
from ckptkit.core.object_parts import CopiedRange, ObjectPart, cut_into_parts
from ckptkit.storage.part_buffers import PartBuffers
from ckptkit.storage.s3_uploads import S3Uploads, SentPart

if TYPE_CHECKING:  # the process that uploads does without numpy
    from ckptkit.storage.base import CopySource

SMALL_BYTES = 1 << 20
"""Up to which an object is kept in memory and sent by one request, when it may be visible."""


class S3Object:
    """An object of known size, filled in any order by any number of threads."""

    def __init__(
        self,
        store: S3Uploads,
        key: str,
        size_bytes: int,
        copies: Sequence[CopiedRange] = (),
        *,
        begun: Callable[[str, str], None],
    ) -> None:
        """Prepares it; the store hears of it with the first bytes.

        Args:
            store: Where it will be.
            key: What it will be called.
            size_bytes: Its size.
            copies: What the store is to copy, as `choose_copies` chose it.
            begun: Called with key and upload before the upload gets its first part.
        """
        self.key = key
        self.size_bytes = size_bytes
        self._store = store
        self._begun = begun
        self._is_small = size_bytes <= SMALL_BYTES and not copies
        self._parts = _parts(size_bytes, copies, in_one=self._is_small)
        self._buffers = PartBuffers(self._parts)
        self._small = b""
        self._upload = ""
        self._is_visible = False
        self._lock = threading.Lock()
        self._sent: dict[int, SentPart] = {}
        self._sums: dict[int, int] = {}

    @property
    def copied_parts(self) -> tuple[ObjectPart, ...]:
        """The parts that are to be copied by the store."""
        return tuple(part for part in self._parts if part.copied is not None)

    def write(self, start: int, data: memoryview) -> None:
        """Takes bytes from `start` on, and sends every part that they complete."""
        for part, whole in self._buffers.add(start, data.cast("B")):
            with whole.getbuffer() as view:
                self._sums[part.number] = crc32(view)
            if self._is_small:
                self._small = whole.getvalue()
            else:
                upload, checksum = self._begin(), self._sums[part.number]
                self._sent[part.number] = self._store.send(
                    self.key, upload, part.number, whole, checksum
                )

    def copy(self, part: ObjectPart, source: CopySource) -> None:
        """Has the store copy a part."""
        span = part.source_start, part.source_start + part.stop - part.start
        upload = self._begin()
        self._sent[part.number] = self._store.copy(self.key, upload, part.number, source, span)

    @property
    def is_whole(self) -> bool:
        """Whether all of its bytes are there."""
        done = self._sums if self._is_small else self._sent
        return len(done) == len(self._parts)

    def publish(self) -> None:
        """Makes it visible, and compares what the store has with what it was given.

        Raises:
            ChecksumError: If the store has other bytes.
            OutputError: If the store copied parts and does not tell what it has.
            ValueError: If bytes are missing.
        """
        if not self.is_whole:
            raise ValueError(f"{self.key!r} lacks {len(self._parts) - len(self._sent)} parts")
        expected = self._expected()
        if self._is_small:
            self._store.put(self.key, self._small, expected)
            self._is_visible = True
            return
        self._complete(expected)
        self._is_visible = True
        self._check(expected)

    def remove(self) -> None:
        """Removes what was sent, and the object if it is visible already."""
        if self._is_visible:
            self._store.delete([self.key])
        elif self._upload:
            self._store.abort(self.key, self._upload)

    def _complete(self, expected: int) -> None:
        parts = [self._sent[part.number] for part in self._parts]
        try:
            self._store.complete(self.key, self._upload, parts, expected)
        except FileNotFoundError:
            # Also where the answer to a first try was lost: then the object is there.
            if self._store.head(self.key).size_bytes != self.size_bytes:
                raise

    def _begin(self) -> str:
        with self._lock:
            if not self._upload:
                upload = self._store.begin(self.key)
                self._begun(self.key, upload)
                self._upload = upload
            return self._upload

    def _expected(self) -> int:
        """Returns the CRC-32 of the whole, from those sent and those stored beside the sources."""
        whole, last = 0, None
        for part in self._parts:
            if part.copied is None:
                size = part.stop - part.start
                whole = crc32_combine(whole, self._sums[part.number], size)
            elif part.copied is not last:
                whole = crc32_combine(whole, part.copied.crc32, part.copied.size_bytes)
            last = part.copied
        return whole

    def _check(self, expected: int) -> None:
        head = self._store.head(self.key)
        if head.size_bytes != self.size_bytes or head.crc32 not in {None, expected}:
            raise ChecksumError(
                f"the store has {head.size_bytes:,} bytes with CRC-32"
                f" {_shown(head.crc32)} against {self.size_bytes:,} with {expected:08x}",
                where=self._store.url(self.key),
                hint="what was saved is damaged, or was on its way; `ckptkit verify` on the source"
                " tells which",
            )
        if head.crc32 is None and self.copied_parts:
            raise OutputError(
                "the store tells no CRC-32 of what it copied, so that nothing proves it",
                where=self._store.url(self.key),
                hint="have the bytes go through this machine: --dst-option"
                " config_kwargs.request_checksum_calculation=when_required",
            )


def _parts(
    size_bytes: int, copies: Sequence[CopiedRange], *, in_one: bool
) -> tuple[ObjectPart, ...]:
    if in_one:
        return (ObjectPart(1, 0, size_bytes),) if size_bytes else ()
    return cut_into_parts(size_bytes, copies)


def _shown(checksum: int | None) -> str:
    return "unknown" if checksum is None else f"{checksum:08x}"
