"""One object on S3 to which several processes send parts, and which one of them completes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.part_buffers import PartBuffers
from ckptkit.storage.s3_checksums import ObjectSums
from ckptkit.storage.s3_object import Upload, check_object, complete_upload
from ckptkit.storage.s3_uploads import S3Uploads, SentPart


class S3SharedObject:
    """One process's view of such an object; threads share it.

    Attributes:
        key: What it will be called.
        etag: Of the object, once it is published.
    """

    def __init__(
        self,
        store: S3Uploads,
        key: str,
        parts: Sequence[ObjectPart],
        upload: Callable[[], str],
    ) -> None:
        """Takes what all processes know.

        Args:
            store: Where it will be.
            key: What it will be called.
            parts: How it is cut; none for an empty object.
            upload: Returns the upload of all processes; asked once, with the first part.
        """
        self.key = key
        self.etag = ""
        self._store = store
        self._parts = {part.number: part for part in parts}
        self._buffers = PartBuffers(parts)
        self._upload = upload
        self._name = ""
        self._lock = threading.Lock()
        self._rows: dict[int, tuple[int, str, int]] = {}

    def write(self, start: int, data: memoryview) -> None:
        """Takes bytes from `start` on, and sends every part that they complete."""
        for part, whole in self._buffers.add(start, data.cast("B")):
            with whole.getbuffer() as view:
                checksum = crc32(view)
            sent = self._store.send(self.key, self._begun(), part.number, whole, checksum)
            self._rows[part.number] = part.number, sent.etag, checksum

    def rows(self) -> list[Sequence[Any]]:
        """Returns number, ETag and CRC-32 of the parts that were sent from here."""
        return [self._rows[number] for number in sorted(self._rows)]

    def adopt(self, rows: Sequence[Sequence[Any]]) -> None:
        """Takes over the parts that others have sent."""
        for number, etag, checksum in rows:
            self._rows[number] = number, etag, checksum

    def missing(self) -> list[ObjectPart]:
        """Returns the parts that nobody has sent, in their order."""
        return [part for number, part in self._parts.items() if number not in self._rows]

    def publish(self) -> None:
        """Makes it visible, and compares what the store has with what it was given.

        Raises:
            ChecksumError: If the store has other bytes.
            ValueError: If parts are missing.
        """
        if not self._parts:
            self.etag = self._store.put(self.key, b"", 0)
            return
        if self.missing():
            raise ValueError(f"{self.key!r} lacks {len(self.missing())} parts")
        size, parts, sums = 0, [], []
        for number, part in self._parts.items():
            _, etag, checksum = self._rows[number]
            sums.append((checksum, part.stop - part.start))
            size = part.stop
            parts.append(SentPart(number, etag, checksum if self._store.has_checksums else None))
        upload = Upload(self.key, self._begun(), size)
        complete_upload(self._store, upload, parts)
        self.etag = check_object(self._store, upload, ObjectSums.of(sums)).etag

    def _begun(self) -> str:
        with self._lock:
            if not self._name:
                self._name = self._upload()
            return self._name
