"""Signatures are those that botocore and boto3 make; any other request is refused as by S3."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.auth import HmacV1QueryAuth, S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptkit.serving.s3_api import (
    S3Error,
    S3Request,
    check_signature,
    make_keys,
    parse_request,
)

KEYS = Credentials("CKPT0123", "a-secret")
HOST = "127.0.0.1:9000"


def now() -> datetime:
    return datetime.now(UTC)


def target_of(url: str) -> str:
    split = urlsplit(url)
    return f"{split.path}?{split.query}" if split.query else split.path


def signed(
    path: str,
    keys: Credentials = KEYS,
    headers: Mapping[str, str] | None = None,
    *,
    region: str = "us-east-1",
) -> S3Request:
    """Returns a request with the headers that botocore adds to it."""
    made = AWSRequest(method="GET", url=f"http://{HOST}{path}", headers=dict(headers or {}))
    S3SigV4Auth(keys, "s3", region).add_auth(made)
    sent = {name.lower(): value for name, value in made.headers.items()} | {"host": HOST}
    return parse_request("GET", path, sent)


def presigned(path: str, keys: Credentials = KEYS, *, expires: int = 60) -> S3Request:
    made = AWSRequest(method="GET", url=f"http://{HOST}{path}")
    S3SigV4QueryAuth(keys, "s3", "us-east-1", expires=expires).add_auth(made)
    return parse_request("GET", target_of(made.url), {"host": HOST})


def refused(request: S3Request, at: datetime | None = None) -> S3Error:
    with pytest.raises(S3Error) as raised:
        check_signature(request, KEYS, at or now())
    return raised.value


@pytest.mark.parametrize("make", [signed, presigned])
@pytest.mark.parametrize("path", ["/", "/ckptkit/m/a%20b%2Bc.json", "/ckptkit?list-type=2&prefix="])
def test_requests_of_botocore_are_accepted(make: Any, path: str) -> None:
    check_signature(make(path), KEYS, now())


@given(key=st.text(min_size=1), prefix=st.text())
def test_any_key_and_any_prefix_can_be_signed(key: str, prefix: str) -> None:
    sent: list[Any] = []
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{HOST}",
        aws_access_key_id=KEYS.access_key,
        aws_secret_access_key=KEYS.secret_key,
        region_name="eu-west-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    for operation, asked in (
        ("get_object", {"Bucket": "ckptkit", "Key": key}),
        ("list_objects_v2", {"Bucket": "ckptkit", "Prefix": prefix}),
    ):
        url = client.generate_presigned_url(operation, Params=asked, ExpiresIn=60)
        sent.append(parse_request("GET", target_of(url), {"host": HOST}))
    for request in sent:
        check_signature(request, KEYS, now())


def test_the_region_is_that_of_the_client() -> None:
    check_signature(signed("/", region="eu-central-1"), KEYS, now())


@pytest.mark.parametrize("make", [signed, presigned])
def test_another_secret_is_refused(make: Any) -> None:
    request = make("/ckptkit/key", Credentials(KEYS.access_key, "another"))
    assert refused(request).code == "SignatureDoesNotMatch"


@pytest.mark.parametrize("make", [signed, presigned])
def test_another_access_key_is_refused(make: Any) -> None:
    request = make("/ckptkit/key", Credentials("CKPT0124", KEYS.secret_key))
    assert refused(request).code == "InvalidAccessKeyId"


@pytest.mark.parametrize("make", [signed, presigned])
@pytest.mark.parametrize(
    "changed",
    [
        {"path": "/ckptkit/other"},
        {"method": "DELETE"},
        {"headers": {"host": "127.0.0.1:9001"}},
        {"query": (("prefix", "b"),)},
    ],
)
def test_a_request_that_was_changed_is_refused(make: Any, changed: dict[str, Any]) -> None:
    request = make("/ckptkit/key?prefix=a")
    if "headers" in changed:
        changed = {"headers": {**request.headers, **changed["headers"]}}
    if "query" in changed:
        rest = tuple(pair for pair in request.query if pair[0] != "prefix")
        changed = {"query": changed["query"] + rest}
    assert refused(replace(request, **changed)).code == "SignatureDoesNotMatch"


def test_a_signed_header_that_was_changed_or_is_missing_is_refused() -> None:
    request = signed("/ckptkit/key", headers={"range": "bytes=0-1"})
    check_signature(request, KEYS, now())
    changed = replace(request, headers={**request.headers, "range": "bytes=0-2"})
    assert refused(changed).code == "SignatureDoesNotMatch"
    rest = {name: value for name, value in request.headers.items() if name != "range"}
    assert refused(replace(request, headers=rest)).code == "SignatureDoesNotMatch"
    added = replace(request, headers={**request.headers, "x-amz-security-token": "token"})
    assert refused(added).code == "SignatureDoesNotMatch"


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_clock_that_is_off_is_refused_with_both_times(minutes: int) -> None:
    error = refused(signed("/"), now() + timedelta(minutes=minutes))
    assert error.code == "RequestTimeTooSkewed"
    assert error.status == 403
    assert error.facts["MaxAllowedSkewMilliseconds"] == "900000"
    check_signature(signed("/"), KEYS, now() + timedelta(minutes=minutes - minutes // 8))


def test_a_presigned_url_ends() -> None:
    request = presigned("/ckptkit/key", expires=60)
    check_signature(request, KEYS, now() + timedelta(seconds=50))
    error = refused(request, now() + timedelta(seconds=70))
    assert (error.code, error.message) == ("AccessDenied", "Request has expired")
    assert refused(request, now() - timedelta(minutes=20)).code == "RequestTimeTooSkewed"


@pytest.mark.parametrize("expires", ["0", "-1", "604801", "1e3", "", "9" * 30])
def test_a_presigned_url_without_a_valid_end_is_refused(expires: str) -> None:
    request = presigned("/ckptkit/key")
    query = [(k, expires if k == "X-Amz-Expires" else v) for k, v in request.query]
    assert refused(replace(request, query=query)).code == "AuthorizationQueryParametersError"


@pytest.mark.parametrize("year", ["0001", "9999"])
def test_a_presigned_url_of_any_time_is_refused(year: str) -> None:
    """Whoever sends it needs no keys for that."""
    request = presigned("/ckptkit/key")
    scope = f"{KEYS.access_key}/{year}1231/us-east-1/s3/aws4_request"
    changed = {"X-Amz-Date": f"{year}1231T235959Z", "X-Amz-Credential": scope}
    query = [(name, changed.get(name, value)) for name, value in request.query]
    assert refused(replace(request, query=query)).status == 403


def test_a_request_without_a_signature_is_refused() -> None:
    error = refused(parse_request("GET", "/ckptkit", {"host": HOST}))
    assert (error.code, error.status) == ("AccessDenied", 403)


def test_the_old_version_of_signatures_is_refused_by_name() -> None:
    made = AWSRequest(method="GET", url=f"http://{HOST}/ckptkit/key")
    HmacV1QueryAuth(KEYS).add_auth(made)
    assert refused(parse_request("GET", target_of(made.url), {"host": HOST})).code == (
        "InvalidRequest"
    )
    header = {"host": HOST, "authorization": "AWS CKPT0123:c2lnbmF0dXJl"}
    assert "AWS4-HMAC-SHA256" in refused(parse_request("GET", "/ckptkit", header)).message


@given(text=st.text(max_size=200))
def test_any_authorization_header_is_refused(text: str) -> None:
    headers = {"host": HOST, "x-amz-date": "20260101T000000Z"}
    for value in (text, f"AWS4-HMAC-SHA256 {text}"):
        asked = parse_request("GET", "/ckptkit", {**headers, "authorization": value})
        assert refused(asked).status in {400, 403}


@pytest.mark.parametrize(
    "scope",
    ["CKPT0123/20260101/us-east-1/s3", "CKPT0123/20260101/us-east-1/ec2/aws4_request", "CKPT0123"],
)
def test_a_scope_of_another_service_is_refused(scope: str) -> None:
    value = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=00"
    headers = {"host": HOST, "x-amz-date": "20260101T000000Z", "authorization": value}
    assert refused(parse_request("GET", "/", headers)).code == "AuthorizationHeaderMalformed"


def test_random_keys_differ_and_hide_their_secret() -> None:
    first, second = make_keys(), make_keys()
    assert first.access_key != second.access_key
    assert first.secret_key != second.secret_key
    assert first.secret_key not in repr(first)
    assert len(first.access_key) == 20
    assert len(first.secret_key) == 40
