"""Outputs that share blocks with their source: equal bytes, or refused, and nothing in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    NoSpaceError,
    NotFiniteError,
    RefusedError,
    SourceChangedError,
)
from ckptkit.core.manifest import BY_SOURCE, parse_manifest
from ckptkit.engine.outcome import BlocksShared
from ckptkit.options import Proof
from ckptkit.storage.local.disk import LOCAL_DISK, OpenFile
from ckptkit.training import Checkpointer
from tests.command_line import run_command
from tests.crash.forked_commands import ForkedCommands
from tests.files import contents, flip_bit, mounted
from tests.made_up_runs import save_step
from tests.reflink import leave_free, reflink_mount
from tests.sharded import write_sharded

SCRIPT = Path(__file__).parents[1] / "distributed" / "congruent_run.py"
CLONE = 0x4020940D  # FICLONERANGE
SHARING = ("xfs", "btrfs")
PARTS = 8  # into which the kills are divided

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks of FSDP2, of 6 MB."""
    folder: Path = tmp_path_factory.mktemp("saved")
    run_ranks(SCRIPT, 4, folder, "save:fsdp2")
    return folder / "save_fsdp2" / "run"


@pytest.fixture(scope="module")
def expected(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the model, which were copied."""
    out = tmp_path_factory.mktemp("expected") / "out"
    ckptkit.consolidate(saved, out, share="never")
    return weights(out)


@pytest.fixture(params=SHARING)
def disk(request: pytest.FixtureRequest, tmp_path: Path, saved: Path) -> Iterator[Path]:
    """A file system that shares blocks, and has the run."""
    with reflink_mount(request.param, tmp_path) as place:
        shutil.copytree(saved, place / "run")
        yield place


def weights(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(out).items() if name != "ckptkit.json"}


def shard_of(run: Path) -> Path:
    return run / "checkpoint-1" / "pytorch_model_fsdp_0" / "__1_0.distcp"


def share(run: Path, out: Path, **options: Any) -> int:
    """Makes a model, and returns how many of its bytes are shared."""
    shared: list[int] = []

    def hear(event: object) -> None:
        if isinstance(event, BlocksShared):
            shared.append(event.size_bytes)

    ckptkit.consolidate(run, out, listener=hear, **options)
    return sum(shared)


def left_in(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.iterdir() if path.name != "lost+found")


@pytest.mark.parametrize("proof", ["read", "stored"])
def test_shared_bytes_are_those_that_would_be_copied(
    disk: Path, proof: str, expected: dict[str, bytes]
) -> None:
    os.sync()
    before = shutil.disk_usage(disk).used
    size = share(disk / "run", disk / "out", share="always", proof=proof)
    os.sync()
    taken = shutil.disk_usage(disk).used - before
    assert weights(disk / "out") == expected
    total = sum(map(len, expected.values()))
    assert size > 0.9 * total
    assert taken < total - size + (2 << 20)
    assert ckptkit.verify(disk / "out").ok
    proofs = {tensor.proof for tensor in manifest_of(disk / "out").tensors.values()}
    assert (BY_SOURCE in proofs) == (proof == "stored")
    assert left_in(disk) == ["out", "run"]


@pytest.mark.parametrize("proof", ["read", "stored"])
def test_a_bit_that_is_flipped_in_the_step_is_found(
    disk: Path, proof: str, expected: dict[str, bytes]
) -> None:
    shard = shard_of(disk / "run")
    flip_bit(shard, shard.stat().st_size // 2)
    if proof == "stored":  # its word was taken, and so it is found later
        share(disk / "run", disk / "out", share="always", proof=proof)
        assert weights(disk / "out") != expected
        verified = ckptkit.verify(disk / "out")
        assert not verified.ok
        assert verified.problems[0].code == "digest-mismatch"
        return
    with pytest.raises(ChecksumError):
        share(disk / "run", disk / "out", share="always")
    assert left_in(disk) == ["run"]


def test_a_bit_that_is_flipped_in_a_model_with_shared_blocks_stays_there(
    disk: Path, expected: dict[str, bytes]
) -> None:
    share(disk / "run", disk / "out", share="always", proof="stored")
    flip_bit(disk / "out" / "model.safetensors", -1000)
    assert not ckptkit.verify(disk / "out").ok
    assert ckptkit.verify(disk / "run").ok
    share(disk / "run", disk / "again", share="always")
    assert weights(disk / "again") == expected


@pytest.mark.parametrize("proof", ["read", "stored"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_source_that_is_rewritten_between_two_clones_is_refused(
    disk: Path, proof: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, clone, left = shard_of(disk / "run"), OpenFile.share_blocks, [number]

    def rewrite_before(self: OpenFile, *arguments: Any) -> None:
        if left[0] == 0:
            shard.write_bytes(shard.read_bytes())
        left[0] -= 1
        clone(self, *arguments)

    monkeypatch.setattr(OpenFile, "share_blocks", rewrite_before)
    with pytest.raises(SourceChangedError, match="changed while it was read"):
        share(disk / "run", disk / "out", share="always", proof=proof)
    assert left[0] < 0
    assert left_in(disk) == ["run"]


def test_a_model_is_whole_after_its_step_is_gone(disk: Path, expected: dict[str, bytes]) -> None:
    share(disk / "run", disk / "out", share="always")
    save_step(disk / "run", 2, save_number=9)
    ckptkit.prune(disk / "run", keep_last=1)
    assert not shard_of(disk / "run").exists()
    os.sync()
    assert weights(disk / "out") == expected
    assert ckptkit.verify(disk / "out").ok


def test_a_file_that_is_open_for_writing_elsewhere_is_shared(
    disk: Path, expected: dict[str, bytes]
) -> None:
    with shard_of(disk / "run").open("r+b") as file:
        file.read(1)
        share(disk / "run", disk / "out", share="always")
    assert weights(disk / "out") == expected


def test_what_fits_only_without_a_copy_is_made(disk: Path, expected: dict[str, bytes]) -> None:
    leave_free(disk, sum(map(len, expected.values())) // 2)
    with pytest.raises(NoSpaceError):
        share(disk / "run", disk / "out", share="never")
    assert left_in(disk) == ["ballast", "run"]
    share(disk / "run", disk / "out", share="always")
    assert weights(disk / "out") == expected
    assert left_in(disk) == ["ballast", "out", "run"]


def test_a_disk_without_room_for_heads_and_tails_is_refused(disk: Path) -> None:
    leave_free(disk, 32 << 10)
    with pytest.raises(NoSpaceError):
        share(disk / "run", disk / "out", share="always")
    assert left_in(disk) == ["ballast", "run"]


def convert_and_die(run: str, out: str, proof: Proof, before: int) -> None:
    """Dies before the nth clone; each later opening for writing and renaming counts as one, too."""
    left, has_begun = [before], [False]

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        is_clone = event == "fcntl.ioctl" and arguments[1] == CLONE
        has_begun[0] |= is_clone
        writes = event == "open" and out in str(arguments[0]) and bool(arguments[2] & 3)
        if is_clone or (has_begun[0] and (event == "os.rename" or writes)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)
    ckptkit.consolidate(run, out, share="always", proof=proof)


# Of the parts, every second one takes the word of the step.
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.quick("xfs-0")
def test_a_kill_at_any_clone_leaves_nothing_that_is_visible(
    disk: Path,
    part: int,
    expected: dict[str, bytes],
    forks: ForkedCommands,
    record_property: Callable[[str, object], None],
) -> None:
    run, out = disk / "run", disk / "out"
    proof: Proof = "stored" if part % 2 else "read"
    numbers = iter(range(part, 200, PARTS))
    kills = 0
    while forks.host.run(convert_and_die, str(run), str(out), proof, next(numbers)):
        kills += 1
        assert not out.exists()
        share(run, out, share="always", proof=proof)
        assert weights(out) == expected
        assert left_in(disk) == ["out", "run"], "what was killed is swept away"
        shutil.rmtree(out)
    record_property("kills", kills)
    assert kills > 1
    assert weights(out) == expected


@pytest.mark.parametrize("kind", ["xfs", "xfs_plain", "ext4"])
def test_a_target_that_cannot_share_gets_copies(
    kind: str, saved: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    with reflink_mount(kind, tmp_path) as disk:
        source = saved
        if kind != "xfs":  # which only is another disk
            source = disk / "run"
            shutil.copytree(saved, source)
        assert share(source, disk / "out") == 0
        assert weights(disk / "out") == expected
        shutil.rmtree(disk / "out")
        reason = "is on another file system" if kind == "xfs" else rf"\({kind[:4].strip('_')}\)"
        with pytest.raises(RefusedError, match=reason):
            share(source, disk / "out", share="always")
        assert share(source, disk / "out", proof="stored") == 0
        proofs = {tensor.proof for tensor in manifest_of(disk / "out").tensors.values()}
        assert proofs == {"crc32"}, "what is copied is read"


def test_what_is_checked_is_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    with torch.no_grad():
        model.weight[3, 3] = float("nan")
    with reflink_mount("xfs", tmp_path) as disk:
        with Checkpointer(disk / "run") as checkpointer:
            checkpointer.save(1, {"model": model}).result(60)
        with pytest.raises(NotFiniteError, match="has 1 NaN"):
            share(disk / "run", disk / "out", proof="stored", check=["nan"])
        assert share(disk / "run", disk / "out", proof="stored", check=["inf"]) > 0
        proofs = {tensor.proof for tensor in manifest_of(disk / "out").tensors.values()}
        assert proofs == {"crc32"}


def test_the_word_of_a_folder_that_ckptkit_wrote_is_taken_too(
    disk: Path, expected: dict[str, bytes]
) -> None:
    share(disk / "run", disk / "model")
    assert share(disk / "model", disk / "again", proof="stored") > 0
    assert weights(disk / "again") == expected
    assert BY_SOURCE in {one.proof for one in manifest_of(disk / "again").tensors.values()}
    (disk / "again" / "ckptkit.json").unlink()
    with pytest.raises(RefusedError, match="no manifest of ckptkit"):
        share(disk / "again", disk / "third", proof="stored")


def test_each_source_shares_what_it_can(tmp_path: Path) -> None:
    part, whole = {"b.weight": torch.randn(300, 300)}, tmp_path / "whole"
    whole.mkdir()
    save_file({"a.weight": torch.randn(200, 200), **part}, whole / "model.safetensors")
    with reflink_mount("xfs", tmp_path) as disk:
        (disk / "part").mkdir()
        save_file(part, disk / "part" / "model.safetensors")
        options: dict[str, Any] = {"fill_from": whole, "share": "always"}
        assert share(disk / "part", disk / "out", **options) > 300_000
        share(disk / "part", disk / "copied", **{**options, "share": "never"})
        assert weights(disk / "out") == weights(disk / "copied")
        assert ckptkit.verify(disk / "out").ok


@pytest.mark.parametrize("proof", ["read", "stored"])
def test_deltas_share_what_they_leave_as_it_is(tmp_path: Path, proof: Proof) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(200, 200))
    with reflink_mount("xfs", tmp_path) as disk:
        with Checkpointer(disk / "run") as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, {"model": model}).result(60)
                with torch.no_grad():
                    for parameter in model[1:].parameters() if step == 1 else model.parameters():
                        parameter.add_(1)
        steps = [disk / "run" / f"checkpoint-{step}" for step in (1, 2, 3)]
        ckptkit.create_delta(steps[0], steps[1], disk / "some", version=1)
        ckptkit.create_delta(steps[1], steps[2], disk / "all", version=2)
        made = ckptkit.apply_delta(steps[0], disk / "some", disk / "out", proof=proof)
        assert (made.tensors["0.weight"].proof == BY_SOURCE) == (proof == "stored")
        share(steps[1], disk / "expected", share="never")
        assert weights(disk / "out") == weights(disk / "expected")
        with closing(LOCAL_DISK.open_for_reading(disk / "out" / "model.safetensors")) as file:
            assert sum(stop - start for start, stop in file.shared_blocks()) > 350_000
        with pytest.raises(RefusedError, match="no tensor is stored at an offset that fits"):
            ckptkit.apply_delta(steps[1], disk / "all", disk / "third", share="always")


def test_a_plan_shares_what_the_run_would(tmp_path: Path, disk: Path) -> None:
    run, out = disk / "run", disk / "out"

    def plan(*options: str | Path) -> Any:
        done = run_command("consolidate", run, *options, "--dry-run", "--json")
        return json.loads(done.stdout)["shared_bytes"] if done.returncode == 0 else done.stderr

    assert plan(out) == share(run, out, share="always") > 0
    assert plan(disk / "slices", "--slice", "1/2") == 0
    assert "only one process" in plan(disk / "slices", "--slice", "1/2", "--share", "always")
    (tmp_path / "other").mkdir()
    with reflink_mount("xfs", tmp_path / "other") as other:
        assert plan(other / "out") == 0
        assert "is on another file system" in plan(other / "out", "--share", "always")
    (run / "checkpoint-1" / "ckptkit.json").unlink()
    assert "no manifest of ckptkit" in plan(disk / "new", "--proof", "stored")


def test_a_step_of_stock_torch_is_copied(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = {f"layers.{i}.weight": torch.randn(301, 257) for i in range(4)}
    with reflink_mount("xfs", tmp_path) as disk:
        write_sharded(disk / "step", tensors, ranks=2)
        with pytest.raises(RefusedError, match="no tensor is stored at an offset that fits"):
            share(disk / "step", disk / "out", share="always")
        with pytest.raises(RefusedError, match="no manifest of ckptkit"):
            share(disk / "step", disk / "out", proof="stored")
        assert share(disk / "step", disk / "out") == 0
        share(disk / "step", disk / "copied", share="never")
        assert weights(disk / "out") == weights(disk / "copied")


def test_compressed_files_give_the_same_bytes(tmp_path: Path, saved: Path) -> None:
    with reflink_mount("btrfs_zstd", tmp_path) as disk:
        shutil.copytree(saved, disk / "run")
        os.sync()
        share(disk / "run", disk / "out", share="always")
        share(disk / "run", disk / "copied", share="never")
        assert weights(disk / "out") == weights(disk / "copied")
        assert ckptkit.verify(disk / "out").ok


def test_what_is_refused_is_read_although_the_word_of_the_source_is_taken(
    tmp_path: Path, saved: Path, expected: dict[str, bytes]
) -> None:
    with reflink_mount("btrfs", tmp_path) as disk:
        shutil.copytree(saved, disk / "run")
        shard = shard_of(disk / "run")
        without_checksums(shard)
        assert (
            0 < share(disk / "run", disk / "out", proof="stored") < len(b"".join(expected.values()))
        )
        assert weights(disk / "out") == expected
        flip_bit(shard, shard.stat().st_size // 2)
        with pytest.raises(ChecksumError, match="which was stored with it"):
            share(disk / "run", disk / "other", proof="stored")
        assert left_in(disk) == ["out", "run"]
        for one in shard.parent.glob("*.distcp"):
            without_checksums(one)
        with pytest.raises(RefusedError, match=r"no blocks of '.*distcp', as of one without"):
            share(disk / "run", disk / "other", share="always")


def without_checksums(file: Path) -> None:
    """Makes a file one whose blocks btrfs puts into no file that has checksums of its own."""
    data = file.read_bytes()
    file.unlink()
    file.touch()
    subprocess.run(["chattr", "+C", file], check=True)  # noqa: S607
    file.write_bytes(data)


def test_an_overlay_gives_the_same_bytes(
    tmp_path: Path, saved: Path, expected: dict[str, bytes]
) -> None:
    with reflink_mount("xfs", tmp_path) as disk:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir()
        shutil.copytree(saved, disk / "lower" / "run")
        layers = ",".join(f"{name}dir={disk / name}" for name in ("lower", "upper", "work"))
        with mounted(tmp_path / "over", "-t", "overlay", "overlay", "-o", layers) as over:
            share(over / "run", over / "out")
            assert weights(over / "out") == expected
            shutil.copytree(over / "run", over / "again")
            share(over / "again", over / "other", share="always")
            assert weights(over / "other") == expected


def manifest_of(out: Path) -> Any:
    return parse_manifest((out / "ckptkit.json").read_bytes(), where="the output")
