"""`ckptkit ls`, `ckptkit du` and `ckptkit prune` as a shell sees them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME, RUN_FACTS, FileRecord
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.manifests import read_local_manifest
from tests.command_line import Result, run_command
from tests.made_up_runs import save_step, save_stock_step
from tests.object_store import ObjectStore
from tests.reflink import reflink_mount

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def document(result: Result) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def age(folder: Path, seconds: float = 3600.0) -> None:
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


def spoil(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200, 300, 400):
        save_step(tmp_path / "run", step, metrics={"loss": abs(step - 200)}, save_number=step)
    return tmp_path / "run"


def test_du_counts_each_file_once_by_run_step_and_kind(run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-100" / "optimizer_0").mkdir()
    (run / "checkpoint-100" / "optimizer_0" / "__0_0.distcp").write_bytes(bytes(5000))
    shared = run / "checkpoint-100" / "pytorch_model_fsdp_0" / "__0_0.distcp"
    other = run / "checkpoint-200" / "pytorch_model_fsdp_0" / "__0_0.distcp"
    other.unlink()
    other.hardlink_to(shared)
    (run / ".checkpoint-500.ckptkit-abc").mkdir()
    (run / ".checkpoint-500.ckptkit-abc" / "x.distcp").write_bytes(bytes(700))
    found = document(run_command("du", tmp_path, "--json"))
    sizes = {path: path.lstat().st_size for path in run.rglob("*") if path.is_file()}
    del sizes[other]
    assert found["bytes"] == sum(sizes.values())
    usage = found["runs"][0]
    assert usage["run"] == str(run)
    assert [step["name"] for step in usage["steps"]][-1] == ""
    first, second = usage["steps"][:2]
    assert (first["step"], first["kinds"]["optimizer"]) == (100, 5000)
    assert usage["kinds"]["leftovers"] == 700
    assert first["bytes"] - first["freed_bytes"] == shared.stat().st_size
    assert second["bytes"] - second["freed_bytes"] == shared.stat().st_size
    assert sum(usage["kinds"].values()) == usage["bytes"]
    (run / ".ckptkit").mkdir()
    (run / ".ckptkit" / "mark").write_bytes(bytes(3))
    assert document(run_command("du", run, "--json"))["runs"][0]["kinds"]["leftovers"] == 700
    (run / ".ckptkit" / "mark").unlink()
    page = run_command("du", f"{run}/").stdout
    assert page.startswith(f"{run}: ")
    header = page.splitlines()[1].split()
    assert header == ["step", "size", "frees", "model", "optimizer", "side", "files", "leftovers"]
    assert "in no step" in page
    removed = document(run_command("prune", run, "--keep-last", "3", "--json"))
    assert removed["freed_bytes"] == first["freed_bytes"]


@pytest.mark.parametrize("kind", ["xfs", "btrfs", "subvolume"])
def test_du_counts_shared_blocks_once(kind: str, tmp_path: Path) -> None:
    size, half = 4 << 20, 2 << 20
    with reflink_mount("xfs" if kind == "xfs" else "btrfs", tmp_path) as place:
        if kind == "subvolume":  # files of it have another device
            tool = shutil.which("btrfs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
            assert tool is not None, "mkfs.btrfs comes with it"
            command = [tool, "subvolume", "create", str(place / "models")]
            subprocess.run(command, check=True, capture_output=True)
        step, model = place / "run" / "checkpoint-100", place / "models" / "checkpoint-100"
        for folder in (step, model):
            folder.mkdir(parents=True)
        (step / "model.safetensors").write_bytes(os.urandom(size))
        (step / "optimizer.pt").write_bytes(os.urandom(size))
        before = document(run_command("du", place, "--json"))
        assert before["bytes"] == before["taken_bytes"] == 2 * size
        assert "share blocks" not in run_command("du", place).stdout
        shutil.copytree(step, place / "copied" / "checkpoint-100")
        disk = Disk()
        with ExitStack() as stack:
            names = (step / "model.safetensors", model / "model.safetensors")
            source, target = (
                stack.enter_context(closing(disk.open(n, os.O_RDWR | os.O_CREAT))) for n in names
            )
            target.share_blocks(source, 0, half, 0)
            target.write_at(half, memoryview(os.urandom(half)))
            target.sync()
        found = document(run_command("du", place, "--json"))
        assert (found["bytes"], found["taken_bytes"]) == (5 * size, 5 * size - half)
        runs = {Path(run["run"]).name: run for run in found["runs"]}
        assert runs["run"]["taken_bytes"] == runs["run"]["bytes"] == 2 * size
        freed = {name: run["steps"][0]["freed_bytes"] for name, run in runs.items()}
        # btrfs keeps all of what was written at once as long as a part is used.
        held = half if kind == "xfs" else size
        assert freed == {"run": 2 * size - held, "models": half, "copied": 2 * size}
        page = run_command("du", place).stdout
        assert page.count("share blocks") == 1
        assert page.splitlines()[-1].endswith("18.9 MB on the disk, since files share blocks")
        if kind == "subvolume":  # nothing is moved out of it without a copy
            return
        (model / "model.safetensors").replace(step / "model-again.safetensors")
        page = run_command("du", place / "run").stdout
        assert page.splitlines()[0].endswith(
            "12.6 MB, 1 step; 10.5 MB on the disk, since files share blocks"
        )


def test_du_of_several_runs_and_of_a_url(
    run: Path, tmp_path: Path, object_store: ObjectStore
) -> None:
    save_stock_step(tmp_path / "2026" / "other", 5)
    page = run_command("du", tmp_path)
    assert page.stdout.splitlines()[0].startswith(f"{run}: ")
    assert f"{tmp_path}/2026/other: " in page.stdout
    assert "2 runs, " in page.stdout.splitlines()[-1]
    bucket = object_store.bucket("sizes")
    url = bucket.put_tree(run, "run")
    far = document(run_command("du", url, "--json", *object_store.arguments()))
    assert far["bytes"] == document(run_command("du", run, "--json"))["bytes"]
    nothing = run_command("du", tmp_path / "run" / "checkpoint-100")
    assert nothing.returncode == 3
    assert "pass a folder with checkpoint-N folders in it" in nothing.stderr


def test_prune_removes_the_oldest_until_all_fit(run: Path) -> None:
    size = document(run_command("ls", run, "--json"))["steps"][0]["bytes"]
    words = ["prune", run, "--max-total-size", f"{2 * size}B", "--keep-best", "loss", "--json"]
    planned = document(run_command(*words, "--dry-run"))
    assert planned["removed"] == [100, 300]
    assert len(list(run.iterdir())) == 4
    tight = document(run_command("prune", run, "--max-total-size", "1KB", "--json", "--dry-run"))
    assert tight["removed"] == [100, 200, 300]
    assert any("more than 1.00 KB" in note for note in tight["notes"])
    assert [s["why"] for s in tight["steps"] if s["step"] == 400] == ["the newest complete step"]
    both = ["prune", run, "--keep-last", "3", "--max-total-size", f"{2 * size}B", "--json"]
    assert document(run_command(*both))["removed"] == [100, 200]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-300", "checkpoint-400"]
    refused = run_command("prune", run, "--max-total-size", "5XB")
    assert refused.returncode == 2
    assert "expected B, KB, MB, GB or TB" in refused.stderr
    api = ckptkit.prune(run, max_total_size=1, dry_run=True)
    assert [step.step for step in api.removed] == [300]


def test_prune_removes_incomplete_steps_that_nothing_writes(run: Path) -> None:
    for step in (200, 400):
        spoil(run / f"checkpoint-{step}")
    age(run, 60.0)
    young = document(run_command("prune", run, "--incomplete", "--json"))
    assert young["removed"] == []
    whys = {step["step"]: step["why"] for step in young["steps"]}
    assert whys[200] == "not complete, and was written to in the last 10 minutes"
    assert whys[100] == "nothing removes it"
    age(run)
    planned = run_command("prune", run, "--incomplete", "--dry-run")
    assert "checkpoint-200  would go" in planned.stdout
    done = document(run_command("prune", run, "--incomplete", "--json"))
    assert done["removed"] == [200, 400]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-100", "checkpoint-300"]


def test_incomplete_steps_stay_if_they_are_all_that_is_left(run: Path) -> None:
    for step in run.iterdir():
        spoil(step)
    age(run)
    found = document(run_command("prune", run, "--incomplete", "--json"))
    assert found["removed"] == []
    assert "it may be all that is left" in found["steps"][0]["why"]
    nothing = run_command("prune", run)
    assert nothing.returncode == 2
    assert "--max-total-size SIZE" in nothing.stderr


def test_ls_of_a_bucket_names_what_a_checkpointer_needs_there(
    run: Path, object_store: ObjectStore
) -> None:
    url = object_store.bucket("resumed-from").put_tree(run, "run")
    page = run_command("ls", url, *object_store.arguments()).stdout
    assert f"    Checkpointer({url!r}, local=LOCAL).resume(state)\n" in page


def test_ls_says_which_step_to_resume_from_and_how(run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-400" / MANIFEST_NAME).unlink()
    page = run_command("ls", run).stdout
    assert "  resume from checkpoint-300\n" in page
    assert f"    Checkpointer({str(run)!r}).resume(state)\n" in page
    found = document(run_command("ls", run, "--json"))["resume"]
    assert (found["step"], found["path"]) == (300, str(run / "checkpoint-300"))
    trainer = tmp_path / "trainer"
    save_stock_step(trainer, 10)
    save_stock_step(trainer, 20)
    step = str(trainer / "checkpoint-20")
    page = run_command("ls", trainer).stdout
    assert "  resume from checkpoint-20, the newest\n" in page
    assert f"trainer.train(resume_from_checkpoint={step!r})" in page
    zero = FIXTURES / "zero1_bf16" / "checkpoint"
    page = run_command("ls", zero).stdout
    assert f"engine.load_checkpoint({str(zero)!r}, tag='global_step2')" in page
    door = save_step(tmp_path / "door", 7, layout="dcp").rename(tmp_path / "door" / "step-7")
    whole = read_local_manifest(door)
    files = {name: file for name, file in whole.files.items() if name != RUN_FACTS}
    (door / RUN_FACTS).unlink()  # which ckptkit.training.dcp does not write
    (door / MANIFEST_NAME).write_bytes(replace(whole, files=files).to_json())
    page = run_command("ls", door.parent).stdout
    assert f"    dcp.load(state, checkpoint_id={str(door)!r})\n" in page
    automatic = tmp_path / "automatic"  # as accelerate names steps, with ckptkit or without
    shutil.copytree(run / "checkpoint-300", automatic / "checkpoint_300")
    page = run_command("ls", automatic).stdout
    assert f"accelerator.load_state({str(automatic / 'checkpoint_300')!r})" in page
    named = tmp_path / "named" / "epoch_300"  # which a Checkpointer finds by its folder only
    shutil.copytree(run / "checkpoint-300", named)
    page = run_command("ls", named.parent).stdout
    assert f"Checkpointer({str(named.parent)!r}).resume(state, folder={str(named)!r})" in page
    (named / "meta.pt").touch()
    assert f"ckpt_path={str(named)!r}" in run_command("ls", named.parent).stdout
    ddp = tmp_path / "ddp" / "step_300"  # what the integration of accelerate saves without FSDP
    shutil.copytree(FIXTURES / "accelerate_ddp" / "checkpoint", ddp)
    (ddp / RUN_FACTS).parent.mkdir()
    (ddp / RUN_FACTS).write_text("{}")
    sizes = {
        path.relative_to(ddp).as_posix(): FileRecord(path.stat().st_size)
        for path in ddp.rglob("*")
        if path.is_file()
    }
    manifest = read_local_manifest(run / "checkpoint-300")
    (ddp / MANIFEST_NAME).write_bytes(replace(manifest, files=sizes).to_json())
    assert f"accelerator.load_state({str(ddp)!r})" in run_command("ls", ddp.parent).stdout
    for folder in run.iterdir():
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        spoil(folder)
    assert "no step is complete: training would begin anew" in run_command("ls", run).stdout
    assert document(run_command("ls", run, "--json"))["resume"] is None


def test_ls_finds_damaged_steps_where_it_is_asked_to_read_them(run: Path) -> None:
    shard = run / "checkpoint-400" / "pytorch_model_fsdp_0" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 4 : len(data) // 4 + 300] = bytes(300)
    shard.write_bytes(data)
    assert "checkpoint-400  complete" in run_command("ls", run).stdout
    read = run_command("ls", run, "--verify")
    assert read.returncode == 6
    assert "checkpoint-400  damaged" in read.stdout
    assert "checkpoint-300  verified" in read.stdout
    assert "checkpoint-400 is damaged: " in read.stdout
    assert "  4 steps, 3 complete, 1 damaged, " in read.stdout
    assert "  resume from checkpoint-300\n" in read.stdout
    report = run_command("ls", run, "--verify", "--json")
    steps = json.loads(report.stdout)["steps"]
    assert [step["verified"] for step in steps] == [True, True, True, False]
    assert steps[3]["damage"]


def test_ls_shows_a_line_for_each_step_and_why_one_is_not_complete(run: Path) -> None:
    (run / "checkpoint-400" / MANIFEST_NAME).unlink()
    result = run_command("ls", run)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == [f"{run},", "no", "job", "is", "writing", "to", "it"]
    assert rows[2][:2] == ["checkpoint-100", "complete"]
    assert rows[2][-2:] == ["loss", "100"]
    assert rows[5][:2] == ["checkpoint-400", "incomplete"]
    assert "checkpoint-400 is not complete: 'ckptkit.json' is not there" in result.stdout
    assert "4 steps, 3 complete" in result.stdout
    found = document(run_command("ls", run, "--json"))
    assert [step["complete"] for step in found["steps"]] == [True, True, True, False]
    assert found["steps"][0]["metrics"] == {"loss": 100}
    assert found["steps"][0]["age_seconds"] < 3600


def test_prune_shows_the_same_table_in_a_dry_run_and_tells_what_it_freed(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-200")
    (run / "checkpoint-400" / MANIFEST_NAME).unlink()
    with ckptkit.open(run / "checkpoint-100"):
        kept = run_command("prune", run, "--keep-last", "1", "--dry-run")
    assert "checkpoint-100  stays" in kept.stdout
    assert "it is being read" in kept.stdout
    report = document(run_command("prune", run, "--keep-last", "1", "--dry-run", "--json"))
    assert (report["removed"], report["dry_run"]) == ([100], True)
    done = run_command("prune", run, "--keep-last", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoint-100  removed" in done.stdout
    assert "1 step removed, 154 KB freed" in done.stdout
    assert not (run / "checkpoint-100").exists()


@pytest.mark.parametrize(
    ("words", "status"), [(["--keep-every", "many"], 2), (["--keep-best", "accuracy"], 4)]
)
def test_a_rule_that_is_none_removes_nothing(run: Path, words: list[str], status: int) -> None:
    result = run_command("prune", run, *words)
    assert (result.returncode, result.stdout) == (status, "")
    assert len(list(run.iterdir())) == 4
