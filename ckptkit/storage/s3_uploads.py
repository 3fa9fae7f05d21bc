"""Uploads to S3 in parts, and what else has to be asked of a bucket while an output is written.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ckptkit.storage.remote_store import RemoteStore
from ckptkit.storage.retries import retried

if TYPE_CHECKING:  # the process that uploads does without numpy
    from ckptkit.storage.base import CopySource

_DELETED_AT_ONCE = 1000
_CHECKSUM = "ChecksumCRC32"
_WHOLE = "FULL_OBJECT"  # as against a checksum of the checksums of the parts


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part that the store has taken: what it is called when the upload is completed."""

    number: int
    etag: str
    crc32: int | None = None

    def to_request(self) -> dict[str, Any]:
        """Returns what the request to complete an upload says of it."""
        said: dict[str, Any] = {"PartNumber": self.number, "ETag": self.etag}
        return said if self.crc32 is None else said | {_CHECKSUM: _encoded(self.crc32)}


@dataclass(frozen=True, slots=True)
class Head:
    """What a store says of an object: its size, and the CRC-32 of all its bytes if it knows it."""

    size_bytes: int
    crc32: int | None


class S3Uploads:
    """The objects of one bucket, and the uploads to it; threads share it.

    What fails raises what s3fs makes of it, an `OSError` as a rule, after it was tried again
    where that may help.
    """

    def __init__(self, store: RemoteStore, bucket: str) -> None:
        """Connects.

        Args:
            store: The client.
            bucket: The name of the bucket.
        """
        self.store = store
        self._bucket = bucket
        store.filesystem.connect()
        config = store.filesystem.s3.meta.config
        # Stores that know no checksums are used with this setting of the client's.
        when = getattr(config, "request_checksum_calculation", "when_required")
        self.has_checksums = when == "when_supported"

    def url(self, key: str) -> str:
        """Returns what messages call an object."""
        return f"s3://{self._bucket}/{key}"

    def keys(self, prefix: str) -> Iterator[str]:
        """Yields the keys that begin with a prefix, in their order."""
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_objects_v2", prefix, Prefix=prefix, **more)
            yield from (item["Key"] for item in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def get(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes of an object of any bucket, which its path names."""
        read = self.store.filesystem.cat_file
        data: bytes = retried(
            lambda: read(path, start=start, end=stop), self.store.patience, what=f"read {path}"
        )
        return data

    def put(self, key: str, data: bytes, crc32: int) -> None:
        """Writes a small object, which is visible at once."""
        self._ask("put_object", key, Key=key, Body=data, **self._proof(crc32))

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there do not matter.

        Raises:
            OSError: If the store keeps one.
        """
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            some = [{"Key": key} for key in keys[first : first + _DELETED_AT_ONCE]]
            answer = self._ask("delete_objects", "", Delete={"Objects": some, "Quiet": True})
            kept = next(iter(answer.get("Errors", ())), None)
            if kept is not None:
                raise OSError(f"{kept.get('Key')!r} is not removed: {kept.get('Message')}")

    def begin(self, key: str) -> str:
        """Begins an upload in parts, and returns its name."""
        wanted = {"ChecksumAlgorithm": "CRC32", "ChecksumType": _WHOLE}
        given = wanted if self.has_checksums else {}
        answer = self._ask("create_multipart_upload", key, Key=key, **given)
        return str(answer["UploadId"])

    def send(self, key: str, upload: str, number: int, data: BytesIO, crc32: int) -> SentPart:
        """Sends a part; the store refuses it if its bytes have another checksum on arrival."""
        call = self.store.filesystem.call_s3
        of = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": number}

        def ask() -> Any:
            data.seek(0)
            return call("upload_part", **of, Body=data, **self._proof(crc32))

        answer = retried(ask, self.store.patience, what=f"upload_part {number} {key}")
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
        return SentPart(number, answer["ETag"], _decoded(answer.get(_CHECKSUM)))

    def complete(self, key: str, upload: str, parts: Sequence[SentPart], crc32: int) -> None:
        """Makes an object of an upload; a store may refuse it if it has another checksum."""
        proof = self._proof(crc32)
        if proof:
            proof["ChecksumType"] = _WHOLE
        listed = {"Parts": [part.to_request() for part in parts]}
        self._ask(
            "complete_multipart_upload",
            key,
            Key=key,
            UploadId=upload,
            MultipartUpload=listed,
            **proof,
        )

    def abort(self, key: str, upload: str) -> None:
        """Removes an upload and its parts; one that is not there does not matter."""
        try:
            self._ask("abort_multipart_upload", key, Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def head(self, key: str) -> Head:
        """Asks what the store knows of an object."""
        asked = {"ChecksumMode": "ENABLED"} if self.has_checksums else {}
        answer = self._ask("head_object", key, Key=key, **asked)
        whole = answer.get("ChecksumType", _WHOLE) == _WHOLE
        crc32 = _decoded(answer.get(_CHECKSUM)) if whole else None
        return Head(int(answer["ContentLength"]), crc32)

    def _ask(self, request: str, key: str, **given: Any) -> Any:
        call = self.store.filesystem.call_s3
        return retried(
            lambda: call(request, Bucket=self._bucket, **given),
            self.store.patience,
            what=f"{request} {key}",
        )

    def _proof(self, crc32: int) -> dict[str, str]:
        return {_CHECKSUM: _encoded(crc32)} if self.has_checksums else {}


def _encoded(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode("ascii")


def _decoded(text: str | None) -> int | None:
    """Reads a checksum; that of checksums has a number of parts behind it, and is none."""
    if text is None or "-" in text:
        return None
    return int.from_bytes(base64.b64decode(text), "big")
