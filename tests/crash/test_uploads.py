"""Saves to a URL: what goes wrong between the node's own disk and the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    OutputError,
    OutputExistsError,
    RefusedError,
    UsageError,
    WriterError,
)
from ckptkit.core.object_parts import PART_BYTES
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from ckptkit.training.tiers.save import TieredCommitter
from ckptkit.writer.messages import ByteCounter, Remote
from ckptkit.writer.upload.run_store import RunStore, send_file
from ckptkit.writer.upload.uploader import upload_command
from tests.crash import troubles
from tests.hub_server import TOKEN, HubServer
from tests.object_store import KEY, SECRET, Bucket, Fault, ObjectStore

SECONDS = 60.0
RUN = "exp[1]*?#%20 +{b}&e\u0301\U0001f680"  # no name is a pattern, or a part of a URL
WEIGHT = "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.fixture
def bucket(object_store: ObjectStore) -> Iterator[Bucket]:
    found = object_store.bucket("uploads")
    yield found
    object_store.proxy.reset()
    found.clear()


def fresh(seed: int) -> dict[str, Any]:
    return dict(troubles.state_of(troubles.network(seed, 12_000), seed))  # objects above 1 MiB


def opened(bucket: Bucket, folder: Path, **options: Any) -> Checkpointer:
    given: dict[str, Any] = {"local": folder / "node", "storage_options": bucket.store.options}
    given |= options
    return Checkpointer(f"{bucket.url}/{RUN}", **given)


def uploader_of(checkpointer: Checkpointer) -> Any:
    backend = checkpointer._committer
    assert isinstance(backend, TieredCommitter)
    return backend._drain_process


def steps_of(bucket: Bucket) -> dict[str, bool]:
    """Returns the folders of the run, and whether they look whole."""
    keys = [key.removeprefix(f"{RUN}/") for key in bucket.keys(f"{RUN}/")]
    folders = {key.partition("/")[0] for key in keys if not key.startswith(".")}
    return {name: f"{name}/ckptkit.json" in keys for name in sorted(folders)}


def sent(bucket: Bucket, pattern: str) -> Counter[str]:
    """Returns how many bytes were sent for each object whose key has that in it."""
    found: Counter[str] = Counter()
    for one in bucket.store.proxy.log:
        if pattern in one.path and one.received:
            found[one.path.partition("?")[0]] += one.received
    return found


def place(bucket: Bucket, path: str) -> Place:
    return Place(f"{bucket.url}/{path}", bucket.store.options)


class Partly(nn.Module):
    """A large part that is frozen, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1024, 1024).requires_grad_(False)
        self.head = nn.Linear(1024, 4)

    def state(self) -> dict[str, Any]:
        return {"model": self, "optimizer": torch.optim.SGD(self.head.parameters(), lr=0.1)}


@pytest.mark.slow
def test_steps_at_a_url_are_whole_retired_and_resumed_from_and_frozen_weights_copied(
    bucket: Bucket, tmp_path: Path
) -> None:
    model = Partly()
    state, frozen_bytes = model.state(), 1024 * 1024 * 4
    in_use = f"{RUN}/.ckptkit/in-use/checkpoint-1/0123.json"

    def uploaded(step: int, **options: Any) -> int:
        bucket.store.proxy.reset()
        with torch.no_grad():
            model.head.weight.add_(1.0)
        checkpointer.save(step, state, **options).result(SECONDS)
        return sum(sent(bucket, f"/{options.get('name', f'checkpoint-{step}')}/").values())

    with opened(bucket, tmp_path, keep_last=1) as checkpointer:
        assert uploaded(1) > frozen_bytes
        bucket.put(in_use, b"{}")
        assert uploaded(2) < frozen_bytes // 10
        [copy] = [one for one in bucket.store.proxy.log if "x-amz-copy-source" in one.headers]
        assert steps_of(bucket) == {"checkpoint-1": True, "checkpoint-2": True}  # one is read
        bucket.delete(in_use)
        # Somebody has changed what would be copied: it is uploaded again.
        key = unquote(copy.path.removeprefix("/uploads/"))
        bucket.put(key, bytes(len(bucket.get(key))))
        assert uploaded(3) > frozen_bytes
        assert steps_of(bucket) == {"checkpoint-3": True}
        assert uploaded(0, name="best") < frozen_bytes // 10
        assert uploaded(3) < frozen_bytes // 10  # a step that is there is replaced
        bucket.put(f"{RUN}/checkpoint-4/model.safetensors", b"somebody's")
        troubles.fails(checkpointer.save(4, state), OutputExistsError, "something without")
        assert uploaded(5) > 0
        assert bucket.get(f"{RUN}/checkpoint-4/model.safetensors") == b"somebody's"
        assert steps_of(bucket) == {"best": True, "checkpoint-4": False, "checkpoint-5": True}
        resumes_partly(checkpointer, model, bucket)
    ckptkit.consolidate(place(bucket, f"{RUN}/checkpoint-5"), tmp_path / "out", names="live")
    assert (tmp_path / "out/model.safetensors").stat().st_size > frozen_bytes
    assert bucket.unfinished_uploads() == []


def resumes_partly(checkpointer: Checkpointer, model: Partly, bucket: Bucket) -> None:
    assert not any(".ranks/" in key for key in bucket.keys(f"{RUN}/"))
    other = Partly()
    assert checkpointer.resume(other.state()) == 5
    assert torch.equal(other.base.weight, model.base.weight)
    assert torch.equal(other.head.weight, model.head.weight)
    assert checkpointer.resume(Partly().state(), folder=f"{bucket.url}/{RUN}/best") == 0


@pytest.mark.slow
def test_errors_that_pass_cost_no_step_and_a_killed_uploader_one_save(
    bucket: Bucket, tmp_path: Path
) -> None:
    proxy, state = bucket.store.proxy, fresh(1)
    proxy.fail(f"PUT .*{WEIGHT}", 500, times=2)
    proxy.fail("PUT .*checkpoint-1/ckptkit.json", 503, "SlowDown")
    proxy.add(Fault("POST .*optimizer_0/__0_0.distcp.*uploadId", lose_answer=True))
    proxy.add(Fault("PUT .*scheduler.bin", lose_answer=True))
    proxy.cut("GET .*ranks/0.json", after=10)
    proxy.hide("checkpoint-1/")  # its listing lags
    with opened(bucket, tmp_path) as checkpointer:
        truth = saved(checkpointer, 1, state)
        assert steps_of(bucket) == {"checkpoint-1": True}
        assert all(fault.met for fault in proxy._faults)
        troubles.resumes(checkpointer, 1, truth, fresh(2))
        assert not [one for one in proxy.log if "GET" in one.method and WEIGHT in one.path]
        damaged = tmp_path / "node/checkpoint-1" / WEIGHT
        damaged.write_bytes(bytes(damaged.stat().st_size))
        troubles.resumes(checkpointer, 1, truth, fresh(2))
        assert [one for one in proxy.log if "GET" in one.method and WEIGHT in one.path]
        proxy.reset()
        proxy.add(
            Fault(
                f"POST .*checkpoint-2/{WEIGHT}.*uploadId",
                before=lambda: os.kill(uploader_of(checkpointer).pid, signal.SIGKILL),
                status=500,
            )
        )
        troubles.train(state)
        truth = troubles.facts(state)
        troubles.fails(checkpointer.save(2, state), WriterError, "SIGKILL")
        assert steps_of(bucket) == {"checkpoint-1": True, "checkpoint-2": False}
        assert len(bucket.unfinished_uploads()) == 1
        troubles.resumes(checkpointer, 2, truth, fresh(2))
        assert steps_of(bucket) == {"checkpoint-1": True, "checkpoint-2": True}
    assert ckptkit.verify(place(bucket, f"{RUN}/checkpoint-1")).ok


def saved(checkpointer: Checkpointer, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    troubles.train(state)
    truth: dict[str, Any] = troubles.facts(state)
    checkpointer.save(step, state).result(SECONDS)
    return truth


@pytest.mark.slow
def test_what_could_not_be_uploaded_fails_loudly_and_is_uploaded_by_the_next_job(
    bucket: Bucket, tmp_path: Path
) -> None:
    proxy, state, told = bucket.store.proxy, fresh(1), list[str]()
    with troubles.listening() as log:
        checkpointer = opened(bucket, tmp_path)
        proxy.fail("PUT .*checkpoint-1/.ranks/0", 403, f"AccessDenied{SECRET}", times=None)
        told += facts_of(checkpointer.save(1, state).exception(SECONDS))
        assert steps_of(bucket) == {"checkpoint-1": False}
        saved(checkpointer, 2, state)  # with which goes what is left of the one before
        assert steps_of(bucket) == {"checkpoint-2": True}
        proxy.fail("PUT .*checkpoint-3/scheduler.bin", 403, "AccessDenied", times=None)
        truth = troubles.facts(state)
        handle = checkpointer.save(3, state)
        assert handle.local_result(SECONDS) == tmp_path / "node/checkpoint-3"
        handle.wait(SECONDS)
        process = uploader_of(checkpointer)
        told += [repr(checkpointer._settings), repr(process._remote)]
        told.append(Path(f"/proc/{process.pid}/cmdline").read_text())
        with pytest.raises(OutputError, match=r"checkpoint-3/scheduler.bin: .* refused access"):
            checkpointer.close()
        told += [record.getMessage() for record in log.records]
    before = sent(bucket, "checkpoint-3")[f"/uploads/{quote(RUN)}/checkpoint-3/{WEIGHT}"]
    proxy.reset()
    with opened(bucket, tmp_path) as checkpointer:
        troubles.resumes(checkpointer, 3, truth, fresh(2))
        # Of two jobs with one URL the earlier one stops saving.
        with opened(bucket, tmp_path, local=tmp_path / "other"):
            refused = checkpointer.save(4, state)
            troubles.fails(refused, RefusedError, "another job has opened the run")
    assert steps_of(bucket) == {"checkpoint-2": True, "checkpoint-3": True}
    # What was uploaded already is not uploaded again.
    assert before > 1 << 20 > sent(bucket, WEIGHT)[f"/uploads/{quote(RUN)}/checkpoint-3/{WEIGHT}"]
    tells_no_secret(bucket, tmp_path, told)


def test_a_job_leaves_alone_what_a_later_job_saved_under_the_same_step(
    bucket: Bucket, tmp_path: Path
) -> None:
    state = fresh(1)
    earlier = opened(bucket, tmp_path, local=tmp_path / "earlier")
    later = opened(bucket, tmp_path)
    with later:
        saved(later, 7, state)
        before = bucket.files_below(RUN)
        troubles.fails(earlier.save(7, fresh(2)), RefusedError, "another job has opened the run")
        assert bucket.files_below(RUN) == before
        earlier.close()


def test_the_process_that_uploads_takes_packages_from_where_the_trainer_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "json"):  # one of site-packages, one of the standard library
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    command = [
        part.replace("from ckptkit.writer.upload.uploader import main; main()", SHOW)
        for part in upload_command(0)
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.split("\n")[:2] == [str(tmp_path / "msgspec/__init__.py"), json.__file__]


SHOW = "import msgspec, json; print(msgspec.__file__); print(json.__file__)"


def tells_no_secret(bucket: Bucket, folder: Path, told: list[str]) -> None:
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    files += map(bucket.get, bucket.keys())
    for text in (*(text.encode() for text in told), *files):
        assert SECRET.encode() not in text
        assert KEY.encode() not in text


@pytest.mark.slow
def test_steps_in_a_bucket_of_the_hub_are_whole_retired_and_resumed_from(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for the process that uploads
    bucket, state = hub.put_bucket("org/runs"), fresh(1)
    options = {"endpoint": hub.url, "token": TOKEN}

    def opened_at(node: str, url: str = "hf://buckets/org/runs/a", **more: Any) -> Checkpointer:
        return Checkpointer(url, local=tmp_path / node, storage_options=options, **more)

    with opened_at("node", keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            troubles.train(state)
            handle = checkpointer.save(step, state)
            assert handle.result(SECONDS) == f"hf://buckets/org/runs/a/checkpoint-{step}"
            assert ckptkit.verify(handle.result()).ok
        truth = troubles.facts(state)
        hub.roles["me"] = "read"
        with pytest.raises(AccessError, match="permission to write") as caught:
            checkpointer.save(4, state).result(SECONDS)
        assert "may write" in caught.value.hint
        hub.roles.clear()
    whole = {name.split("/")[1] for name in bucket.files if name.endswith("/ckptkit.json")}
    assert whole == {"checkpoint-2", "checkpoint-3"}
    with opened_at("another") as checkpointer:
        troubles.resumes(checkpointer, 3, truth, fresh(2))
    # A node that still has the step that could not be sent goes on from it.
    with opened_at("node") as checkpointer:
        assert checkpointer.resume(fresh(2)) == 4
    assert "a/checkpoint-4/ckptkit.json" in bucket.files
    assert not [name for name in bucket.files if "/.ranks/" in name]
    facts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in facts if TOKEN.encode() in data]
    for url, text in (
        ("hf://buckets/org/typo/a", "no such bucket"),
        ("hf://buckets/org", "names no place in a bucket"),
    ):
        with pytest.raises(CkptkitError, match=text) as refused:
            opened_at("refused", url)
        assert refused.value.hint


def facts_of(error: CkptkitError | None) -> list[str]:
    assert isinstance(error, OutputError)
    return [str(error), repr(error), repr(error.to_json()), *error.__notes__]


def test_urls_and_options_that_cannot_do_are_refused_at_once(
    bucket: Bucket, tmp_path: Path
) -> None:
    node, options = tmp_path / "node", bucket.store.options
    wrong = bucket.store.options_for(KEY, "another")
    bucket.store.proxy.fail(".*forbidden", 403, "InvalidAccessKeyId", times=None)
    cases: list[tuple[type[CkptkitError], str, str, dict[str, Any]]] = [
        (UsageError, "steps are durable there first", "s3://uploads/run", {}),
        (UsageError, "with a run that is a directory", str(tmp_path), {"storage_options": options}),
        (UsageError, "names and plain values", "s3://b", {"storage_options": {"session": node}}),
        (UsageError, "within one process", "memory://run", {"local": node}),
        (UsageError, "keeps every file of every step", "hf://org/name", {"local": node}),
        (UsageError, "holds a password", "s3://user:pass@b/run", {"local": node}),
        (OutputError, "no such bucket", "s3://not-there/run", {"storage_options": options}),
        (OutputError, "refused access", "s3://uploads/forbidden", {"storage_options": wrong}),
    ]
    for kind, text, url, given in cases:
        if "storage_options" in given and url != str(tmp_path):
            given["local"] = node
        with pytest.raises(kind, match=text) as caught:
            Checkpointer(url, **given)
        assert caught.value.hint, text
        assert "another" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's advice
def test_few_parts_are_in_memory_however_large_a_file_is(bucket: Bucket) -> None:
    held: Counter[str] = Counter()
    lock, parts = threading.Lock(), 10

    def read(start: int, count: int) -> bytes:
        with lock:
            held["read"] += 1
            held["most"] = max(held["most"], held["read"] - held["sent"])
        return bytes([start // PART_BYTES]) * count

    class Counting(ByteCounter):
        def __setattr__(self, name: str, value: int) -> None:
            super().__setattr__(name, value)
            with lock:
                held["sent"] = value // PART_BYTES

    direct = bucket.store.direct_options
    store = RunStore(Remote(f"{bucket.url}/large", direct))
    send_file(store, Counting(), read, parts * PART_BYTES, "file")
    assert held["read"] == held["sent"] == parts
    assert held["most"] <= 6
    data = bucket.get("large/file")
    assert [data[n * PART_BYTES] for n in range(parts)] == list(range(parts))
