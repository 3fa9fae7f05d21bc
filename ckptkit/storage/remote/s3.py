"""Requests to S3 by exact keys: fsspec takes some names for patterns, and knows no conditions.

By which checksums S3 knows an object, and what they have to be.

An object that was sent in parts has one checksum of all its bytes, or one of the checksums of its
parts. The second is the older one, which more stores know, and it costs a store next to nothing
when the upload is completed; either proves every byte.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.crc import crc32, crc32_combine

S3_PROTOCOLS = frozenset({"s3", "s3a"})
_BLOCK = 256 << 10
_DELETED_AT_ONCE = 1000
_ACCESS_POINT = re.compile(r"(arn:[^/]+:accesspoint[/:][^/]+|arn:[^/]+/[^/]+)(?:/(.*))?", re.DOTALL)
_NOT_IN_XML = re.compile(r"[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def s3_options(options: Mapping[str, Any], *, connections: int) -> dict[str, Any]:
    """Returns options for s3fs with which the client leaves asking again to us.

    Args:
        options: The user's, which win.
        connections: How many may be open at once.
    """
    config = dict(options.get("config_kwargs") or {})
    config.setdefault("retries", {"total_max_attempts": 1})
    config.setdefault("max_pool_connections", connections)
    return {**options, "config_kwargs": config}


def split_s3_path(filesystem: Any, path: str) -> tuple[str, str, str]:
    """Returns bucket, key, and version of an object; every character of a key is its own.

    Args:
        filesystem: An `s3fs.S3FileSystem`; only one that is told of versions takes `?versionId=`
            for more than a part of the key.
        path: Bucket and key.
    """
    arn = _ACCESS_POINT.fullmatch(path)
    bucket, key = (arn[1], arn[2] or "") if arn is not None else path.partition("/")[::2]
    version = ""
    if filesystem.version_aware:
        key, _, version = key.partition("?versionId=")
    return bucket, key, version


def s3_listing(filesystem: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields all keys below a prefix, relative to it, with what a listing says of them.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        path: Bucket and prefix, without the slash at its end.
    """
    bucket, key, _ = split_s3_path(filesystem, path)
    prefix = f"{key}/" if key else ""
    more: dict[str, str] = {}
    while True:
        page = filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        for item in page.get("Contents", ()):
            yield item["Key"][len(prefix) :], {**item, "size": item["Size"], "type": "file"}
        if not page.get("IsTruncated"):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}


def s3_delete(filesystem: Any, bucket: str, keys: Sequence[str]) -> None:
    """Removes the objects of exactly these keys; those that are not there do not matter.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        bucket: Of the objects.
        keys: Their names.
    """
    # The body of a request for many is XML, whose readers change such characters.
    odd = [key for key in keys if _NOT_IN_XML.search(key)]
    for key in odd:
        filesystem.call_s3("delete_object", Bucket=bucket, Key=key)
    plain = [key for key in keys if key not in set(odd)]
    for first in range(0, len(plain), _DELETED_AT_ONCE):
        some = [{"Key": key} for key in plain[first : first + _DELETED_AT_ONCE]]
        wanted = {"Objects": some, "Quiet": True}
        answer = filesystem.call_s3("delete_objects", Bucket=bucket, Delete=wanted)
        kept = next(iter(answer.get("Errors", ())), None)
        if kept is not None:
            raise OSError(f"{kept.get('Key')!r} is not removed: {kept.get('Message')}")


def s3_range(filesystem: Any, path: str, start: int, target: memoryview, etag: str) -> None:
    """Fills `target` from byte `start` of an object on, straight from the connection.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        path: Bucket and key.
        start: First byte.
        target: Where the bytes go; it has their number.
        etag: What the object has to have still; empty where that does not matter.

    Source:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
    """
    from fsspec.asyn import sync

    sync(filesystem.loop, _fill, filesystem, path, start, target, etag)


def s3_head(filesystem: Any, path: str) -> Mapping[str, Any]:
    """Returns what is known of an object, asked for by its name: listings may lag, this does not.

    Args:
        filesystem: An `s3fs.S3FileSystem`.
        path: Bucket and key.

    Returns:
        The same names as in a listing of fsspec's.
    """
    bucket, key, version = split_s3_path(filesystem, path)
    given = {"VersionId": version} if version else {}
    found = filesystem.call_s3("head_object", Bucket=bucket, Key=key, **given)
    facts = {name: found[name] for name in ("ETag", "LastModified") if name in found}
    return {**facts, "size": found["ContentLength"], "type": "file"}


def s3_get(filesystem: Any, path: str) -> bytes:
    """Returns all bytes of a small object; `cat_file` takes a part of some keys for a version."""
    from fsspec.asyn import sync

    data: bytes = sync(filesystem.loop, _get, filesystem, path)
    return data


async def _get(filesystem: Any, path: str) -> bytes:
    bucket, key, version = split_s3_path(filesystem, path)
    given = {"VersionId": version} if version else {}
    answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **given)  # noqa: SLF001
    body = answer["Body"]
    try:
        data: bytes = await body.read()
    finally:
        body.close()
    return data


async def _fill(filesystem: Any, path: str, start: int, target: memoryview, etag: str) -> None:
    bucket, key, version = split_s3_path(filesystem, path)
    given = {"Range": f"bytes={start}-{start + len(target) - 1}"}
    if etag:
        given["IfMatch"] = etag
    if version:
        given["VersionId"] = version
    answer = await filesystem._call_s3(  # noqa: SLF001  s3fs offers no other way to name the ETag
        "get_object", Bucket=bucket, Key=key, **given
    )
    done, body = 0, answer["Body"]
    try:
        while block := await body.read(_BLOCK):
            if done + len(block) > len(target):
                raise EOFError("more bytes came than were asked for")
            target[done : done + len(block)] = block
            done += len(block)
    finally:
        body.close()
    if done < len(target):
        raise EOFError(f"{done:,} bytes came, {len(target):,} were asked for")


CHECKSUM = "ChecksumCRC32"
WHOLE = "FULL_OBJECT"
OF_PARTS = "COMPOSITE"
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class ObjectSums:
    """The checksums of an object that is sent in parts.

    Attributes:
        whole: The CRC-32 of all its bytes.
        of_parts: The CRC-32 of those of its parts, one after the other, the high byte first; None
            where one of them is not known.
        parts: How many there are.
    """

    whole: int
    of_parts: int | None
    parts: int

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> ObjectSums:
        """Joins those of all parts.

        Args:
            parts: CRC-32 and size of each, in their order.
        """
        whole = of_parts = count = 0
        for checksum, size_bytes in parts:
            whole = crc32_combine(whole, checksum, size_bytes)
            of_parts = crc32(checksum.to_bytes(_CRC_BYTES, "big"), of_parts)
            count += 1
        return cls(whole, of_parts, count)

    def agree_with(self, told: StoreChecksum) -> bool:
        """Tells whether a store means the same object; it may leave open which sum it tells."""
        if told.parts is not None and told.parts != self.parts:
            return False
        if told.kind == WHOLE:
            return told.crc32 == self.whole
        if told.kind == OF_PARTS:
            return told.crc32 == self.of_parts
        return told.crc32 in {self.whole, self.of_parts}


@dataclass(frozen=True, slots=True)
class StoreChecksum:
    """What a store says of an object's bytes.

    Attributes:
        crc32: The checksum.
        kind: Of what it is, `WHOLE` or `OF_PARTS`; empty where the store does not say.
        parts: Of how many parts, where the store says so.
    """

    crc32: int
    kind: str = ""
    parts: int | None = None

    @classmethod
    def in_answer(cls, answer: Mapping[str, Any]) -> StoreChecksum | None:
        """Returns the sum that an answer tells, None if it tells none."""
        text = answer.get(CHECKSUM)
        if not text:
            return None
        encoded, _, parts = str(text).partition("-")
        kind = OF_PARTS if parts else str(answer.get("ChecksumType", ""))
        return cls(decoded(encoded), kind, int(parts) if parts else None)


def encoded(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(_CRC_BYTES, "big")).decode("ascii")


def decoded(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")
