"""`list_run` and `prune` of a run on an object store, and of one in fsspec's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckptkit
from ckptkit.conversion.job import run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.errors import AccessError, MissingFileError, OutputError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.engine.outcome import Event, Started
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import Share
from ckptkit.runs.local_run import hold_at_stores
from ckptkit.storage.places import Place
from tests.made_up_runs import save_step
from tests.object_store import Bucket, Fault, ObjectStore

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import json, sys
import ckptkit
from ckptkit.storage.places import Place
ckptkit.prune(Place(sys.argv[1], json.load(sys.stdin)), keep_last=1)
"""


@pytest.fixture
def bucket(object_store: ObjectStore, tmp_path: Path) -> Iterator[Bucket]:
    for step in (1, 2, 3):
        save_step(tmp_path / "run", step, metrics={"loss": float(step)}, save_number=step)
    bucket = object_store.bucket("runs-to-prune")
    bucket.clear()
    bucket.put_tree(tmp_path / "run", "run")
    yield bucket
    bucket.clear()


@pytest.fixture
def run(bucket: Bucket) -> Place:
    return Place(f"{bucket.url}/run", bucket.store.options)


def left(bucket: Bucket) -> list[str]:
    return sorted({key.split("/")[1] for key in bucket.keys("run/")})


def step_of(run: Place, step: int) -> Place:
    return run.beside(f"{run}/checkpoint-{step}")


def test_a_run_on_a_store_is_listed_and_pruned_like_a_local_one(
    bucket: Bucket, run: Place, tmp_path: Path
) -> None:
    here, there = ckptkit.list_run(tmp_path / "run"), ckptkit.list_run(run)
    for one, other in zip(here.steps, there.steps, strict=True):
        assert (one.name, one.complete, one.metrics) == (other.name, other.complete, other.metrics)
        assert (one.size_bytes, one.save_number) == (other.size_bytes, other.save_number)
        assert other.modified > 0
    assert there.live is None
    before = bucket.keys()
    planned = ckptkit.prune(run, keep_last=1, keep_best="loss", dry_run=True)
    assert bucket.keys() == before
    done = ckptkit.prune(run, keep_last=1, keep_best="loss")
    assert (planned.removed, planned.freed_bytes) == (done.removed, done.freed_bytes)
    assert done.freed_bytes == here.steps[1].size_bytes
    assert left(bucket) == ["checkpoint-1", "checkpoint-3"]


def test_a_step_that_is_being_read_stays(bucket: Bucket, run: Place, tmp_path: Path) -> None:
    with hold_at_stores([step_of(run, 1)]):
        assert ckptkit.prune(run, keep_last=1, dry_run=True).steps[0].why == "it is being read"
        assert ckptkit.prune(run, keep_last=1).steps[0].why == "it is being read"
        assert left(bucket) == [".ckptkit", "checkpoint-1", "checkpoint-3"]
    assert ckptkit.consolidate(step_of(run, 1), tmp_path / "out").tensors
    assert left(bucket) == ["checkpoint-1", "checkpoint-3"]  # no mark is left
    ckptkit.prune(run, keep_last=1)
    assert left(bucket) == ["checkpoint-3"]


@pytest.mark.slow
def test_a_step_that_a_slice_reads_stays(bucket: Bucket, run: Place, tmp_path: Path) -> None:
    reasons: list[str] = []

    def prune(event: Event) -> None:
        if isinstance(event, Started):
            reasons.append(ckptkit.prune(run, keep_last=1, dry_run=True).steps[0].why)

    job = ConversionJob(step_of(run, 1), tmp_path / "out", ConsolidateRequest())
    done = [run_job(replace(job, share=Share(number, 2)), prune) for number in (1, 0)]
    assert reasons == ["it is being read"] * 2
    assert done[-1].manifest is not None
    ckptkit.consolidate(step_of(run, 1), tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert left(bucket) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]  # no mark is left


def test_a_mark_of_a_process_that_died_long_ago_keeps_nothing(
    bucket: Bucket, run: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("run/.ckptkit/in-use/checkpoint-1/0123.json", b"{}")
    monkeypatch.setattr("ckptkit.runs.remote_run._LIFE_SECONDS", -3600.0)
    bucket.put("run/.ckptkit/in-use/checkpoint-0/4567.json", b"{}")  # of a step that is gone
    ckptkit.prune(run, keep_last=1)
    assert left(bucket) == ["checkpoint-3"]


def test_who_may_only_read_reads_without_a_mark(
    bucket: Bucket, run: Place, object_store: ObjectStore
) -> None:
    denied = object_store.proxy.fail("^PUT", 403, "AccessDenied", times=None)
    with hold_at_stores([step_of(run, 1)]):
        assert left(bucket) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert denied.met == 1
    pruned = ckptkit.prune(run, keep_last=1)
    assert [one.step.step for one in pruned.failed] == [1, 2]
    assert len(left(bucket)) == 3


def test_a_reader_that_comes_during_a_removal_is_told(
    bucket: Bucket, run: Place, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.runs.remote_run._TRY_SECONDS", 0.0)
    told: list[type[Exception]] = []

    def read() -> None:
        try:
            with hold_at_stores([step_of(run, 1)]):
                pass
        except MissingFileError as error:
            told.append(type(error))

    object_store.proxy.add(Fault(r"^(DELETE|POST) .*", before=read))
    ckptkit.prune(run, keep_last=1)
    assert told == [MissingFileError]
    assert left(bucket) == ["checkpoint-3"]


# The manifest goes with the first deletion, then the index, the rest, and the note of it all.
@pytest.mark.parametrize(
    ("before", "begun"), [pytest.param(1, True, marks=pytest.mark.slow), (3, False)]
)
def test_a_kill_never_leaves_a_step_that_looks_whole(
    bucket: Bucket, run: Place, object_store: ObjectStore, before: int, begun: bool
) -> None:
    """The process dies before its n-th deletion reaches the store, and the next one goes on."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, run], stdin=subprocess.PIPE) as process:
        deletions = iter(range(before))

        def die_in_time() -> None:
            if next(deletions, None) is None:
                process.kill()
                process.wait(60)
                raise ConnectionAbortedError

        object_store.proxy.add(Fault(r"^(DELETE|POST) ", times=None, before=die_in_time))
        assert process.stdin is not None
        process.stdin.write(json.dumps(dict(run.options)).encode())
        process.stdin.close()
        assert process.wait(60) == -9
    object_store.proxy.reset()
    for step in ckptkit.list_run(run).steps:
        keys = bucket.keys(f"run/{step.name}/")
        is_marked = f"run/{step.name}/{MANIFEST_NAME}" in keys
        assert step.complete == (is_marked and sum(key.endswith(".distcp") for key in keys) == 2)
        assert step.complete or step.step == 1
    pruned = ckptkit.prune(run, keep_last=1)
    assert pruned.cleared == (("checkpoint-1",) if begun else ())
    assert left(bucket) == ["checkpoint-3"]


def test_what_was_written_again_since_a_kill_is_not_removed(
    bucket: Bucket, run: Place, object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.proxy.fail(r"^(DELETE|POST) .*", 403, "AccessDenied", times=1)
    stuck = ckptkit.prune(run, keep_last=2)
    assert [one.step.step for one in stuck.failed] == [1]
    bucket.put_tree(tmp_path / "run" / "checkpoint-1", "run/checkpoint-1")
    bucket.put("run/checkpoint-1/new", b"by a later save")
    pruned = ckptkit.prune(run, keep_last=3)
    assert pruned.cleared == ()
    assert bucket.get("run/checkpoint-1/new")
    assert ckptkit.list_run(run).steps[0].complete


def test_errors_hold_no_secret(run: Place, object_store: ObjectStore) -> None:
    object_store.proxy.fail("", 403, "InvalidAccessKeyId", times=None)
    with pytest.raises((AccessError, OutputError)) as caught:
        ckptkit.prune(run, keep_last=1)
    shown = f"{caught.value} {caught.value.hint} {caught.value!r} {run!r}"
    assert str(run.options["secret"]) not in shown
    assert str(run.options["key"]) not in shown


def test_memory_is_a_store_too(tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for step in (1, 2):
        save_step(tmp_path, step)
    store.put(str(tmp_path), "/made-up-run", recursive=True)
    try:
        names = [step.name for step in ckptkit.list_run("memory://made-up-run").steps]
        assert names == ["checkpoint-1", "checkpoint-2"]
        ckptkit.prune("memory://made-up-run", keep_last=1)
        assert [step.step for step in ckptkit.list_run("memory://made-up-run").steps] == [2]
    finally:
        store.rm("/made-up-run", recursive=True)
