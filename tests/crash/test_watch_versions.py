"""A watch that publishes versions makes one chain, however often it is killed or restarted."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME, TRAINING, FileRecord, Manifest
from tests.command_line import run_command
from tests.crash.forked_commands import ForkedCommands
from tests.fork_host import Child
from tests.object_store import Bucket, Fault, ObjectStore
from tests.sampled import sampled
from tests.sharded import write_sharded
from tests.small_deltas import model_bytes

SIZES = {"layers.0.weight": (40, 30), "layers.1.weight": (7, 5), "norm.weight": (30,)}


def add_step(run: Path, step: int, *, rows: int = 40) -> None:
    """Puts a step of two ranks there, as a save does: at once. It is another one for each step."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand((rows, 30) if name == "layers.0.weight" else shape, generator=generator)
        for name, shape in SIZES.items()
    }
    for past in range(1, step + 1):
        change = torch.rand(rows, 30, generator=generator) < 0.05
        tensors["layers.0.weight"] += change * past
    draft = run / f".draft-{step}"
    write_sharded(draft, tensors, 2)
    files = {p.name: FileRecord(p.stat().st_size) for p in sorted(draft.iterdir())}
    source = {"step": step, "save_number": step, "metrics": {}}
    manifest = Manifest(TRAINING, source, {}, {"ckptkit": "0"}, {}, files=files)
    (draft / MANIFEST_NAME).write_bytes(manifest.to_json())
    draft.rename(run / f"checkpoint-{step}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir(parents=True)
    for step in (1, 2, 3):
        add_step(run, step)
    return run


def copy_old(source: str, target: str) -> None:
    """Copies a file as one that was finished long ago."""
    shutil.copy(source, target)
    os.utime(target, (1e9, 1e9))


def flip_bits(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 4, 3 * len(data) // 4, 97):
        data[at] ^= 1
    path.write_bytes(data)


def watch(run: Path, into: object, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """Runs a watch to its end; returns its events."""
    words = ["watch", run, "--into", into, "--once", "--weights-only", "--json", *options]
    done = run_command(*words)
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def versions(folder: Path) -> list[tuple[int, bool, int]]:
    """Returns the number of each version, whether it is a delta, and the step it is made from."""
    found = []
    for path in sorted(folder.iterdir()):
        manifest = json.loads((path / MANIFEST_NAME).read_bytes())
        number = int(path.name.removeprefix("weight_v"))
        assert manifest["source"]["delta"]["version"] == number
        published = manifest["source"]["published"]
        found.append((number, manifest["kind"] == "delta", published["step"]))
    return found


def check_chain(folder: Path, run: Path, tmp: Path) -> None:
    """Compares every version with the step that it was made from, as an engine would pull it."""
    whole, deltas = Path(), list[Path]()
    for number, is_delta, step in versions(folder):
        path = folder / f"weight_v{number:06d}"
        whole, deltas = (whole, [*deltas, path]) if is_delta else (path, [])
        if not (run / f"checkpoint-{step}").exists():
            continue
        shutil.rmtree(tmp / "expected", ignore_errors=True)
        shutil.rmtree(tmp / "found", ignore_errors=True)
        ckptkit.consolidate(run / f"checkpoint-{step}", tmp / "expected")
        if deltas:
            ckptkit.apply_delta(whole, deltas, tmp / "found")
        found = model_bytes(tmp / "found" if deltas else whole)
        assert found == model_bytes(tmp / "expected")


def test_one_of_every_versions_is_a_whole_model(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "shared" / "weights"
    for step in (4, 5):
        add_step(run, step)
    events = watch(run, into, "--delta", "3")
    assert versions(into) == [
        (1, False, 1),
        (2, True, 2),
        (3, True, 3),
        (4, False, 4),
        (5, True, 5),
    ]
    check_chain(into, run, tmp_path)
    pushed = [event for event in events if event["event"] == "pushed"]
    assert [event["tag"] for event in pushed] == [f"weight_v{n:06d}" for n in range(1, 6)]
    index = json.loads((into / "weight_v000005" / "model.safetensors.index.json").read_bytes())
    assert (index["metadata"]["version"], index["metadata"]["base_version"]) == ("000005", "000004")
    listed = run_command("ls", run).stdout
    assert "weights@weight_v000005" in listed


def test_without_delta_every_version_is_a_whole_model(run: Path, tmp_path: Path) -> None:
    watch(run, tmp_path / "weights")
    assert versions(tmp_path / "weights") == [(1, False, 1), (2, False, 2), (3, False, 3)]
    check_chain(tmp_path / "weights", run, tmp_path)


def test_a_watch_that_is_started_again_continues_the_chain(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10")
    add_step(run, 4)
    watch(run, into, "--delta", "10")
    assert versions(into)[-1] == (4, True, 4)
    # Without its journal, it finds in the folder what it has published.
    add_step(run, 5)
    events = watch(run, into, "--delta", "10", "--state", str(tmp_path / "state"))
    resumed = {event["step"]: event["resumed"] for event in events if event["event"] == "pushed"}
    assert resumed == {1: True, 2: True, 3: True, 4: True, 5: False}
    assert versions(into)[-1] == (5, True, 5)
    check_chain(into, run, tmp_path)


def test_a_step_whose_base_is_gone_is_published_whole(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10")
    shutil.rmtree(run / "checkpoint-3")
    for step in (4, 5):
        add_step(run, step)
    watch(run, into, "--delta", "10")
    assert versions(into)[3:] == [(4, False, 4), (5, True, 5)]
    check_chain(into, run, tmp_path)


def test_pruning_keeps_the_step_that_the_next_delta_needs(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10", "--keep-last", "1")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    add_step(run, 4)
    watch(run, into, "--delta", "10", "--keep-last", "1")
    assert versions(into) == [(1, False, 1), (2, True, 2), (3, True, 3), (4, True, 4)]
    check_chain(into, run, tmp_path)


def test_a_model_of_another_shape_is_published_whole(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10")
    add_step(run, 4, rows=50)
    events = watch(run, into, "--delta", "10")
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert any("since no delta is possible" in text for text in warned)
    assert versions(into)[3] == (4, False, 4)
    check_chain(into, run, tmp_path)


def test_other_options_are_no_delta_to_what_was_published(run: Path, tmp_path: Path) -> None:
    """The delta would be made from the step as it would be published now."""
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10", "--dtype", "bfloat16")
    add_step(run, 4)
    events = watch(run, into, "--delta", "10")
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert "'layers.0.weight' was published as bfloat16 [40, 30]" in warned[0]
    assert versions(into)[2:] == [(3, True, 3), (4, False, 4)]


@pytest.mark.parametrize("damage", [flip_bits, lambda path: path.unlink()], ids=["flip", "remove"])
def test_a_damaged_base_costs_a_whole_model_and_no_step(
    damage: Callable[[Path], None], run: Path, tmp_path: Path
) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10")
    damage(max((run / "checkpoint-3").glob("*.distcp"), key=lambda path: path.stat().st_size))
    for step in (4, 5):
        add_step(run, step)
    watch(run, into, "--delta", "10")
    assert versions(into)[3:] == [(4, False, 4), (5, True, 5)]
    shutil.rmtree(run / "checkpoint-3")
    check_chain(into, run, tmp_path)


def test_a_chain_that_lost_its_whole_model_gets_another(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    watch(run, into, "--delta", "10")
    shutil.rmtree(into / "weight_v000001")
    add_step(run, 4)
    watch(run, into, "--delta", "10")
    assert versions(into) == [(2, True, 2), (3, True, 3), (4, False, 4)]


def test_a_step_of_several_models_fails_with_advice_that_can_be_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fixture = Path(__file__).resolve().parents[2] / "fixtures/fsdp2_actor_and_critic/checkpoint"
    shutil.copytree(fixture, run / "checkpoint-1", copy_function=copy_old)
    events = watch(run, tmp_path / "weights", status=4)
    error = next(event["error"] for event in events if event["event"] == "failed")
    assert error["message"] == "holds 2 models: 'actor', 'critic'"
    assert error["hint"].startswith("write one of them with `ckptkit consolidate --select`")


@pytest.mark.parametrize("below", [".", "weights", "checkpoint-1/weights"])
def test_a_folder_in_the_run_is_refused(run: Path, tmp_path: Path, below: str) -> None:
    """Versions there would be checkpoints of the run, or change a step."""
    before = sorted(tmp_path.rglob("*"))
    events = watch(run, run / below, "--delta", "2", status=4)
    assert "where models would be taken for checkpoints" in events[-1]["error"]["message"]
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_that_are_not_its_own_are_refused(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    (into / "weight_v000001").mkdir(parents=True)
    (into / "weight_v000001" / "model.safetensors").write_bytes(b"")
    events = watch(run, into, "--delta", "2", status=4)
    assert "was not published by a watch" in events[-1]["error"]["message"]
    shutil.rmtree(into)
    watch(run, into, "--delta", "2")
    other = tmp_path / "other"
    other.mkdir()
    add_step(other, 1)
    events = watch(other, into, "--delta", "2", status=4)
    assert "was published from another run" in events[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--delta", "3"], "one of --push, --to-dir, --into, --seal and --exec is needed"),
        (["--push", "org/name", "--into", "x"], "--into cannot be combined with --push"),
        (["--to-dir", "x", "--into", "y"], "--into cannot be combined with --to-dir"),
        (["--to-dir", "x", "--private"], "--private: needs --push"),
        (["--to-dir", "x", "--whole-step", "last-checkpoint"], "--whole-step: needs --push"),
        (["--to-dir", "s3://bucket/x"], "is a URL, where a directory was expected"),
        (["--to-dir", "x", "--delta", "3"], "needs --into"),
        (["--push", "org/name", "--delta", "3"], "needs --into"),
        (["--into", "x", "--delta", "0"], "--delta"),
        (["--into", "x", "--revision", "main"], "cannot be combined with --into"),
        (["--into", "x", "--as", "adapter"], "cannot be combined with --into"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    options: list[str], text: str, run: Path
) -> None:
    done = run_command("watch", run, "--once", *options)
    assert done.returncode == 2
    assert text in done.stderr


def pull(bucket: Bucket, tmp_path: Path) -> Path:
    """Copies the versions in a bucket to a disk; returns their folder."""
    keys = bucket.keys()
    for key in keys:
        path = tmp_path / "pulled" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.get(key))
    return tmp_path / "pulled" / "weights"


def test_versions_are_published_to_a_store(
    object_store: ObjectStore, run: Path, tmp_path: Path
) -> None:
    bucket = object_store.bucket("versions")
    bucket.clear()
    options = object_store.arguments("--dst-option")
    watch(run, f"{bucket.url}/weights", "--delta", "10", *options)
    add_step(run, 4)
    watch(run, f"{bucket.url}/weights", "--delta", "10", *options)
    into = pull(bucket, tmp_path)
    assert versions(into) == [(1, False, 1), (2, True, 2), (3, True, 3), (4, True, 4)]
    check_chain(into, run, tmp_path)


@pytest.mark.parametrize(
    "file",
    sampled(
        [
            *("weight_v000001/model.safetensors", "weight_v000001/ckptkit.json"),
            *("weight_v000002/model.safetensors.index.json", "weight_v000002/ckptkit.json"),
        ],
        ["weight_v000001/ckptkit.json"],
    ),
)
@pytest.mark.slow
def test_a_watch_that_is_killed_while_a_store_shows_its_files_goes_on(
    file: str, object_store: ObjectStore, forks: ForkedCommands, run: Path, tmp_path: Path
) -> None:
    bucket = object_store.bucket("killed-versions")
    bucket.clear()
    into, options = f"{bucket.url}/weights", object_store.arguments("--dst-option")
    words = ["watch", str(run), "--into", into, "--once", "--weights-only", "--delta", "10"]
    child: Future[Child] = Future()
    kill = Fault(
        f"^PUT .*{file}", status=500, before=lambda: os.kill(child.result(60).pid, signal.SIGKILL)
    )
    object_store.proxy.add(kill)
    log = tmp_path / "log"
    child.set_result(forks.start([*words, *options], log))
    assert child.result().wait() == -signal.SIGKILL, log.read_text()
    assert kill.met == 1
    watch(run, into, "--delta", "10", *options)
    pulled = pull(bucket, tmp_path)
    assert versions(pulled) == [(1, False, 1), (2, True, 2), (3, True, 3)]
    check_chain(pulled, run, tmp_path)


@pytest.mark.slow
def test_a_place_that_another_machine_may_still_write_to_is_waited_for(
    object_store: ObjectStore, forks: ForkedCommands, run: Path, tmp_path: Path
) -> None:
    """As after a restart in another container: only renewals show that the holder is alive."""
    shutil.rmtree(run / "checkpoint-3")
    bucket = object_store.bucket("busy-versions")
    bucket.clear()
    into, options = f"{bucket.url}/weights", object_store.arguments("--dst-option")
    claim = {"writer": "a", "machine": "other", "process": "1 1", "names": ["model.safetensors"]}
    place = "weights/weight_v000001"
    bucket.put(f"{place}/.ckptkit-commit", json.dumps(claim).encode())
    bucket.put(f"{place}/model.safetensors", b"of a commit that was killed")
    words = ["watch", str(run), "--into", into, "--once", "--weights-only", "--json"]
    log = tmp_path / "log"
    readable, writable = os.pipe()
    child = forks.start([*words, *options], log, streams=(writable,) * 3)
    os.close(writable)
    with os.fdopen(readable) as output:
        lines = (json.loads(line) for line in output if line.startswith("{"))
        with bucket.renewed(f"{place}/.ckptkit-commit", claim):
            waited = next(event for event in lines if event["event"] in {"retrying", "failed"})
        assert waited["error"]["code"] == "output-busy"
        assert waited["event"] == "retrying"
        bucket.put(f"{place}/.ckptkit-commit", json.dumps(claim | {"writer": ""}).encode())
        rest = [event["event"] for event in lines]
    assert child.wait() == 0, rest
    assert "failed" not in rest
    pulled = pull(bucket, tmp_path)
    assert versions(pulled) == [(1, False, 1), (2, False, 2)]
    check_chain(pulled, run, tmp_path)


@pytest.mark.slow
def test_kills_at_every_write_leave_a_chain_without_a_gap(
    forks: ForkedCommands, tmp_path: Path
) -> None:
    run, into = tmp_path / "all" / "run", tmp_path / "all" / "weights"
    run.mkdir(parents=True)
    steps = kills = 0
    arguments = ["watch", str(run), "--into", str(into), "--once", "--weights-only", "--delta", "4"]
    for die_at in range(2, 60, 3):
        steps += 1
        add_step(run, steps)
        status = forks.start(arguments, tmp_path / "log", die_at=die_at).wait()
        assert status in {0, -signal.SIGKILL}, (tmp_path / "log").read_text()
        kills += bool(status)
    assert forks.start(arguments, tmp_path / "log").wait() == 0, (tmp_path / "log").read_text()
    assert kills > 10
    found = versions(into)
    assert [number for number, _, _ in found] == list(range(1, steps + 1))
    assert [step for _, _, step in found] == list(range(1, steps + 1))
    assert [number for number, is_delta, _ in found if not is_delta] == list(range(1, steps + 1, 4))
    check_chain(into, run, tmp_path)
