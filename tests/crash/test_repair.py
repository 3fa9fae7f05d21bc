"""`ckptkit verify --repair`: mended from a copy and proven, or refused with nothing changed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.conversion.verify import NOT_MENDED, run_repair
from ckptkit.core.errors import CkptkitError, NoSpaceError, OutputError, RefusedError, UsageError
from ckptkit.storage.local.disk import Disk
from ckptkit.training import Checkpointer, dcp
from tests.campaigns.bit_rot.damage import classify
from tests.command_line import run_command
from tests.files import contents, flip_bit
from tests.object_store import ObjectStore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LLAMA = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
MODEL = "pytorch_model_fsdp_0"
SHARD = f"{MODEL}/__0_0.distcp"
CHANGES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.chmod"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose files have the same sizes."""
    run = tmp_path_factory.mktemp("saved") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(run) as checkpointer:
        for step in (2, 4):
            model(torch.randn(2, 40)).sum().backward()
            optimizer.step()
            checkpointer.save(step, state).result(60)
    return run


@pytest.fixture
def tiers(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    return tuple(  # type: ignore[return-value]
        Path(shutil.copytree(saved, tmp_path / tier)) / "checkpoint-2" for tier in ("a", "b")
    )


def names_in(run: Path) -> set[str]:
    """Returns the names in a run, without the folder of marks."""
    return {path.name for path in run.iterdir()} - {".ckptkit"}


def flip(path: Path) -> None:
    flip_bit(path, 1000, 4)


def data_of(path: Path) -> int:
    """Returns a byte in the data of the largest tensor of a file of archives."""
    ranges = classify(path.name, path.read_bytes())["data"]
    return max(ranges, key=lambda part: part[1] - part[0])[0] + 1


def zero_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-300] + bytes(300))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "data": (SHARD, flip),
    "directory": (SHARD, zero_end),
    "short": (SHARD, cut),
    "missing": (SHARD, Path.unlink),
    "index": (f"{MODEL}/.metadata", lambda path: flip_bit(path, 300, 4)),
    "facts": ("ckptkit/run.json", lambda path: flip_bit(path, 20, 4)),
    "values": ("random_states_0.pkl", flip),
    "manifest": ("ckptkit.json", lambda path: flip_bit(path, 90, 4)),
    "no manifest": ("ckptkit.json", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.quick("directory", "index", "missing", "short", "values")
def test_a_step_is_mended_from_the_other_tier(damage: str, tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    truth, (name, harm) = contents(copy), DAMAGES[damage]
    harm(step / name)
    broken = contents(step)
    assert not is_sound(step)
    assert contents(step) == broken  # nothing is changed without --repair
    report = ckptkit.verify(step, repair=True, copies=[copy])
    assert report.ok, report.problems
    assert report.mended == (name,)
    assert contents(step) == truth == contents(copy)
    assert names_in(step.parent) == {"checkpoint-2", "checkpoint-4"}


def is_sound(step: Path) -> bool:
    try:
        return ckptkit.verify(step).ok
    except CkptkitError:
        return False


def refusals(report: Any) -> list[str]:
    return [str(problem) for problem in report.problems if problem.code == NOT_MENDED]


def test_without_a_copy_the_list_says_what_is_lacking(tiers: tuple[Path, Path]) -> None:
    step, _ = tiers
    flip(step / SHARD)
    flip(step / "random_states_0.pkl")
    broken = contents(step)
    report = ckptkit.verify(step, repair=True)
    assert not report.ok
    listed = refusals(report)
    assert [text.partition(":")[0] for text in listed] == [SHARD, "random_states_0.pkl"]
    assert all("pass --from" in text for text in listed)
    assert contents(step) == broken


def test_a_copy_of_another_step_with_the_same_sizes_is_refused(tiers: tuple[Path, Path]) -> None:
    step, _ = tiers
    other = step.with_name("checkpoint-4")
    assert (other / SHARD).stat().st_size == (step / SHARD).stat().st_size
    for harm in (flip, zero_end):
        harm(step / SHARD)
        broken = contents(step)
        report = ckptkit.verify(step, repair=True, copies=[other])
        assert not report.ok
        assert any("of the same save" in text for text in refusals(report)), report.problems
        assert contents(step) == broken


@pytest.mark.parametrize("damage", ["manifest", "no manifest"])
def test_no_manifest_is_taken_from_another_step(damage: str, tiers: tuple[Path, Path]) -> None:
    step, _ = tiers
    name, harm = DAMAGES[damage]
    harm(step / name)
    broken = contents(step)
    report = ckptkit.verify(step, repair=True, copies=[step.with_name("checkpoint-4")])
    assert not report.ok
    assert any(SHARD in text for text in refusals(report)), report.problems
    assert contents(step) == broken


def test_two_copies_that_are_damaged_in_other_files_make_a_whole(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    truth = contents(step)
    flip(step / SHARD)
    flip(copy / "optimizer_0/__0_0.distcp")
    assert ckptkit.verify(step, repair=True, copies=[copy]).mended == (SHARD,)
    assert contents(step) == truth


def test_two_copies_that_are_damaged_in_one_place_are_refused(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    for place in tiers:
        flip(place / SHARD)
    broken = contents(step), contents(copy)
    report = ckptkit.verify(step, repair=True, copies=[copy])
    assert not report.ok
    assert any(SHARD in text for text in refusals(report))
    assert (contents(step), contents(copy)) == broken


def test_a_third_copy_helps(tiers: tuple[Path, Path], saved: Path) -> None:
    step, copy = tiers
    for place in tiers:
        flip(place / SHARD)
    report = ckptkit.verify(step, repair=True, copies=[copy, saved / "checkpoint-2"])
    assert report.ok
    assert contents(step) == contents(saved / "checkpoint-2")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("output") / "out"
    ckptkit.consolidate(LLAMA, out, max_shard_size="8KB")
    return out


@pytest.mark.parametrize(
    ("name", "at"),
    [("config.json", 20), ("ckptkit.json", 90), ("model.safetensors.index.json", 40), ("*", 20),
     ("*", 5000)],
)  # fmt: skip
def test_an_output_is_mended_whatever_the_copy_says_of_itself(
    name: str, at: int, output: Path, tmp_path: Path
) -> None:
    one, two = (Path(shutil.copytree(output, tmp_path / name)) for name in ("one", "two"))
    path = min(one.glob("model-*.safetensors")) if name == "*" else one / name
    flip_bit(path, at, 4)
    if os.geteuid() == 0:
        os.chown(path, 1234, 100)
    path.chmod(0o640)
    before = path.stat()
    if name != "ckptkit.json":
        (two / "ckptkit.json").unlink()
    report = ckptkit.verify(one, repair=True, copies=[two])
    assert report.ok, report.problems
    assert report.mended == (path.name,)
    now = path.stat()
    assert (now.st_uid, now.st_gid, now.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert contents(one) == contents(output)


def test_an_index_and_the_data_that_it_describes_are_mended_together(
    output: Path, tiers: tuple[Path, Path], tmp_path: Path
) -> None:
    step, copy = tiers
    flip_bit(step / MODEL / ".metadata", 300, 4)
    flip(step / SHARD)
    assert ckptkit.verify(step, repair=True, copies=[copy]).ok
    assert contents(step) == contents(copy)
    folder = Path(shutil.copytree(output, tmp_path / "one"))
    for path in folder.glob("model*"):
        flip_bit(path, 40, 4)
    assert ckptkit.verify(folder, repair=True, copies=[output]).ok
    assert contents(folder) == contents(output)


def test_a_checkpoint_without_a_manifest_is_not_mended(tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_plain" / "checkpoint"
    folder = Path(shutil.copytree(source, tmp_path / "step"))
    flip_bit(folder / "__0_0.distcp", data_of(folder / "__0_0.distcp"), 4)
    broken = contents(folder)
    report = ckptkit.verify(folder, repair=True, copies=[source])
    assert any("without ckptkit.json nothing shows" in text for text in refusals(report))
    assert contents(folder) == broken


def test_of_a_step_of_parts_the_damaged_part_is_mended(tmp_path: Path) -> None:
    step, copy = tmp_path / "run" / "step-3", tmp_path / "copy" / "step-3"
    for part in ("model", "optim"):
        dcp.save({part: torch.randn(500)}, checkpoint_id=step / part, no_dist=True)
    shutil.copytree(step, copy)
    flip(step / "optim" / "__0_0.distcp")
    (refused,) = refusals(ckptkit.verify(step, repair=True, copies=[copy]))
    assert f"pass {step}/model or {step}/optim, and with --from its copy" in refused
    assert ckptkit.verify(step / "optim", repair=True, copies=[copy / "optim"]).ok
    assert contents(step) == contents(copy)


def test_steps_that_share_a_file_are_mended_together(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    other = step.with_name("checkpoint-6")
    shutil.copytree(step, other, copy_function=os.link)
    inode = (step / SHARD).stat().st_ino
    with (step / SHARD).open("r+b") as file:  # in place: both have it
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 4]))
    assert not is_sound(other)
    assert ckptkit.verify(step, repair=True, copies=[copy]).ok
    assert (step / SHARD).stat().st_ino == (other / SHARD).stat().st_ino != inode
    assert contents(other) == contents(copy)


def test_a_copy_at_a_url_mends_a_step(object_store: ObjectStore, tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    url = object_store.bucket("copies").put_tree(copy, "run/checkpoint-2")
    for name in (SHARD, "random_states_0.pkl"):
        zero_end(step / name)
    options = object_store.options
    report = ckptkit.verify(step, repair=True, copies=[url], src_options=options)
    assert report.ok, report.problems
    assert contents(step) == contents(copy)


def test_a_step_at_a_url_is_not_mended() -> None:
    with pytest.raises(RefusedError, match="on a file system only"):
        ckptkit.verify("s3://bucket/run/checkpoint-2", repair=True)


def test_a_run_is_not_mended(tiers: tuple[Path, Path]) -> None:
    with pytest.raises(RefusedError, match="holds the checkpoint"):
        ckptkit.verify(tiers[0].parent, repair=True)


def test_copies_are_of_no_use_without_repair(tiers: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="needs --repair"):
        ckptkit.verify(tiers[0], copies=[tiers[1]])


def test_what_is_sound_is_left_alone(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    before = {path: path.stat().st_mtime_ns for path in step.rglob("*")}
    report = ckptkit.verify(step, repair=True, copies=[copy])
    assert report.ok
    assert report.mended == ()
    assert {path: path.stat().st_mtime_ns for path in step.rglob("*")} == before


def test_a_full_disk_loses_nothing(
    tiers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, copy = tiers
    flip(step / SHARD)
    broken = contents(step)

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    monkeypatch.setattr(Disk, "link_file", refuse)
    with pytest.raises(NoSpaceError):
        run_repair(step, [copy])
    assert contents(step) == broken
    assert names_in(step.parent) == {"checkpoint-2", "checkpoint-4"}


def test_a_file_system_without_hard_links_is_mended_too(
    tiers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, copy = tiers
    flip(step / SHARD)
    monkeypatch.setattr(
        "ckptkit.conversion.verify.LOCAL_DISK", dataclasses.replace(Disk(), hard_links=False)
    )
    assert run_repair(step, [copy]).ok
    assert contents(step) == contents(copy)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_is_read_only_is_refused_as_such(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    flip(step / SHARD)
    step.parent.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="permission denied"):
            ckptkit.verify(step, repair=True, copies=[copy])
    finally:
        step.parent.chmod(0o700)


def test_a_read_only_file_system_is_refused_as_such(
    tiers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, copy = tiers
    flip(step / SHARD)
    broken = contents(step)

    def refuse(path: Path, *_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match="read-only file system"):
        ckptkit.verify(step, repair=True, copies=[copy])
    assert contents(step) == broken


def test_a_file_that_changes_meanwhile_is_not_replaced(
    tiers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, copy = tiers
    flip(step / SHARD)
    from ckptkit.conversion import verify

    make = verify._stage

    def change(*arguments: Any) -> Any:
        made = make(*arguments)
        flip_bit(step / SHARD, 1001, 4)
        return made

    monkeypatch.setattr(verify, "_stage", change)
    with pytest.raises(CkptkitError, match="changed while it was mended"):
        ckptkit.verify(step, repair=True, copies=[copy])
    assert not is_sound(step)


def killed(step: Path, copy: Path, change: int) -> bool:
    """Repairs in a process of its own, which is killed before one of its changes."""
    process = os.fork()
    if process == 0:
        left, place = [change], str(step.parent)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in CHANGES or not str(arguments[0]).startswith(place):
                return
            if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                return
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            run_repair(step, [copy])
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_kills_in_the_middle_lose_nothing(every: int, saved: Path, tmp_path: Path) -> None:
    """Before each change that a repair makes, or before one of `every` changes."""
    whole = contents(saved / "checkpoint-2")
    kills = change = 0
    names = (SHARD, "random_states_0.pkl", "optimizer_0/.metadata")
    while True:
        run = Path(shutil.copytree(saved, tmp_path / str(change)))
        step = run / "checkpoint-2"
        for name in names:
            flip_bit(step / name, 1000 if name == SHARD else 300, 4)
        broken = contents(step)
        is_killed = killed(step, saved / "checkpoint-2", change)
        left = contents(step)
        assert left.keys() == whole.keys()
        for name, data in left.items():
            assert data in {broken[name], whole[name]}, name
        assert ckptkit.verify(step, repair=True, copies=[saved / "checkpoint-2"]).ok
        assert contents(step) == whole
        assert names_in(run) == {"checkpoint-2", "checkpoint-4"}
        shutil.rmtree(run)
        kills, change = kills + is_killed, change + every
        if not is_killed:
            break
    assert kills > 10 // every


def test_the_command_mends_and_says_so(tiers: tuple[Path, Path]) -> None:
    step, copy = tiers
    flip(step / SHARD)
    refused = run_command("verify", step, "--repair")
    assert refused.returncode == 6
    assert "[not-mended]" in refused.stdout
    done = run_command("verify", step, "--repair", "--from", copy)
    assert done.returncode == 0, done.stderr
    assert f"mended: {SHARD}" in done.stdout
    again = run_command("verify", step, "--json")
    assert json.loads(again.stdout)["mended"] == []
