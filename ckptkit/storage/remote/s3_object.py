"""An object that is being written to S3, invisible until its upload is completed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, OutputError
from ckptkit.core.object_parts import CopiedRange, ObjectPart, cut_into_parts
from ckptkit.storage.remote.errors import lost_place_error
from ckptkit.storage.remote.s3 import ObjectHead, ObjectSums, S3Uploads, SentPart

if TYPE_CHECKING:
    from ckptkit.storage.base import CopySource


class _Filling(Struct):
    data: BytesIO  # clients send it in pieces, and `bytes` as a whole
    missing: int


class PartBuffers:
    """The parts of one object that are being filled. Few are open at a time.

    Writes come in about the order of the bytes of the object.
    """

    def __init__(self, parts: Sequence[ObjectPart]) -> None:
        self._parts = parts
        self._starts = [part.start for part in parts]
        self._filling: dict[int, _Filling] = {}
        self._free: list[BytesIO] = []  # new memory would be cleared page by page
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> Iterator[tuple[ObjectPart, BytesIO]]:
        """Takes bytes, disjoint from those of other calls, and yields the parts that they complete.

        The bytes of a part are valid until the next one is requested.
        """
        stop = start + data.nbytes
        size = self._parts[-1].stop if self._parts else 0
        if start < 0 or stop > size:
            raise ValueError(f"bytes [{start}, {stop}) are not in an object of {size} bytes")
        low, at = start, bisect_right(self._starts, start) - 1
        while low < stop:
            part = self._parts[at]
            if part.copied is not None:
                raise ValueError(f"bytes from {low} on are not to be sent but copied")
            whole = self._put(part, low, data[low - start : min(stop, part.stop) - start])
            if whole is not None:
                yield part, whole
                with self._lock:
                    self._free.append(whole)
            low, at = part.stop, at + 1

    def _put(self, part: ObjectPart, start: int, data: memoryview) -> BytesIO | None:
        size = part.stop - part.start
        with self._lock:
            filling = self._filling.get(part.number)
            if filling is None:
                filling = self._filling[part.number] = _Filling(self._take_buffer(size), size)
        low = start - part.start
        with filling.data.getbuffer() as view:
            view[low : low + data.nbytes] = data
        with self._lock:
            filling.missing -= data.nbytes
            if filling.missing:
                return None
            del self._filling[part.number]
        return filling.data

    def _take_buffer(self, size_bytes: int) -> BytesIO:
        """Returns a buffer of exactly that size, one that was used before if there is one."""
        for at, buffer in enumerate(self._free):
            if buffer.getbuffer().nbytes == size_bytes:
                return self._free.pop(at)
        new = BytesIO()
        new.seek(size_bytes - 1)
        new.write(b"\0")
        return new


SMALL_BYTES = 1 << 20
"""Smaller objects are kept in memory, and sent by one request at the commit."""


_DAMAGED = (
    "the source is damaged, or the bytes were on their way; run `ckptkit verify` on the source"
)


class MultipartUpload(Struct, frozen=True):
    """An upload that is to become an object.

    Attributes:
        key: What the object will be called.
        name: What the store calls the upload.
        size_bytes: Of the object.
    """

    key: str
    name: str
    size_bytes: int


def complete_upload(
    store: S3Uploads, upload: MultipartUpload, parts: Sequence[SentPart], whole: int | None = None
) -> None:
    """Completes an upload, also if an earlier request did so and its answer was lost.

    `whole` is the CRC-32 of all bytes, where that is the checksum of the object.
    """
    try:
        store.complete(upload.key, upload.name, parts, whole)
    except FileNotFoundError:
        # Also where the answer to a first try was lost: then the object is there.
        head = store.head(upload.key)
        if head.size_bytes != upload.size_bytes or head.writer != store.writer:
            raise


def check_object(store: S3Uploads, upload: MultipartUpload, expected: ObjectSums) -> ObjectHead:
    """Compares an object with what was sent for it, and returns what the store knows of it."""
    head = store.head(upload.key)
    stored = head.checksum
    agrees = stored is None or expected.matches(stored)
    if head.size_bytes != upload.size_bytes or not agrees:
        stored_crc = "unknown" if stored is None else f"{stored.crc32:08x}"
        kind = "" if stored is None or not stored.kind else f" ({stored.kind.lower()})"
        sums = [f"{crc:08x}" for crc in (expected.whole, expected.of_parts) if crc is not None]
        raise ChecksumError(
            f"the store has {head.size_bytes:,} bytes with CRC-32 {stored_crc}{kind} against"
            f" {upload.size_bytes:,} with {sums[0]}, or {sums[-1]} of {expected.parts} parts",
            where=store.url(upload.key),
            hint=_DAMAGED,
        )
    return head


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
        sums_parts: bool = True,
    ) -> None:
        """Prepares it; the upload begins with the first bytes.

        Args:
            store: Where it will be.
            key: What it will be called.
            size_bytes: Its size.
            copies: What the store is to copy, as `choose_copies` chose it.
            begun: Called with the key and an empty name right before the upload begins, and with
                its name before it gets its first part.
            sums_parts: Whether the store keeps the checksum of the checksums of its parts, which
                costs it least; else that of all bytes, which a copy of the object keeps.
        """
        self.key = key
        self.size_bytes = size_bytes
        self._store = store
        self._begun = begun
        self._is_small = size_bytes <= SMALL_BYTES and not copies
        self._parts = cut_into_parts(size_bytes, copies)
        if self._is_small:
            self._parts = (ObjectPart(1, 0, size_bytes),) if size_bytes else ()
        # If a copied range is cut in two, the checksums of the halves are unknown.
        self._is_split = any(
            part.copied is not None and part.copied is other.copied
            for part, other in pairwise(self._parts)
        )
        self._sums_parts = sums_parts and not self._is_split
        self._buffers = PartBuffers(self._parts)
        self._small = b""
        self._upload = ""
        self._is_visible = False
        self.etag = ""
        self._lock = threading.Lock()
        self._sent: dict[int, SentPart] = {}
        self._sums: dict[int, int] = {}

    @property
    def copied_parts(self) -> tuple[ObjectPart, ...]:
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
        """Lets the store copy a part."""
        assert part.copied is not None  # noqa: S101  that is what `copied_parts` gave
        span = part.source_start, part.source_start + part.stop - part.start
        sent = self._store.copy(self.key, self._begin(), part.number, source, span)
        if not self._is_split:
            expected = part.copied.crc32
            if sent.crc32 not in {None, expected}:
                raise ChecksumError(
                    f"the store has copied bytes with CRC-32 {sent.crc32:08x},"
                    f" {expected:08x} was stored beside them",
                    where=self._store.url(self.key),
                    hint=_DAMAGED,
                )
            sent = replace(sent, crc32=expected)
        self._sent[part.number] = sent

    @property
    def is_whole(self) -> bool:
        """Whether all of its bytes are there."""
        done = self._sums if self._is_small else self._sent
        return len(done) == len(self._parts)

    def publish(self) -> None:
        """Makes it visible, and compares the stored object with what was sent."""
        if not self.is_whole:
            raise ValueError(f"{self.key!r} lacks {len(self._parts) - len(self._sent)} parts")
        expected = self._expected()
        if self._is_small:
            self._is_visible = True  # also where the answer is lost
            self.etag = self._store.put(self.key, self._small, expected.whole)
            return
        parts = [self._sent[part.number] for part in self._parts]
        whole = None if self._sums_parts else expected.whole
        upload = MultipartUpload(self.key, self._upload, self.size_bytes)
        complete_upload(self._store, upload, parts, whole)
        self._is_visible = True
        head = check_object(self._store, upload, expected)
        self.etag = head.etag
        if head.checksum is None and self.copied_parts:
            raise OutputError(
                "the store reports no CRC-32 of what it copied, so the bytes cannot be verified",
                where=self._store.url(self.key),
                hint="copy the bytes through this machine: --dst-option"
                " config_kwargs.request_checksum_calculation=when_required",
            )

    def publish_new(self) -> None:
        """Makes it visible unless there is an object of that name; a large one in any case."""
        if not self._is_small or not self.is_whole:
            self.publish()
            return
        data, expected = self._small, self._expected()
        is_put = self._store.put_new(self.key, data, expected.whole, in_parts=False)
        if not is_put and self._store.head(self.key).writer != self._store.writer:
            why = "another run has put its file there meanwhile"
            raise lost_place_error(why, self._store.url(self.key))
        self._is_visible = True

    def remove(self) -> None:
        """Removes what was sent, and the object if it is visible already."""
        if self._is_visible:
            self._store.delete([self.key])
        elif self._upload:
            self._store.abort(self.key, self._upload)

    def _begin(self) -> str:
        with self._lock:
            if not self._upload:
                self._begun(self.key, "")
                upload = self._store.begin(self.key, sums_parts=self._sums_parts)
                self._begun(self.key, upload)
                self._upload = upload
            return self._upload

    def _expected(self) -> ObjectSums:
        checksums: list[tuple[int, int]] = []
        last = None
        for part in self._parts:
            if part.copied is None:
                checksums.append((self._sums[part.number], part.stop - part.start))
            elif part.copied is not last:
                checksums.append((part.copied.crc32, part.copied.size_bytes))
            last = part.copied
        sums = ObjectSums.of(checksums)
        return replace(sums, of_parts=None, parts=len(self._parts)) if self._is_split else sums
