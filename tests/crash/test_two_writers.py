"""Two runs that write to one place at a time: one wins whole, and the other says so."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import ckptkit
from ckptkit.conversion.job import run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.errors import CkptkitError, NotACheckpointError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.engine.outcome import BytesWritten, Event, Planned, Started
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import Share
from ckptkit.storage.places import Place
from ckptkit.storage.remote import s3
from ckptkit.storage.remote import store as store_module
from ckptkit.storage.remote.store import CLAIM_NAME
from tests.crash.forked_commands import ForkedCommands, consolidate_in_parts
from tests.faulty_proxy import Fault, Proxy
from tests.fork_host import Child
from tests.object_store import KEY, SECRET, Bucket, ObjectStore

ROOT = Path(__file__).resolve().parents[2]
STEP = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config"
FIRST: dict[str, Any] = {"dtype": "bfloat16"}
SECOND: dict[str, Any] = {"max_shard_size": "64KB"}
OUT = "exp[1]/out"
EVERY = 3  # request of a writer is tried
CHANGING = r"^(PUT|POST|DELETE) "


@pytest.fixture
def bucket(object_store: ObjectStore) -> Bucket:
    bucket = object_store.bucket("two-writers")
    bucket.clear()
    return bucket


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go in parts, as large ones do, and a claim of another run is waited for briefly."""
    monkeypatch.setattr(s3, "SMALL_BYTES", 2048)
    monkeypatch.setattr(store_module, "_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(store_module, "_POLL_SECONDS", 0.05)


@pytest.fixture
def own_proxy(object_store: ObjectStore) -> Iterator[Proxy]:
    """A second way to the same server, for the requests of one writer alone."""
    parts = urlsplit(object_store.direct)
    proxy = Proxy(str(parts.hostname), int(parts.port or 0))
    yield proxy
    proxy.close()


def write(place: Place, options: dict[str, Any], **more: Any) -> str:
    """Returns how a run ended: empty where it succeeded."""
    try:
        ckptkit.consolidate(
            STEP / "checkpoint", place, names="live", overwrite=True, **options, **more
        )
    except CkptkitError as error:
        return f"{error.exit_status} {error}"
    return ""


def by_way_of(bucket: Bucket, endpoint: str = "") -> Place:
    store = bucket.store
    return Place(f"{bucket.url}/{OUT}", store.options_for(KEY, SECRET, endpoint=endpoint))


def found(bucket: Bucket) -> dict[str, bytes]:
    return {
        key.removeprefix(f"{OUT}/"): bucket.get(key)
        for key in bucket.keys(f"{OUT}/")
        if not key.endswith(MANIFEST_NAME)
    }


@pytest.fixture
def known(bucket: Bucket) -> dict[str, dict[str, bytes]]:
    """The files of each whole output; the earlier one is in place afterwards."""
    outputs = {}
    for name, options in (("first", FIRST), ("second", SECOND), ("earlier", {})):
        assert write(by_way_of(bucket), options) == ""
        outputs[name] = found(bucket)
    return outputs


def see_one_whole(
    bucket: Bucket, known: dict[str, dict[str, bytes]], first: str, second: str
) -> None:
    """Sees that what lies there is one output, that of the run that succeeded."""
    winner = {(False, True): "first", (True, False): "second", (True, True): "earlier"}
    # Both succeed where the first one looked at the place only after the second had ended.
    name = winner.get((bool(first), bool(second)), "first")
    assert found(bucket) == known[name], (first, second)
    assert ckptkit.verify(by_way_of(bucket)).ok
    assert bucket.unfinished_uploads() == []


def see_no_mixture(bucket: Bucket, known: dict[str, dict[str, bytes]]) -> None:
    """Sees that what a reader takes for an output in the middle of a commit is a whole one."""
    before = found(bucket)
    try:
        verified = ckptkit.verify(by_way_of(bucket))
    except CkptkitError as error:
        told = str(error)
    else:
        told = "" if verified.ok else str(verified.problems[0])
    if not told and before == found(bucket):  # other requests of the writer are not held
        files = {name: data for name, data in before.items() if not name.startswith(".ckptkit")}
        assert files in known.values()
    elif told:
        assert "not finished" in told


@pytest.mark.slow
def test_a_writer_that_is_held_back_anywhere_mixes_nothing(
    bucket: Bucket, known: dict[str, dict[str, bytes]], own_proxy: Proxy
) -> None:
    """The first run is held at one request after another until the second has ended."""
    earlier = {key: bucket.get(key) for key in set(bucket.keys())}
    assert write(by_way_of(bucket, own_proxy.url), FIRST) == ""
    requests, both = len(own_proxy.log), 0
    assert requests > 20
    for number in range(requests % EVERY, requests, EVERY):
        bucket.clear()
        for key, data in earlier.items():
            bucket.put(key, data)
        own_proxy.reset()
        gate = _Gate(own_proxy, number)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(write, by_way_of(bucket, own_proxy.url), FIRST)
            assert gate.reached.wait(60)
            see_no_mixture(bucket, known)
            second = write(by_way_of(bucket), SECOND)
            gate.open.set()
            ended = first.result(60)
        own_proxy.reset()
        see_one_whole(bucket, known, ended, second)
        both += not ended and not second
    assert both <= 3


class _Gate:
    def __init__(self, proxy: Proxy, number: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._left = number
        self._lock = threading.Lock()
        proxy.add(Fault(".", None, before=self._come))

    def _come(self) -> None:
        with self._lock:
            self._left -= 1
            is_held = self._left == -1
        if is_held:
            self.reached.set()
            self.open.wait(60)


@pytest.mark.parametrize("event", [Planned, Started, BytesWritten])
def test_a_writer_to_a_directory_does_not_replace_what_came_after_it_began(
    tmp_path: Path, event: type[Event]
) -> None:
    out = Place(tmp_path / "exp[1]" / "out")
    if event is not Planned:  # replaced; else both write where nothing is
        assert write(out, {}) == ""
    reached, opened = threading.Event(), threading.Event()

    def hold(one: Event) -> None:
        if isinstance(one, event) and not reached.is_set():
            reached.set()
            opened.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(write, out, FIRST, listener=hold)
        assert reached.wait(60)
        assert write(out, SECOND) == ""
        written = {path.name: path.read_bytes() for path in Path(out).iterdir()}
        opened.set()
        ended = first.result(60)
    assert ended.startswith("5 ")
    assert "another run has put its output there" in ended
    assert {path.name: path.read_bytes() for path in Path(out).iterdir()} == written
    assert [path.name for path in Path(out).parent.iterdir()] == ["out"]
    assert ckptkit.verify(out).ok


def write_slice(place: Place, number: int, dtype: str, **more: Any) -> str:
    """Returns how a slice of two ended, as `write` does."""
    request = ConsolidateRequest(names="live", dtype=dtype)  # type: ignore[arg-type]
    share = Share(number, 2)
    job = ConversionJob(STEP / "checkpoint", place, request, overwrite=True, share=share)
    try:
        run_job(job, **more)
    except CkptkitError as error:
        return f"{error.exit_status} {error}"
    return ""


class _Held:
    """A listener that waits at the first event of a kind."""

    def __init__(self, kind: type[Event]) -> None:
        self._kind = kind
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, self._kind) and not self.reached.is_set():
            self.reached.set()
            self.opened.wait(60)


@pytest.mark.parametrize("where", ["directory", pytest.param("bucket", marks=pytest.mark.slow)])
def test_slices_do_not_replace_what_other_slices_put_there_after_the_first_of_them_began(
    bucket: Bucket, tmp_path: Path, where: str
) -> None:
    out = by_way_of(bucket) if where == "bucket" else Place(tmp_path / OUT)

    def there() -> dict[str, bytes]:
        if where == "bucket":
            return {key: bucket.get(key) for key in set(bucket.keys())}
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}

    assert write(out, {}) == ""
    assert write_slice(out, 0, "bfloat16") == ""
    assert write_slice(out, 0, "float32").startswith("4 ")  # they meet, and have other plans
    held = _Held(Planned)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(write_slice, out, 0, "float32", listener=held)
        assert held.reached.wait(60)
        assert write_slice(out, 1, "bfloat16") == ""
        written = there()
        held.opened.set()
        assert later.result(60) == ""
    ended = write_slice(out, 1, "float32")  # began after the commit, and its set before
    assert ended.startswith("5 ")
    assert "another run has put its output there" in ended
    assert there() == written
    assert ckptkit.verify(out).ok
    assert bucket.unfinished_uploads() == []


def test_a_slice_does_not_replace_what_one_process_put_in_a_directory_meanwhile(
    tmp_path: Path,
) -> None:
    out = Place(tmp_path / "out")
    assert write(out, {}) == ""
    assert write_slice(out, 0, "bfloat16") == ""
    held = _Held(BytesWritten)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(write_slice, out, 1, "bfloat16", listener=held)
        assert held.reached.wait(60)
        assert write(out, SECOND) == ""
        written = {path.name: path.read_bytes() for path in Path(out).iterdir()}
        held.opened.set()
        ended = last.result(60)
    assert ended.startswith("5 ")
    assert {path.name: path.read_bytes() for path in Path(out).iterdir()} == written
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_two_processes_at_once_leave_one_output(
    bucket: Bucket,
    known: dict[str, dict[str, bytes]],
    own_proxy: Proxy,
    forks: ForkedCommands,
    tmp_path: Path,
) -> None:
    own_proxy.slow(CHANGING, 0.05)
    for delay in (0.0, 0.4):
        logs = tmp_path / f"first-{delay}", tmp_path / f"second-{delay}"
        first = forks.start(_words(bucket, own_proxy.url, "--dtype", "bfloat16"), logs[0])
        time.sleep(delay)
        options = "--max-shard-size", "64KB"
        second = forks.start(_words(bucket, bucket.store.endpoint, *options), logs[1])
        statuses = first.wait(), second.wait()
        ends = [log.read_text() for log in logs]
        assert set(statuses) <= {0, 1, 3, 4, 5}
        assert 1 not in statuses, ends
        if statuses == (0, 0):  # one had ended before the other began to look
            assert found(bucket) in (known["first"], known["second"])
            assert ckptkit.verify(by_way_of(bucket)).ok
        else:
            see_one_whole(
                bucket, known, *(e if s else "" for e, s in zip(ends, statuses, strict=True))
            )
        for end, status in zip(ends, statuses, strict=True):
            assert not status or "another run" in end or "uploads" in end, end
        bucket.clear()
        assert write(by_way_of(bucket), {}) == ""


def _words(bucket: Bucket, endpoint: str, *options: str) -> list[str]:
    given = [
        f"key={KEY}",
        f"secret={SECRET}",
        f"client_kwargs.endpoint_url={endpoint}",
        "client_kwargs.region_name=us-east-1",
    ]
    return [
        *("consolidate", str(STEP / "checkpoint"), f"{bucket.url}/{OUT}"),
        *("--overwrite", "--names", "live", "--quiet", *options),
        *(word for pair in given for word in ("--dst-option", pair)),
    ]


@pytest.mark.slow
def test_a_kill_in_the_commit_blocks_nothing_and_is_seen(
    bucket: Bucket,
    known: dict[str, dict[str, bytes]],
    own_proxy: Proxy,
    forks: ForkedCommands,
    tmp_path: Path,
) -> None:
    gate = Fault(r"PUT .*config\.json", wait=threading.Event(), times=None)
    own_proxy.add(gate)
    process = forks.start(_words(bucket, own_proxy.url, "--dtype", "bfloat16"), tmp_path / "log")
    until = time.monotonic() + 60
    while not gate.met and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(RefusedError, match="another run is putting its output there"):
        ckptkit.consolidate(STEP / "checkpoint", by_way_of(bucket), names="live", overwrite=True)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert f"{OUT}/{CLAIM_NAME}" in set(bucket.keys())
    assert f"{OUT}/{MANIFEST_NAME}" not in set(bucket.keys())
    with pytest.raises(NotACheckpointError, match="not finished"):
        ckptkit.inspect(by_way_of(bucket))
    began = time.monotonic()
    assert write(by_way_of(bucket), SECOND) == ""
    assert time.monotonic() - began < 30
    assert found(bucket) == known["second"]
    assert bucket.unfinished_uploads() == []


ELSEWHERE = {"writer": "a", "machine": "other", "process": "1 1", "names": ["config.json"]}


def test_a_run_that_died_on_another_machine_is_waited_for_once_and_not_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "_LEASE_SECONDS", 3.0)
    bucket.put(f"{OUT}/{CLAIM_NAME}", json.dumps(ELSEWHERE).encode())
    bucket.put(f"{OUT}/config.json", b"of a commit that was killed")
    began = time.monotonic()
    assert write(by_way_of(bucket), {}) == ""
    assert time.monotonic() - began > 3
    assert caplog.text.count("waiting up to 3 s to see whether it is alive") == 1
    assert ckptkit.verify(by_way_of(bucket)).ok
    assert f"{OUT}/{CLAIM_NAME}" not in set(bucket.keys())


def test_a_run_that_renews_its_claim_on_another_machine_is_not_disturbed(bucket: Bucket) -> None:
    with bucket.renewed(f"{OUT}/{CLAIM_NAME}", ELSEWHERE):
        told = write(by_way_of(bucket), {})
    assert told.startswith("4 ")
    assert "another run is putting its output there" in told
    assert {key.removeprefix(f"{OUT}/") for key in set(bucket.keys())} == {CLAIM_NAME}


def run_and_die(
    forks: ForkedCommands,
    bucket: Bucket,
    proxy: Proxy,
    number: int | None,
    *,
    is_done: bool = False,
) -> int:
    """Kills the process at a request, which the server then sees or not; returns its end."""
    proxy.reset()
    place = by_way_of(bucket, proxy.url)
    child, left = Future[Child](), itertools.count()

    def come() -> None:
        if next(left) == number:
            os.kill(child.result().pid, signal.SIGKILL)
            if not is_done:
                raise OSError("the request was not sent")

    proxy.add(Fault(".", None, before=come))
    options = {"names": "live", "overwrite": True, **FIRST}
    given = (str(STEP / "checkpoint"), place.location, dict(place.options), options)
    child.set_result(forks.host.start(consolidate_in_parts, *given))
    status = child.result().wait()
    assert status is not None
    return status


@pytest.mark.slow
def test_after_a_kill_at_any_request_the_same_command_leaves_nothing_but_its_output(
    bucket: Bucket,
    known: dict[str, dict[str, bytes]],
    own_proxy: Proxy,
    forks: ForkedCommands,
) -> None:
    """The request that is the last one is tried as one that the store has met, and has not."""
    earlier = {key: bucket.get(key) for key in set(bucket.keys())}
    assert run_and_die(forks, bucket, own_proxy, None) == 0
    requests = own_proxy.log
    changing = {at for at, one in enumerate(requests) if one.method in {"PUT", "POST", "DELETE"}}
    left_behind = 0
    for at, number in enumerate(sorted(changing | set(range(0, len(requests), 2 * EVERY)))):
        bucket.clear()
        for key, data in earlier.items() if at % 2 else ():  # replaced, or written anew
            bucket.put(key, data)
        # The order of requests is not always the same, and so is not the number of the last one.
        end = run_and_die(forks, bucket, own_proxy, number, is_done=at % 3 > 0)
        assert end in {-signal.SIGKILL, 0}
        own_proxy.reset()
        left = bucket.unfinished_uploads()
        left_behind += bool(left)
        assert write(by_way_of(bucket), FIRST) == "", number
        assert found(bucket) == known["first"], (number, requests[number])
        assert bucket.unfinished_uploads() == [], (left, number, requests[number])
    assert left_behind > 3


@pytest.mark.usefixtures("known")
@pytest.mark.slow
def test_files_of_the_user_in_an_output_on_s3_are_not_removed(bucket: Bucket) -> None:
    bucket.put(f"{OUT}/other/model.safetensors", b"mine")
    told = write(by_way_of(bucket), FIRST)
    assert told.startswith("4 ")
    assert "'other/model.safetensors'" in told
    bucket.delete(f"{OUT}/other/model.safetensors")
    bucket.put(f"{OUT}/notes.md", b"mine")
    bucket.put(f"{OUT}/", b"")  # a folder's marker is nobody's file
    assert write(by_way_of(bucket), FIRST) == ""
    assert bucket.get(f"{OUT}/notes.md") == b"mine"


def test_what_comes_while_an_output_is_made_stays_too(
    bucket: Bucket, known: dict[str, dict[str, bytes]], own_proxy: Proxy
) -> None:
    late = f"{OUT}/checkpoint-2/.metadata"
    own_proxy.add(Fault(r"PUT .*partNumber=1", before=lambda: bucket.put(late, b"mine")))
    told = write(by_way_of(bucket, own_proxy.url), FIRST)
    assert told.startswith("4 ")
    assert found(bucket) == {**known["earlier"], "checkpoint-2/.metadata": b"mine"}
    assert bucket.unfinished_uploads() == []


@pytest.mark.usefixtures("known")
@pytest.mark.slow
def test_all_objects_of_an_output_carry_the_name_of_their_writer(bucket: Bucket) -> None:
    client = bucket.store.client
    writers = {
        client.head_object(Bucket=bucket.name, Key=key)["Metadata"].get("ckptkit-writer")
        for key in bucket.keys(f"{OUT}/")
    }
    assert len(writers) == 1
    assert None not in writers
