"""One plan run by the nodes of a Ray cluster, one of which is killed in the middle."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import ckptkit
from ckptkit.conversion import job as jobs
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.write import PlannedOutput
from ckptkit.core.errors import EngineError, RefusedError
from ckptkit.engine.outcome import Outcome
from ckptkit.options import ConsolidateRequest, Resources
from ckptkit.plan.plan import Share
from ckptkit.storage.base import OutputAttempt
from ckptkit.storage.places import PathLike, Place
from tests.object_store import Bucket, ObjectStore

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves workers beside other tests
}
LIMIT_SECONDS = 600  # below pytest's limit of a test
Told = dict[str, Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    chance = np.random.default_rng(0)
    tensors = {f"layers.{n}.weight": chance.random((4_500_000,), np.float32) for n in range(3)}
    tensors |= {f"layers.{n}.norm": chance.random((7,), np.float32) for n in range(3)}
    (folder / "model").mkdir()
    safetensors.numpy.save_file(tensors, folder / "model/model.safetensors", {"format": "pt"})
    ckptkit.convert(folder / "model", folder / "dcp", to="dcp")
    return folder / "dcp"


@pytest.fixture(scope="module")
def bucket(source: Path, running_store: ObjectStore) -> Bucket:
    running_store.proxy.reset()
    bucket = running_store.bucket("ray")
    bucket.put_tree(source, "run")
    return bucket


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    for name in "abcde":
        (out / name).mkdir()
    return out


@pytest.fixture(scope="module")
def told(source: Path, out: Path, bucket: Bucket) -> Told:
    store = {"source": f"{bucket.url}/run", "target": f"{bucket.url}/out"}
    # Other tests start Ray too, and find clusters by files in Ray's folder. Its path is short:
    # sockets are in it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as own:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("ray_run.py")), str(source), str(out)],
            input=json.dumps(store | {"options": bucket.store.options}),
            env=os.environ | SETTINGS | {"RAY_TMPDIR": own},
            timeout=LIMIT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-8_000:]
    answer: Told = json.loads(done.stdout.splitlines()[-1])
    return answer


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_nodes_write_together_what_one_process_writes_alone(told: Told) -> None:
    one = told["archive"]
    assert one["same"]
    assert one["verified"]
    assert one["parts"] > 2
    assert one["beside"] == ["local", "ray"]


def test_a_node_that_is_killed_changes_no_byte(told: Told) -> None:
    one = told["killed"]
    assert one["written_before_the_act"] < one["announced"]
    assert one["same"]
    assert one["verified"]
    assert one["beside"] == ["local", "ray"]


def test_a_node_that_is_killed_changes_no_byte_in_a_bucket_either(
    told: Told, out: Path, bucket: Bucket, tmp_path: Path
) -> None:
    one = told["bucket"]
    assert one["written_before_the_act"] < one["announced"]
    found = {key.removeprefix("out/"): bucket.get(key) for key in bucket.keys("out/")}
    place = Place(f"{bucket.url}/run", bucket.store.options)
    ckptkit.convert(place, tmp_path / "out", to="dcp", max_shard_size="30MB")
    assert found == content(tmp_path / "out") == content(out / "d" / "ray")
    assert bucket.unfinished_uploads() == []


def test_no_log_of_ray_shows_what_the_storage_is_told(told: Told) -> None:
    assert told["bucket"]["told_by"] == []


@pytest.mark.parametrize("which", ["archive", "killed", "bucket"])
def test_progress_of_all_nodes_adds_up_to_what_was_announced(told: Told, which: str) -> None:
    assert told[which]["written"] == told[which]["announced"]


def test_what_a_node_finds_damaged_is_told_and_nothing_is_left(told: Told) -> None:
    one = told["damaged"]
    assert one["code"] == "checksum-mismatch"
    assert "tensor 'model.layers." in one["where"]
    assert one["beside"] == ["damaged"]


def test_names_of_another_model_are_refused_after_the_nodes_wrote_and_nothing_is_left(
    told: Told,
) -> None:
    one = told["compared"]
    assert one["code"] == "refused"
    assert "1 tensor would not be used" in one["message"]
    assert one["beside"] == ["right", "wrong"]


def test_the_answer_on_names_is_there_before_the_commit(told: Told) -> None:
    one = told["compared"]
    assert one["answers"]["OutputCommitted"] > one["answers"]["Planned"]
    assert one["verified"]


def test_what_one_process_put_there_while_the_nodes_wrote_is_not_replaced(told: Told) -> None:
    one = told["raced"]
    assert one["code"] == "output-exists"
    assert "another run has put its output there" in one["message"]
    assert one["options"]["dtype"] == "bfloat16"
    assert one["verified"]
    assert one["beside"] == ["ray", "right", "wrong"]


# Without a cluster


def worker_of(
    source: PathLike, out: PathLike, fingerprint: str, workers: int | None = None
) -> partial[Any]:
    """What a node is sent."""
    job = ConversionJob(source, out, ConsolidateRequest(), resources=Resources(workers=workers))
    attempt = OutputAttempt("0123456789abcdef", is_agreed=False)
    return partial(jobs.open_worker, job, attempt, fingerprint)


def test_where_ray_is_not_installed_the_error_says_what_to_install(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="Ray is not installed") as caught:
        ckptkit.convert(source, tmp_path / "out", to="hf", engine="ray")
    assert "pip install ray" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_url_is_refused_with_what_to_do_instead(source: Path) -> None:
    with pytest.raises(RefusedError, match="--engine ray needs a directory"):
        ckptkit.convert(source, "memory://bucket/out", to="hf", engine="ray")


def test_a_node_that_makes_another_plan_is_refused(source: Path, tmp_path: Path) -> None:
    worker = worker_of(source, tmp_path / "out", "another")
    with pytest.raises(RefusedError, match="the plan made here is another one"), worker(1):
        pass


@pytest.mark.parametrize(("wanted", "threads"), [(None, 1), (3, 3)])
def test_a_node_has_a_thread_for_each_of_its_cores_unless_told_otherwise(
    source: Path, tmp_path: Path, wanted: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ConversionJob(source, tmp_path / "out", ConsolidateRequest())
    with job.plan_output() as planned:
        fingerprint = planned.fingerprint()
    found: list[int] = []

    def note(planned: PlannedOutput, *_: object) -> Outcome:
        found.append(planned.settings.workers)
        return Outcome()

    monkeypatch.setattr(jobs, "run_share", note)
    worker = worker_of(source, tmp_path / "out", fingerprint, wanted)
    with worker(1) as run:
        run(Share(0, 1))
    assert found == [threads]


def test_a_node_is_sent_storage_options_that_no_message_shows(tmp_path: Path) -> None:
    place = Place("s3://bucket/run", {"key": "user", "secret": "hidden"})
    worker = worker_of(place, tmp_path / "out", "any")
    sent = pickle.loads(pickle.dumps(worker))  # noqa: S301, TID251  what Ray does
    assert sent.args[0].src.options == place.options
    assert "hidden" not in repr(sent)
