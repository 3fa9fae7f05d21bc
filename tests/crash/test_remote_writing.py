"""Outputs that are written to a real S3 server, by a store that copies, fails and is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import fsspec
import pytest

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    OutputError,
    OutputExistsError,
    RefusedError,
)
from ckptkit.core.manifest import Manifest
from ckptkit.options import FRAMEWORKS_BY_LAYOUT, Layout
from ckptkit.storage.places import Place
from tests.files import contents, wait_until
from tests.object_store import KEY, SECRET, Bucket, Fault, ObjectStore
from tests.sampled import sampled

MANIFEST = "ckptkit.json"
pytestmark = pytest.mark.usefixtures("impatient")
MIB = 1 << 20
# Whatever differs in the options makes source and output two stores, between which nothing copies.
APART = {"config_kwargs": {"request_checksum_calculation": "when_required"}}
ALSO_APART = {"config_kwargs": {"user_agent_extra": "other"}}  # and the store knows checksums


@pytest.fixture
def bucket(object_store: ObjectStore, two_ranks: Path) -> Bucket:
    bucket = object_store.bucket("writing")
    bucket.clear()
    bucket.put_tree(two_ranks, "run")
    return bucket


def consolidate(bucket: Bucket, out: Place, **options: Any) -> Manifest:
    return ckptkit.consolidate(bucket.place("run"), out, names="live", **options)


def weights(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path != MANIFEST}


@pytest.mark.parametrize("layout", ["hf", pytest.param("dcp", marks=pytest.mark.slow)])
def test_what_a_store_copies_is_what_would_have_been_written_here(
    bucket: Bucket, two_ranks: Path, tmp_path: Path, layout: Layout
) -> None:
    ckptkit.convert(two_ranks, tmp_path / "out", to=layout, names="live")
    bucket.store.proxy.reset()
    events: list[object] = []
    manifest = ckptkit.convert(
        *(bucket.place("run"), bucket.place("out")),
        to=layout,
        names="live",
        listener=events.append,
    )
    received = bucket.store.proxy.received["PUT"]
    found = bucket.files_below("out")
    assert weights(found) == weights(contents(tmp_path / "out"))
    assert bucket.unfinished_uploads() == []
    copied = {name for name, one in manifest.tensors.items() if one.proof == "store-crc32"}
    assert copied
    assert received < sum(map(len, found.values())) - 5 * MIB * len(copied) + 10_000
    assert ckptkit.verify(bucket.place("out")).ok
    told = f"{found[MANIFEST].decode()}{events}{bucket.place('out')!r}"
    assert KEY not in told
    assert SECRET not in told


@pytest.mark.parametrize("further", [APART, pytest.param(ALSO_APART, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_between_two_accounts_every_byte_is_read_once_and_sent_once(
    bucket: Bucket, two_ranks: Path, tmp_path: Path, further: dict[str, object]
) -> None:
    ckptkit.consolidate(two_ranks, tmp_path / "out", names="live")
    bucket.store.proxy.reset()
    manifest = consolidate(bucket, bucket.place("out", **further))
    found, model = bucket.files_below("out"), sum(map(len, contents(two_ranks).values()))
    assert weights(found) == weights(contents(tmp_path / "out"))
    assert {one.proof for one in manifest.tensors.values()} == {"crc32"}
    assert bucket.store.proxy.sent["GET"] <= 1.02 * model
    assert bucket.store.proxy.received["PUT"] <= 1.01 * sum(map(len, found.values()))


@pytest.mark.parametrize("further", sampled([{}, APART, ALSO_APART], [{}]))
def test_a_damaged_chunk_is_found_whoever_copies_it_and_nothing_stays(
    bucket: Bucket, further: dict[str, object]
) -> None:
    data = bytearray(bucket.get("run/__1_0.distcp"))
    data[len(data) - 3 * MIB] ^= 1
    bucket.put("run/__1_0.distcp", bytes(data))
    with pytest.raises(ChecksumError, match="CRC-32"):
        consolidate(bucket, bucket.place("out", **further))
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []


@pytest.mark.parametrize("target", ["copies", pytest.param("sends", marks=pytest.mark.slow)])
def test_a_store_that_fails_now_and_then_makes_no_difference(
    bucket: Bucket, two_ranks: Path, tmp_path: Path, target: str
) -> None:
    ckptkit.consolidate(two_ranks, tmp_path / "out", names="live")
    proxy = bucket.store.proxy
    proxy.reset()
    faults = [
        proxy.fail(r"PUT .*partNumber=2", 500, times=2),
        proxy.fail(r"POST .*out/.*\?uploads", 503, "SlowDown"),
        proxy.add(Fault(r"POST .*safetensors\?uploadId", lose_answer=True)),
        proxy.add(Fault(r"PUT .*partNumber=3", lose_answer=True)),
        proxy.fail(r"PUT .*ckptkit.json", 500),
    ]
    out = bucket.place("out", **({} if target == "copies" else APART))
    consolidate(bucket, out)
    assert all(fault.met for fault in faults)
    assert weights(bucket.files_below("out")) == weights(contents(tmp_path / "out"))


def test_a_store_that_fails_for_good_keeps_nothing(bucket: Bucket) -> None:
    bucket.store.proxy.fail(r"PUT .*partNumber=2", 500, times=None)
    with pytest.raises(OutputError) as caught:
        consolidate(bucket, bucket.place("out", **APART))
    assert caught.value.where == f"{bucket.url}/out"
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []


def test_a_store_that_does_not_copy_gets_the_bytes_sent(bucket: Bucket) -> None:
    bucket.store.proxy.fail(r"PUT .*probe.*partNumber", 501, "NotImplemented", times=None)
    manifest = consolidate(bucket, bucket.place("out"))
    assert {one.proof for one in manifest.tensors.values()} == {"crc32"}
    assert sorted(bucket.files_below("out")) == [MANIFEST, "model.safetensors"]
    assert bucket.unfinished_uploads() == []


def test_a_place_that_holds_something_is_refused_before_anything_is_read(bucket: Bucket) -> None:
    bucket.put("out/notes.txt", b"mine")
    bucket.store.proxy.reset()
    with pytest.raises(OutputExistsError):
        consolidate(bucket, bucket.place("out"))
    assert bucket.files_below("out") == {"notes.txt": b"mine"}
    assert not [seen for seen in bucket.store.proxy.log if "/run" in seen.path]


@pytest.mark.parametrize("out", ["run", "run/out", ""])
def test_an_output_is_not_written_into_its_source_nor_around_it(bucket: Bucket, out: str) -> None:
    before = bucket.keys()
    with pytest.raises(RefusedError, match="inside"):
        consolidate(bucket, bucket.place(out), overwrite=True)
    assert bucket.keys() == before


def test_a_whole_bucket_is_not_replaced(bucket: Bucket, two_ranks: Path) -> None:
    before = bucket.keys()
    with pytest.raises(RefusedError, match="whole bucket"):
        ckptkit.consolidate(two_ranks, bucket.place(""), names="live", overwrite=True)
    assert bucket.keys() == before


@pytest.mark.slow
def test_a_reader_never_sees_the_old_manifest_with_new_files(bucket: Bucket) -> None:
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors": b"older"}
    for path, data in {**old, MANIFEST: b"{}"}.items():
        bucket.put(f"out/{path}", data)
    wrong: list[str] = []

    def look() -> None:
        found = bucket.files_below("out")
        if found.get(MANIFEST) == b"{}" and any(found.get(p) != old[p] for p in old):
            wrong.append("the old manifest stands beside new files")
        if found.get(MANIFEST, b"{}") != b"{}" and found["model.safetensors"] == b"older":
            wrong.append("the new manifest stands beside old files")

    watched = Fault(r"(PUT|POST|DELETE) /writing", times=None, before=look)
    bucket.store.proxy.add(watched)
    consolidate(bucket, bucket.place("out"), overwrite=True)
    look()
    assert watched.met > 5
    assert wrong == []
    assert sorted(bucket.files_below("out")) == [MANIFEST, "model.safetensors"]


@pytest.mark.slow
def test_a_run_whose_uploads_another_run_removes_fails_and_leaves_the_other_alone(
    bucket: Bucket,
) -> None:
    reached = threading.Event()
    gate = Fault(r"PUT .*out/model.safetensors.*partNumber=1", wait=threading.Event())
    gate.before = reached.set
    bucket.store.proxy.add(gate)
    failed: list[BaseException] = []

    def first() -> None:
        try:
            consolidate(bucket, bucket.place("out", **APART))
        except OutputError as error:
            failed.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    wait_until(lambda: bool(bucket.unfinished_uploads()))
    consolidate(bucket, bucket.place("out"))
    kept = bucket.files_below("out")
    assert gate.wait is not None
    gate.wait.set()
    thread.join()
    assert failed
    assert bucket.files_below("out") == kept


@pytest.mark.slow
def test_any_other_store_of_fsspec_takes_an_output_too(
    bucket: Bucket, two_ranks: Path, tmp_path: Path
) -> None:
    files = fsspec.filesystem("memory")
    # The others have names of their own, or the states of an optimizer.
    for layout in set(get_args(Layout)) - {*FRAMEWORKS_BY_LAYOUT, "universal"}:
        ckptkit.convert(two_ranks, tmp_path / layout, to=layout, names="live")
        url = f"memory://written/{layout}"
        ckptkit.convert(bucket.place("run"), url, to=layout, names="live", workers=3)
        found = {
            path.removeprefix(f"/written/{layout}/"): files.cat_file(path)
            for path in files.find(f"/written/{layout}")
        }
        assert weights(found) == weights(contents(tmp_path / layout))
        assert ckptkit.verify(url).ok
    files.rm("/written", recursive=True)


def test_a_failure_far_from_its_turn_ends_a_stream_too(two_ranks: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in two_ranks.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "__0_0.distcp":
            data[3 * MIB] ^= 1  # in what is written first
        (broken / path.name).write_bytes(data)
    with pytest.raises(ChecksumError):
        ckptkit.consolidate(broken, "memory://broken/out", names="live", workers=4)
    assert not fsspec.filesystem("memory").exists("/broken")


@contextmanager
def started(bucket: Bucket, *options: str) -> Iterator[subprocess.Popen[str]]:
    store = bucket.store
    command = [
        *(sys.executable, "-m", "ckptkit_cli", "consolidate"),
        *(f"{bucket.url}/run", f"{bucket.url}/out", "--names", "live", "--quiet"),
        *(*store.arguments("--src-option"), *store.arguments("--dst-option"), *options),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            yield process
        finally:
            process.kill()


def _stuck(bucket: Bucket) -> Fault:
    """Holds the second part back, when the first are there."""
    gate = Fault(r"PUT .*out/model.safetensors.*partNumber=2", wait=threading.Event(), times=None)
    return bucket.store.proxy.add(gate)


@pytest.mark.slow
def test_a_signal_removes_what_was_sent(bucket: Bucket) -> None:
    gate = _stuck(bucket)
    with started(bucket) as process:
        wait_until(lambda: gate.met)
        process.send_signal(signal.SIGTERM)
        assert gate.wait is not None
        gate.wait.set()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []


def _stop_within(bucket: Bucket, request: str, *options: str) -> None:
    """Stops a command while such a request is on its way, which the store then serves."""
    proxy, gate = bucket.store.proxy, threading.Event()
    fault = proxy.add(Fault(request, times=None, wait=gate))
    with started(bucket, *options) as process:
        wait_until(lambda: fault.met)
        process.send_signal(signal.SIGTERM)
        threading.Timer(0.5, gate.set).start()
        process.communicate(timeout=60)
    assert process.returncode == 143
    served = re.compile(request)
    wait_until(
        lambda: (
            sum(bool(served.search(f"{one.method} {one.path}")) for one in proxy.log) >= fault.met
        )
    )


@pytest.mark.parametrize(
    "request_sent",
    [
        pytest.param(r"POST .*-probe\?uploads", id="probe"),
        pytest.param(r"PUT .*/\.ckptkit-commit", id="claim", marks=pytest.mark.slow),
        pytest.param(r"PUT .*/ckptkit\.json", id="manifest", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_a_request_is_on_its_way_leaves_nothing(
    bucket: Bucket, request_sent: str
) -> None:
    _stop_within(bucket, request_sent)
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_a_signal_while_the_manifest_of_an_earlier_output_is_removed_keeps_that_output(
    bucket: Bucket,
) -> None:
    consolidate(bucket, bucket.place("out"))
    earlier = bucket.files_below("out")
    bucket.store.proxy.reset()
    other = "config_kwargs.user_agent_extra=other"
    _stop_within(bucket, r"POST .*\?delete", "--overwrite", "--dst-option", other)
    assert bucket.files_below("out") == earlier
    assert bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_what_a_kill_leaves_is_seen_by_nobody_and_removed_by_the_next_run(bucket: Bucket) -> None:
    gate = _stuck(bucket)
    with started(bucket) as process:
        wait_until(lambda: gate.met)
        process.kill()
        process.communicate(timeout=60)
    bucket.store.proxy.reset()
    left = bucket.keys("out/")
    assert left
    assert all("/.ckptkit-" in key for key in left)
    assert bucket.unfinished_uploads() == ["out/model.safetensors"]
    foreign = bucket.store.client.create_multipart_upload(Bucket=bucket.name, Key="out/theirs")
    consolidate(bucket, bucket.place("out"))
    assert sorted(bucket.files_below("out")) == [MANIFEST, "model.safetensors"]
    assert bucket.unfinished_uploads() == [foreign["Key"]]
    assert json.loads(bucket.get(f"out/{MANIFEST}"))["kind"] == "model"


@pytest.mark.slow
def test_of_a_source_that_lies_in_two_places_the_store_copies_its_own_part(
    bucket: Bucket, two_ranks: Path, tmp_path: Path
) -> None:
    ckptkit.consolidate(two_ranks, tmp_path / "out", names="live")
    other = tmp_path / "other"
    other.mkdir()
    for name in (".metadata", "__1_0.distcp"):
        (other / name).write_bytes((two_ranks / name).read_bytes())
    bucket.delete("run/__1_0.distcp")
    manifest = consolidate(bucket, bucket.place("out"), also=[other])
    assert weights(bucket.files_below("out")) == weights(contents(tmp_path / "out"))
    assert "store-crc32" in {one.proof for one in manifest.tensors.values()}
