"""The part of S3 that is served: signed requests become answers, without I/O.

Listings and reads of one bucket, which cannot be written to. Everything else is refused as S3
refuses it. Signatures are made again by botocore's own signer (AWS Signature Version 4, in headers
and in presigned URLs), for the headers and the credential scope that the client names.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.serving.planned_folder import PlannedFile

BUCKET, REGION = "ckptkit", "us-east-1"
MOST_KEYS = 1000
_STATUS = (  # of codes that are not answered with 400
    dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), 403)
    | {"RequestTimeTooSkewed": 403, "NoSuchBucket": 404, "NoSuchKey": 404}
    | {"MethodNotAllowed": 405, "PreconditionFailed": 412, "InvalidRange": 416}
    | {"InternalError": 500, "NotImplemented": 501, "ServiceUnavailable": 503}
)
_NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_RANGE = re.compile(r"bytes=(\d{0,1000})-(\d{0,1000})", re.ASCII)
_TYPES = {".json": "application/json", ".txt": "text/plain", ".jinja": "text/plain"}
_OPERATIONS = re.compile(  # parameters that ask for something else, none of which is served
    "accelerate|acl|analytics|attributes|cors|encryption|intelligent-tiering|inventory|legal-hold"
    "|lifecycle|logging|metrics|notification|object-lock|ownershipControls|partNumber|policy"
    "|policyStatus|publicAccessBlock|replication|requestPayment|restore|retention|select|session"
    "|tagging|torrent|uploadId|uploads|versionId|versioning|versions|website|response-.*",
    re.DOTALL,
)
_ALGORITHM = "AWS4-HMAC-SHA256"
_CLAIMED = ("Credential", "SignedHeaders", "Signature", "Date")
_MOST_SKEW, _MOST_EXPIRES = timedelta(minutes=15), 7 * 24 * 3600


class S3Error(Exception):
    """A refused request, as S3 names it, with further elements and headers of the answer.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    """

    def __init__(self, code: str, message: str, *headers: tuple[str, str], **facts: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status, self.message = code, _STATUS.get(code, 400), message
        self.headers, self.facts = dict(headers), facts


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


def parse_request(method: str, target: str, headers: Mapping[str, str]) -> S3Request:
    """Decodes a request, whose target is path and query as they were sent."""
    path, _, sent = _without_host(target).partition("?")
    try:
        query = parse_qsl(sent.replace("+", "%2B"), keep_blank_values=True, errors="strict")
        path = unquote(path, errors="strict") or "/"
        for text in (method, path, *chain(*query), *headers, *headers.values()):
            text.encode()  # of bytes that are no UTF-8, nothing could be signed
    except UnicodeError as error:
        raise S3Error("InvalidURI", "Couldn't parse the specified URI.") from error
    return S3Request(method, path, query, headers)


def _without_host(target: str) -> str:
    # AWS's client in C sends the absolute form; see https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2
    return re.sub(r"\Ahttps?://[^/?]*", "", target, count=1, flags=re.IGNORECASE)


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
            ("Allow", "GET, HEAD"),
            Method=request.method,
        )
    if not (name or key):
        made = (("Name", BUCKET), ("CreationDate", _format_time(began)))
        buckets: Tree = (("Owner", _OWNER), ("Buckets", (("Bucket", made),)))
        return _make_document("ListAllMyBucketsResult", buckets)
    if name != BUCKET:
        message = f"The only bucket here is {BUCKET!r}."
        raise S3Error("NoSuchBucket", message, BucketName=name[:100])
    for one in filter(_OPERATIONS.fullmatch, query):
        raise S3Error("NotImplemented", f"{one[:100]!r} is not implemented by this server.")
    if key:
        if key not in objects:
            raise S3Error("NoSuchKey", "The specified key does not exist.", Key=key[:1024])
        return _read_object(key, objects[key], request.headers)
    if request.method == "HEAD":
        return Answer(200, {"x-amz-bucket-region": REGION})
    if "location" in query:
        return _make_document("LocationConstraint", "")  # which means us-east-1
    return _list_objects(query, objects)


def answer_error(error: S3Error, request_id: str, target: str) -> Answer:
    """Returns the answer for a refused request, whose query may have a signature in it."""
    resource = _without_host(target).partition("?")[0] or "/"
    rows: list[tuple[str, Tree]] = [("Code", error.code), ("Message", error.message)]
    rows += [*error.facts.items(), ("Resource", resource[:1024]), ("RequestId", request_id)]
    answer = _make_document("Error", rows, namespace="")
    return replace(answer, status=error.status, headers={**answer.headers, **error.headers})


Tree = str | Sequence["tuple[str, Tree]"]
"""The content of an element: a text, or elements with their names."""
_OWNER: Tree = (("ID", BUCKET), ("DisplayName", BUCKET))


def _make_document(name: str, content: Tree, namespace: str = _NAMESPACE) -> Answer:
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{namespace}>{make_xml(content)}</{name}>'
    )
    return Answer(200, {"Content-Type": "application/xml"}, text.encode())


def make_xml(content: Tree) -> str:
    if isinstance(content, str):
        # Other characters cannot be written in XML 1.0; clients ask for encoded keys instead.
        return escape(_NOT_IN_XML.sub("\ufffd", content))
    return "".join(f"<{name}>{make_xml(inner)}</{name}>" for name, inner in content)


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


def _is_known(asked: Mapping[str, str], entry: PlannedFile) -> bool:
    """Says whether the client has this version already; refuses if it wants another one.

    Source: https://www.rfc-editor.org/rfc/rfc9110#section-13.2.2
    """
    wanted, etag = asked.get("if-match"), asked.get("if-none-match")
    if wanted is not None:
        failed = "" if _names_etag(wanted, entry, strongly=True) else "If-Match"
    else:
        failed = "If-Unmodified-Since" if _is_newer(entry, asked, "if-unmodified-since") else ""
    if failed:
        message = "At least one of the preconditions you specified did not hold."
        raise S3Error("PreconditionFailed", message, Condition=failed)
    if etag is not None:
        return _names_etag(etag, entry)
    return _is_newer(entry, asked, "if-modified-since") is False


def _names_etag(header: str, entry: PlannedFile, *, strongly: bool = False) -> bool:
    """Says whether a list of ETags has that of an object; compared strongly, no weak one is it."""
    named = {one.strip() for one in header.split(",")}
    if not strongly:
        named = {one.removeprefix("W/") for one in named}
    return "*" in named or entry.etag.strip('"') in {one.strip('"') for one in named}


def _is_newer(entry: PlannedFile, asked: Mapping[str, str], header: str) -> bool | None:
    """Says whether an object is newer than a header; None if there is no time in it."""
    try:
        since = parsedate_to_datetime(asked[header])
    except (KeyError, ValueError, OverflowError):
        return None
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
            ("Content-Range", f"bytes */{size}"),
            RangeRequested=header.strip(),
            ActualObjectSize=str(size),
        )
    return start, stop


# --- listings ---


def _list_objects(query: Mapping[str, str], objects: Mapping[str, PlannedFile]) -> Answer:
    """Answers a listing of either version.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
    """
    version, most = query.get("list-type", "1"), query.get("max-keys", "") or str(MOST_KEYS)
    for is_right, message in (
        (version in {"1", "2"}, "Invalid List Type specified in Request"),
        (query.get("encoding-type", "url") == "url", "Invalid Encoding Method specified"),
        (re.fullmatch("[0-9]{1,10}", most), "max-keys must be an integer of at least 0."),
    ):
        if not is_right:
            raise S3Error("InvalidArgument", message)
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    token = query.get("continuation-token") if version == "2" else None
    start = query.get("marker" if version == "1" else "start-after", "")
    names = list_names(list(objects), prefix, delimiter, start if token is None else unquote(token))
    page = names[: min(int(most), MOST_KEYS)]
    is_truncated = 0 < len(page) < len(names)
    is_encoded = "encoding-type" in query

    def encode(text: str) -> str:
        return quote(text, safe="/-_.~") if is_encoded else text

    facts = {"Name": BUCKET, "Prefix": encode(prefix), "Delimiter": encode(delimiter)}
    facts |= {"Marker" if version == "1" else "StartAfter": encode(start), "MaxKeys": most}
    facts |= {"EncodingType": "url" if is_encoded else "", "ContinuationToken": token or ""}
    facts |= {"KeyCount": str(len(page)) if version == "2" else ""}
    facts |= {"IsTruncated": "true" if is_truncated else "false"}
    if is_truncated and version == "1":
        facts["NextMarker"] = encode(page[-1])
    elif is_truncated:
        facts["NextContinuationToken"] = quote(page[-1], safe="")
    rows: list[tuple[str, Tree]] = [
        one for one in facts.items() if one[1] or one[0] in {"Prefix", "Marker"}
    ]
    joined = [name for name in page if delimiter and delimiter in name[len(prefix) :]]
    for name in (one for one in page if one not in joined):
        described = (
            *(("Key", encode(name)), ("LastModified", _format_time(objects[name].modified))),
            *(("ETag", objects[name].etag), ("Size", str(objects[name].size_bytes))),
            *(("StorageClass", "STANDARD"), ("Owner", _OWNER)),
        )
        rows.append(("Contents", described))
    rows += [("CommonPrefixes", (("Prefix", encode(name)),)) for name in joined]
    return _make_document("ListBucketResult", rows)


def list_names(keys: Sequence[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """Returns keys and common prefixes that a listing has after `after`, in the order of keys."""
    names: dict[str, None] = {}
    for key in keys:
        if key.startswith(prefix) and key > after:
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            names[key if end < 0 else key[: end + len(delimiter)]] = None
    names.pop(after, None)  # a common prefix, whose keys come later than itself
    return list(names)


# --- signatures ---


def make_keys() -> Credentials:
    """Returns random keys, as long as those of AWS; the secret has 240 bits."""
    return Credentials(f"CKPT{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))


class _SameAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signs the headers that the client has signed, which are all that its request is given."""

    def headers_to_sign(self, request: Any) -> Any:
        return request.headers

    def payload(self, request: Any) -> Any:
        return request.context["payload"]


def check_signature(request: S3Request, keys: Credentials, now: datetime) -> None:
    """Refuses a request that is not signed with the keys, or not at about this time.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html
    """
    query, headers = dict(request.query), request.headers
    algorithm, _, claims = headers.get("authorization", "").partition(" ")
    is_presigned = "X-Amz-Signature" in query or "X-Amz-Algorithm" in query
    if is_presigned:
        algorithm = query.get("X-Amz-Algorithm", "")
        claim = {name: query.get(f"X-Amz-{name}", "") for name in _CLAIMED}
    elif not algorithm and "Signature" not in query:  # which version 2 has
        raise S3Error("AccessDenied", "The request has no signature.")
    else:
        claim = dict(part.strip().partition("=")[::2] for part in claims.split(","))
        claim["Date"] = headers.get("x-amz-date", "")
    if algorithm != _ALGORITHM:
        message = "The authorization mechanism you have provided is not supported. Please use"
        raise S3Error("InvalidRequest", f"{message} {_ALGORITHM}.")
    credential, names, signature, timestamp = (claim.get(name, "") for name in _CLAIMED)
    key, date, region, *end = (*credential.split("/"), "", "", "")
    if not (names and signature) or date != timestamp[:8] or end[:2] != ["s3", "aws4_request"]:
        raise S3Error(
            "AuthorizationHeaderMalformed",
            "It needs Credential, with the day of the request and the scope of S3, SignedHeaders"
            " and Signature.",
        )
    if not hmac.compare_digest(key.encode(), keys.access_key.encode()):
        raise S3Error("InvalidAccessKeyId", "The access key is not the one of this server.")
    _check_time(timestamp, query.get("X-Amz-Expires", "") if is_presigned else None, now)
    signed = set(names.split(";"))
    unsigned = {n for n in headers if n.startswith("x-amz-") and not is_presigned} | {"host"}
    if wrong := (unsigned - signed) | (signed - headers.keys()):
        raise _mismatch(f"{min(wrong)!r} was sent and not signed, or signed and not sent")
    pairs = [pair for pair in request.query if pair[0] != "X-Amz-Signature"]
    encoded = "&".join("=".join(quote(text, safe="-_.~") for text in pair) for pair in pairs)
    url = f"http://host{quote(request.path, safe='/-_.~')}?{encoded}"
    made = AWSRequest(request.method, url, {name: headers[name] for name in signed})
    body = "UNSIGNED-PAYLOAD" if is_presigned else headers.get("x-amz-content-sha256", "")
    payload = query.get("X-Amz-Content-Sha256", body)
    made.context |= {"timestamp": timestamp, "payload": payload}
    auth = _SameAuth(keys, "s3", region)
    expected = auth.signature(auth.string_to_sign(made, auth.canonical_request(made)), made)
    if not hmac.compare_digest(str(expected).encode(), signature.encode()):
        raise _mismatch("check the secret key")


def _check_time(timestamp: str, expires: str | None, now: datetime) -> None:
    """Refuses a request of another time; a presigned URL is valid for some seconds."""
    if expires is not None and not (
        re.fullmatch("[0-9]{1,6}", expires) and 0 < int(expires) <= _MOST_EXPIRES
    ):
        message = f"X-Amz-Expires has to be from 1 to {_MOST_EXPIRES}."
        raise S3Error("AuthorizationQueryParametersError", message)
    try:
        age = now - datetime.strptime(timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        message = "A signed request needs a valid Date or x-amz-date header."
        raise S3Error("AccessDenied", message) from error
    if expires is not None and age > timedelta(seconds=int(expires)):
        raise S3Error("AccessDenied", "Request has expired")
    if -age > _MOST_SKEW or (expires is None and age > _MOST_SKEW):
        raise S3Error(
            "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
            RequestTime=timestamp,
            ServerTime=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            MaxAllowedSkewMilliseconds=str(int(_MOST_SKEW.total_seconds() * 1000)),
        )


def _mismatch(why: str) -> S3Error:
    message = f"The request signature we calculated does not match the one that was sent: {why}."
    return S3Error("SignatureDoesNotMatch", message)
