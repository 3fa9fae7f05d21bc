"""`prune --drop-optimizer-older-than`: older steps lose their optimizer, and are models still."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckptkit
from ckptkit.core.errors import ResumeError
from ckptkit.core.manifest import MANIFEST_NAME, parse_manifest
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from tests.command_line import run_command
from tests.crash.forked_commands import ForkedCommands
from tests.crash.removal_kills import die_before
from tests.crash.test_seal import listed, put
from tests.object_store import ObjectStore


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step)).result()
    return tmp_path / "run"


def names(step: Path) -> set[str]:
    return {path.relative_to(step).as_posix() for path in step.rglob("*")}


def weights(step: Path) -> dict[str, torch.Tensor]:
    with ckptkit.open(step) as checkpoint:
        return {name: checkpoint.get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118


def test_older_steps_lose_their_optimizer_alone(run: Path, tmp_path: Path) -> None:
    before = {n: names(run / f"checkpoint-{n}") for n in (1, 2, 3)}
    tensors = weights(run / "checkpoint-1")
    digests = {step.name: step.digest for step in WatchedRun(run, None).list_steps()}
    times = {name: step.modified for name, step in listed(run).items()}
    dry = ckptkit.prune(run, drop_optimizer_older_than=1, dry_run=True)
    assert [step.step for step in dry.thinned] == [1, 2]
    assert {n: names(run / f"checkpoint-{n}") for n in (1, 2, 3)} == before
    pruned = ckptkit.prune(run, drop_optimizer_older_than=1)
    assert [one.action for one in pruned.steps] == ["thin", "thin", "keep"]
    assert pruned.freed_bytes == dry.freed_bytes > 0
    assert names(run / "checkpoint-3") == before[3]
    gone = before[1] - names(run / "checkpoint-1")
    assert gone
    assert all(name.startswith("optimizer_0") for name in gone)
    assert not any(name.startswith("optimizer") for name in names(run / "checkpoint-1"))
    steps = listed(run)
    assert all(step.complete for step in steps.values())
    assert [bool(step.thinned) for step in steps.values()] == [True, True, False]
    for name in ("checkpoint-1", "checkpoint-2"):
        assert abs(steps[name].modified - times[name]) < 5
    assert ckptkit.verify(run / "checkpoint-1").ok
    assert all(torch.equal(t, tensors[n]) for n, t in weights(run / "checkpoint-1").items())
    ckptkit.convert(run / "checkpoint-1", tmp_path / "out", to="hf", names="live")
    # What a watch has pushed is not pushed again.
    assert {s.name: s.digest for s in WatchedRun(run, None).list_steps()} == digests
    assert "checkpoint-1  weights only" in run_command("ls", run).stdout
    again = ckptkit.prune(run, drop_optimizer_older_than=1)
    assert [one.action for one in again.steps] == ["keep"] * 3
    assert "it is thinned" in again.steps[0].why


def test_training_does_not_go_on_from_a_thinned_step_and_says_why(run: Path) -> None:
    ckptkit.prune(run, drop_optimizer_older_than=1)
    loaded = state(9)
    with Checkpointer(run) as checkpointer:
        with pytest.raises(ResumeError, match="has lost its optimizer: `ckptkit prune"):
            checkpointer.resume(loaded, step=1)
        assert checkpointer.resume({"model": loaded["model"]}, step=1) == 1
        assert checkpointer.resume(loaded) == 3
    shutil.rmtree(run / "checkpoint-3")
    shown = run_command("ls", run).stdout
    assert "2 steps, 2 complete, 2 of them with weights only" in shown
    assert "no step has its optimizer: training would go on from weights alone" in shown
    assert "no step is complete" not in shown


def thin_and_die(run: str, before: int) -> None:
    die_before(before)
    ckptkit.prune(run, drop_optimizer_older_than=1)
    os._exit(0)


# An earlier draft is removed, the new one renamed; three files go, and then their folder does.
@pytest.mark.parametrize("before", range(6))
@pytest.mark.quick("1", "2", "4")
def test_a_kill_at_any_point_leaves_a_step_whole_or_thinned(
    before: int, run: Path, forks: ForkedCommands
) -> None:
    shutil.rmtree(run / "checkpoint-2")
    assert forks.host.run(thin_and_die, str(run), before) == -9
    step = listed(run)["checkpoint-1"]
    assert step.complete
    assert bool(step.thinned) == (before > 1)
    assert ckptkit.verify(run / "checkpoint-1").ok
    assert weights(run / "checkpoint-1")
    loaded = state(9)
    with Checkpointer(run) as checkpointer:
        if step.thinned:
            with pytest.raises(ResumeError, match="has lost its optimizer"):
                checkpointer.resume(loaded, step=1)
        else:
            assert checkpointer.resume(loaded, step=1) == 1
    ckptkit.prune(run, drop_optimizer_older_than=1)
    left = (run / "checkpoint-1").glob("optimizer*/*")  # a folder without files may stay
    assert not list(left)
    assert listed(run)["checkpoint-1"].thinned


def test_steps_of_other_savers_are_sealed_first(tmp_path: Path) -> None:
    for number in (10, 20):
        put(tmp_path, "trainer", number)
    first = ckptkit.prune(tmp_path, drop_optimizer_older_than=1)
    assert [one.action for one in first.steps] == ["keep", "keep"]
    proposed = first.steps[0].why.split("`")[1].split()
    assert run_command(*proposed[1:]).returncode == 0
    digests = [step.digest for step in WatchedRun(tmp_path, None).list_steps()]
    assert ckptkit.prune(tmp_path, drop_optimizer_older_than=1).thinned
    step = tmp_path / "checkpoint-10"
    assert names(step) & {"optimizer_0", "scheduler.pt"} == {"scheduler.pt"}
    assert ckptkit.verify(step).ok
    assert [step.digest for step in WatchedRun(tmp_path, None).list_steps()] == digests
    (step / "scheduler.pt").write_bytes((step / "scheduler.pt").read_bytes()[::-1])
    assert not ckptkit.verify(step).ok


@pytest.mark.parametrize("kind", ["deepspeed", "dcp", "torchtitan"])
def test_an_optimizer_in_the_files_of_the_weights_stays(kind: str, tmp_path: Path) -> None:
    for number in (10, 20):
        put(tmp_path, kind, number)
    ckptkit.seal(tmp_path)
    before = names(tmp_path)
    pruned = ckptkit.prune(tmp_path, drop_optimizer_older_than=1)
    assert [one.action for one in pruned.steps] == ["keep", "keep"]
    assert "none in files of its own" in pruned.steps[0].why
    assert names(tmp_path) == before


def test_a_step_that_is_read_keeps_its_optimizer(run: Path) -> None:
    with ckptkit.open(run / "checkpoint-1"):
        (first, second, _) = ckptkit.prune(run, drop_optimizer_older_than=1).steps
        assert (first.action, second.action) == ("keep", "thin")
        assert first.why == "it is being read"
    assert [step.step for step in ckptkit.prune(run, drop_optimizer_older_than=1).thinned] == [1]


def test_rules_and_thinning_go_together(run: Path) -> None:
    alone = run_command("prune", run, "--drop-optimizer-older-than", "1", "--dry-run")
    assert "\n  the optimizer of 2 steps would be removed, which frees " in alone.stdout
    done = run_command("prune", run, "--keep-last", "2", "--drop-optimizer-older-than", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(listed(run)) == ["checkpoint-2", "checkpoint-3"]
    assert listed(run)["checkpoint-2"].thinned
    assert "  1 step and the optimizer of 1 step removed, " in done.stdout
    assert run_command("prune", run, "--drop-optimizer-older-than", "0").returncode == 2
    with pytest.raises(ckptkit.UsageError):
        ckptkit.prune(run, drop_optimizer_older_than=0)


def test_a_run_on_a_store_is_thinned_like_a_local_one(run: Path, object_store: ObjectStore) -> None:
    bucket = object_store.bucket("runs-to-thin")
    bucket.clear()
    bucket.put_tree(run, "run")
    place = Place(f"{bucket.url}/run", bucket.store.options)
    assert [one.step for one in ckptkit.prune(place, drop_optimizer_older_than=1).thinned] == [1, 2]
    steps = listed(place)
    assert [bool(step.thinned) for step in steps.values()] == [True, True, False]
    assert not [key for key in bucket.keys("run/checkpoint-1/") if "optimizer" in key]
    assert ckptkit.verify(place.beside(f"{place}/checkpoint-1")).ok
    # A kill between manifest and files: what is left goes the next time, and nothing else.
    for path in (run / "checkpoint-2" / "optimizer_0").iterdir():
        bucket.put(f"run/checkpoint-2/optimizer_0/{path.name}", path.read_bytes())
    assert [one.step for one in ckptkit.prune(place, drop_optimizer_older_than=1).thinned] == [2]
    assert len(listed(place)) == 3
    assert ckptkit.verify(place.beside(f"{place}/checkpoint-2")).ok
    bucket.clear()


def test_a_manifest_that_lies_about_what_was_dropped_is_read(run: Path) -> None:
    path = run / "checkpoint-1" / MANIFEST_NAME
    manifest = parse_manifest(path.read_bytes(), where="")
    lies: tuple[Any, ...] = (
        3,
        [],
        {},
        {"files": 7},
        {"files": ["../../x", 5], "digest": []},
        {"digest": 1},
    )
    for lie in lies:
        changed = replace(manifest, source={**manifest.source, "thinned": lie})
        path.write_bytes(changed.to_json())
        assert listed(run)["checkpoint-1"].complete
        ckptkit.prune(run, drop_optimizer_older_than=3)
        assert WatchedRun(run, None).list_steps()
