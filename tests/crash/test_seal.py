"""`ckptkit seal` beside steps that other savers wrote, and what then knows of them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    IncompleteCheckpointError,
    RefusedError,
    SourceChangedError,
    VerificationError,
)
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.engine.outcome import BytesWritten, Event
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from ckptkit.training import dcp as open_saves
from tests.command_line import run_command
from tests.crash.forked_commands import ForkedCommands
from tests.files import age, contents
from tests.object_store import ObjectStore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEPS = {
    "trainer": "trainer_fsdp2/checkpoint/checkpoint-2",
    "accelerate": "accelerate_fsdp2_two_models/checkpoint",
    "accelerate-ddp": "accelerate_ddp/checkpoint",
    "deepspeed": "deepspeed_0_18_zero2/checkpoint/global_step2",
    "torchtitan": "torchtitan_0_3_steps/checkpoint/step-10",
    "lightning": "lightning_trainer_sharded/checkpoint/epoch=0-step=4.ckpt",
    "dcp": "fsdp2_plain/checkpoint",
    "hf": "hf_sharded/checkpoint",
    "dcp-without-checksums": "fsdp2_without_checksums/checkpoint",
}


def put(run: Path, kind: str, step: int = 7) -> Path:
    folder = run / f"checkpoint-{step}"
    shutil.copytree(FIXTURES / STEPS[kind], folder)
    age(folder)
    return folder


def written(out: Path) -> dict[str, bytes]:
    """Returns the files of an output but its manifest, which says how they were proven."""
    return {name: data for name, data in contents(out).items() if name != MANIFEST_NAME}


def flip(path: Path, at: int | None = None) -> None:
    data, status = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip_data(path: Path) -> None:
    """Flips a bit of the first tensor in a file of torch, which follows a padding."""
    data = path.read_bytes()
    padding = data.index(b"FB", data.index(b"data/0"))
    flip(path, padding + 4 + int.from_bytes(data[padding + 2 : padding + 4], "little"))


def listed(run: Path | Place) -> dict[str, Any]:
    return {step.name: step for step in ckptkit.list_run(run).steps}


@pytest.mark.parametrize("kind", STEPS)
def test_every_flipped_bit_in_a_sealed_step_is_found(kind: str, tmp_path: Path) -> None:
    step = put(tmp_path, kind)
    before = listed(tmp_path)["checkpoint-7"]
    assert [one.action for one in ckptkit.seal(step).steps] == ["sealed"]
    assert ckptkit.verify(step).ok
    after = listed(tmp_path)["checkpoint-7"]
    assert (after.sealed, after.complete, after.writer) == (True, True, before.writer)
    assert (after.modified, after.metrics) == (before.modified, before.metrics)
    for path in sorted(path for path in step.rglob("*") if path.is_file()):
        for at in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            whole = path.read_bytes()
            flip(path, at)
            with suppress(CkptkitError):  # what cannot be parsed is an error
                assert not ckptkit.verify(step).ok, (path, at)
            path.write_bytes(whole)
    assert ckptkit.verify(step).ok


@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind != "dcp-without-checksums"])
def test_nothing_is_made_of_a_sealed_step_with_a_flipped_bit(kind: str, tmp_path: Path) -> None:
    step = put(tmp_path, kind)
    select = {"accelerate": "pytorch_model_fsdp_0", "accelerate-ddp": "model.safetensors"}.get(kind)
    ckptkit.seal(step)
    made = ckptkit.convert(step, tmp_path / "made", to="hf", names="live", select=select)
    assert not made.unverified
    for number, path in enumerate(sorted(path for path in step.rglob("*") if path.is_file())):
        whole, out = path.read_bytes(), tmp_path / f"made-{number}"
        flip(path)
        with suppress(CkptkitError):
            ckptkit.convert(step, out, to="hf", names="live", select=select)
            assert written(out) == written(tmp_path / "made"), path
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["trainer", "deepspeed", "torchtitan", "dcp", "hf"])
def test_a_seal_changes_nothing_of_what_a_step_makes(kind: str, tmp_path: Path) -> None:
    step = put(tmp_path, kind)
    inspected = ckptkit.inspect(step)
    ckptkit.convert(step, tmp_path / "before", to="hf", names="live")
    ckptkit.seal(step)
    ckptkit.convert(step, tmp_path / "after", to="hf", names="live")
    assert written(tmp_path / "before") == written(tmp_path / "after")
    assert ckptkit.inspect(step).writer == inspected.writer


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("trainer", "pytorch_model_fsdp_0/__0_0.distcp"),
        ("accelerate", "pytorch_model_fsdp_1/__1_0.distcp"),
        ("trainer", "rng_state_1.pth"),
        ("accelerate-ddp", "random_states_0.pkl"),
        ("deepspeed", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
def test_bytes_without_their_stored_checksum_are_not_sealed(
    kind: str, file: str, tmp_path: Path
) -> None:
    step = put(tmp_path, kind)
    flip_data(step / file)
    with pytest.raises((VerificationError, ckptkit.ChecksumError, ckptkit.FormatError)):
        ckptkit.seal(step)
    assert not (step / MANIFEST_NAME).exists()


def test_of_a_run_all_complete_steps_are_sealed_once(tmp_path: Path) -> None:
    for number in (10, 20, 30, 40):
        put(tmp_path, "trainer", number)
    flip_data(tmp_path / "checkpoint-20" / "pytorch_model_fsdp_0" / "__0_0.distcp")
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    result = ckptkit.seal(tmp_path)
    assert [one.action for one in result.steps] == ["sealed", "failed", "sealed", "left"]
    assert not result.ok
    assert "checkpoint-20" in str(result.failed[0].error)
    manifest = (tmp_path / "checkpoint-10" / MANIFEST_NAME).read_bytes()
    again = run_command("seal", tmp_path)
    assert again.returncode == 6
    assert "checkpoint-10  as it was" in again.stdout
    assert "checkpoint-20 is damaged, and was not sealed: " in again.stderr
    assert (tmp_path / "checkpoint-10" / MANIFEST_NAME).read_bytes() == manifest
    shutil.rmtree(tmp_path / "checkpoint-20")
    assert run_command("seal", tmp_path).returncode == 0
    # A step that is not sealed is as complete as it was, though others beside it are.
    assert listed(tmp_path)["checkpoint-30"].complete
    put(tmp_path, "trainer", 50)
    assert listed(tmp_path)["checkpoint-50"].complete


@pytest.mark.parametrize("cut", [False, True])
def test_damage_beside_the_tensors_of_a_step_names_its_file(cut: bool, tmp_path: Path) -> None:
    step = put(tmp_path, "trainer")
    path = step / "rng_state_1.pth"
    if cut:
        path.write_bytes(path.read_bytes()[:1000])
        age(step)
    else:
        flip_data(path)
    for target in (step, tmp_path):
        done = run_command("seal", target)
        assert done.returncode == 6
        assert "checkpoint-7" in done.stderr
        assert " is damaged, and was not sealed: " in done.stderr
        assert "rng_state_1.pth: " in done.stderr
    assert not (step / MANIFEST_NAME).exists()


def test_a_link_to_a_step_stands_for_the_step(tmp_path: Path) -> None:
    step = put(tmp_path / "run", "trainer")
    (tmp_path / "elsewhere").mkdir()
    for link in (tmp_path / "elsewhere" / "checkpoint-7", tmp_path / "run" / "latest"):
        link.symlink_to(step)
        (one,) = ckptkit.seal(link).steps
        assert (one.step.name, one.action) == ("checkpoint-7", "sealed")
        (step / MANIFEST_NAME).unlink()


def test_what_is_not_finished_is_refused(tmp_path: Path) -> None:
    step = put(tmp_path, "trainer")
    (step / "optimizer_0" / "__1_0.distcp").unlink()
    (step / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match="not complete"):
        ckptkit.seal(step)
    with pytest.raises(ckptkit.NotACheckpointError):
        ckptkit.seal(tmp_path / "checkpoint-8")
    single = tmp_path / "files" / "step-500.pt"
    single.parent.mkdir()
    torch.save({"weight": torch.ones(3)}, single)
    age(single.parent)
    result = ckptkit.seal(single.parent)
    assert isinstance(result.steps[0].error, RefusedError)
    assert not list(tmp_path.rglob(MANIFEST_NAME))


def test_a_step_that_changes_while_it_is_sealed_is_not(tmp_path: Path) -> None:
    step = put(tmp_path, "trainer")
    changed = threading.Event()

    def change(event: Event) -> None:
        if isinstance(event, BytesWritten) and not changed.is_set():
            changed.set()
            (step / "scheduler.pt").write_bytes((step / "scheduler.pt").read_bytes())

    with pytest.raises(SourceChangedError, match="changed while it was read"):
        ckptkit.seal(step, listener=change)
    assert not (step / MANIFEST_NAME).exists()


def test_a_step_that_is_still_written_to_is_not_sealed(tmp_path: Path) -> None:
    step = put(tmp_path, "trainer")
    (step / "rng_state_0.pth").touch()
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.2):
            with (step / "rng_state_2.pth").open("ab") as file:
                file.write(b"x")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with pytest.raises(SourceChangedError, match="still written to"):
            ckptkit.seal(step)
    finally:
        ended.set()
        thread.join()
    assert not (step / MANIFEST_NAME).exists()
    (step / "rng_state_2.pth").unlink()
    assert ckptkit.seal(step).ok  # though it is young: nothing changes between two looks


def test_a_step_that_was_saved_again_is_named_with_what_helps(tmp_path: Path) -> None:
    step = put(tmp_path, "dcp")
    ckptkit.seal(step)
    (step / "__0_0.distcp").write_bytes((step / "__0_0.distcp").read_bytes() + b"x")
    with pytest.raises(VerificationError, match="does not fit") as caught:
        ckptkit.seal(step)
    shutil.rmtree(step)
    put(tmp_path, "dcp")
    ckptkit.seal(step)
    os.system(caught.value.hint.partition(": ")[2])  # noqa: S605  what the message proposes
    assert [one.action for one in ckptkit.seal(step).steps] == ["sealed"]


def seal_and_die(step: str, at: str) -> None:
    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == at and ".put-" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    ckptkit.seal(step)


@pytest.mark.parametrize("at", ["open", "os.rename"])
def test_a_kill_leaves_the_step_as_it_was(at: str, tmp_path: Path, forks: ForkedCommands) -> None:
    step = put(tmp_path, "dcp")
    names = sorted(path.name for path in step.iterdir())
    assert forks.host.run(seal_and_die, str(step), at) == -9
    assert sorted(path.name for path in step.iterdir()) == names
    assert not listed(tmp_path)["checkpoint-7"].sealed
    assert ckptkit.seal(step).ok
    assert sorted(path.name for path in step.iterdir()) == sorted([*names, MANIFEST_NAME])


def test_a_run_on_a_store_is_sealed_like_a_local_one(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    put(tmp_path / "run", "trainer", 5)
    put(tmp_path / "run", "trainer", 7)
    bucket = object_store.bucket("runs-to-seal")
    bucket.clear()
    bucket.put_tree(tmp_path / "run", "run")
    run = Place(f"{bucket.url}/run", bucket.store.options)
    step = run.beside(f"{run}/checkpoint-7")
    assert [one.action for one in ckptkit.seal(run).steps] == ["sealed", "sealed"]
    assert [one.action for one in ckptkit.seal(step).steps] == ["kept"]
    assert [one.sealed for one in listed(run).values()] == [True, True]
    assert ckptkit.verify(step).ok
    assert not [key for key in bucket.keys("run/") if "in-use" in key]
    bucket.clear()


def test_what_was_pushed_of_a_step_is_not_pushed_again_once_it_is_sealed(tmp_path: Path) -> None:
    put(tmp_path, "trainer", 5)
    run = WatchedRun(tmp_path, None)
    (before,) = run.list_steps()
    ckptkit.seal(tmp_path)
    (after,) = run.list_steps()
    assert after.sealed
    assert after.digest == before.digest
    (other,) = WatchedRun(tmp_path, None).list_steps()
    assert other.digest == before.digest


def test_the_order_of_sealed_steps_is_that_of_their_times(tmp_path: Path) -> None:
    for number, hours in ((100, 3), (200, 2), (150, 1)):  # training went back
        step = put(tmp_path, "trainer", number)
        state = (step / "trainer_state.json").read_text()
        (step / "trainer_state.json").write_text(state.replace('"step": 2', f'"step": {number}'))
        age(step, hours * 3600)
    plain = ckptkit.prune(tmp_path, keep_last=1, dry_run=True)
    ckptkit.seal(tmp_path)
    sealed = ckptkit.prune(tmp_path, keep_last=1, dry_run=True)
    assert [(one.action, one.why) for one in sealed.steps] == [
        (one.action, one.why) for one in plain.steps
    ]
    assert ckptkit.prune(tmp_path, keep_last=1).removed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpointer_resumes_from_a_sealed_step_of_stock_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint-5", no_dist=True)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    age(tmp_path / "checkpoint-5")
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        torch.nn.init.zeros_(model.weight)
        assert checkpointer.resume({"model": model}) is None
    ckptkit.seal(tmp_path)
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        assert checkpointer.resume({"model": model}) is not None
    with Checkpointer(tmp_path / "new") as checkpointer:  # whose own layout is another
        assert checkpointer.resume({"model": model}, folder=tmp_path / "checkpoint-5") == 5
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    stock = {"model": torch.nn.Linear(3, 2).state_dict()}
    dcp.load(stock, checkpoint_id=tmp_path / "checkpoint-5", no_dist=True)
    assert all(torch.equal(value, saved[name]) for name, value in stock["model"].items())


def test_every_flipped_bit_in_a_step_of_parts_with_their_own_manifests_is_found(
    tmp_path: Path,
) -> None:
    """As nemo-automodel saves with `ckptkit.run`."""
    step = tmp_path / "epoch_0_step_1"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optim": {"optim": optimizer.state_dict()}}
    for part, state in states.items():
        open_saves.save(state, checkpoint_id=step / part)
    open_saves.close_all()
    (step / "rng.pt").write_bytes(b"of another saver")
    files = [path for part in states for path in (step / part).iterdir()]
    for place in (tmp_path, step):
        proven = " ".join(ckptkit.verify(place).proven)
        assert f"their size in the manifest: {len(files) - 2:,}" in proven
    for path in files:
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            flip(path, at)
            with suppress(CkptkitError):  # what cannot be parsed is an error
                assert not ckptkit.verify(step).ok, (path, at)
        path.unlink()
        if path.name != MANIFEST_NAME:
            with suppress(CkptkitError):
                assert not ckptkit.verify(step).ok
        path.write_bytes(whole)
    assert ckptkit.verify(step).ok
    ckptkit.seal(step)
    count = f"{len(files) + 1:,}"  # each once
    (proven,) = [line for line in ckptkit.verify(step).proven if "manifest" in line]
    assert f"in the manifest: {count}; that have their CRC-32: {count}" in proven


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("ours", ["dcp", "checkpointer"])
def test_a_whole_step_of_stock_torch_beside_those_of_ckptkit_is_the_newest(
    ours: str, tmp_path: Path
) -> None:
    state = {"model": torch.nn.Linear(3, 2)}
    tensors = {"model": state["model"].state_dict()}
    with Checkpointer(tmp_path) as checkpointer:
        for number in (1, 2):
            if ours == "dcp":
                open_saves.save(tensors, checkpoint_id=tmp_path / f"checkpoint-{number}")
            else:
                checkpointer.save(number, state).result()
    open_saves.close_all()
    whole, begun, short = (tmp_path / f"checkpoint-{number}" for number in (9, 10, 11))
    for step in (whole, begun, short):
        dcp.save(tensors, checkpoint_id=step, no_dist=True)
    (begun / ".metadata").unlink()
    (data,) = short.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)
    age(tmp_path)
    steps = listed(tmp_path)
    assert [name for name, step in steps.items() if not step.complete] == [begun.name, short.name]
    assert "resume from checkpoint-9" in run_command("ls", tmp_path).stdout
    assert ckptkit.inspect(tmp_path).step == 9
    pruned = ckptkit.prune(tmp_path, incomplete=True, keep_last=2)
    assert [step.step for step in pruned.removed] == [1, 10, 11]
    assert [one.action for one in ckptkit.seal(tmp_path).steps] == ["kept", "sealed"]
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(state) == 9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_at_a_url_a_step_without_a_manifest_is_kept_and_sealed_unless_a_save_has_begun_it(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model}).result()
    for name in ("run/checkpoint-9", "run/checkpoint-10"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
    age(tmp_path / "run")
    bucket = object_store.bucket("mixed-runs")
    bucket.clear()
    bucket.put_tree(tmp_path / "run", "run")
    bucket.put("run/checkpoint-10/.ranks/uploading", b"an attempt")
    run = Place(f"{bucket.url}/run", bucket.store.options)
    assert "another saver wrote it (see `ckptkit seal`), or" in listed(run)["checkpoint-9"].problem
    assert "written last" in listed(run)["checkpoint-10"].problem
    monkeypatch.setattr("ckptkit.runs.pruning._SETTLED_SECONDS", -1.0)
    monkeypatch.setattr("ckptkit.conversion.seal._QUIET_SECONDS", -1.0)
    pruned = ckptkit.prune(run, incomplete=True, dry_run=True)
    assert [one.action for one in pruned.steps] == ["keep", "keep", "remove"]
    assert [one.action for one in ckptkit.seal(run).steps] == ["kept", "sealed", "left"]
    assert listed(run)["checkpoint-9"].complete
    bucket.clear()


def test_a_damaged_file_of_a_sealed_step_is_mended_from_a_copy(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a", "trainer"), put(tmp_path / "b", "trainer")
    ckptkit.seal(first)
    ckptkit.seal(second)  # apart: it is the same step nevertheless
    flip(first / "rng_state_0.pth")
    assert not ckptkit.verify(first).ok
    assert ckptkit.verify(first, repair=True, copies=[second]).mended == ("rng_state_0.pth",)


def test_a_step_of_deepspeed_below_one_of_the_trainer_is_sealed(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-2"
    shutil.copytree(FIXTURES / STEPS["deepspeed"], step / "global_step2")
    (step / "latest").write_text("global_step2")
    age(tmp_path)
    assert [one.action for one in ckptkit.seal(step).steps] == ["sealed"]
    assert listed(tmp_path)["checkpoint-2"].sealed
    assert list(listed(tmp_path)) == ["checkpoint-2"]
    flip(step / "latest")
    assert not ckptkit.verify(step).ok
