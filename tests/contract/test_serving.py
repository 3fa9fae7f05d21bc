"""Objects that are served are the files that the commands write, for the clients that people use.

The clients are boto3, s3fs, the AWS command line and the Run:ai model streamer, which vLLM and
SGLang load with; none of them knows that it does not talk to S3.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from botocore import UNSIGNED
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptkit
from ckptkit.serving import serving as server_module
from ckptkit.serving.plans import ServePlan
from ckptkit.serving.serving import Serving
from ckptkit.storage.locations import resolve_places
from tests.contract.test_file_system import content, same_content, save_odd_tensors
from tests.object_store import Bucket, ObjectStore
from tests.s3_client import client_of
from tests.sampled import sampled

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
Served = tuple[Serving, Path]


CASES = {
    "several files": {"max_shard_size": 4000},
    "odd, cast": {"names": "live", "dtype": "bfloat16"},
}
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"


@pytest.fixture(scope="module", params=sampled(CASES, ["several files"]))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    options: Any = CASES[request.param]
    source, out = STEP, tmp_path_factory.mktemp("written")
    if request.param.startswith("odd"):
        source = save_odd_tensors(tmp_path_factory.mktemp("odd"))
    ckptkit.consolidate(source, out, **options)
    with ckptkit.serve(source, name="m", **options) as serving:
        yield serving, out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    out = tmp_path_factory.mktemp("written")
    ckptkit.consolidate(STEP, out)
    with ckptkit.serve(STEP, name="m") as serving:
        yield serving, out


def environment_of(serving: Serving, **more: str) -> dict[str, str]:
    """Returns the environment of a client's process, without anything of this one's."""
    return {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **serving.environment, **more}


# --- the clients ---


def test_boto3_reads_what_was_written(served: Served) -> None:
    serving, out = served
    client, found = client_of(serving.environment), {}
    for entry in client.list_objects_v2(Bucket="ckptkit", Prefix="m/")["Contents"]:
        answer = client.get_object(Bucket="ckptkit", Key=entry["Key"])
        assert answer["ETag"] == entry["ETag"]
        found[entry["Key"].removeprefix("m/")] = answer["Body"].read()
    same_content(found, content(out))


def test_s3fs_reads_what_was_written(served: Served) -> None:
    import s3fs

    serving, out = served
    environment = serving.environment
    files = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=serving.url,
        skip_instance_cache=True,
    )
    found = {path.removeprefix("ckptkit/m/"): files.cat(path) for path in files.find("ckptkit/m")}
    same_content(found, content(out))
    assert files.ls("ckptkit") == ["ckptkit/m"]
    name = min(content(out))
    with files.open(f"ckptkit/m/{name}") as opened:
        assert opened.read() == (out / name).read_bytes()


def test_transfers_of_boto3_in_parts_are_the_file(one: Served, tmp_path: Path) -> None:
    from boto3.s3.transfer import TransferConfig

    serving, out = one
    parts = TransferConfig(multipart_threshold=1, multipart_chunksize=1000, max_concurrency=8)
    copy = tmp_path / "copy"
    client = client_of(serving.environment)
    client.download_file("ckptkit", "m/model.safetensors", str(copy), Config=parts)
    assert copy.read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_aws_command_line_reads_what_was_written(one: Served, tmp_path: Path) -> None:
    pytest.importorskip("awscli")
    serving, out = one
    command = [sys.executable, "-m", "awscli", "s3", "sync", serving.location, str(tmp_path)]
    done = subprocess.run(
        command, env=environment_of(serving), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    same_content(content(tmp_path), content(out))
    again = subprocess.run(
        command, env=environment_of(serving), capture_output=True, text=True, check=True
    )
    assert again.stdout == ""  # sizes and times show that nothing changed


_STREAM = """
import json, sys
from runai_model_streamer import SafetensorsStreamer
found = {}
with SafetensorsStreamer() as streamer:
    streamer.stream_files(sys.argv[1:])
    for name, tensor in streamer.get_tensors():
        data = tensor.contiguous().flatten().view(__import__("torch").uint8)
        found[name] = [str(tensor.dtype), list(tensor.shape), bytes(data.tolist()).hex()]
print("FOUND" + json.dumps(found))
"""


def stream(serving: Serving, urls: list[str], **more: str) -> dict[str, Any]:
    """Returns what the Run:ai model streamer loads: type, shape and bytes of each tensor."""
    addressing = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _STREAM, *urls],
        env=environment_of(serving, **addressing, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return found


# Each starts a process with torch. The bytes of all cases are compared with other clients.
@pytest.mark.slow
def test_a_model_streamer_loads_what_was_written(served: Served) -> None:
    pytest.importorskip("runai_model_streamer")
    serving, out = served
    paths = sorted(out.glob("*.safetensors"))
    found = stream(serving, [f"{serving.location}{path.name}" for path in paths])
    assert found == tensors_of(paths)


def tensors_of(paths: list[Path]) -> dict[str, Any]:
    """Returns type, shape and bytes of each tensor in some files, as the loaders return them."""
    expected = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            data = tensor.contiguous().flatten().view(torch.uint8)
            shape = [str(tensor.dtype), list(tensor.shape)]
            expected[name] = [*shape, bytes(data.tolist()).hex()]
    return expected


_VLLM = """
import hashlib, json, sys
import torch
from vllm.model_executor.model_loader.weight_utils import runai_safetensors_weights_iterator
from vllm.transformers_utils.runai_utils import ObjectStorageModel, list_safetensors
ObjectStorageModel(sys.argv[1]).pull_files(sys.argv[1], allow_pattern=["*config.json"])
found = {}
for name, tensor in runai_safetensors_weights_iterator(list_safetensors(sys.argv[1]), False):
    data = tensor.contiguous().flatten().view(torch.uint8)
    found[name] = [str(tensor.dtype), list(tensor.shape), bytes(data.tolist()).hex()]
print("FOUND" + json.dumps(found))
"""
_SGLANG = """
import json, pathlib, sys
from sglang.srt.connector import create_remote_connector
connector = create_remote_connector(sys.argv[1])
connector.pull_files()
folder = pathlib.Path(connector.get_local_dir())
print("FOUND" + json.dumps({p.name: p.read_bytes().hex() for p in folder.iterdir()}))
"""


def load_with(program: str, serving: Serving) -> dict[str, Any]:
    """Returns what the loader of an engine finds below the address of a model."""
    addressing = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, serving.location],
        env=environment_of(serving, **addressing),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return found


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is too large for the test extra")
def test_the_loader_of_vllm_reads_what_was_written(one: Served) -> None:
    serving, out = one
    assert load_with(_VLLM, serving) == tensors_of([out / "model.safetensors"])


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is too large for the test extra")
def test_the_connector_of_sglang_reads_what_was_written(one: Served) -> None:
    serving, out = one
    found = load_with(_SGLANG, serving)
    same_content({name: bytes.fromhex(data) for name, data in found.items()}, content(out))


def test_ckptkit_reads_what_it_serves(one: Served, tmp_path: Path) -> None:
    serving, out = one
    keys = serving.environment
    options = {
        "key": keys["AWS_ACCESS_KEY_ID"],
        "secret": keys["AWS_SECRET_ACCESS_KEY"],
        "client_kwargs": {"endpoint_url": serving.url},
    }
    ckptkit.consolidate("s3://ckptkit/m", tmp_path / "again", src_options=options)
    written = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert written == (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def objects(served: Served) -> tuple[Any, dict[str, bytes]]:
    """A client, and the objects that it is to find."""
    return client_of(served[0].environment), content(served[1])


@given(data=st.data())
def test_any_range_is_that_of_the_written_file(
    objects: tuple[Any, dict[str, bytes]], data: st.DataObject
) -> None:
    client, files = objects
    name = data.draw(st.sampled_from(sorted(files)))
    whole = files[name]
    size = len(whole)
    length = data.draw(st.integers(1, min(size, 1 << 18)))
    first = data.draw(st.integers(0, size - length))
    ranges = {
        f"{first}-{first + length - 1}": whole[first : first + length],
        f"{size - length}-{size + 9}": whole[-length:],
        f"{size - length}-": whole[-length:],
        f"-{length}": whole[-length:],
    }
    asked = data.draw(st.sampled_from(sorted(ranges)))
    answer = client.get_object(Bucket="ckptkit", Key=f"m/{name}", Range=f"bytes={asked}")
    assert answer["Body"].read() == ranges[asked]
    assert answer["ContentLength"] == length


@pytest.mark.parametrize("asked", ["{first}-", "-{last}", "{first}-{last}"])
def test_long_ranges_are_those_of_the_written_file(
    objects: tuple[Any, dict[str, bytes]], asked: str
) -> None:
    client, files = objects
    for name, whole in files.items():
        first, last = len(whole) // 9, len(whole) * 8 // 9
        expected = {
            "{first}-": whole[first:],
            "-{last}": whole[-last:],
            "{first}-{last}": whole[first : last + 1],
        }[asked]
        span = "bytes=" + asked.format(first=first, last=last)
        answer = client.get_object(Bucket="ckptkit", Key=f"m/{name}", Range=span)
        assert answer["Body"].read() == expected


# --- what a client can ask for ---


def test_presigned_urls_need_no_keys(one: Served) -> None:
    serving, out = one
    url = client_of(serving.environment, signature_version="s3v4").generate_presigned_url(
        "get_object", Params={"Bucket": "ckptkit", "Key": "m/config.json"}, ExpiresIn=60
    )
    assert requests.get(url, timeout=60).content == (out / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("minutes", "codes"),
    [
        (14, ("", "AccessDenied", "")),
        (16, ("RequestTimeTooSkewed", "AccessDenied", "")),
        (-16, ("RequestTimeTooSkewed",) * 3),
    ],
)
def test_the_clock_of_the_server_decides(
    one: Served, monkeypatch: pytest.MonkeyPatch, minutes: int, codes: tuple[str, ...]
) -> None:
    """Of a signed request, and of presigned URLs that are valid for 10 and for 60 minutes."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + timedelta(minutes=minutes)

    monkeypatch.setattr(server_module, "datetime", Clock)
    client = client_of(one[0].environment, signature_version="s3v4")
    asked = {"Bucket": "ckptkit", "Key": "m/config.json"}
    found = [""]
    try:
        client.get_object(**asked)
    except ClientError as error:
        found[0] = error.response["Error"]["Code"]
    for seconds in (600, 3600):
        url = client.generate_presigned_url("get_object", Params=asked, ExpiresIn=seconds)
        answer = requests.get(url, timeout=60)
        assert answer.status_code in {200, 403}
        code = answer.text.partition("<Code>")[2].partition("</Code>")[0]
        found.append(code if answer.status_code == 403 else "")
    assert tuple(found) == codes


def test_checksums_of_small_files_are_known_and_those_of_weights_are_not(one: Served) -> None:
    serving, out = one
    client = client_of(serving.environment)
    asked = {"Bucket": "ckptkit", "ChecksumMode": "ENABLED"}
    for name in ("config.json", "tokenizer.json"):
        answer = client.head_object(Key=f"m/{name}", **asked)
        crc = zlib.crc32((out / name).read_bytes()).to_bytes(4, "big")
        assert answer["ChecksumCRC32"] == base64.b64encode(crc).decode()
    assert "ChecksumCRC32" not in client.head_object(Key="m/model.safetensors", **asked)


PEFT = FIXTURES / "peft_fsdp2"
GUESSED = {"lora_alpha": 16, "use_rslora": False}


@pytest.mark.slow
def test_a_copy_is_brought_up_to_date_by_the_aws_command_line(tmp_path: Path) -> None:
    """It compares sizes and times; other options give other bytes of the same size."""
    pytest.importorskip("awscli")
    for alpha in (16, 32, 16):
        options: Any = {"overrides": GUESSED | {"lora_alpha": alpha}, "names": "live"}
        out = tmp_path / f"out-{alpha}"
        ckptkit.merge_adapter(PEFT / "checkpoint", out, overwrite=True, **options)
        with ckptkit.serve(PEFT / "checkpoint", name="m", **options) as serving:
            command = [sys.executable, "-m", "awscli", "s3", "sync", "--exact-timestamps"]
            subprocess.run(
                [*command, serving.location, tmp_path / "copy"],
                env=environment_of(serving),
                capture_output=True,
                check=True,
            )
        same_content(content(tmp_path / "copy"), content(out))
        time.sleep(1)  # times are whole seconds there


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.put_object(Bucket="ckptkit", Key="m/x", Body=b"x"), "MethodNotAllowed"),
        (lambda c: c.delete_object(Bucket="ckptkit", Key="m/config.json"), "MethodNotAllowed"),
        (lambda c: c.create_multipart_upload(Bucket="ckptkit", Key="m/x"), "MethodNotAllowed"),
        (lambda c: c.get_object(Bucket="ckptkit", Key="m/../config.json"), "NoSuchKey"),
        (lambda c: c.get_object(Bucket="other", Key="m/config.json"), "NoSuchBucket"),
        (lambda c: c.get_bucket_acl(Bucket="ckptkit"), "NotImplemented"),
        (
            lambda c: c.get_object(Bucket="ckptkit", Key="m/config.json", Range="bytes=9999-"),
            "InvalidRange",
        ),
        (
            lambda c: c.get_object(Bucket="ckptkit", Key="m/config.json", IfMatch='"x"'),
            "PreconditionFailed",
        ),
    ],
)
def test_what_is_refused_has_the_error_of_s3(
    one: Served, call: Callable[[Any], Any], code: str
) -> None:
    with pytest.raises(ClientError) as raised:
        call(client_of(one[0].environment))
    assert raised.value.response["Error"]["Code"] == code


def test_a_wrong_key_and_a_wrong_secret_are_refused(one: Served) -> None:
    serving, _ = one
    right = serving.environment["AWS_ACCESS_KEY_ID"]
    for key, code in ((right, "SignatureDoesNotMatch"), ("other", "InvalidAccessKeyId")):
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "wrong"}
        client = client_of(serving.environment | keys)
        with pytest.raises(ClientError) as raised:
            client.get_object(Bucket="ckptkit", Key="m/config.json")
        assert raised.value.response["Error"]["Code"] == code
    unsigned = requests.get(f"{serving.url}/ckptkit/m/config.json", timeout=60)
    assert unsigned.status_code == 403
    assert "<Code>AccessDenied</Code>" in unsigned.text


def test_without_signatures_only_names_of_this_machine_are_answered(one: Served) -> None:
    with ckptkit.serve(STEP, name="m", auth=False) as serving:
        url = f"{serving.url}/ckptkit/m/config.json"
        assert requests.get(url, timeout=60).content == (one[1] / "config.json").read_bytes()
        elsewhere = requests.get(url, headers={"Host": "evil.example"}, timeout=60)
        assert elsewhere.status_code == 403


def test_a_header_that_is_sent_twice_is_joined() -> None:
    with ckptkit.serve(STEP, name="m", auth=False) as serving:
        etag = requests.head(f"{serving.url}/ckptkit/m/config.json", timeout=60).headers["ETag"]
        for etags in (('"x"', etag), (etag, '"x"')):
            connection = HTTPConnection(serving.url.removeprefix("http://"), timeout=60)
            connection.putrequest("GET", "/ckptkit/m/config.json")
            for value in etags:
                connection.putheader("If-Match", value)
            connection.endheaders()
            assert connection.getresponse().status == 200
            connection.close()


def test_many_clients_read_at_a_time(served: Served) -> None:
    serving, out = served
    expected, wrong = content(out), []

    def read() -> None:
        client = client_of(serving.environment)
        for name, data in expected.items():
            if client.get_object(Bucket="ckptkit", Key=f"m/{name}")["Body"].read() != data:
                wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    return object_store.bucket("serving")


def test_a_source_at_a_url_is_served(bucket: Bucket, one: Served) -> None:
    url = bucket.put_tree(STEP, "run")
    with ckptkit.serve(url, name="m", src_options=bucket.store.options) as serving:
        client = client_of(serving.environment)
        for name, data in content(one[1]).items():
            assert client.get_object(Bucket="ckptkit", Key=f"m/{name}")["Body"].read() == data


@pytest.mark.slow
def test_a_run_at_a_url_is_followed(bucket: Bucket) -> None:
    url = bucket.put_tree(STEP, "steps/checkpoint-1").rpartition("/")[0]
    options = {"src_options": bucket.store.options}
    plan = ServePlan.from_options(resolve_places(url, None, options))
    with Serving(plan, name="m", follow=True, poll_seconds=0.1) as serving:
        client = client_of(serving.environment, signature_version=UNSIGNED)
        wait_for(client, "m/checkpoint-1/model.safetensors")
        bucket.put_tree(STEP, "steps/checkpoint-2")
        wait_for(client, "m/checkpoint-2/model.safetensors")


def wait_for(client: Any, key: str) -> None:
    for _ in range(300):
        listed = client.list_objects_v2(Bucket="ckptkit").get("Contents", ())
        if key in [entry["Key"] for entry in listed]:
            client.get_object(Bucket="ckptkit", Key=key)["Body"].read()
            return
        time.sleep(0.1)
    pytest.fail(f"{key} was not served")
