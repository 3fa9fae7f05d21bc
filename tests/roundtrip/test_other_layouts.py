"""Checkpoints of DLRover, TorchRec, ColossalAI and LeRobot beside the live weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import ckptkit
from ckptkit.core.errors import FormatError
from tests.live_truth import FIXTURES, copied, refuse, truth_of, written
from tests.tensor_images import images

STEPS = {
    "dlrover_fsdp": ("40", "DLRover"),
    "torchrec_tables": ("step_3", ""),
    "colossalai_stages": ("epoch-0_step-10", "torch.save"),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_newest_step_is_bit_equal_to_the_live_model(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    assert written(source, tmp_path / "out") == truth_of(case)
    found = ckptkit.inspect(source)
    step, writer = STEPS[case]
    assert found.path == str(source / step)
    assert found.writer == writer or not writer
    assert ckptkit.verify(source).ok


def test_the_optimizer_of_a_flash_checkpoint_is_read_by_name(tmp_path: Path) -> None:
    source = FIXTURES / "dlrover_fsdp" / "checkpoint"
    ckptkit.convert(source, tmp_path / "out", to="torch", optimizer=True, names="live")
    saved = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    assert saved["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["state"]["0.weight"]["exp_avg"].shape == (25, 16)


def test_elements_of_other_lengths_are_refused(tmp_path: Path) -> None:
    run = copied("dlrover_fsdp", tmp_path / "run")
    path = run / "40" / ".metadata"
    data = path.read_bytes()
    assert b"float32" in data
    path.write_bytes(data.replace(b"float32", b"float64"))
    refuse("lengths of their elements", run, tmp_path / "out", FormatError)


def test_the_step_that_dlrover_committed_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        (run / str(step)).mkdir(parents=True)
        torch.save({"a.weight": torch.full((3, 3), float(step))}, run / str(step) / "rank_0.pt")
    (run / "dlrover_latest.txt").write_text("10")
    assert ckptkit.inspect(run).path == str(run / "10")
    assert "'dlrover_latest.txt' names 10" in " ".join(ckptkit.inspect(run).notes)
    (run / "dlrover_latest.txt").unlink()
    assert ckptkit.inspect(run).path == str(run / "20")


def test_a_file_of_composer_has_configuration_and_tokenizer_inside(tmp_path: Path) -> None:
    source = FIXTURES / "composer_monolithic" / "checkpoint"
    ckptkit.consolidate(source, tmp_path / "out")
    assert images(tmp_path / "out" / "model.safetensors") == truth_of("composer_monolithic")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
    found = ckptkit.inspect(source)
    assert (found.writer, found.version, found.step) == ("Composer", "0.32.1", 2)


def test_what_is_proposed_with_an_optimizer_works_with_it(tmp_path: Path) -> None:
    source = FIXTURES / "composer_monolithic" / "checkpoint"
    caught = refuse("names begin with 'model.'", source, tmp_path / "out", optimizer=True)
    assert str(caught.value.hint) == (
        "leave out --optimizer to have the weights alone; or pass --names live to write the tensors"
        " as they are"
    )
    ckptkit.consolidate(source, tmp_path / "out", optimizer=True, names="live")
    assert len(ckptkit.inspect(tmp_path / "out").trees) >= 1


def test_a_stage_whose_file_is_lost_is_missed(tmp_path: Path) -> None:
    run = copied("colossalai_stages", tmp_path / "run")
    shutil.rmtree(run / "epoch-0_step-5")
    (run / "epoch-0_step-10" / "modeling" / "pytorch_model-stage-00002-shard-00001.bin").unlink()
    refuse("pytorch_model-stage-00002-shard-00001.bin", run, tmp_path / "out")


def test_a_policy_of_lerobot_is_taken_from_its_newest_step(tmp_path: Path) -> None:
    """Laid out as lerobot 0.4.4 does (utils/train_utils.py, `save_checkpoint`)."""
    run = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        policy, state = (
            run / f"{step:06d}" / "pretrained_model",
            run / f"{step:06d}" / "training_state",
        )
        for folder in (policy, state):
            folder.mkdir(parents=True)
        save_file({"model.a.weight": torch.full((2, 2), step)}, policy / "model.safetensors")
        normalizer = "policy_preprocessor_step_5_normalizer_processor.safetensors"
        save_file({"normalizer.mean": torch.zeros(3)}, policy / normalizer)
        (policy / "config.json").write_text('{"type": "act"}')
        steps = [{"registry_name": "normalizer_processor", "state_file": normalizer}]
        preprocessor = {"name": "policy_preprocessor", "steps": steps}
        (policy / "policy_preprocessor.json").write_text(json.dumps(preprocessor))
        (state / "training_step.json").write_text(json.dumps({"step": step}))
        save_file({"state.0.exp_avg": torch.zeros(2, 2)}, state / "optimizer_state.safetensors")
        save_file({"torch_rng_state": torch.zeros(5)}, state / "rng_state.safetensors")
    (run / "last").symlink_to("000020")
    found = written(tmp_path / "run", tmp_path / "out")
    assert found == images(run / "000020" / "pretrained_model" / "model.safetensors")
    assert ckptkit.inspect(tmp_path / "run").step == 20
