"""Checks the signatures of requests: AWS Signature Version 4, in headers and in presigned URLs.

The canonical request and its signature are made by botocore's own signer, for the headers and the
credential scope that the client names.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html
"""

from __future__ import annotations

import dataclasses
import hmac
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials
from msgspec import Struct

from ckptkit.serving.s3_api import S3Error, S3Request

_MOST_SKEW = timedelta(minutes=15)
_MOST_EXPIRES = 7 * 24 * 3600
_ALGORITHM = "AWS4-HMAC-SHA256"
_FIELD = re.compile(r"\s*(Credential|SignedHeaders|Signature)=([^,\s]+)\s*")
_CONTENT = "x-amz-content-sha256"


@dataclasses.dataclass(frozen=True, slots=True)
class AccessKeys:
    """The keys that clients sign with."""

    access_key: str
    secret_key: str = dataclasses.field(repr=False)


def make_keys() -> AccessKeys:
    """Returns random keys, as long as those of AWS; the secret has 240 bits."""
    return AccessKeys(f"CKPT{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))


class _Claim(Struct, frozen=True):
    """A signature as the client sends it."""

    credential: str
    signed_headers: str
    signature: str
    timestamp: str
    lifetime: timedelta | None = None  # of a presigned URL


class _ScopedAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signs the headers that a client has signed, and no others."""

    def __init__(self, keys: AccessKeys, region: str, signed: Sequence[str]) -> None:
        super().__init__(Credentials(keys.access_key, keys.secret_key), "s3", region)
        self._signed = signed

    def headers_to_sign(self, request: Any) -> Any:
        wanted = HTTPHeaders()
        for name in self._signed:
            wanted[name] = request.headers[name]
        return wanted


def check_signature(request: S3Request, keys: AccessKeys, now: datetime) -> None:
    """Refuses a request that is not signed with the keys, or not at about this time."""
    claim = _read_claim(request)
    scope, signed = claim.credential.split("/"), claim.signed_headers.split(";")
    if len(scope) != len(("key", "date", "region", "s3", "aws4_request")) or "host" not in signed:
        raise _malformed("the credential or the signed headers are incomplete")
    access_key, date, region, service, end = scope
    if (service, end) != ("s3", "aws4_request") or date != claim.timestamp[:8]:
        raise _malformed(f"the credential scope {'/'.join(scope[1:])!r} is not one of S3 today")
    if not hmac.compare_digest(access_key.encode(), keys.access_key.encode()):
        raise S3Error("InvalidAccessKeyId", "The access key is not the one of this server.")
    _check_time(claim, now)
    missing = [name for name in signed if name not in request.headers]
    if missing:
        raise _mismatch(f"the signed header {missing[0]!r} was not sent")
    unsigned = [n for n in request.headers if n.startswith("x-amz-") and n not in signed]
    if unsigned and claim.lifetime is None:
        raise _mismatch(f"the header {unsigned[0]!r} was sent and not signed")
    pairs = [pair for pair in request.query if pair[0] != "X-Amz-Signature"]
    encoded = "&".join("=".join(quote(text, safe="-_.~") for text in pair) for pair in pairs)
    url = f"http://host{quote(request.path, safe='/-_.~')}"
    headers = {name: request.headers[name] for name in signed}
    default = request.headers.get(_CONTENT, "") if claim.lifetime is None else "UNSIGNED-PAYLOAD"
    headers.setdefault(_CONTENT, dict(pairs).get("X-Amz-Content-Sha256", default))
    made = AWSRequest(request.method, f"{url}?{encoded}" if encoded else url, headers)
    made.context["timestamp"] = claim.timestamp
    auth = _ScopedAuth(keys, region, signed)
    expected = auth.signature(auth.string_to_sign(made, auth.canonical_request(made)), made)
    if not hmac.compare_digest(str(expected).encode(), claim.signature.encode()):
        raise _mismatch("check the secret key")


def _read_claim(request: S3Request) -> _Claim:
    """Finds the signature in the headers, or in the query of a presigned URL."""
    query, authorization = dict(request.query), request.headers.get("authorization", "")
    if "X-Amz-Signature" in query or "X-Amz-Algorithm" in query:
        names = ("Credential", "SignedHeaders", "Signature", "Date")
        credential, signed, signature, timestamp = (
            query.get(f"X-Amz-{name}", "") for name in names
        )
        algorithm, expires = query.get("X-Amz-Algorithm", ""), query.get("X-Amz-Expires", "")
        is_number = expires.isascii() and expires.isdecimal() and len(expires) < len("1000000")
        lifetime = int(expires) if is_number else 0
        is_whole = all((credential, signed, signature, timestamp))
        if algorithm != _ALGORITHM or not is_whole or not 0 < lifetime <= _MOST_EXPIRES:
            raise S3Error(
                "AuthorizationQueryParametersError",
                f"X-Amz-Expires has to be from 1 to {_MOST_EXPIRES}, and Algorithm, Credential,"
                " SignedHeaders, Signature and Date have to be there.",
            )
        return _Claim(credential, signed, signature, timestamp, timedelta(seconds=lifetime))
    if not authorization and "Signature" not in query:
        raise S3Error("AccessDenied", "The request has no signature.")
    algorithm, _, rest = authorization.partition(" ")
    if algorithm != _ALGORITHM:
        raise S3Error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use"
            f" {_ALGORITHM}.",
        )
    matches = [_FIELD.fullmatch(part) for part in rest.split(",")]
    fields = {match[1]: match[2] for match in matches if match is not None}
    if len(fields) != len(matches) or len(fields) != len(("Credential", "Headers", "Signature")):
        raise _malformed("it needs Credential, SignedHeaders and Signature")
    return _Claim(
        *(fields["Credential"], fields["SignedHeaders"], fields["Signature"]),
        request.headers.get("x-amz-date", ""),
    )


def _check_time(claim: _Claim, now: datetime) -> None:
    try:
        signed_at = datetime.strptime(claim.timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise S3Error(
            "AccessDenied", "A signed request needs a valid Date or x-amz-date header."
        ) from error
    age = now - signed_at
    if claim.lifetime is not None and age > claim.lifetime:
        raise S3Error("AccessDenied", "Request has expired")
    if -age > _MOST_SKEW or (claim.lifetime is None and age > _MOST_SKEW):
        raise S3Error(
            "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
            {
                "RequestTime": claim.timestamp,
                "ServerTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "MaxAllowedSkewMilliseconds": str(int(_MOST_SKEW.total_seconds() * 1000)),
            },
        )


def _malformed(why: str) -> S3Error:
    return S3Error(
        "AuthorizationHeaderMalformed", f"The authorization of the request is malformed: {why}."
    )


def _mismatch(why: str) -> S3Error:
    return S3Error(
        "SignatureDoesNotMatch",
        f"The request signature we calculated does not match the one that was sent: {why}.",
    )
