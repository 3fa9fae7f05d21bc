"""Requests to S3 through s3fs: by exact keys, with conditions, checksums and uploads in parts.

The functions of fsspec take some keys for patterns, and know no conditions. Of an object that was
sent in parts, S3 has either one checksum of all its bytes, or one of the checksums of its parts.
The second is older, more stores know it, and it costs a store next to nothing when the upload is
completed; either one proves every byte.

Source:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html
"""

from __future__ import annotations

import base64
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32, crc32_combine
from ckptkit.core.errors import ChecksumError, OutputError, UnsafePathError
from ckptkit.core.object_parts import CopiedRange, ObjectPart, cut_into_parts
from ckptkit.storage.remote.errors import error_translator, lost_place_error, status_of

if TYPE_CHECKING:
    from ckptkit.storage.base import CopySource
    from ckptkit.storage.remote.store import RemoteStore


SMALL_BYTES = 1 << 20
"""Smaller objects are kept in memory, and sent by one request at the commit."""
_BLOCK = 256 << 10
_DELETED_AT_ONCE = 1000
_ACCESS_POINT = re.compile(r"(arn:[^/]+:accesspoint[/:][^/]+|arn:[^/]+/[^/]+)(?:/(.*))?", re.DOTALL)
_NOT_IN_XML = re.compile(r"[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CHECKSUM = "ChecksumCRC32"
WHOLE = "FULL_OBJECT"
OF_PARTS = "COMPOSITE"
_CRC_BYTES = 4
_WRITER = "ckptkit-writer"
_THERE = frozenset({409, 412})  # another object is being written, or exists


def make_s3_options(options: Mapping[str, Any], *, connections: int) -> dict[str, Any]:
    """Returns options for s3fs that switch off the retries of the client; those of the user win."""
    config = dict(options.get("config_kwargs") or {})
    config.setdefault("retries", {"total_max_attempts": 1})
    config.setdefault("max_pool_connections", connections)
    return {**options, "config_kwargs": config}


def split_s3_path(filesystem: Any, path: str) -> tuple[str, str, str]:
    """Returns bucket, key, and version of an object; every character of a key is its own.

    Only a version-aware client takes `?versionId=` for more than a part of the key.
    """
    arn = _ACCESS_POINT.fullmatch(path)
    bucket, key = (arn[1], arn[2] or "") if arn is not None else path.partition("/")[::2]
    version = ""
    if filesystem.version_aware:
        key, _, version = key.partition("?versionId=")
    return bucket, key, version


def list_s3_objects(filesystem: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields all keys below a prefix without its slash, relative to it, with their entries."""
    bucket, key, _ = split_s3_path(filesystem, path)
    prefix = f"{key}/" if key else ""
    for item in _list_objects(filesystem.call_s3, bucket, prefix):
        yield item["Key"][len(prefix) :], {**item, "size": item["Size"], "type": "file"}


def _list_objects(
    call: Callable[..., Any], bucket: str, prefix: str
) -> Iterator[Mapping[str, Any]]:
    more: dict[str, str] = {}
    while True:
        page = call("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        yield from page.get("Contents", ())
        if not page.get("IsTruncated"):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}


def delete_s3_objects(filesystem: Any, bucket: str, keys: Sequence[str]) -> None:
    """Removes the objects of exactly these keys; missing ones do not matter."""
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


def read_s3_range(filesystem: Any, path: str, start: int, target: memoryview, etag: str) -> None:
    """Fills `target` from byte `start` of an object on, whose ETag is `etag` unless that is empty.

    Source:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
    """
    from fsspec.asyn import sync

    conditions = {"Range": f"bytes={start}-{start + len(target) - 1}"}
    if etag:
        conditions["IfMatch"] = etag
    sync(filesystem.loop, _read, filesystem, path, target, conditions)


def head_s3_object(filesystem: Any, path: str) -> Mapping[str, Any]:
    """Returns the entry of an object, as in a listing, also where listings do not show it yet."""
    bucket, key, version = split_s3_path(filesystem, path)
    arguments = {"VersionId": version} if version else {}
    head = filesystem.call_s3("head_object", Bucket=bucket, Key=key, **arguments)
    facts = {name: head[name] for name in ("ETag", "LastModified") if name in head}
    return {**facts, "size": head["ContentLength"], "type": "file"}


def get_s3_object(filesystem: Any, path: str) -> bytes:
    """Returns all bytes of a small object; `cat_file` misreads some keys as versions."""
    from fsspec.asyn import sync

    data: bytes = sync(filesystem.loop, _read, filesystem, path, None, {})
    return data


async def _read(
    filesystem: Any, path: str, target: memoryview | None, conditions: dict[str, str]
) -> bytes:
    """Returns an object, or fills a buffer with exactly the range that the conditions name."""
    bucket, key, version = split_s3_path(filesystem, path)
    if version:
        conditions["VersionId"] = version
    # The public `call_s3` leaves the event loop before the body is read, which it cannot be then.
    answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **conditions)  # noqa: SLF001
    body, done = answer["Body"], 0
    try:
        if target is None:
            data: bytes = await body.read()
            return data
        while block := await body.read(_BLOCK):
            if done + len(block) > len(target):
                raise EOFError("more bytes came than were asked for")
            target[done : done + len(block)] = block
            done += len(block)
    finally:
        body.close()
    if done < len(target):
        raise EOFError(f"{done:,} bytes came, {len(target):,} were asked for")
    return b""


class ObjectSums(Struct, frozen=True):
    whole: int  # CRC-32 of all bytes
    of_parts: int | None  # of those of the parts, big-endian; None where one of them is not known
    parts: int

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> ObjectSums:
        """Joins CRC-32 and size of each part."""
        whole = of_parts = count = 0
        for checksum, size_bytes in parts:
            whole = crc32_combine(whole, checksum, size_bytes)
            of_parts = crc32(checksum.to_bytes(_CRC_BYTES, "big"), of_parts)
            count += 1
        return cls(whole, of_parts, count)

    def matches(self, stored: StoreChecksum) -> bool:
        """Says whether the checksum of a store is that of this object; its kind may be unknown."""
        if stored.parts is not None and stored.parts != self.parts:
            return False
        if stored.kind == WHOLE:
            return stored.crc32 == self.whole
        if stored.kind == OF_PARTS:
            return stored.crc32 == self.of_parts
        return stored.crc32 in {self.whole, self.of_parts}


class StoreChecksum(Struct, frozen=True):
    crc32: int
    kind: str = ""  # `WHOLE` or `OF_PARTS`, where the store says it
    parts: int | None = None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> StoreChecksum | None:
        text = answer.get(CHECKSUM)
        if not text:
            return None
        encoded, _, parts = str(text).partition("-")
        kind = OF_PARTS if parts else str(answer.get("ChecksumType", ""))
        crc = int.from_bytes(base64.b64decode(encoded), "big")
        return cls(crc, kind, int(parts) if parts else None)


def encode_crc32(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(_CRC_BYTES, "big")).decode("ascii")


class SentPart(Struct, frozen=True):
    """A part that the store has taken, as the request that completes the upload names it."""

    number: int
    etag: str
    crc32: int | None = None


class ObjectHead(Struct, frozen=True):
    """What a store knows of an object: size, checksum if any, ETag, and which run wrote it."""

    size_bytes: int
    checksum: StoreChecksum | None
    etag: str = ""
    writer: str = ""


class S3Uploads:
    """The objects below a prefix of a bucket, and the uploads to it; threads share it.

    A failed request raises the error of s3fs, usually an `OSError`, after retries where these may
    help. Nothing outside of `root` is removed.

    Attributes:
        store: The client.
        root: Bucket and prefix of the place.
        writer: The name that all written objects carry; empty for none.
        location: The URL, for messages.
        translate_errors: A context that turns errors of the client into ours.
        prefix: Of the keys of the place, with the slash at its end; empty for a whole bucket.
    """

    def __init__(
        self, store: RemoteStore, root: str, *, writer: str = "", location: str = ""
    ) -> None:
        self.store = store
        self.root = root
        self.writer = writer
        self.location = location
        self.translate_errors = error_translator(location, store.options)
        self._bucket, prefix, _ = split_s3_path(store.filesystem, root)
        self.prefix = f"{prefix}/" if prefix else ""
        store.filesystem.connect()
        config = store.filesystem.s3.meta.config
        # Stores without checksums are used with this setting of the client.
        when = getattr(config, "request_checksum_calculation", "when_required")
        self.has_checksums = when == "when_supported"

    def path(self, key: str) -> str:
        return f"{self._bucket}/{key}"

    def url(self, key: str) -> str:
        return f"s3://{self.path(key)}"

    def list_objects(self, prefix: str) -> dict[str, str]:
        """Returns the keys that begin with a prefix, each with the ETag of its object."""
        listed = _list_objects(self._call, self._bucket, prefix)
        return {item["Key"]: str(item.get("ETag", "")) for item in listed}

    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        more: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Bucket=self._bucket, Prefix=prefix, **more)
            uploads = page.get("Uploads", ())
            yield from ((item["Key"], item["UploadId"]) for item in uploads)
            if not page.get("IsTruncated") or not uploads:
                return
            more = {
                "KeyMarker": str(page.get("NextKeyMarker") or uploads[-1]["Key"]),
                "UploadIdMarker": str(page.get("NextUploadIdMarker") or uploads[-1]["UploadId"]),
            }

    def get(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes of an object of any bucket, which its path names."""
        read = self.store.filesystem.cat_file
        data: bytes = self.store.retry(lambda: read(path, start=start, end=stop), f"read {path}")
        return data

    def put(self, key: str, data: bytes, crc32: int) -> str:
        """Writes a small object, which is visible at once; returns its ETag."""
        return str(self._put(key, data, crc32)["ETag"])

    def _put(self, key: str, data: bytes, crc32: int, **conditions: str) -> Any:
        facts = {**self._make_checksum(crc32), **self._make_metadata(), **conditions}
        return self._call("put_object", Bucket=self._bucket, Key=key, Body=data, **facts)

    def put_new(self, key: str, data: bytes, crc32: int, *, in_parts: bool) -> bool:
        """Writes a small, non-empty object unless there is one; returns whether it did.

        Stores that ignore the condition write it in any case; some know it only at the end of an
        upload in parts, with `in_parts`.
        """
        try:
            if in_parts:
                self._put_in_parts(key, data, crc32)
            else:
                self._put(key, data, crc32, IfNoneMatch="*")
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
        root = f"{self._bucket}/{self.prefix}"
        for key in keys:
            if not key.startswith(self.prefix):
                raise UnsafePathError(
                    f"{key!r} was to be removed, which is not below the place", where=root
                )
        self.store.delete(root.rstrip("/"), [key[len(self.prefix) :] for key in keys])

    def begin(self, key: str, *, sums_parts: bool = True) -> str:
        """Begins an upload in parts, and returns its name.

        The checksum of the object is that of the checksums of its parts, all of which `complete`
        has to know; without `sums_parts` it is that of its bytes.
        """
        kind = OF_PARTS if sums_parts else WHOLE
        wanted = {"ChecksumAlgorithm": "CRC32", "ChecksumType": kind}
        checksums = (wanted if self.has_checksums else {}) | self._make_metadata()
        answer = self._call("create_multipart_upload", Bucket=self._bucket, Key=key, **checksums)
        return str(answer["UploadId"])

    def send(self, key: str, upload: str, number: int, data: BytesIO, crc32: int) -> SentPart:
        """Sends a part; the store refuses it if its bytes have another checksum on arrival."""
        call = self.store.filesystem.call_s3
        part = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": number}

        def ask() -> Any:
            data.seek(0)
            return call("upload_part", **part, Body=data, **self._make_checksum(crc32))

        answer = self.store.retry(ask, f"upload_part {number} {key}")
        return SentPart(number, answer["ETag"], crc32 if self.has_checksums else None)

    def copy(
        self, key: str, upload: str, number: int, source: CopySource, span: tuple[int, int]
    ) -> SentPart:
        """Lets the store copy the range `span` of another object, half-open, into a part."""
        bucket, _, name = source.path.partition("/")
        answer = self._call(
            "upload_part_copy",
            Bucket=self._bucket,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": name},
            CopySourceIfMatch=source.etag,
            CopySourceRange=f"bytes={span[0]}-{span[1] - 1}",
        )["CopyPartResult"]
        checksum = StoreChecksum.from_answer(answer)
        return SentPart(number, answer["ETag"], checksum.crc32 if checksum else None)

    def complete(
        self,
        key: str,
        upload: str,
        parts: Sequence[SentPart],
        whole: int | None = None,
        **conditions: str,
    ) -> str:
        """Completes an upload, and returns the ETag; a store may refuse it for its checksum.

        `whole` is the CRC-32 of all bytes, where that is the checksum of the object.
        """
        proof = {} if whole is None else self._make_checksum(whole)
        if proof:
            proof["ChecksumType"] = WHOLE
        listed = [
            {"PartNumber": part.number, "ETag": part.etag}
            | ({} if part.crc32 is None else {CHECKSUM: encode_crc32(part.crc32)})
            for part in parts
        ]
        answer = self._call(
            "complete_multipart_upload",
            Bucket=self._bucket,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": listed},
            **proof,
            **conditions,
        )
        return str(answer.get("ETag", ""))

    def abort(self, key: str, upload: str) -> None:
        """Removes an upload and its parts; one that is not there does not matter."""
        try:
            self._call("abort_multipart_upload", Bucket=self._bucket, Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def head(self, key: str) -> ObjectHead:
        asked = {"ChecksumMode": "ENABLED"} if self.has_checksums else {}
        answer = self._call("head_object", Bucket=self._bucket, Key=key, **asked)
        writer = str((answer.get("Metadata") or {}).get(_WRITER, ""))
        etag = str(answer.get("ETag", ""))
        return ObjectHead(
            int(answer["ContentLength"]), StoreChecksum.from_answer(answer), etag, writer
        )

    def _call(self, request: str, **arguments: Any) -> Any:
        call = self.store.filesystem.call_s3
        what = f"{request} {arguments.get('Key', arguments.get('Prefix'))}"
        return self.store.retry(lambda: call(request, **arguments), what)

    def _make_metadata(self) -> dict[str, Any]:
        return {"Metadata": {_WRITER: self.writer}} if self.writer else {}

    def _make_checksum(self, crc32: int) -> dict[str, str]:
        return {CHECKSUM: encode_crc32(crc32)} if self.has_checksums else {}


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
        for at, buffer in enumerate(self._free):
            if buffer.getbuffer().nbytes == size_bytes:
                return self._free.pop(at)
        new = BytesIO()
        new.seek(size_bytes - 1)
        new.write(b"\0")
        return new


_DAMAGED = (
    "the source is damaged, or the bytes were on their way; run `ckptkit verify` on the source"
)


class S3Object:
    """An object that is written in any order by any number of threads, or by several processes.

    It is invisible until its upload is completed. A small one is kept in memory, and put then.

    Attributes:
        key: What it will be called.
        size_bytes: Its size.
        etag: Of the visible object.
    """

    def __init__(
        self,
        store: S3Uploads,
        key: str,
        parts: Sequence[ObjectPart],
        begin: Callable[[bool], str],
        *,
        is_small: bool = False,
        sums_parts: bool = True,
    ) -> None:
        """Prepares it; the upload begins with the first bytes.

        `begin` begins or joins the upload, and returns its name; it takes `sums_parts`: whether the
        store keeps the checksum of the checksums of the parts, which costs it least; else that of
        all bytes, which a copy of the object keeps. A small object is put as a whole.
        """
        self.key = key
        self.size_bytes = parts[-1].stop if parts else 0
        self.etag = ""
        self._store = store
        self._begin = begin
        self._parts = parts
        self._is_small = is_small or not parts
        # If a copied range is cut in two, the checksums of the halves are unknown.
        self._is_split = any(
            part.copied is not None and part.copied is other.copied
            for part, other in pairwise(parts)
        )
        self._sums_parts = sums_parts and not self._is_split
        self._buffers = PartBuffers(parts)
        self._small = b""
        self._upload = ""
        self._is_visible = False
        self._lock = threading.Lock()
        self._sent: dict[int, SentPart] = {}
        self._sums: dict[int, int] = {}

    @classmethod
    def of_size(
        cls,
        store: S3Uploads,
        key: str,
        size_bytes: int,
        begin: Callable[[bool], str],
        copies: Sequence[CopiedRange] = (),
        *,
        sums_parts: bool = True,
    ) -> S3Object:
        """Cuts an object into parts; the store copies the ranges that `choose_copies` chose."""
        if size_bytes <= SMALL_BYTES and not copies:
            parts = (ObjectPart(1, 0, size_bytes),) if size_bytes else ()
            return cls(store, key, parts, begin, is_small=True)
        return cls(store, key, cut_into_parts(size_bytes, copies), begin, sums_parts=sums_parts)

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
                upload, checksum = self._get_upload(), self._sums[part.number]
                self._sent[part.number] = self._store.send(
                    self.key, upload, part.number, whole, checksum
                )

    def copy(self, part: ObjectPart, source: CopySource) -> None:
        assert part.copied is not None  # noqa: S101  that is what `copied_parts` gave
        span = part.source_start, part.source_start + part.stop - part.start
        sent = self._store.copy(self.key, self._get_upload(), part.number, source, span)
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

    def rows(self) -> list[Sequence[Any]]:
        """Returns what other processes have to know of the sent parts, as JSON values."""
        return [(at, self._sent[at].etag, self._sums[at]) for at in sorted(self._sent)]

    def adopt(self, rows: Sequence[Sequence[Any]]) -> None:
        for number, etag, checksum in rows:
            known = checksum if self._store.has_checksums else None
            self._sent[number], self._sums[number] = SentPart(number, etag, known), checksum

    def missing(self) -> list[ObjectPart]:
        done = self._sums if self._is_small else self._sent
        return [part for part in self._parts if part.number not in done]

    def publish(self) -> None:
        """Makes it visible, and compares the stored object with what was sent."""
        if self.missing():
            raise ValueError(f"{self.key!r} lacks {len(self.missing())} parts")
        expected = self._expected()
        if self._is_small:
            self._is_visible = True  # also where the answer is lost
            self.etag = self._store.put(self.key, self._small, expected.whole)
            return
        self._complete(None if self._sums_parts else expected.whole)
        self._is_visible = True
        head = self._check(expected)
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
        if not self._is_small or self.missing():
            self.publish()
            return
        data, expected = self._small, self._expected()
        is_put = self._store.put_new(self.key, data, expected.whole, in_parts=False)
        if not is_put and self._store.head(self.key).writer != self._store.writer:
            why = "another run has put its file there meanwhile"
            raise lost_place_error(why, self._store.url(self.key))
        self._is_visible = True

    def remove(self) -> None:
        if self._is_visible:
            self._store.delete([self.key])
        elif self._upload:
            self._store.abort(self.key, self._upload)

    def _get_upload(self) -> str:
        with self._lock:
            if not self._upload:
                self._upload = self._begin(self._sums_parts)
            return self._upload

    def _complete(self, whole: int | None) -> None:
        parts = [self._sent[part.number] for part in self._parts]
        upload = self._get_upload()
        try:
            self._store.complete(self.key, upload, parts, whole)
        except FileNotFoundError:
            # Also where the answer to a first try was lost: then the object is there.
            head = self._store.head(self.key)
            if head.size_bytes != self.size_bytes or head.writer != self._store.writer:
                raise

    def _check(self, expected: ObjectSums) -> ObjectHead:
        head = self._store.head(self.key)
        stored = head.checksum
        agrees = stored is None or expected.matches(stored)
        if head.size_bytes != self.size_bytes or not agrees:
            stored_crc = "unknown" if stored is None else f"{stored.crc32:08x}"
            kind = "" if stored is None or not stored.kind else f" ({stored.kind.lower()})"
            sums = [f"{crc:08x}" for crc in (expected.whole, expected.of_parts) if crc is not None]
            raise ChecksumError(
                f"the store has {head.size_bytes:,} bytes with CRC-32 {stored_crc}{kind} against"
                f" {self.size_bytes:,} with {sums[0]}, or {sums[-1]} of {expected.parts} parts",
                where=self._store.url(self.key),
                hint=_DAMAGED,
            )
        return head

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
