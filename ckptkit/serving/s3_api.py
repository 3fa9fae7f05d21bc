"""The part of S3 that is served: requests become answers, without I/O.

Listings and reads of one bucket, which cannot be written to. Everything else is refused as S3
refuses it.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Protocol
from urllib.parse import quote, unquote_to_bytes

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.serving.s3_errors import S3Error, Tree, make_xml
from ckptkit.serving.served_objects import (
    BUCKET,
    MOST_KEYS,
    ListedPage,
    ListRequest,
    ServedObject,
    list_page,
)
from ckptkit.serving.signatures import SignedRequest

REGION = "us-east-1"
_RANGE = re.compile(r"bytes=(\d{0,1000})-(\d{0,1000})", re.ASCII)
_ABSOLUTE = re.compile(r"\Ahttps?://[^/?]*", re.IGNORECASE)
_TYPES = {".json": "application/json", ".txt": "text/plain", ".jinja": "text/plain"}
_OTHER_TYPE = "application/octet-stream"
# Each of these parameters asks for something else; none of them is served.
_OPERATIONS = frozenset(
    {
        *("accelerate", "acl", "analytics", "attributes", "cors", "encryption", "inventory"),
        *("intelligent-tiering", "legal-hold", "lifecycle", "logging", "metrics", "notification"),
        *("object-lock", "ownershipControls", "partNumber", "policy", "policyStatus"),
        *("publicAccessBlock", "replication", "requestPayment", "restore", "retention", "select"),
        *("session", "tagging", "torrent", "uploadId", "uploads", "versioning", "versions"),
        "website",
        # Headers of the answer, which S3 lets a signed request choose.
        *("response-cache-control", "response-content-disposition", "response-content-encoding"),
        *("response-content-language", "response-content-type", "response-expires"),
    }
)


class Bucket(Protocol):
    """What is served at the moment."""

    def objects(self) -> Sequence[ServedObject]:
        """Returns all objects in the order of their keys."""
        ...

    def find(self, key: str) -> ServedObject | None:
        """Returns an object by its key."""
        ...


class Answer(Struct, frozen=True):
    """An answer to a request.

    Attributes:
        status: The HTTP status.
        headers: Its headers, without Content-Length.
        body: The body, unless it is bytes of an object.
        entry: The object that the body has bytes of.
        start: The first of these bytes.
        stop: The first byte after them.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    entry: ServedObject | None = None
    start: int = 0
    stop: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start if self.entry is not None else len(self.body)


def parse_request(method: str, target: str, headers: Mapping[str, str]) -> SignedRequest:
    """Decodes a request.

    Args:
        method: The method.
        target: Path and query as they were sent, maybe with the address in front of them.
        headers: The headers, by names in lower case.
    """
    # AWS's client in C sends the absolute form; see https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2
    path, query = _split_target(target)
    try:
        for text in (method, *headers, *headers.values()):
            text.encode()  # of bytes that are no UTF-8, nothing could be signed
        pairs = [pair.partition("=") for pair in query.split("&") if pair]
        decoded = [(_decode(name), _decode(value)) for name, _, value in pairs]
        return SignedRequest(method, _decode(path), decoded, headers)
    except UnicodeError as error:
        raise S3Error("InvalidURI", "Couldn't parse the specified URI.") from error


def _split_target(target: str) -> tuple[str, str]:
    """Returns path and query as they were sent, without the address."""
    path, _, query = _ABSOLUTE.sub("", target, count=1).partition("?")
    return path or "/", query


def _decode(text: str) -> str:
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8")


def answer_request(request: SignedRequest, bucket: Bucket, began: datetime) -> Answer:
    """Answers a request whose signature was checked.

    Args:
        request: The request.
        bucket: What is served.
        began: When the server was started.

    Raises:
        S3Error: If it is refused.
    """
    name, key = _find_target(request, bucket)
    query = dict(request.query)
    if request.method not in {"GET", "HEAD"}:
        raise S3Error(
            "MethodNotAllowed",
            "The specified method is not allowed against this resource: it can only be read.",
            {"Method": request.method},
            {"Allow": "GET, HEAD"},
        )
    if not (name or key):
        return _list_buckets(began)
    if name != BUCKET:
        raise S3Error(
            "NoSuchBucket", f"The only bucket here is {BUCKET!r}.", {"BucketName": name[:100]}
        )
    if not _OPERATIONS.isdisjoint(query):
        operation = min(_OPERATIONS & query.keys())
        raise S3Error("NotImplemented", f"{operation!r} is not implemented by this server.")
    if key:
        return _read_object(request, query, bucket, key)
    if request.method == "HEAD":
        return Answer(200, {"x-amz-bucket-region": REGION})
    if "location" in query:
        return _make_document("LocationConstraint", "")  # which means us-east-1
    listing = {"1": _list_version_1, "2": _list_version_2}.get(query.get("list-type", "1"))
    if listing is None:
        raise S3Error("InvalidArgument", "Invalid List Type specified in Request")
    return listing(query, bucket)


def _find_target(request: SignedRequest, bucket: Bucket) -> tuple[str, str]:
    """Returns bucket and key; the bucket may be in the name of the host."""
    path = request.path.removeprefix("/")
    name, _, key = path.partition("/")
    if request.headers.get("host", "").lower().startswith(f"{BUCKET}."):
        # The machine itself may have a name such as ckptkit.example.org.
        is_of_machine = name == BUCKET and bucket.find(path) is None
        return (name, key) if is_of_machine else (BUCKET, path)
    return name, key


def _make_document(name: str, content: Tree) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, make_xml(name, content))


_OWNER: Tree = (("ID", BUCKET), ("DisplayName", BUCKET))


def _list_buckets(began: datetime) -> Answer:
    only = (("Bucket", (("Name", BUCKET), ("CreationDate", _format_time(began)))),)
    return _make_document("ListAllMyBucketsResult", (("Owner", _OWNER), ("Buckets", only)))


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


# --- objects ---


def _read_object(
    request: SignedRequest, query: Mapping[str, str], bucket: Bucket, key: str
) -> Answer:
    entry = bucket.find(key)
    if entry is None:
        raise S3Error("NoSuchKey", "The specified key does not exist.", {"Key": key[:1024]})
    if query.get("versionId", "null") != "null":
        raise S3Error("InvalidArgument", "Invalid version id specified")
    if _is_known(request.headers, entry):
        return Answer(304, {"ETag": entry.etag, "Last-Modified": _http_time(entry)})
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": _TYPES.get(key[key.rfind(".") :], _OTHER_TYPE),
        "ETag": entry.etag,
        "Last-Modified": _http_time(entry),
    }
    part = _find_range(request.headers, entry)
    if part is None:
        if entry.crc32 is not None and _asks_for_checksum(request.headers):
            encoded = base64.b64encode(entry.crc32.to_bytes(4, "big")).decode()
            headers |= {"x-amz-checksum-crc32": encoded, "x-amz-checksum-type": "FULL_OBJECT"}
        return Answer(200, headers, entry=entry, stop=entry.size_bytes)
    start, stop = part
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{entry.size_bytes}"
    return Answer(206, headers, entry=entry, start=start, stop=stop)


def _asks_for_checksum(headers: Mapping[str, str]) -> bool:
    return headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"


def _http_time(entry: ServedObject) -> str:
    return format_datetime(entry.modified.astimezone(UTC), usegmt=True)


def _is_known(headers: Mapping[str, str], entry: ServedObject) -> bool:
    """Says whether the client has this version already; refuses if it wants another one.

    Source: https://www.rfc-editor.org/rfc/rfc9110#section-13.2.2
    """
    match, unmodified = headers.get("if-match"), headers.get("if-unmodified-since")
    if match is not None:
        fails = not _names_etag(match, entry, strongly=True)
    else:
        fails = unmodified is not None and _is_newer(entry, unmodified)
    if fails:
        raise S3Error(
            "PreconditionFailed",
            "At least one of the preconditions you specified did not hold.",
            {"Condition": "If-Match" if match is not None else "If-Unmodified-Since"},
        )
    if (none := headers.get("if-none-match")) is not None:
        return _names_etag(none, entry)
    since = headers.get("if-modified-since")
    return since is not None and not _is_newer(entry, since, unreadable=True)


def _names_etag(header: str, entry: ServedObject, *, strongly: bool = False) -> bool:
    """Says whether a list of ETags has that of an object; compared strongly, no weak one is it."""
    named = {one.strip() for one in header.split(",")}
    if not strongly:
        named = {one.removeprefix("W/") for one in named}
    return "*" in named or entry.etag.strip('"') in {one.strip('"') for one in named}


def _is_newer(entry: ServedObject, header: str, *, unreadable: bool = False) -> bool:
    try:
        since = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return unreadable
    if since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    return entry.modified.replace(microsecond=0) > since


def _find_range(headers: Mapping[str, str], entry: ServedObject) -> tuple[int, int] | None:
    """Returns the range that a request asks for; None for all of the object.

    As S3 does, several ranges and what is no range are answered with the whole object.
    """
    match = _RANGE.fullmatch(headers.get("range", "").strip())
    condition = headers.get("if-range", entry.etag)
    is_same = condition == _http_time(entry) or _names_etag(condition, entry, strongly=True)
    if match is None or not is_same:
        return None
    first, last, size = match[1], match[2], entry.size_bytes
    if not (first or last):
        return None
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise S3Error(
            "InvalidRange",
            "The requested range is not satisfiable",
            {"RangeRequested": match[0], "ActualObjectSize": str(size)},
            {"Content-Range": f"bytes */{size}"},
        )
    return start, stop


# --- listings ---


def _list_version_2(query: Mapping[str, str], bucket: Bucket) -> Answer:
    token = query.get("continuation-token")
    request = _parse_listing(query, query.get("start-after", ""))
    if token is not None:
        request = replace(request, after=_decode_token(token))
    page, encode = list_page(bucket.objects(), request), _encoder(query)
    rows = [*_head(query, encode, "StartAfter", "start-after")]
    rows.append(("KeyCount", str(len(page.objects) + len(page.prefixes))))
    if token is not None:
        rows.append(("ContinuationToken", token))
    if page.last:
        rows.append(("NextContinuationToken", _encode_token(page.last)))
    return _make_document("ListBucketResult", (*rows, *_contents(page, request, encode)))


def _list_version_1(query: Mapping[str, str], bucket: Bucket) -> Answer:
    request = _parse_listing(query, query.get("marker", ""))
    page, encode = list_page(bucket.objects(), request), _encoder(query)
    rows = [*_head(query, encode, "Marker", "marker")]
    if page.last and request.delimiter:
        rows.append(("NextMarker", encode(page.last)))
    return _make_document("ListBucketResult", (*rows, *_contents(page, request, encode)))


def _parse_listing(query: Mapping[str, str], after: str) -> ListRequest:
    if query.get("encoding-type", "url") != "url":
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    text = query.get("max-keys", "") or str(MOST_KEYS)
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**31))):
        raise S3Error("InvalidArgument", "Argument max-keys must be an integer of at least 0.")
    most = min(int(text), MOST_KEYS)
    return ListRequest(query.get("prefix", ""), query.get("delimiter", ""), after, most)


def _encoder(query: Mapping[str, str]) -> Callable[[str], str]:
    return _quote if query.get("encoding-type") == "url" else str


def _quote(text: str) -> str:
    return quote(text, safe="/-_.~")


def _head(
    query: Mapping[str, str], encode: Callable[[str], str], start: str, parameter: str
) -> list[tuple[str, Tree]]:
    """Returns what a listing repeats of its request."""
    rows: list[tuple[str, Tree]] = [
        ("Name", BUCKET),
        ("Prefix", encode(query.get("prefix", ""))),
        ("MaxKeys", query.get("max-keys", "") or str(MOST_KEYS)),
    ]
    for name, key in (("Delimiter", "delimiter"), (start, parameter)):
        if query.get(key) or key == "marker":
            rows.append((name, encode(query.get(key, ""))))
    if "encoding-type" in query:
        rows.append(("EncodingType", "url"))
    return rows


def _contents(
    page: ListedPage, request: ListRequest, encode: Callable[[str], str]
) -> Sequence[tuple[str, Tree]]:
    objects = [
        (
            "Contents",
            (
                ("Key", encode(entry.key)),
                ("LastModified", _format_time(entry.modified)),
                ("ETag", entry.etag),
                ("Size", str(entry.size_bytes)),
                ("StorageClass", "STANDARD"),
                ("Owner", _OWNER),
            ),
        )
        for entry in page.objects
    ]
    prefixes = [("CommonPrefixes", (("Prefix", encode(name)),)) for name in page.prefixes]
    is_truncated = bool(page.last) and request.most > 0
    return [("IsTruncated", "true" if is_truncated else "false"), *objects, *prefixes]


def _encode_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from error


def answer_error(error: S3Error, request_id: str, resource: str, *, is_head: bool) -> Answer:
    """Returns the answer for a refused request; that of HEAD has no body.

    Of the resource, the path is named: the query of a presigned URL has its signature in it.
    """
    content: list[tuple[str, Tree]] = [("Code", error.code), ("Message", error.message)]
    content += error.facts.items()
    content += [("Resource", _split_target(resource)[0][:1024]), ("RequestId", request_id)]
    body = b"" if is_head else make_xml("Error", content, named=False)
    return Answer(error.status, {"Content-Type": "application/xml", **error.headers}, body)
