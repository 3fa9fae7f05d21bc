"""Slices of one output that go from a real S3 server to it, sent by processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import ckptkit
from ckptkit.conversion.job import JobResult, run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.errors import OutputExistsError, RefusedError, SourceChangedError
from ckptkit.engine.outcome import BytesWritten, Event, OutputKept
from ckptkit.options import ConsolidateRequest, Layout, Resources
from ckptkit.plan.plan import Share
from ckptkit.storage.places import PathLike
from ckptkit.storage.remote.s3 import S3Uploads
from tests.crash.forked_commands import ForkedCommands
from tests.files import contents, wait_until
from tests.object_store import KEY, SECRET, Bucket, Fault
from tests.sampled import sampled

MANIFEST = "ckptkit.json"
pytestmark = pytest.mark.usefixtures("impatient")
ONE = Resources(workers=1)


@pytest.fixture
def bucket(object_store, two_ranks: Path) -> Bucket:  # type: ignore[no-untyped-def]  # noqa: ANN001
    bucket: Bucket = object_store.bucket("slices")
    bucket.clear(kept="run/")
    if not bucket.keys("run/"):  # for all tests: nobody changes it for good
        bucket.put_tree(two_ranks, "run")
    return bucket


def slice_of(
    bucket: Bucket,
    number: int,
    count: int,
    *,
    out: PathLike | None = None,
    overwrite: bool = False,
    listener: list[Event] | None = None,
    **options: str,
) -> JobResult:
    request = ConsolidateRequest(names="live", **options)  # type: ignore[arg-type]
    job = ConversionJob(
        bucket.place("run"),
        out or bucket.place("out"),
        request,
        resources=ONE,
        overwrite=overwrite,
        share=Share(number, count),
    )
    hear = (lambda _: None) if listener is None else listener.append
    return run_job(job, hear)


def alone(bucket: Bucket, tmp_path: Path, layout: Layout = "hf") -> dict[str, bytes]:
    """What one process writes to a disk, the manifest included."""
    ckptkit.convert(bucket.place("run"), tmp_path / "alone", to=layout, names="live")
    return contents(tmp_path / "alone")


@pytest.fixture(scope="module")
def weights(two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one process makes of the checkpoint, wherever it lies."""
    out = tmp_path_factory.mktemp("weights") / "out"
    ckptkit.consolidate(two_ranks, out, names="live")
    return (out / "model.safetensors").read_bytes()


def is_whole(bucket: Bucket, weights: bytes) -> bool:
    """Says whether the output is all that lies there."""
    found = bucket.files_below("out")
    return found.keys() == {MANIFEST, "model.safetensors"} and (
        found["model.safetensors"] == weights
    )


@pytest.mark.parametrize("layout", sampled(["hf", "torch", "dcp"], ["hf"]))
@pytest.mark.slow
def test_slices_in_any_order_make_in_a_bucket_what_one_process_makes(
    bucket: Bucket, tmp_path: Path, layout: Layout
) -> None:
    whole = alone(bucket, tmp_path, layout)
    bucket.store.proxy.reset()
    for number, missing in ((2, (0, 1)), (0, (1,))):
        done = slice_of(bucket, number, 3, layout=layout)
        assert (done.missing, done.manifest) == (missing, None)
        seen = [key for key in bucket.keys("out/") if not key.startswith("out/.ckptkit-")]
        assert not seen
        notes = b"".join(map(bucket.get, bucket.keys("out/")))
        assert KEY.encode() not in notes
        assert SECRET.encode() not in notes
    assert slice_of(bucket, 1, 3, layout=layout).manifest is not None
    assert bucket.files_below("out") == whole
    assert bucket.unfinished_uploads() == []
    again = 0 if layout == "hf" else 2 * 14 << 20  # the parts that end with others' checksums
    sent = bucket.store.proxy.received["PUT"]
    assert sent <= 1.01 * sum(map(len, whole.values())) + again
    assert ckptkit.verify(bucket.place("out")).ok
    with pytest.raises(OutputExistsError):
        slice_of(bucket, 1, 3, layout=layout)


def words(bucket: Bucket, which: str) -> list[str]:
    store = bucket.store
    return [
        *("consolidate", f"{bucket.url}/run", f"{bucket.url}/out"),
        *("--names", "live", "--quiet", "--slice", which),
        *(*store.arguments("--src-option"), *store.arguments("--dst-option"), "--workers", "1"),
    ]


def kill_at(gate: Fault, bucket: Bucket, forks: ForkedCommands, log: Path) -> None:
    """Kills the first of two slices while it waits at the gate."""
    bucket.store.proxy.add(gate)
    process = forks.start(words(bucket, "0/2"), log)
    try:
        wait_until(lambda: gate.met)
    finally:
        process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, log.read_text()
    bucket.store.proxy.reset()


@pytest.mark.slow
def test_of_processes_that_run_at_a_time_one_commits(
    bucket: Bucket, weights: bytes, forks: ForkedCommands, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    processes = [forks.start(words(bucket, f"{number}/2"), log) for number in range(2)]
    assert [process.wait() for process in processes] == [0, 0], log.read_text()
    assert is_whole(bucket, weights)
    assert bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_a_killed_slice_sends_its_parts_again_and_others_do_not(
    bucket: Bucket, weights: bytes, forks: ForkedCommands, tmp_path: Path
) -> None:
    gate = Fault(r"PUT .*out/model.safetensors.*partNumber=2", wait=threading.Event(), times=None)
    kill_at(gate, bucket, forks, tmp_path / "log")
    assert slice_of(bucket, 1, 2).missing == (0,)
    heard: list[Event] = []
    assert slice_of(bucket, 1, 2, listener=heard).missing == (0,)
    assert not any(isinstance(event, BytesWritten) for event in heard)
    assert bucket.unfinished_uploads() == ["out/model.safetensors"]
    assert slice_of(bucket, 0, 2).manifest is not None
    assert is_whole(bucket, weights)
    assert bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_a_slice_killed_while_it_commits_finishes_when_it_is_run_again(
    bucket: Bucket, weights: bytes, forks: ForkedCommands, tmp_path: Path
) -> None:
    slice_of(bucket, 1, 2)
    gate = Fault(r"POST .*safetensors\?uploadId", wait=threading.Event(), times=None)
    kill_at(gate, bucket, forks, tmp_path / "log")
    wait_until(lambda: "out/model.safetensors" in bucket.keys("out/"))  # and nobody heard of it
    assert f"out/{MANIFEST}" not in bucket.keys("out/")
    other = slice_of(bucket, 1, 2, overwrite=True)
    assert (other.missing, other.manifest) == ((), None)  # the other one was at it
    with pytest.raises(OutputExistsError):
        slice_of(bucket, 0, 2)
    assert slice_of(bucket, 0, 2, overwrite=True).manifest is not None
    assert is_whole(bucket, weights)


@pytest.mark.slow
def test_slices_of_another_plan_are_refused_until_the_first_are_given_up(
    bucket: Bucket, weights: bytes
) -> None:
    slice_of(bucket, 0, 2, dtype="bfloat16")
    with pytest.raises(RefusedError, match="of another plan") as caught:
        slice_of(bucket, 1, 2)
    hint = caught.value.hint
    key = hint.rpartition("'")[0].rpartition("'")[2].removeprefix(f"{bucket.url}/")
    assert "aws s3 rm" in hint
    bucket.delete(key)
    assert len(bucket.unfinished_uploads()) == 1
    slice_of(bucket, 0, 2)
    assert slice_of(bucket, 1, 2).manifest is not None
    assert is_whole(bucket, weights)
    assert bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_slices_that_were_given_up_are_cleared_away_by_one_process(bucket: Bucket) -> None:
    slice_of(bucket, 0, 2)
    foreign = bucket.store.client.create_multipart_upload(Bucket=bucket.name, Key="out/theirs")
    ckptkit.consolidate(bucket.place("run"), bucket.place("out"), names="live")
    assert sorted(bucket.files_below("out")) == [MANIFEST, "model.safetensors"]
    assert bucket.unfinished_uploads() == [foreign["Key"]]


@pytest.mark.slow
def test_a_source_that_is_saved_again_between_slices_is_another_plan(bucket: Bucket) -> None:
    slice_of(bucket, 0, 2)
    data = bucket.get("run/__1_0.distcp")
    try:
        bucket.put("run/__1_0.distcp", data + b" ")
        with pytest.raises(RefusedError, match="of another plan"):
            slice_of(bucket, 1, 2)
    finally:
        bucket.put("run/__1_0.distcp", data)


def test_a_source_that_changes_before_the_commit_leaves_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_of(bucket, 0, 2)

    def changed(_: object) -> None:
        raise SourceChangedError("changed")

    monkeypatch.setattr("ckptkit.conversion.job.refuse_changed_sources", changed)
    with pytest.raises(SourceChangedError):
        slice_of(bucket, 1, 2)
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []


@pytest.mark.slow
def test_what_is_replaced_goes_with_the_commit(bucket: Bucket, weights: bytes) -> None:
    for path in ("old.safetensors", MANIFEST):
        bucket.put(f"out/{path}", b"{}")
    with pytest.raises(OutputExistsError):
        slice_of(bucket, 0, 2)
    for number in range(2):
        assert bucket.get(f"out/{MANIFEST}") == b"{}"
        slice_of(bucket, number, 2, overwrite=True)
    assert is_whole(bucket, weights)


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.quick("disk")
def test_a_slice_repeated_after_the_commit_leaves_nothing_behind(
    bucket: Bucket, tmp_path: Path, where: str
) -> None:
    out = tmp_path / "out" if where == "disk" else bucket.place("out")
    for number in range(2):
        slice_of(bucket, number, 2, out=out)
    heard: list[Event] = []
    done = slice_of(bucket, 0, 2, out=out, overwrite=True, listener=heard)
    assert done.manifest is not None
    assert OutputKept(os.fspath(out)) in heard
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not [key for key in bucket.keys("out/") if ".ckptkit-" in key]
    assert bucket.unfinished_uploads() == []


def test_slices_on_a_disk_read_from_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(3):
        slice_of(bucket, number, 3, out=tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found == alone(bucket, tmp_path)


@pytest.mark.slow
def test_a_store_that_knows_no_conditions_is_refused_with_what_to_do(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = S3Uploads.put

    def always(self: S3Uploads, key: str, data: bytes, crc32: int, **_: bool) -> bool:
        real(self, key, data, crc32)
        return True

    monkeypatch.setattr(S3Uploads, "put_new", always)
    with pytest.raises(RefusedError, match="the store writes over an object") as caught:
        slice_of(bucket, 0, 2)
    assert "--engine ray" in caught.value.hint
    assert bucket.keys("out/") == bucket.unfinished_uploads() == []
