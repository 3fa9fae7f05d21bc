"""Requests become answers as S3 gives them, without a server."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.plan.plan import Literal, lay_out_file
from ckptkit.serving.planned_folder import PlannedFile, make_etag
from ckptkit.serving.s3_api import (
    Answer,
    S3Error,
    answer_error,
    answer_request,
    list_names,
    make_xml,
    parse_request,
)

NS = "{http://s3.amazonaws.com/doc/2006-03-01/}"
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DATA = bytes(range(100))


def made(key: str, data: bytes = DATA) -> PlannedFile:
    file = lay_out_file(key, [(len(data), Literal(data), None)])
    return PlannedFile(file, make_etag(key, len(data)), AT, crc32=zlib.crc32(data))


SHELF = {key: made(key) for key in ("m/a.json", "m/b.safetensors", "n/s/x")}
SHELF = dict(sorted((SHELF | {"m/empty": made("m/empty", b"")}).items()))


def ask(target: str, method: str = "GET", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = parse_request(method, target, {"host": "127.0.0.1:9000", **named})
    return answer_request(request, SHELF, AT)


def refused(target: str, method: str = "GET", **headers: str) -> S3Error:
    with pytest.raises(S3Error) as raised:
        ask(target, method, **headers)
    return raised.value


def texts(answer: Answer, path: str) -> list[str]:
    found = ET.fromstring(answer.body).findall("/".join(f"{NS}{p}" for p in path.split("/")))  # noqa: S314  our own
    return [element.text or "" for element in found]


# --- objects ---


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-7", (93, 100)),
        ("bytes=-700", (0, 100)),
        ("bytes=95-1000", (95, 100)),
        ("bytes=99-99", (99, 100)),
        (f"bytes=98-{'9' * 40}", (98, 100)),
    ],
)
def test_a_range_is_answered_with_its_place(header: str, expected: tuple[int, int]) -> None:
    answer = ask("/ckptkit/m/a.json", range=header)
    assert (answer.status, answer.start, answer.stop) == (206, *expected)
    assert answer.headers["Content-Range"] == f"bytes {expected[0]}-{expected[1] - 1}/100"


@pytest.mark.parametrize(
    "header", ["bytes=100-", "bytes=100-200", "bytes=-0", f"bytes={'1' * 40}-"]
)
def test_a_range_past_the_end_is_refused_with_the_size(header: str) -> None:
    error = refused("/ckptkit/m/a.json", range=header)
    assert (error.code, error.status) == ("InvalidRange", 416)
    assert error.headers["Content-Range"] == "bytes */100"
    assert refused("/ckptkit/m/empty", range="bytes=0-").code == "InvalidRange"


@pytest.mark.parametrize(
    "header",
    [
        *("bytes=", "bytes=-", "bytes=9-1", "bytes=0-1,3-4", "items=0-1", f"bytes={'1' * 4400}-"),
        "bytes=\N{ARABIC-INDIC DIGIT ONE}-",
    ],
)
def test_what_is_no_single_range_gets_the_whole_object(header: str) -> None:
    answer = ask("/ckptkit/m/a.json", range=header)
    assert (answer.status, answer.start, answer.stop) == (200, 0, 100)


def test_an_object_has_the_headers_of_s3() -> None:
    answer = ask("/ckptkit/m/a.json", "HEAD")
    assert answer.headers == {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/json",
        "ETag": make_etag("m/a.json", 100),
        "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
    }
    assert (answer.start, answer.stop) == (0, 100)


def test_a_checksum_is_sent_only_where_it_is_asked_for_and_of_all_bytes() -> None:
    answer = ask("/ckptkit/m/a.json", x_amz_checksum_mode="ENABLED")
    expected = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
    assert answer.headers["x-amz-checksum-crc32"] == expected
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    for other in (
        ask("/ckptkit/m/a.json"),
        ask("/ckptkit/m/a.json", x_amz_checksum_mode="ENABLED", range="bytes=0-9"),
    ):
        assert not [name for name in other.headers if "checksum" in name]


def test_conditions_are_those_of_http() -> None:
    etag = make_etag("m/a.json", 100)
    assert ask("/ckptkit/m/a.json", if_match=etag).status == 200
    assert ask("/ckptkit/m/a.json", if_match=f'"x", {etag}').status == 200
    assert ask("/ckptkit/m/a.json", if_match="*").status == 200
    assert refused("/ckptkit/m/a.json", if_match='"x"').status == 412
    assert ask("/ckptkit/m/a.json", if_none_match=etag).status == 304
    assert ask("/ckptkit/m/a.json", if_none_match=etag).body == b""
    assert ask("/ckptkit/m/a.json", if_none_match='"x"').status == 200
    before, after = "Fri, 02 Jan 2026 03:04:04 GMT", "Fri, 02 Jan 2026 03:04:05 GMT"
    assert ask("/ckptkit/m/a.json", if_modified_since=after).status == 304
    assert ask("/ckptkit/m/a.json", if_modified_since=before).status == 200
    assert ask("/ckptkit/m/a.json", if_modified_since="yesterday").status == 200
    assert refused("/ckptkit/m/a.json", if_unmodified_since=before).status == 412
    assert ask("/ckptkit/m/a.json", if_unmodified_since=after).status == 200
    assert ask("/ckptkit/m/a.json", if_unmodified_since=before, if_match=etag).status == 200
    assert ask("/ckptkit/m/a.json", range="bytes=0-1", if_range='"x"').status == 200
    assert ask("/ckptkit/m/a.json", range="bytes=0-1", if_range=etag).status == 206
    for time, status in ((after, 206), (before, 200), ("yesterday", 200)):
        assert ask("/ckptkit/m/a.json", range="bytes=0-1", if_range=time).status == status


def test_a_weak_etag_is_good_enough_for_a_client_that_has_the_object_and_for_nothing_else() -> None:
    weak = f"W/{make_etag('m/a.json', 100)}"
    assert ask("/ckptkit/m/a.json", if_none_match=weak).status == 304
    assert refused("/ckptkit/m/a.json", if_match=weak).status == 412
    assert ask("/ckptkit/m/a.json", range="bytes=0-1", if_range=weak).status == 200


@pytest.mark.parametrize(
    "name", ["if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "range"]
)
@given(
    text=st.text(max_size=60)
    | st.from_regex(r"[A-Z][a-z]{2}, \d+ (Jan|Dec) \d+ \d+:\d\d:\d\d ([+-]\d+|GMT)", fullmatch=True)
)
@example(text="Thu, 31 Dec 2026 00:00:00 +99999999999999")
@example(text="Mon, 01 Jan 0001 00:00:00 +2359")
def test_any_condition_is_answered_or_refused(name: str, text: str) -> None:
    with suppress(S3Error):
        ask("/ckptkit/m/a.json", **{name: text})


@pytest.mark.parametrize(
    "key",
    [
        "m/../../etc/passwd",
        "../m/a.json",
        "%2e%2e/m/a.json",
        "m/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "..%5cm",
        "m/a.json%00",
        "m/a.json/",
        "/m/a.json",
        "m//a.json",
        "m",
        "M/a.json",
    ],
)
def test_keys_that_are_not_there_are_nothing_but_missing(key: str) -> None:
    error = refused(f"/ckptkit/{key}")
    assert (error.code, error.status) == ("NoSuchKey", 404)


def test_a_key_that_is_no_utf8_is_refused() -> None:
    assert refused("/ckptkit/m/%ff").code == "InvalidURI"


@pytest.mark.parametrize("host", ["ckptkit.localhost:9000", "CKPTKIT.localhost", "Ckptkit.a"])
def test_the_bucket_may_be_in_the_name_of_the_host(host: str) -> None:
    request = parse_request("GET", "/m/a.json", {"host": host})
    assert answer_request(request, SHELF, AT).entry == SHELF["m/a.json"]


def test_a_machine_may_have_the_name_of_the_bucket() -> None:
    for target in ("/ckptkit/m/a.json", "/ckptkit", "/"):
        request = parse_request("GET", target, {"host": "ckptkit.example.org:9000"})
        answer = answer_request(request, SHELF, AT)
        assert answer.entry == SHELF.get(target.removeprefix("/ckptkit/"))
        assert answer.entry is not None or texts(answer, "Contents/Key")
    shelf = {key: made(key) for key in ["ckptkit/a.json"]}  # of a source with this name
    for target, host in (("/ckptkit/a.json", "ckptkit.localhost"), ("/ckptkit/ckptkit/a.json", "")):
        request = parse_request("GET", target, {"host": host})
        assert answer_request(request, shelf, AT).entry is not None


@pytest.mark.parametrize("target", ["//ckptkit/m/a.json", "///m/a.json", "//ckptkit"])
def test_a_path_without_a_bucket_is_not_the_list_of_buckets(target: str) -> None:
    """A client whose endpoint ends with a slash would take the list for the object."""
    assert refused(target).code == "NoSuchBucket"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9000", "HTTPS://ckptkit.example"])
def test_the_address_may_be_in_front_of_the_path(address: str) -> None:
    assert ask(f"{address}/ckptkit/m/a.json").entry == SHELF["m/a.json"]
    assert texts(ask(address), "Buckets/Bucket/Name") == ["ckptkit"]


# --- everything else ---


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("target", ["/", "/ckptkit", "/ckptkit/m/a.json", "/ckptkit?delete"])
def test_nothing_can_be_written(method: str, target: str) -> None:
    error = refused(target, method)
    assert (error.code, error.status) == ("MethodNotAllowed", 405)
    assert error.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "query", ["acl", "versions", "uploads", "policy", "tagging=", "versioning", "partNumber=1"]
)
def test_other_operations_are_not_implemented(query: str) -> None:
    for target in (f"/ckptkit?{query}", f"/ckptkit/m/a.json?{query}"):
        assert (refused(target).code, refused(target).status) == ("NotImplemented", 501)


@pytest.mark.parametrize("name", ["content-type", "content-disposition", "expires"])
def test_headers_that_the_client_chooses_are_not_implemented(name: str) -> None:
    error = refused(f"/ckptkit/m/a.json?response-{name}=text%2Fhtml")
    assert (error.code, error.status) == ("NotImplemented", 501)


def test_another_bucket_is_missing() -> None:
    assert refused("/other/m/a.json").code == "NoSuchBucket"
    assert refused("/other", "HEAD").status == 404
    assert ask("/ckptkit", "HEAD").status == 200


def test_the_bucket_is_listed_and_has_a_location() -> None:
    assert texts(ask("/"), "Buckets/Bucket/Name") == ["ckptkit"]
    located = ET.fromstring(ask("/ckptkit?location").body)  # noqa: S314  our own
    assert (located.tag, located.text) == (f"{NS}LocationConstraint", None)


def test_an_error_is_xml() -> None:
    error = refused("/ckptkit/m/%01")
    answer = answer_error(error, "ID", "/ckptkit/m/%01")
    document = ET.fromstring(answer.body)  # noqa: S314  our own
    assert document.tag == "Error"
    assert document.findtext("Code") == "NoSuchKey"
    assert document.findtext("Key") == "m/\ufffd"  # XML has no such character


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9000"])
def test_an_error_names_the_path_without_the_signature_of_its_query(address: str) -> None:
    target = f"{address}/ckptkit/x%20y?X-Amz-Signature=0123&X-Amz-Credential=KEY"
    answer = answer_error(refused(target), "ID", target)
    assert ET.fromstring(answer.body).findtext("Resource") == "/ckptkit/x%20y"  # noqa: S314  our own
    assert b"X-Amz" not in answer.body


@given(text=st.text())
def test_any_text_becomes_xml_that_can_be_parsed(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    found = ET.fromstring(f"<Key>{make_xml(text)}</Key>").text or ""  # noqa: S314  our own
    assert len(found) == len(text.replace("\r\n", "\n"))


# --- listings ---

KEYS = st.lists(st.text("ab/é", min_size=1, max_size=5), max_size=12, unique=True)


def list_plainly(keys: Sequence[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """Returns keys and common prefixes in the order of a listing, by the definition."""
    names: list[str] = []
    for key in sorted(keys):
        if not key.startswith(prefix) or key <= after:
            continue
        rest = key[len(prefix) :]
        joined = delimiter and delimiter in rest
        name = prefix + rest[: rest.index(delimiter) + len(delimiter)] if joined else key
        if name not in names and not (joined and name == after):
            names.append(name)
    return names


@given(
    KEYS, st.text("ab/", max_size=2), st.sampled_from(["", "/", "a"]), st.text("ab/", max_size=3)
)
def test_a_listing_is_that_of_its_definition(
    keys: list[str], prefix: str, delimiter: str, after: str
) -> None:
    found = list_names(sorted(keys), prefix, delimiter, after)
    assert sorted(found) == sorted(list_plainly(keys, prefix, delimiter, after))


@given(KEYS, st.sampled_from(["", "/"]), st.integers(1, 3), st.sampled_from(["1", "2"]))
def test_pages_together_are_the_whole_listing(
    keys: list[str], delimiter: str, most: int, version: str
) -> None:
    shelf = {key: made(key) for key in sorted(keys)}
    found: list[str] = []
    start = ""
    for _ in range(len(keys) + 1):
        target = f"/ckptkit?list-type={version}&delimiter={delimiter}&max-keys={most}{start}"
        target += "&encoding-type=url"
        answer = answer_request(parse_request("GET", target, {}), shelf, AT)
        names = texts(answer, "Contents/Key") + texts(answer, "CommonPrefixes/Prefix")
        assert len(names) <= most
        found += names
        if texts(answer, "IsTruncated") == ["false"]:
            break
        token = texts(answer, "NextContinuationToken" if version == "2" else "NextMarker")
        name = "continuation-token" if version == "2" else "marker"
        start = f"&{name}={quote(token[0] if token else names[-1], safe='%')}"
    assert sorted(found) == sorted(
        quote(n, safe="/") for n in list_plainly(keys, "", delimiter, "")
    )


def test_a_listing_has_what_clients_read() -> None:
    answer = ask("/ckptkit?list-type=2&prefix=m/&max-keys=2")
    assert texts(answer, "Contents/Key") == ["m/a.json", "m/b.safetensors"]
    assert texts(answer, "Contents/Size") == ["100", "100"]
    assert texts(answer, "Contents/ETag") == [
        make_etag("m/a.json", 100),
        *texts(answer, "Contents/ETag")[1:],
    ]
    assert texts(answer, "Contents/LastModified")[0] == "2026-01-02T03:04:05.000Z"
    assert texts(answer, "KeyCount") == ["2"]
    assert texts(answer, "IsTruncated") == ["true"]
    assert texts(ask("/ckptkit?list-type=2&max-keys=0"), "KeyCount") == ["0"]
    assert texts(ask("/ckptkit?delimiter=/"), "CommonPrefixes/Prefix") == ["m/", "n/"]


@pytest.mark.parametrize("query", ["max-keys=x", "max-keys=-1", "encoding-type=xml"])
def test_a_listing_with_a_bad_parameter_is_refused(query: str) -> None:
    assert refused(f"/ckptkit?list-type=2&{query}").code == "InvalidArgument"


@pytest.mark.parametrize("version", ["3", "0", "", "v2"])
def test_a_listing_of_another_version_is_refused(version: str) -> None:
    assert refused(f"/ckptkit?list-type={version}").code == "InvalidArgument"


@given(st.text(max_size=60))
def test_any_target_is_answered_or_refused(text: str) -> None:
    for target in (f"/{text}", f"/ckptkit/{text}", f"/ckptkit?{text}"):
        answers: list[Any] = []
        try:
            answers.append(ask(quote(target, safe="/?&=%;+:@")))
        except S3Error as error:
            answers.append(error)
        assert answers[0].status in {200, 206, 304, 400, 404, 405, 501}
