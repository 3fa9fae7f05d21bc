"""What comes from a network or the command line: answers of S3 and of a Hub, and requests to
`serve`.

Answers of S3 go through botocore's own parser first, as they do in a run.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import botocore.parsers
import botocore.session
from botocore.credentials import Credentials
from botocore.parsers import ResponseParserError
from huggingface_hub.hf_api import RepoFile, RepoFolder

from ckptkit.core.errors import CkptkitError
from ckptkit.hub.client import Hub, list_files, pause_before, tree_of
from ckptkit.hub.secrets import secrets_in
from ckptkit.plan.plan import OutputFile
from ckptkit.serving.planned_folder import PlannedFile
from ckptkit.serving.s3_api import (
    S3Error,
    answer_error,
    answer_request,
    check_signature,
    parse_request,
)
from ckptkit.storage.locations import check_relative
from ckptkit.storage.remote.errors import RetryPolicy, as_input_error
from ckptkit.storage.remote.s3 import S3Uploads
from ckptkit.storage.remote.store import RemoteFolder, RemoteStore
from tests.campaigns.fuzz.judge import Target
from tests.campaigns.fuzz.mutation import (
    mutate_archive,
    mutate_bytes,
    mutate_json,
    mutate_xml,
)

# --- S3 ---

_OPERATIONS = (
    *("ListObjectsV2", "HeadObject", "ListMultipartUploads", "PutObject", "CreateMultipartUpload"),
    *("CompleteMultipartUpload", "DeleteObjects", "GetObject"),
)
_BY_CALL = {
    "list_objects_v2": 0, "head_object": 1, "list_multipart_uploads": 2, "put_object": 3,
    "create_multipart_upload": 4, "complete_multipart_upload": 5, "delete_objects": 6,
}  # fmt: skip


@cache
def _model() -> Any:
    return botocore.session.Session().get_service_model("s3")


@cache
def _parser() -> Any:
    return botocore.parsers.create_parser("rest-xml")


class _AnsweringClient:
    """In the place of s3fs: every request gets the same answer."""

    version_aware = False

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._status = status
        self._answer = {"status_code": status, "headers": headers, "body": body}
        self.s3 = SimpleNamespace(meta=SimpleNamespace(config=SimpleNamespace()))
        self._asked = 0

    def connect(self) -> None:
        pass

    def call_s3(self, call: str, **_: Any) -> Any:
        self._asked += 1
        if self._asked > 5:  # a listing whose pages never end is cut off by the user
            raise OSError("no more answers")
        shape = _model().operation_model(_OPERATIONS[_BY_CALL[call]]).output_shape
        parsed = _parser().parse(self._answer, shape)
        if self._status >= 300:
            from botocore.exceptions import ClientError

            error = ClientError(parsed, call)
            raise OSError(5, str(error)) from error
        return parsed


def _store(client: Any) -> RemoteStore:
    store = object.__new__(RemoteStore)
    store.protocol, store.options, store.is_s3, store.has_conditions = "s3", {}, True, True
    store.retry_policy = RetryPolicy(attempts=1)
    store.filesystem = client
    return store


def _folder(store: RemoteStore) -> RemoteFolder:
    folder = object.__new__(RemoteFolder)
    folder.location, folder.store, folder.root = "s3://b/p", store, "b/p"
    folder._as_error = lambda error, where, _: as_input_error(error, where=where, options={})
    return folder


def _run_s3(data: bytes) -> None:
    """Status and headers are JSON on the first line; the body follows."""
    first, _, body = data.partition(b"\n")
    try:
        status, headers = json.loads(first)
        headers = {str(key): str(value) for key, value in headers.items()}
        status = int(status) % 600
        _parser().parse(
            {"status_code": status, "headers": headers, "body": body},
            _model().operation_model("ListObjectsV2").output_shape,
        )
    except (ValueError, TypeError, AttributeError, ResponseParserError, RecursionError):
        return  # botocore refuses it, or no HTTP library would pass it on
    except (KeyError, LookupError, OverflowError, ArithmeticError):
        return  # a fault of botocore, which RemoteStore reports as any other failure of a client
    client = _AnsweringClient(status, headers, body)
    store = _store(client)
    folder = _folder(store)
    for ask in (folder.entries, lambda: folder.look_up("x")):
        try:
            found = ask()
        except CkptkitError as error:
            str(error).encode()
            continue
        for name in found if isinstance(found, dict) else ():
            try:
                check_relative(name, "s3://b/p")
            except CkptkitError:
                continue
    _run_uploads(client, store)


def _run_uploads(client: _AnsweringClient, store: RemoteStore) -> None:
    """What an upload asks for is reported by its caller's translation, as all of s3fs's errors."""
    from ckptkit.storage.remote.errors import error_translator

    client._asked = 0
    uploads = S3Uploads(store, "b/p")
    for ask in (
        lambda: uploads.head("p/x"),
        lambda: list(uploads.list_uploads("p/")),
        lambda: uploads.list_objects("p/"),
        lambda: uploads.begin("p/x"),
    ):
        try:
            with error_translator("s3://b/p", {})():
                ask()
        except CkptkitError as error:
            str(error).encode()


def _mutate_s3(rng: Random, data: bytes) -> bytes:
    first, _, body = data.partition(b"\n")
    if rng.random() < 0.3:
        return mutate_json(rng, first).replace(b"\n", b" ") + b"\n" + body
    return first + b"\n" + mutate_xml(rng, body)


def _s3_seeds() -> list[bytes]:
    listing = (
        b"<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Name>b</Name>"
        b"<Prefix>p/</Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>"
        b"<IsTruncated>false</IsTruncated><Contents><Key>p/x</Key>"
        b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;a&quot;</ETag>"
        b"<Size>3</Size><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"
    )
    uploads = (
        b"<ListMultipartUploadsResult><Bucket>b</Bucket><IsTruncated>true</IsTruncated>"
        b"<NextKeyMarker>p/x</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
        b"<Upload><Key>p/x</Key><UploadId>u</UploadId></Upload></ListMultipartUploadsResult>"
    )
    error = b"<Error><Code>SlowDown</Code><Message>m</Message><RequestId>1</RequestId></Error>"
    begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    head = {
        "content-length": "3", "etag": '"a"', "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "x-amz-checksum-crc32": "AAAAAQ==-2", "x-amz-meta-ckptkit-writer": "w",
    }  # fmt: skip
    answers = [(200, listing), (200, uploads), (503, error), (404, error), (200, begun), (200, b"")]
    return [json.dumps([status, head]).encode() + b"\n" + body for status, body in answers]


# --- Hub ---


class _HubError(Exception):
    """As the client raises it."""

    def __init__(self, text: str, response: Any) -> None:
        super().__init__(text)
        self.response = response
        self.server_message = text


def _run_hub(data: bytes) -> None:
    """A JSON object: the pages of a tree, and an answer that is an error."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(answer, dict):
        return
    hub = _hub()

    def list_tree(*_: Any, **__: Any) -> Iterator[Any]:
        for entry in answer.get("tree") or ():  # as HfApi.list_repo_tree does
            yield (RepoFile if entry["type"] == "file" else RepoFolder)(**entry)

    hub.api = SimpleNamespace(list_repo_tree=list_tree, endpoint="https://hub")  # type: ignore[assignment]
    for ask in (list_files, tree_of):
        try:
            for file in ask(hub, "main"):
                check_relative(str(getattr(file, "path", file)), "hub")
        except CkptkitError as error:
            str(error).encode()
    headers, status = answer.get("headers"), answer.get("status")
    if isinstance(headers, dict) and isinstance(status, int):
        texts = {str(key): str(value) for key, value in headers.items()}
        response = SimpleNamespace(status_code=status, headers=texts)
        refused = _HubError(str(answer.get("error")), response)
        pause_before(refused, 1)  # and not `call`, which would really wait
        str(hub.translate_error(refused)).encode()


@cache
def _hub() -> Hub:
    logging.getLogger("ckptkit.hub").setLevel(logging.ERROR)
    return Hub("owner/name", token="a-token", endpoint="https://hub")  # noqa: S106


def _hub_seeds() -> list[bytes]:
    tree = [
        {"type": "file", "path": "config.json", "size": 3, "oid": "a" * 40},
        {
            "type": "file", "path": "a/model.safetensors", "size": 9, "oid": "b" * 40,
            "lfs": {"oid": "c" * 64, "size": 9, "pointerSize": 130}, "xetHash": "d" * 64,
            "lastCommit": {"id": "e", "title": "t", "date": "2026-01-01T00:00:00.000Z"},
        },
        {"type": "directory", "path": "a", "oid": "f" * 40},
    ]  # fmt: skip
    headers = {"Retry-After": "400", "RateLimit": '"api";r=0;t=500'}
    return [
        json.dumps({"tree": tree, "status": status, "headers": headers, "error": "no"}).encode()
        for status in (401, 404, 413, 429, 503)
    ]


# --- requests to `serve` ---

_KEYS = Credentials("CKPT0123", "a-secret")
_NOW = datetime(2026, 1, 1, tzinfo=UTC)


_OBJECTS = {
    key: PlannedFile(OutputFile(key, size, ()), '"e"', _NOW, crc32=1)
    for key, size in (("m/config.json", 3), ("m/model.safetensors", 1 << 40))
}


def _run_request(data: bytes) -> None:
    """The first line is method and target, each further one a header."""
    first, *lines = data.decode("utf-8", "surrogateescape").split("\n")
    method, _, target = first.partition(" ")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs if name}
    try:
        request = parse_request(method, target, headers)
    except S3Error as error:
        answer_error(error, "id", target.encode("utf-8", "replace").decode())
        return
    for check in (
        lambda: check_signature(request, _KEYS, _NOW),
        lambda: answer_request(request, _OBJECTS, _NOW),
    ):
        try:
            check()
        except S3Error as error:
            answer_error(error, "id", request.path)


def _request_seeds() -> list[bytes]:
    credential = "CKPT0123/20260101/us-east-1/s3/aws4_request"
    signed = "SignedHeaders=host;x-amz-date, Signature=" + "0" * 64
    head = "Host: 127.0.0.1:9000\nx-amz-date: 20260101T000000Z\n"
    head += f"Authorization: AWS4-HMAC-SHA256 Credential={credential}, {signed}"
    presigned = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60"
    presigned += f"&X-Amz-Credential={credential.replace('/', '%2F')}"
    presigned += "&X-Amz-SignedHeaders=host&X-Amz-Signature=00"
    requests = [
        f"GET /ckptkit?list-type=2&prefix=m%2F&delimiter=%2F&max-keys=1&encoding-type=url\n{head}",
        f"GET /ckptkit?marker=m&prefix=m\n{head}",
        f'GET /ckptkit/m/model.safetensors\n{head}\nRange: bytes=0-9\nIf-Range: "e"',
        f"HEAD /ckptkit/m/config.json\n{head}\nIf-Modified-Since: Thu, 01 Jan 2026 00:00:00 GMT",
        f'GET /ckptkit/m/config.json\n{head}\nIf-None-Match: W/"x"\nx-amz-checksum-mode: ENABLED',
        f"GET /ckptkit/m/config.json?{presigned}\nHost: h",
        f"GET /ckptkit?list-type=2&continuation-token=bS9j\n{head}",
    ]
    return [one.encode() for one in requests]


# --- secrets in what is pushed ---


def _run_secrets(data: bytes) -> None:
    secrets_in([data[:700], data[700:]] if data[:1] == b"t" else [data], ["hf_" + "a" * 34])


def _secret_seeds() -> list[bytes]:
    text = b"token = 'hf_" + b"a" * 34 + b"'\naws_secret_access_key=" + b"b" * 40
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", text)
    packs = [gzip.compress(text), bz2.compress(text), lzma.compress(text), packed.getvalue()]
    return [text, b"t" * 690 + text, text.decode().encode("utf-16"), *packs]


TARGETS = (
    Target("secret-search", _run_secrets, _secret_seeds, mutate_archive, free_bytes=80 << 20),
    Target("s3-answers", _run_s3, _s3_seeds, _mutate_s3, share=4),
    Target("hub-answers", _run_hub, _hub_seeds, mutate_json, share=4),
    Target("serve-requests", _run_request, _request_seeds, mutate_bytes, share=6),
)
