"""`--delete-source`: what was read goes once the output is proven, and nothing else ever."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
    UsageError,
    VerificationError,
)
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Event, OutputCommitted
from ckptkit.storage.places import Place
from tests.command_line import Result, run_command
from tests.crash.removal_kills import kill_everywhere
from tests.files import flip_bit
from tests.fork_host import ForkHost
from tests.object_store import ObjectStore

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
SEPARATE = "accelerate_fsdp2_cpu_offload"
TOGETHER = "fsdp2_plain"
OPTIMIZERS = ("optimizer_0", "optimizer.bin")
Act = Callable[[], object]


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint without an optimizer of its own to where it may be removed."""

    def copy(name: str) -> Path:
        return whole_step(name, tmp_path, *OPTIMIZERS)

    return copy


def whole_step(name: str, folder: Path, *without: str) -> Path:
    ignored = shutil.ignore_patterns(*without)
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", folder / "run", ignore=ignored))


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


def consolidated(source: Path, **options: Any) -> Path:
    out = source.parent / "out"
    given = {"to": "hf", "names": "live", "delete_source": True, **options}
    ckptkit.convert(source, out, **given)
    return out


def once_committed(act: Act) -> Callable[[Event], None]:
    """Does something as soon as the output is in place."""

    def listen(event: Event) -> None:
        if isinstance(event, OutputCommitted):
            act()

    return listen


def refused(source: Path, kind: type[CkptkitError], **options: Any) -> CkptkitError:
    before = files(source)
    with pytest.raises(kind) as caught:
        consolidated(source, **options)
    assert files(source) == before
    return caught.value


def test_the_files_that_were_read_go_and_others_stay(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    before = files(run)
    gone = {path for path in before if path.startswith("pytorch_model_fsdp_0/")}
    assert gone
    assert gone != before
    out = consolidated(run)
    assert files(run) == before - gone
    assert not (run / "pytorch_model_fsdp_0").exists()
    assert ckptkit.verify(out).ok


def test_an_optimizer_in_the_same_files_is_not_lost(source: Callable[[str], Path]) -> None:
    run = source(TOGETHER)
    error = refused(run, RefusedError)
    assert "optimizer tensor" in error.message
    assert "--optimizer" in error.hint
    assert not (run.parent / "out").exists()
    consolidated(run, to="dcp", optimizer=True)
    assert not run.exists()


@pytest.mark.parametrize(
    "options", [{"include": ["*embed*"]}, {"exclude": ["*norm*"]}, {"exclude": ["lm_head*"]}]
)
def test_a_tensor_that_is_left_out_keeps_its_source(
    source: Callable[[str], Path], options: dict[str, Any]
) -> None:
    error = refused(source(SEPARATE), RefusedError, **options)
    assert "model tensor" in error.message


def test_unrounded_weights_of_zero_are_not_lost(source: Callable[[str], Path]) -> None:
    error = refused(source("zero3_bf16"), RefusedError)
    assert "not in the output" in error.message


def test_a_single_file_goes_alone(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    found = sorted((FIXTURES / "hf_tied" / "checkpoint").rglob("*.safetensors"))
    shutil.copy(found[0], folder / "a.safetensors")
    shutil.copy(found[0], folder / "b.safetensors")
    ckptkit.consolidate(folder / "a.safetensors", folder / "out", names="live", delete_source=True)
    assert {path for path in files(folder) if "/" not in path} == {"b.safetensors"}


def test_what_is_not_proven_on_the_disk_keeps_its_source(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    before, weights = files(run), run.parent / "out" / "model.safetensors"

    def flip() -> None:
        flip_bit(weights, -1)

    with pytest.raises(VerificationError, match="the source was not removed") as caught:
        consolidated(run, listener=once_committed(flip))
    assert caught.value.exit_status == 6
    assert files(run) == before


def test_a_manifest_that_is_another_one_on_the_disk_keeps_the_source(
    source: Callable[[str], Path],
) -> None:
    run = source(SEPARATE)
    manifest = run.parent / "out" / "ckptkit.json"

    def change() -> None:
        manifest.write_bytes(manifest.read_bytes().replace(b'"tied"', b'"tied" '))

    error = refused(run, VerificationError, listener=once_committed(change))
    assert "its manifest is another one" in error.message


def test_a_source_that_changed_meanwhile_stays(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    data = min(run.glob("pytorch_model_fsdp_0/*.distcp"))
    error = refused(
        run, SourceChangedError, listener=once_committed(lambda: os.utime(data, ns=(1, 1)))
    )
    assert "was not removed" in error.message


def test_a_source_that_somebody_reads_stays(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    with ckptkit.open(run):
        error = refused(run, RefusedError)
    assert "another process reads the source" in error.message


def test_links_are_not_followed_nor_removed(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    data = min(run.glob("pytorch_model_fsdp_0/*.distcp"))
    shutil.move(data, run / "elsewhere")
    data.symlink_to(run / "elsewhere")
    error = refused(run, RefusedError)
    assert "is no file of its own but a link" in error.message


@pytest.mark.parametrize(
    ("case", "path"),
    [
        (SEPARATE, "pytorch_model_fsdp_0/__7_0.distcp"),  # of an earlier save, of more ranks
        ("torchsnapshot_dtensor", "100/model.safetensors"),  # where other ranks keep theirs
    ],
)
def test_a_file_that_is_no_part_of_the_checkpoint_keeps_all_of_it(
    source: Callable[[str], Path], case: str, path: str
) -> None:
    run = source(case)
    (run / path).parent.mkdir(exist_ok=True)
    (run / path).write_bytes(b"another")
    error = refused(run, RefusedError)
    assert f"'{path}' would be removed with the checkpoint, and is no part of it" in error.message
    (run / path).write_bytes(b"")  # what a rank without anything leaves
    consolidated(run)
    assert not (run / path).exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_name_that_is_tied_in_one_model_is_not_lost_of_another(tmp_path: Path) -> None:
    """Only the first has both names in one tensor; the second has nothing else."""
    tied = torch.arange(32.0).reshape(8, 4)
    models = {
        "model": {"model.embed_tokens.weight": tied, "lm_head.weight": tied.clone()},
        "ema": {"lm_head.weight": -tied},
    }
    run = tmp_path / "run"
    dcp.save(models, checkpoint_id=run, no_dist=True)
    (run / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})
    )
    error = refused(run, RefusedError, select="model")
    assert "model tensor 'lm_head.weight'" in error.message


def test_what_lightning_keeps_beside_its_shards_goes_with_them(
    source: Callable[[str], Path],
) -> None:
    run = source("lightning_fabric_sharded")
    consolidated(run, to="dcp", optimizer=True)
    assert not (run / "state.ckpt").exists()


def test_an_output_that_is_there_and_proven_lets_its_source_go(
    source: Callable[[str], Path],
) -> None:
    """As after a kill between the commit and the removal."""
    run = source(SEPARATE)
    consolidated(run, delete_source=False)
    consolidated(run, if_exists="verify")
    assert not (run / "pytorch_model_fsdp_0").exists()


def test_source_and_output_within_one_another_are_refused(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    before = files(run)
    with pytest.raises(RefusedError, match="inside"):
        ckptkit.consolidate(run, run / "out", names="live", delete_source=True)
    with pytest.raises(RefusedError, match="inside"):
        ckptkit.consolidate(
            run / "pytorch_model_fsdp_0", run, names="live", delete_source=True, overwrite=True
        )
    assert files(run) == before


def test_a_source_in_several_places_is_refused(source: Callable[[str], Path]) -> None:
    run = source(SEPARATE)
    error = refused(run, UsageError, also=[run.parent])
    assert "--also" in error.message


def test_a_step_that_ckptkit_saved_is_no_whole_step_afterwards(tmp_path: Path) -> None:
    run = whole_step("peft_qdora_fsdp2_ckptkit", tmp_path)
    consolidated(run, select="pytorch_model_fsdp_0")
    assert "ckptkit.json" not in files(run)
    assert any(path.startswith("optimizer_0/") for path in files(run))
    assert not [path for path in files(run) if path.startswith("pytorch_model_fsdp_0/")]


@pytest.mark.parametrize("name", ["peft_qdora_fsdp2_ckptkit", SEPARATE, "accelerate_ddp_bin"])
def test_a_step_that_training_could_resume_from_stays(name: str, tmp_path: Path) -> None:
    run = whole_step(name, tmp_path)
    error = refused(run, RefusedError)
    assert "training could not resume from the step any more: 'optimizer" in error.message
    assert "ckptkit prune" in error.hint
    assert Path(error.hint.split("pass ")[1].split(" as SRC")[0]).exists()
    assert not (tmp_path / "out").exists()
    planned = command(run, "--delete-source", "--dry-run")
    assert planned.returncode == 4


def test_the_optimizer_goes_too_where_it_is_in_the_output(tmp_path: Path) -> None:
    run = whole_step("accelerate_fsdp2_bf16_tied", tmp_path)
    consolidated(run, to="dcp", optimizer=True)
    assert not {*OPTIMIZERS, "pytorch_model_fsdp_0"} & {path.name for path in run.iterdir()}


@pytest.mark.parametrize("by", ["path", "select"])
def test_a_model_that_is_named_alone_goes_and_its_optimizer_stays(by: str, tmp_path: Path) -> None:
    run = whole_step(SEPARATE, tmp_path)
    optimizer = {path for path in files(run) if path.startswith("optimizer_0/")}
    if by == "path":
        out = tmp_path / "out"
        model = run / "pytorch_model_fsdp_0"
        ckptkit.consolidate(model, out, names="live", delete_source=True)
    else:
        consolidated(run, select="pytorch_model_fsdp_0")
    assert not (run / "pytorch_model_fsdp_0").exists()
    assert optimizer
    assert optimizer <= files(run)


def test_objects_go_too_and_their_neighbours_stay(
    object_store: ObjectStore, source: Callable[[str], Path]
) -> None:
    run = source(SEPARATE)
    bucket = object_store.bucket("deleting")
    bucket.clear()
    bucket.put_tree(run, "run")
    before = bucket.keys("run/")
    place = Place(f"{bucket.url}/run", object_store.options)
    out = Place(f"{bucket.url}/out", object_store.options)
    ckptkit.consolidate(place, out, names="live", delete_source=True)
    assert bucket.keys("run/") == [key for key in before if "pytorch_model_fsdp_0/" not in key]
    assert ckptkit.verify(out).ok


def command(source: Path, *options: str) -> Result:
    return run_command("consolidate", source, source.parent / "out", "--names", "live", *options)


def test_a_dry_run_says_what_would_go_and_a_run_says_what_went(
    source: Callable[[str], Path],
) -> None:
    run = source(SEPARATE)
    before = files(run)
    gone = {path for path in before if path.startswith("pytorch_model_fsdp_0/")}
    planned = command(run, "--delete-source", "--dry-run", "--json")
    assert set(json.loads(planned.stdout)["deleted"]["files"]) == gone
    page = command(run, "--delete-source", "--dry-run").stdout
    assert all(path in page for path in gone)
    assert files(run) == before
    done = command(run, "--delete-source")
    assert f"removed    {len(gone)} files of the source" in done.stdout
    assert files(run) == before - gone


@pytest.mark.parametrize("option", ["--delete-source", "--resume"])
def test_a_slice_neither_removes_nor_resumes(source: Callable[[str], Path], option: str) -> None:
    run = source(SEPARATE)
    done = command(run, option, "--slice", "0/2")
    assert done.returncode == 2
    assert option in done.stderr


@pytest.fixture(scope="module")
def kills() -> Iterator[ForkHost]:
    with ForkHost(kill_everywhere.__module__) as host:
        yield host


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("dcp_hf_fsdp2", {}),
        ("torch_bin_sharded", {}),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (
                (SEPARATE, {"select": "pytorch_model_fsdp_0"}),
                (TOGETHER, {"to": "dcp", "optimizer": True}),
                (
                    "deepspeed_0_17_zero3",
                    {"to": "dcp", "optimizer": True, "dtype": "float32"},
                ),
                ("verl_fsdp1", {}),
                ("hf_sharded", {}),
                ("accelerate_ddp_bin", {"to": "dcp", "optimizer": True}),
            )
        ),
    ],
)
def test_a_removal_that_is_killed_is_finished_by_the_same_command(
    tmp_path: Path,
    case: str,
    options: dict[str, Any],
    kills: ForkHost,
    record_property: Callable[[str, object], None],
) -> None:
    checkpoint = str(FIXTURES / case / "checkpoint")
    found = kills.call(kill_everywhere, checkpoint, str(tmp_path), options)
    assert found["wrong"] == {}
    record_property("kills", found["kills"])
    assert found["kills"] >= 4


def interrupted(run: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
    """Leaves a removal after its first file; the record of it is in the source then."""
    unlink, gone = Path.unlink, []

    def stop_after_one(path: Path, **others: Any) -> None:
        if path.is_relative_to(run) and path.suffix == ".distcp":
            raise KeyboardInterrupt
        unlink(path, **others)
        gone.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop_after_one)
        with pytest.raises(KeyboardInterrupt):
            consolidated(run, **options)
    assert gone
    return run.parent / "out"


def test_what_is_left_stays_if_it_changed_after_the_kill(
    source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = source(SEPARATE)
    interrupted(run, monkeypatch)
    data = min(run.glob("pytorch_model_fsdp_0/*.distcp"))
    data.write_bytes(data.read_bytes() + b"x")
    assert "was not removed" in refused(run, SourceChangedError).message


def test_what_is_left_stays_if_the_output_is_damaged_or_gone(
    source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = source(SEPARATE)
    out = interrupted(run, monkeypatch)
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(run, VerificationError)
    shutil.rmtree(out)
    assert "its output is not there any more" in refused(run, OutputExistsError).message


def test_other_options_do_not_finish_a_removal(
    source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = source(SEPARATE)
    interrupted(run, monkeypatch)
    error = refused(run, OutputExistsError, dtype="bfloat16")
    assert "made with other options" in error.message
    assert "run the same command" in error.hint


def test_a_removal_is_finished_where_the_newest_step_of_a_run_was_taken(
    source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = source(SEPARATE)
    run = checkpoint.parent / "steps"
    shutil.copytree(checkpoint, run / "checkpoint-1")
    shutil.copytree(checkpoint, run / "checkpoint-2")
    interrupted(run, monkeypatch)
    consolidated(run)
    assert not (run / "checkpoint-2" / "pytorch_model_fsdp_0").exists()
    assert files(run / "checkpoint-1") == files(checkpoint)
    assert not [path for path in files(run) if "ckptkit-removal" in path]


@pytest.mark.parametrize("store", ["local", "memory"])
def test_after_a_whole_removal_older_steps_stay_and_the_same_command_succeeds(
    source: Callable[[str], Path], store: str
) -> None:
    """Nothing is left of the step that was removed, so that an older one is the newest now."""
    model = source(SEPARATE) / "pytorch_model_fsdp_0"
    steps = fsspec.filesystem("file" if store == "local" else "memory")
    run = f"{model.parent}/steps" if store == "local" else "memory://deleting/steps"

    def save(step: int) -> set[str]:
        for path in model.iterdir():
            folder = f"{run}/checkpoint-{step}/{model.name}"
            steps.makedirs(folder, exist_ok=True)
            steps.pipe_file(f"{folder}/{path.name}", path.read_bytes())
        return set(steps.find(f"{run}/checkpoint-{step}"))

    def consolidate(**options: Any) -> Manifest:
        out = model.parent.parent / "out"
        return ckptkit.consolidate(run, out, names="live", delete_source=True, **options)

    first, second = save(1), save(2)
    manifest = consolidate()
    for options in ({}, {"overwrite": True}):
        assert consolidate(**options) == manifest
        assert set(steps.find(run)) == first != second
    with pytest.raises(OutputExistsError):
        consolidate(dtype="bfloat16")
    third = save(3)  # another source, which no earlier run has removed
    with pytest.raises(OutputExistsError):
        consolidate()
    assert set(steps.find(run)) == first | third
    steps.rm(run, recursive=True)


def test_a_removal_is_finished_by_the_command_and_shown_by_a_dry_run(
    source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = source(SEPARATE)
    interrupted(run, monkeypatch)
    before = files(run)
    planned = command(run, "--delete-source", "--dry-run", "--json")
    assert len(json.loads(planned.stdout)["deleted"]["files"]) == 3
    assert files(run) == before
    done = command(run, "--delete-source")
    assert (done.returncode, "removed    3 files" in done.stdout) == (0, True), done.stderr
    again = command(run, "--delete-source")
    assert again.returncode == 0, again.stderr
    assert "was removed by an earlier run" in again.stderr


@pytest.mark.slow
def test_objects_that_are_left_are_removed_by_the_same_command(
    object_store: ObjectStore, source: Callable[[str], Path]
) -> None:
    run = source(SEPARATE)
    bucket = object_store.bucket("deleting")
    bucket.clear()
    bucket.put_tree(run, "run")
    before = bucket.keys("run/")
    place = Place(f"{bucket.url}/run", object_store.options)
    out = Place(f"{bucket.url}/out", object_store.options)

    def consolidate() -> None:
        ckptkit.consolidate(place, out, names="live", delete_source=True)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.conversion.delete_source._remove_object", stop)
        with pytest.raises(KeyboardInterrupt):
            consolidate()
    assert len(bucket.keys("run/")) == len(before) + 1  # the record
    for _ in range(2):
        consolidate()
        stays = [key for key in before if "pytorch_model_fsdp_0/" not in key]
        assert bucket.keys("run/") == stays


@pytest.mark.parametrize("given", ["latest", "latest/", "latest/pytorch_model_fsdp_0"])
def test_a_source_that_is_a_link_is_refused(source: Callable[[str], Path], given: str) -> None:
    checkpoint = source(SEPARATE)
    step = checkpoint.parent / "checkpoint-2"
    checkpoint.rename(step)
    (step.parent / "latest").symlink_to(step.name)
    before = files(step)
    with pytest.raises(RefusedError, match="is a link to") as caught:
        ckptkit.consolidate(
            f"{step.parent}/{given}", step.parent / "out", names="live", delete_source=True
        )
    assert "name the target of the link" in caught.value.hint
    assert files(step) == before
    assert not (step.parent / "out").exists()


def test_a_step_of_a_run_that_is_a_link_is_not_followed(source: Callable[[str], Path]) -> None:
    checkpoint = source(SEPARATE)
    run = checkpoint.parent / "steps"
    run.mkdir()
    (run / "checkpoint-2").symlink_to(checkpoint)
    before = files(checkpoint)
    with pytest.raises(CkptkitError):
        ckptkit.consolidate(run, run.parent / "out", names="live", delete_source=True)
    assert files(checkpoint) == before


@pytest.mark.slow
def test_a_link_far_above_the_source_is_a_way_like_any_other(
    source: Callable[[str], Path],
) -> None:
    checkpoint = source(SEPARATE)
    disk = checkpoint.parent / "disk"
    disk.mkdir()
    checkpoint.rename(disk / "run")
    (disk.parent / "home").symlink_to(disk)
    consolidated(disk.parent / "home" / "run")
    assert not (disk / "run" / "pytorch_model_fsdp_0").exists()
