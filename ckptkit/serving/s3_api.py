"""The part of S3 that is served: requests become answers, without I/O.

Listings and reads of one bucket, which cannot be written to. Everything else is refused as S3
refuses it.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from urllib.parse import quote, unquote_to_bytes
from xml.sax.saxutils import escape

from msgspec import Struct, field

from ckptkit.serving.planned_folder import PlannedFile

BUCKET, REGION = "ckptkit", "us-east-1"
MOST_KEYS = 1000
_STATUS = {  # of codes that are not answered with 400
    "AccessDenied": 403,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidRange": 416,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NotImplemented": 501,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_RANGE = re.compile(r"bytes=(\d{0,1000})-(\d{0,1000})", re.ASCII)
_ABSOLUTE = re.compile(r"\Ahttps?://[^/?]*", re.IGNORECASE)
_TYPES = {".json": "application/json", ".txt": "text/plain", ".jinja": "text/plain"}
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


class S3Error(Exception):
    """A refused request, as S3 names it, with further elements and headers of the answer.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    """

    def __init__(
        self,
        code: str,
        message: str,
        facts: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status, self.message = code, _STATUS.get(code, 400), message
        self.facts, self.headers = dict(facts or {}), dict(headers or {})


class S3Request(Struct, frozen=True):
    """A request, with path and query decoded, and its headers by names in lower case."""

    method: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]


class Answer(Struct, frozen=True):
    """An answer; its body is `body`, or the bytes `[start, stop)` of the object `entry`."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    key: str = ""
    entry: PlannedFile | None = None
    start: int = 0
    stop: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start if self.entry is not None else len(self.body)


def parse_request(method: str, target: str, headers: Mapping[str, str]) -> S3Request:
    """Decodes a request, whose target is path and query as they were sent."""
    path, query = _split_target(target)
    try:
        for text in (method, *headers, *headers.values()):
            text.encode()  # of bytes that are no UTF-8, nothing could be signed
        pairs = [pair.partition("=") for pair in query.split("&") if pair]
        decoded = [(_decode(name), _decode(value)) for name, _, value in pairs]
        return S3Request(method, _decode(path), decoded, headers)
    except UnicodeError as error:
        raise S3Error("InvalidURI", "Couldn't parse the specified URI.") from error


def _split_target(target: str) -> tuple[str, str]:
    # AWS's client in C sends the absolute form; see https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2
    path, _, query = _ABSOLUTE.sub("", target, count=1).partition("?")
    return path or "/", query


def _decode(text: str) -> str:
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8")


def answer_request(
    request: S3Request, objects: Mapping[str, PlannedFile], began: datetime
) -> Answer:
    """Answers a request whose signature was checked; `objects` are all, in the order of keys."""
    path = request.path.removeprefix("/")
    name, _, key = path.partition("/")
    if request.headers.get("host", "").lower().startswith(f"{BUCKET}."):
        # The bucket in the name of the host. The machine may have a name such as ckptkit.org, too.
        name, key = (name, key) if name == BUCKET and path not in objects else (BUCKET, path)
    query = dict(request.query)
    if request.method not in {"GET", "HEAD"}:
        raise S3Error(
            "MethodNotAllowed",
            "The specified method is not allowed against this resource: it can only be read.",
            {"Method": request.method},
            {"Allow": "GET, HEAD"},
        )
    if not (name or key):
        made = (("Name", BUCKET), ("CreationDate", _format_time(began)))
        buckets: Tree = (("Owner", _OWNER), ("Buckets", (("Bucket", made),)))
        return _make_document("ListAllMyBucketsResult", buckets)
    if name != BUCKET:
        raise S3Error(
            "NoSuchBucket", f"The only bucket here is {BUCKET!r}.", {"BucketName": name[:100]}
        )
    if not _OPERATIONS.isdisjoint(query):
        operation = min(_OPERATIONS & query.keys())
        raise S3Error("NotImplemented", f"{operation!r} is not implemented by this server.")
    if key:
        if key not in objects:
            raise S3Error("NoSuchKey", "The specified key does not exist.", {"Key": key[:1024]})
        if query.get("versionId", "null") != "null":
            raise S3Error("InvalidArgument", "Invalid version id specified")
        return _read_object(key, objects[key], request.headers)
    if request.method == "HEAD":
        return Answer(200, {"x-amz-bucket-region": REGION})
    if "location" in query:
        return _make_document("LocationConstraint", "")  # which means us-east-1
    return _list_objects(query, objects)


def answer_error(error: S3Error, request_id: str, resource: str, *, is_head: bool) -> Answer:
    """Returns the answer for a refused request; that of HEAD has no body.

    Of the resource, the path is named: the query of a presigned URL has its signature in it.
    """
    content: list[tuple[str, Tree]] = [("Code", error.code), ("Message", error.message)]
    content += error.facts.items()
    content += [("Resource", _split_target(resource)[0][:1024]), ("RequestId", request_id)]
    body = b"" if is_head else make_xml("Error", content, named=False)
    return Answer(error.status, {"Content-Type": "application/xml", **error.headers}, body)


Tree = str | Sequence["tuple[str, Tree]"]
"""The content of an element: a text, or elements with their names."""
_OWNER: Tree = (("ID", BUCKET), ("DisplayName", BUCKET))


def make_xml(name: str, content: Tree, *, named: bool = True) -> bytes:
    """Returns a document; `named` says whether it has the namespace of S3, which errors lack."""
    begin = f'{name} xmlns="{_NAMESPACE}"' if named else name
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{begin}>{_inner_xml(content)}</{name}>'
    return text.encode()


def _inner_xml(content: Tree) -> str:
    if isinstance(content, str):
        # Other characters cannot be written in XML 1.0; clients ask for encoded keys instead.
        return escape(_NOT_IN_XML.sub("\ufffd", content))
    return "".join(f"<{name}>{_inner_xml(inner)}</{name}>" for name, inner in content)


def _make_document(name: str, content: Tree) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, make_xml(name, content))


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


# --- objects ---


def _read_object(key: str, entry: PlannedFile, asked: Mapping[str, str]) -> Answer:
    modified = format_datetime(entry.modified.astimezone(UTC), usegmt=True)
    headers = {"ETag": entry.etag, "Last-Modified": modified}
    if _is_known(asked, entry):
        return Answer(304, headers)
    headers["Accept-Ranges"] = "bytes"
    headers["Content-Type"] = _TYPES.get(key[key.rfind(".") :], "application/octet-stream")
    condition = asked.get("if-range", entry.etag)
    is_same = condition == modified or _names_etag(condition, entry, strongly=True)
    part = _find_range(asked.get("range", ""), entry.size_bytes) if is_same else None
    if part is not None:
        headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{entry.size_bytes}"
        return Answer(206, headers, b"", key, entry, *part)
    if entry.crc32 is not None and asked.get("x-amz-checksum-mode", "").upper() == "ENABLED":
        encoded = base64.b64encode(entry.crc32.to_bytes(4, "big")).decode()
        headers |= {"x-amz-checksum-crc32": encoded, "x-amz-checksum-type": "FULL_OBJECT"}
    return Answer(200, headers, b"", key, entry, 0, entry.size_bytes)


def _is_known(headers: Mapping[str, str], entry: PlannedFile) -> bool:
    """Says whether the client has this version already; refuses if it wants another one.

    Source: https://www.rfc-editor.org/rfc/rfc9110#section-13.2.2
    """
    failed = ""
    if (match := headers.get("if-match")) is not None:
        failed = "" if _names_etag(match, entry, strongly=True) else "If-Match"
    elif (unmodified := headers.get("if-unmodified-since")) is not None:
        failed = "If-Unmodified-Since" if _is_newer(entry, unmodified) else ""
    if failed:
        raise S3Error(
            "PreconditionFailed",
            "At least one of the preconditions you specified did not hold.",
            {"Condition": failed},
        )
    if (none := headers.get("if-none-match")) is not None:
        return _names_etag(none, entry)
    since = headers.get("if-modified-since")
    return since is not None and not _is_newer(entry, since, unreadable=True)


def _names_etag(header: str, entry: PlannedFile, *, strongly: bool = False) -> bool:
    """Says whether a list of ETags has that of an object; compared strongly, no weak one is it."""
    named = {one.strip() for one in header.split(",")}
    if not strongly:
        named = {one.removeprefix("W/") for one in named}
    return "*" in named or entry.etag.strip('"') in {one.strip('"') for one in named}


def _is_newer(entry: PlannedFile, header: str, *, unreadable: bool = False) -> bool:
    try:
        since = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return unreadable
    if since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    return entry.modified.replace(microsecond=0) > since


def _find_range(header: str, size: int) -> tuple[int, int] | None:
    """Returns the range that a request asks for; None for all of the object.

    As S3 does, several ranges and what is no range are answered with the whole object.
    """
    match = _RANGE.fullmatch(header.strip())
    first, last = match.groups() if match is not None else ("", "")
    if not (first or last) or (first and last and int(last) < int(first)):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise S3Error(
            "InvalidRange",
            "The requested range is not satisfiable",
            {"RangeRequested": header.strip(), "ActualObjectSize": str(size)},
            {"Content-Range": f"bytes */{size}"},
        )
    return start, stop


# --- listings ---


def _list_objects(query: Mapping[str, str], objects: Mapping[str, PlannedFile]) -> Answer:
    """Answers a listing of either version.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
    """
    if (version := query.get("list-type", "1")) not in {"1", "2"}:
        raise S3Error("InvalidArgument", "Invalid List Type specified in Request")
    if query.get("encoding-type", "url") != "url":
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    most = query.get("max-keys", "") or str(MOST_KEYS)
    if not (most.isascii() and most.isdecimal() and len(most) <= len(str(2**31))):
        raise S3Error("InvalidArgument", "Argument max-keys must be an integer of at least 0.")
    start, parameter = ("Marker", "marker") if version == "1" else ("StartAfter", "start-after")
    after, token = query.get(parameter, ""), query.get("continuation-token")
    if token is not None and version == "2":
        after = _decode_token(token)
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = list_names(list(objects), prefix, delimiter, after)
    page = names[: min(int(most), MOST_KEYS)]
    is_truncated = 0 < len(page) < len(names)

    def encode(text: str) -> str:
        return quote(text, safe="/-_.~") if "encoding-type" in query else text

    rows: list[tuple[str, Tree]] = [("Name", BUCKET), ("Prefix", encode(prefix)), ("MaxKeys", most)]
    for name, key in (("Delimiter", "delimiter"), (start, parameter)):
        if query.get(key) or key == "marker":
            rows.append((name, encode(query.get(key, ""))))
    if "encoding-type" in query:
        rows.append(("EncodingType", "url"))
    if version == "2":
        rows.append(("KeyCount", str(len(page))))
        rows += [("ContinuationToken", token)] if token is not None else []
        if is_truncated:
            last = base64.urlsafe_b64encode(page[-1].encode()).decode()
            rows.append(("NextContinuationToken", last))
    elif is_truncated and delimiter:
        rows.append(("NextMarker", encode(page[-1])))
    rows.append(("IsTruncated", "true" if is_truncated else "false"))
    joined = [name for name in page if delimiter and delimiter in name[len(prefix) :]]
    for name in (one for one in page if one not in joined):
        entry = objects[name]
        described: Tree = (
            ("Key", encode(name)),
            ("LastModified", _format_time(entry.modified)),
            ("ETag", entry.etag),
            ("Size", str(entry.size_bytes)),
            ("StorageClass", "STANDARD"),
            ("Owner", _OWNER),
        )
        rows.append(("Contents", described))
    rows += [("CommonPrefixes", (("Prefix", encode(name)),)) for name in joined]
    return _make_document("ListBucketResult", rows)


def list_names(keys: Sequence[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """Returns keys and common prefixes that a listing has after `after`, in the order of keys."""
    names: list[str] = []
    for key in keys:
        if not key.startswith(prefix) or key <= after:
            continue
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        name = key if end < 0 else key[: end + len(delimiter)]
        is_old = end >= 0 and name == after
        if not is_old and (not names or names[-1] != name):
            names.append(name)
    return names


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from error
