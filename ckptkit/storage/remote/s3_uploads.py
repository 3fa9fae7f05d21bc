"""Uploads to S3 in parts, and what else has to be asked of a bucket while an output is written.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import UnsafePathError
from ckptkit.storage.remote.errors import status_of
from ckptkit.storage.remote.s3 import (
    CHECKSUM,
    OF_PARTS,
    WHOLE,
    StoreChecksum,
    encoded,
    split_s3_path,
)
from ckptkit.storage.remote.store import RemoteStore

if TYPE_CHECKING:
    from ckptkit.storage.base import CopySource


_WRITER = "ckptkit-writer"
_THERE = frozenset({409, 412})  # another one is being written, or is there


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part that the store has taken: what it is called when the upload is completed."""

    number: int
    etag: str
    crc32: int | None = None

    def to_request(self) -> dict[str, Any]:
        said: dict[str, Any] = {"PartNumber": self.number, "ETag": self.etag}
        return said if self.crc32 is None else said | {CHECKSUM: encoded(self.crc32)}


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """What a store says of an object: size, CRC-32 if it knows it, ETag, and who wrote it."""

    size_bytes: int
    told: StoreChecksum | None
    etag: str = ""
    writer: str = ""


class S3Uploads:
    """The objects of one bucket, and the uploads to it; threads share it.

    What fails raises what s3fs makes of it, an `OSError` as a rule, after it was tried again
    where that may help.

    Attributes:
        store: The client.
        root: Bucket and prefix of the place.
        writer: The name that all written objects carry; empty for none.
        prefix: Of the keys of the place, with the slash at its end; empty for a whole bucket.
    """

    def __init__(self, store: RemoteStore, root: str, *, writer: str = "") -> None:
        """Connects.

        Args:
            store: The client.
            root: Bucket and prefix of the place that was named; nothing else is removed.
            writer: The name that all objects of one output carry in their metadata.
        """
        self.store = store
        self.root = root
        self.writer = writer
        self._bucket, prefix, _ = split_s3_path(store.filesystem, root)
        self.prefix = f"{prefix}/" if prefix else ""
        store.filesystem.connect()
        config = store.filesystem.s3.meta.config
        # Stores that know no checksums are used with this setting of the client's.
        when = getattr(config, "request_checksum_calculation", "when_required")
        self.has_checksums = when == "when_supported"

    def url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def keys(self, prefix: str) -> Iterator[str]:
        yield from self.objects(prefix)

    def objects(self, prefix: str) -> dict[str, str]:
        return {item["Key"]: str(item.get("ETag", "")) for item in self._listed(prefix)}

    def _listed(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_objects_v2", prefix, Prefix=prefix, **more)
            yield from page.get("Contents", ())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yields key and name of uploads whose keys begin with a prefix."""
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_multipart_uploads", prefix, Prefix=prefix, **more)
            found = page.get("Uploads", ())
            yield from ((item["Key"], item["UploadId"]) for item in found)
            if not page.get("IsTruncated") or not found:
                return
            more = {
                "KeyMarker": str(page.get("NextKeyMarker") or found[-1]["Key"]),
                "UploadIdMarker": str(page.get("NextUploadIdMarker") or found[-1]["UploadId"]),
            }

    def get(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes of an object of any bucket, which its path names."""
        read = self.store.filesystem.cat_file
        data: bytes = self.store.retry(lambda: read(path, start=start, end=stop), f"read {path}")
        return data

    def put(self, key: str, data: bytes, crc32: int) -> str:
        """Writes a small object, which is visible at once; returns its ETag."""
        body = {"Key": key, "Body": data, **self._proof(crc32), **self._signed()}
        return str(self._ask("put_object", key, **body)["ETag"])

    def put_new(self, key: str, data: bytes, crc32: int, *, in_parts: bool) -> bool:
        """Writes a small object unless there is one; returns whether it did.

        Stores that take no notice of the condition write it in any case.

        Args:
            key: What it is called.
            data: Its bytes, at least one.
            crc32: Their checksum.
            in_parts: Whether the condition goes with the end of an upload in parts, since some
                stores know it there alone.
        """
        try:
            if in_parts:
                self._put_in_parts(key, data, crc32)
            else:
                body = {"Key": key, "Body": data, **self._proof(crc32), **self._signed()}
                self._ask("put_object", key, **body, IfNoneMatch="*")
        except OSError as error:
            if status_of(error) not in _THERE:
                raise
            return False
        return True

    def _put_in_parts(self, key: str, data: bytes, crc32: int) -> None:
        upload = self.begin(key)
        try:
            part = self.send(key, upload, 1, BytesIO(data), crc32)
            self.complete(key, upload, [part], IfNoneMatch="*")
        except OSError:
            self.abort(key, upload)
            raise

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there do not matter."""
        root = f"{self._bucket}/{self.prefix}"
        for key in keys:
            if not key.startswith(self.prefix):
                raise UnsafePathError(
                    f"{key!r} was to be removed, which does not lie below the place", where=root
                )
        self.store.delete(root.rstrip("/"), [key[len(self.prefix) :] for key in keys])

    def begin(self, key: str, *, sums_parts: bool = True) -> str:
        """Begins an upload in parts.

        Args:
            key: Of the object to be.
            sums_parts: Whether its checksum is that of the checksums of its parts, all of which
                `complete` has to know; else it is that of its bytes.

        Returns:
            What the store calls the upload.
        """
        kind = OF_PARTS if sums_parts else WHOLE
        wanted = {"ChecksumAlgorithm": "CRC32", "ChecksumType": kind}
        given = (wanted if self.has_checksums else {}) | self._signed()
        answer = self._ask("create_multipart_upload", key, Key=key, **given)
        return str(answer["UploadId"])

    def send(self, key: str, upload: str, number: int, data: BytesIO, crc32: int) -> SentPart:
        """Sends a part; the store refuses it if its bytes have another checksum on arrival."""
        call = self.store.filesystem.call_s3
        of = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": number}

        def ask() -> Any:
            data.seek(0)
            return call("upload_part", **of, Body=data, **self._proof(crc32))

        answer = self.store.retry(ask, f"upload_part {number} {key}")
        return SentPart(number, answer["ETag"], crc32 if self.has_checksums else None)

    def copy(
        self, key: str, upload: str, number: int, source: CopySource, span: tuple[int, int]
    ) -> SentPart:
        """Has the store copy a range of another object into a part.

        Args:
            key: Of the object to be.
            upload: As `begin` returned it.
            number: Of the part.
            source: The other object.
            span: The range: its first byte, and the one after it.
        """
        bucket, _, name = source.path.partition("/")
        answer = self._ask(
            "upload_part_copy",
            key,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": name},
            CopySourceIfMatch=source.etag,
            CopySourceRange=f"bytes={span[0]}-{span[1] - 1}",
        )["CopyPartResult"]
        told = StoreChecksum.in_answer(answer)
        return SentPart(number, answer["ETag"], told.crc32 if told else None)

    def complete(
        self,
        key: str,
        upload: str,
        parts: Sequence[SentPart],
        whole: int | None = None,
        **conditions: str,
    ) -> str:
        """Makes an object of an upload; a store may refuse it if it has another checksum.

        Args:
            key: Of the object.
            upload: As `begin` returned it.
            parts: All parts.
            whole: The CRC-32 of all bytes, where the object's checksum is to be that.
            conditions: Other arguments of the request.

        Returns:
            The ETag of the object.
        """
        proof = {} if whole is None else self._proof(whole)
        if proof:
            proof["ChecksumType"] = WHOLE
        listed = {"Parts": [part.to_request() for part in parts]}
        answer = self._ask(
            "complete_multipart_upload",
            key,
            Key=key,
            UploadId=upload,
            MultipartUpload=listed,
            **proof,
            **conditions,
        )
        return str(answer.get("ETag", ""))

    def abort(self, key: str, upload: str) -> None:
        """Removes an upload and its parts; one that is not there does not matter."""
        try:
            self._ask("abort_multipart_upload", key, Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def head(self, key: str) -> ObjectHead:
        """Asks what the store knows of an object."""
        asked = {"ChecksumMode": "ENABLED"} if self.has_checksums else {}
        answer = self._ask("head_object", key, Key=key, **asked)
        writer = str((answer.get("Metadata") or {}).get(_WRITER, ""))
        etag = str(answer.get("ETag", ""))
        return ObjectHead(
            int(answer["ContentLength"]), StoreChecksum.in_answer(answer), etag, writer
        )

    def _ask(self, request: str, key: str, **given: Any) -> Any:
        call = self.store.filesystem.call_s3
        return self.store.retry(
            lambda: call(request, Bucket=self._bucket, **given), f"{request} {key}"
        )

    def _signed(self) -> dict[str, Any]:
        return {"Metadata": {_WRITER: self.writer}} if self.writer else {}

    def _proof(self, crc32: int) -> dict[str, str]:
        return {CHECKSUM: encoded(crc32)} if self.has_checksums else {}
