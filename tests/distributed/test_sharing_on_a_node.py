"""What the ranks of a node download together when they load from a bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.distributed.share_run import LAYERS, make_model
from tests.object_store import Bucket, Fault, ObjectStore
from tests.sampled import sampled

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("share_run.py")
KEY = "model/model.safetensors"
READS = rf"^GET /[^?]*/{KEY}"
Results = dict[int, dict[str, float]]


@pytest.fixture
def bucket(object_store: ObjectStore, tmp_path: Path) -> Bucket:
    bucket = object_store.bucket("shared")
    put_model(bucket, tmp_path, LAYERS)
    return bucket


def put_model(bucket: Bucket, folder: Path, layers: int, kind: str = "safetensors") -> None:
    """Puts a model into a bucket, as one file or as DCP stores it, and its values into a folder."""
    bucket.clear()
    torch.manual_seed(2)
    state = make_model(layers).state_dict()
    truth = {name: torch.randn_like(value) for name, value in state.items()}
    save_file(truth, folder / "model.safetensors")
    source = folder / kind
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    if kind == "safetensors":
        shutil.copy(folder / "model.safetensors", source)
    elif kind == "torch":
        torch.save(truth, source / "pytorch_model.bin")
    else:
        dcp.save(truth, checkpoint_id=source, no_dist=True)
    bucket.put_tree(source, "model")
    store = {"url": f"{bucket.url}/model", "options": bucket.store.options, "layers": layers}
    (folder / "store.json").write_text(json.dumps(store))


def size_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def results(folder: Path) -> Results:
    return {
        int(path.stem.partition("_")[2]): json.loads(path.read_text())
        for path in folder.glob("result_*.json")
    }


def traces() -> set[str]:
    """Returns the abstract sockets of ckptkit that are there, and its shared memory."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    folder = Path("/dev/shm")  # noqa: S108  where Linux has it
    # Folders there are those of other tests.
    names = [path.name for path in folder.iterdir() if not path.is_dir()] if folder.is_dir() else []
    return {line.split()[-1] for line in sockets if "@ckptkit" in line} | {
        name for name in names if "ckptkit" in name
    }


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = traces()
    yield
    until = time.monotonic() + 60  # other tests of this machine leave theirs for a moment
    while left := traces() - before:
        assert time.monotonic() < until, left
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", sampled(["safetensors", "torch", "dcp"], ["safetensors"]))
def test_replicas_download_a_model_once_together(
    kind: str, bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    if kind != "safetensors":
        put_model(bucket, tmp_path, LAYERS, kind)
    bucket.store.proxy.reset()
    run_ranks(SCRIPT, 4, tmp_path, "ddp")
    sent, size = bucket.store.proxy.sent["GET"], size_of(tmp_path)
    found = results(tmp_path)
    assert len(found) == 4
    assert sent < 1.1 * size, (sent / size, found)
    assert sum(one["read"] for one in found.values()) < 1.05 * size
    assert all(one["read"] + one["shared"] > 0.99 * size for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", "tp", "fsdp"])
def test_each_byte_is_downloaded_once_however_a_model_is_cut(
    kind: str, bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 4, tmp_path, kind)
    found = results(tmp_path)
    assert len(found) == 4
    sent, size = bucket.store.proxy.sent["GET"], size_of(tmp_path)
    assert sent < 1.1 * size, (sent / size, found)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_stops_no_other(
    bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    proxy = bucket.store.proxy
    put_model(bucket, tmp_path, 4 * LAYERS)
    proxy.slow(READS, 0.05)
    seen = []

    def kill() -> None:
        seen.append(1)
        if len(seen) == 12:
            os.kill(int((tmp_path / "pid_1").read_text()), signal.SIGKILL)

    proxy.add(Fault(READS, None, before=kill))
    run_ranks(SCRIPT, 4, tmp_path, "ddp:killed", status=None)
    found = results(tmp_path)
    assert set(found) == {0, 2, 3}, found
    assert proxy.sent["GET"] < 2 * size_of(tmp_path)
    assert max(one["seconds"] for one in found.values()) < 20


def end_the_stopped_one(folder: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not {0, 2} <= set(results(folder)):
        time.sleep(0.1)
    os.kill(int((folder / "pid_1").read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_waited_for_in_vain_once(
    bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    proxy = bucket.store.proxy
    put_model(bucket, tmp_path, 4 * LAYERS)
    proxy.slow(READS, 0.05)
    seen = []

    def stop() -> None:
        seen.append(1)
        if len(seen) == 12:
            os.kill(int((tmp_path / "pid_1").read_text()), signal.SIGSTOP)

    proxy.add(Fault(READS, None, before=stop))
    ender = threading.Thread(target=end_the_stopped_one, args=(tmp_path,))
    ender.start()
    run_ranks(SCRIPT, 3, tmp_path, "ddp:stopped", status=None)
    ender.join()
    found = results(tmp_path)
    assert set(found) == {0, 2}, found
    assert max(one["seconds"] for one in found.values()) < 30


@pytest.mark.slow
def test_a_rank_that_comes_late_takes_what_is_still_downloaded(
    bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    put_model(bucket, tmp_path, 8 * LAYERS)
    proxy = bucket.store.proxy
    proxy.slow(READS, 1)
    proxy.add(Fault(READS, None, before=(tmp_path / "downloads").touch))
    run_ranks(SCRIPT, 2, tmp_path, "ddp:late")
    found = results(tmp_path)
    assert len(found) == 2
    assert found[1]["shared"] > 0, found
    shared = sum(one["shared"] for one in found.values())
    assert proxy.sent["GET"] < 2.05 * size_of(tmp_path) - shared


@pytest.mark.slow
def test_an_object_that_is_replaced_meanwhile_is_taken_by_no_rank(
    bucket: Bucket, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    put_model(bucket, tmp_path, 4 * LAYERS)
    seen = []
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-5] ^= 1

    def replace() -> None:
        seen.append(1)
        if len(seen) == 12:
            bucket.put(KEY, bytes(data))

    bucket.store.proxy.add(Fault(READS, None, before=replace))
    run_ranks(SCRIPT, 4, tmp_path, "ddp:changed")
    assert len(results(tmp_path)) == 4
