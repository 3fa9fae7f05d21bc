"""Steps that ckptkit saved, as `inspect`, `verify` and `consolidate` see them."""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptkit
from ckptkit.core.manifest import FileRecord, Manifest
from ckptkit_cli.main import main

STOCK = "accelerate_fsdp2_tied_with_config"
MODEL = "pytorch_model_fsdp_0"


def sign(step: Path, *, number: int, layout: str = "accelerate") -> Path:
    """Puts a manifest over whatever lies in a step, as the commit does."""
    files = {}
    for path in sorted(path for path in step.rglob("*") if path.is_file()):
        data = path.read_bytes()
        digest = "" if path.suffix == ".distcp" else f"crc32:{zlib.crc32(data):08x}"
        files[path.relative_to(step).as_posix()] = FileRecord(len(data), digest)
    source = {
        "step": number,
        "world_size": 2,
        "layout": layout,
        "metrics": {"loss": 0.25},
        "saved_at": "2026-11-21T08:00:00Z",
        "attempt": "a1",
    }
    manifest = Manifest("training", source, {}, {"ckptkit": "0.1.0"}, {}, files=files)
    (step / "ckptkit.json").write_bytes(manifest.to_json())
    return step


SaveStep = Callable[..., Path]


@pytest.fixture
def save_step(tmp_path: Path, real_checkpoints: Path) -> SaveStep:
    """Makes `run/checkpoint-N`; `signed=False` leaves out its manifest."""

    def save(number: int, *, signed: bool = True) -> Path:
        step = tmp_path / f"run/checkpoint-{number}"
        shutil.copytree(real_checkpoints / STOCK / "checkpoint", step)
        (step / "ckptkit").mkdir()
        for path in (*step.glob("*.json"), *step.glob("*.jinja")):
            path.rename(step / "ckptkit" / path.name)
        (step / "ckptkit/run.json").write_text("{}")
        torch.save({"at": 3}, step / "ckptkit/dataloader_0_rank_0.bin")
        return sign(step, number=number) if signed else step

    return save


@pytest.fixture
def dcp_step(tmp_path: Path) -> Path:
    """A step of `layout="dcp"`: everything in one DCP directory, by the caller's own keys."""
    step = tmp_path / "run/checkpoint-7"
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last_epoch": 4},
        "rng": {"0": {"step": 7, "torch_manual_seed": torch.get_rng_state()}},
        "dataloader": {"0": [1, "two"]},
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=str(step), no_dist=True)
    (step / "ckptkit").mkdir()
    (step / "ckptkit/run.json").write_text("{}")
    return sign(step, number=7, layout="dcp")


def test_inspect_tells_what_the_manifest_knows(save_step: SaveStep) -> None:
    found = ckptkit.inspect(save_step(500).parent)
    assert (found.writer, found.step, found.world_size) == ("ckptkit", 500, 2)
    assert (found.layout, found.metrics) == ("accelerate", {"loss": 0.25})
    assert found.saved_at == "2026-11-21T08:00:00Z"
    assert found.problems == ()
    assert found.notes == ()
    assert found.model_type == "llama"


def test_inspects_page_and_json_show_it(
    save_step: SaveStep, capfd: pytest.CaptureFixture[str]
) -> None:
    step = str(save_step(500))
    assert main(["inspect", step]) == 0
    page = capfd.readouterr().out
    for line in (", layout accelerate", "2026-11-21T08:00:00Z", "loss 0.25"):
        assert line in page
    assert main(["inspect", step, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["metrics"] == {"loss": 0.25}
    assert document["problems"] == []
    assert {"format", "path", "world_size", "step", "tensors"} <= document.keys()


def test_a_stock_checkpoint_has_none_of_it(real_checkpoints: Path) -> None:
    found = ckptkit.inspect(real_checkpoints / STOCK / "checkpoint")
    assert (found.layout, found.metrics, found.saved_at) == (None, {}, None)
    assert found.writer.startswith("accelerate")


def test_a_step_without_its_manifest_is_passed_over(save_step: SaveStep) -> None:
    run = save_step(1).parent
    save_step(2, signed=False)
    found = ckptkit.inspect(run)
    assert found.step == 1
    (note,) = found.notes
    assert note.startswith("checkpoint-2 was passed over: 'ckptkit.json' is not there, and it is")
    assert note.endswith("written last: the save was not finished")


def test_a_damaged_manifest_counts_as_none(save_step: SaveStep) -> None:
    run = save_step(1).parent
    (save_step(2) / "ckptkit.json").write_text("{")
    found = ckptkit.inspect(run)
    assert found.step == 1
    assert "checkpoint-2 was passed over: 'ckptkit.json' not a ckptkit manifest" in found.notes[0]


def test_an_unfinished_step_alone_is_shown_with_its_problem(save_step: SaveStep) -> None:
    found = ckptkit.inspect(save_step(2, signed=False).parent)
    assert found.step == 2
    assert [problem.where for problem in found.problems] == ["checkpoint-2/ckptkit.json"]
    assert not ckptkit.verify(found.path).ok


def test_working_folders_are_never_looked_into(save_step: SaveStep) -> None:
    step = save_step(1)
    shutil.copytree(step, step.with_name(".checkpoint-2.ckptkit-00ff"))
    found = ckptkit.inspect(step.parent)
    assert found.step == 1
    assert found.notes == ()


def test_stock_runs_without_any_manifest_work_as_ever(save_step: SaveStep) -> None:
    steps = [save_step(number, signed=False) for number in (1, 2)]
    for step in steps:
        (step / "ckptkit/run.json").unlink()
    found = ckptkit.inspect(steps[0].parent)
    assert found.step == 2
    assert found.problems == ()


def test_consolidate_needs_nothing_else(save_step: SaveStep, tmp_path: Path) -> None:
    step = save_step(500)
    manifest = ckptkit.consolidate(step, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert "lm_head.weight" in manifest.tied
    assert manifest.source["step"] == 500


def test_a_layout_of_one_directory_consolidates_to_the_model(
    dcp_step: Path, tmp_path: Path
) -> None:
    found = ckptkit.inspect(dcp_step.parent)
    assert (found.writer, found.layout, found.step) == ("ckptkit", "dcp", 7)
    assert {line.name for line in found.tensors if line.part == "model"} == {"weight", "bias"}
    assert {line.part for line in found.tensors} == {"model", "optimizer", "other"}
    manifest = ckptkit.consolidate(dcp_step, tmp_path / "out")
    assert sorted(manifest.tensors) == ["bias", "weight"]


def test_verify_says_what_it_proved(save_step: SaveStep, capfd: pytest.CaptureFixture[str]) -> None:
    step = save_step(500)
    report = ckptkit.verify(step)
    assert report.ok
    assert report.unverified == ()
    count = len([path for path in step.rglob("*") if path.is_file()]) - 1
    data = len(list(step.rglob("*.distcp")))
    objects, files = report.proven
    assert objects == "objects beside the tensors that have their CRC-32: 10"
    assert files.startswith(f"files that have their size in the manifest: {count}; ")
    assert files.endswith(f" that have their CRC-32: {count - data}")
    assert main(["verify", str(step)]) == 0
    page = capfd.readouterr().out
    assert all(line in page for line in report.proven)


@pytest.mark.slow
def test_every_byte_of_data_and_of_objects_is_proven(dcp_step: Path) -> None:
    (file,) = dcp_step.glob("*.distcp")
    data = file.read_bytes()
    for name in (b"archive/data.pkl", b"archive/data/0"):
        start = -1
        for _ in range(data.count(b"PK\3\4")):
            start = data.find(b"PK\3\4", start + 1)
            if data[start + 30 : start + 30 + len(name)] != name:
                continue
            skipped = int.from_bytes(data[start + 28 : start + 30], "little")
            at = start + 30 + len(name) + skipped
            damaged = bytearray(data)
            damaged[at] ^= 1
            file.write_bytes(damaged)
            assert not ckptkit.verify(dcp_step).ok, (name, start)
    file.write_bytes(data)
    assert ckptkit.verify(dcp_step).ok


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("random_states_1.pkl", "missing-file"),
        ("ckptkit/dataloader_0_rank_0.bin", "missing-file"),
        ("ckptkit/config.json", "missing-file"),
    ],
)
def test_a_missing_file_is_a_problem(save_step: SaveStep, name: str, code: str) -> None:
    step = save_step(5)
    (step / name).unlink()
    report = ckptkit.verify(step)
    assert [(p.code, p.where) for p in report.problems] == [(code, name)]
    assert [(p.code, p.where) for p in ckptkit.inspect(step).problems] == [(code, name)]
    assert main(["verify", str(step)]) == 6


def test_a_small_file_that_changed_or_was_cut_is_a_problem(save_step: SaveStep) -> None:
    step = save_step(5)
    states = step / "random_states_0.pkl"
    data = states.read_bytes()
    states.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = ckptkit.verify(step).problems
    assert (problem.code, problem.where) == ("checksum-mismatch", "random_states_0.pkl")
    states.write_bytes(data[:-1])
    (problem,) = ckptkit.verify(step).problems
    assert (problem.code, problem.where) == ("truncated-file", "random_states_0.pkl")


def test_verify_takes_the_newest_whole_step_of_a_run(save_step: SaveStep) -> None:
    run = save_step(1).parent
    save_step(2, signed=False)
    report = ckptkit.verify(run)
    assert report.ok
    assert report.path.endswith("checkpoint-1")


def test_two_optimizers_are_both_verified(save_step: SaveStep) -> None:
    step = save_step(1, signed=False)
    shutil.copytree(step / "optimizer_0", step / "optimizer_1")
    shutil.copytree(step / MODEL, step / "pytorch_model_fsdp_1")
    sign(step, number=1)
    assert ckptkit.verify(step).proven[0].endswith("CRC-32: 20")
