"""The folders that Megatron-LM, Megatron-Bridge, NeMo, slime and verl make around a checkpoint."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, CkptkitError, NotACheckpointError

LLAMA = Path(__file__).resolve().parents[3] / "fixtures" / "megatron_model_llama_tp2_pp2"
STEP = LLAMA / "checkpoint" / "iter_0000007"
TRACKER = "latest_checkpointed_iteration.txt"
NEMO = "llama--val_loss=2.40-step={}-consumed_samples=16000.0"


def put(folder: Path, iteration: int | None = None) -> Path:
    """Copies a real step, which says that it is of another iteration."""
    shutil.copytree(STEP, folder)
    if iteration is not None:
        torch.save({"iteration": iteration}, folder / "common.pt")
    return folder


def make_run(run: Path, tracked: str, *iterations: int) -> Path:
    for iteration in iterations:
        put(run / f"iter_{iteration:07d}", iteration)
    (run / TRACKER).write_text(tracked)
    return run


def notes_of(run: Path) -> str:
    return "\n".join(ckptkit.inspect(run).notes)


def test_the_step_that_the_tracker_names_is_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "5\n", 3, 5, 7)
    found = ckptkit.inspect(run)
    assert (found.path, found.step) == (str(run / "iter_0000005"), 5)
    assert f"iter_0000007 left alone: '{TRACKER}' names iter_0000005" in found.notes
    assert "iter_0000005 is used; 1 older step left alone" in found.notes
    assert ckptkit.inspect(run, select="iter_0000007").step == 7


def test_a_release_is_a_step_that_the_tracker_can_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "release", 5)
    put(run / "release", 0)
    assert ckptkit.inspect(run).path == str(run / "release")
    (run / TRACKER).write_text("5")
    found = ckptkit.inspect(run)
    assert (found.path, found.step) == (str(run / "iter_0000005"), 5)
    assert ckptkit.inspect(run, select="release").path == str(run / "release")
    (run / TRACKER).unlink()  # a folder of this name is then any other model
    with pytest.raises(AmbiguousSourceError, match="'release'"):
        ckptkit.inspect(run)


@pytest.mark.parametrize("tracked", ["9", "release", "", "7.5", "\u0667", "9" * 5000])
def test_a_tracker_that_names_nothing_is_mentioned(tracked: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "", 5, 7)
    (run / TRACKER).write_text(tracked, encoding="utf-8")
    found = ckptkit.inspect(run)
    assert found.step == 7
    assert any(TRACKER in note and "which is not there" in note for note in found.notes)


def test_an_incomplete_step_is_passed_over_though_the_tracker_names_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "7", 5, 7)
    (run / "iter_0000007" / "__0_0.distcp").unlink()
    found = ckptkit.inspect(run)
    assert found.step == 5
    assert any("iter_0000007 was passed over" in note for note in found.notes)
    (run / "iter_0000005" / ".metadata").unlink()
    with pytest.raises(NotACheckpointError, match="none of 2 steps is complete"):
        ckptkit.inspect(run)


def test_each_of_two_runs_has_a_tracker_of_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "5", 5, 7)
    make_run(tmp_path / "b", "7", 5, 7)
    assert ckptkit.inspect(tmp_path, select="a").step == 5
    assert ckptkit.inspect(tmp_path, select="b").step == 7


def test_a_run_of_megatron_bridge(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "7", 5, 7)
    step = run / "iter_0000007"
    config = "model:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\n"
    (step / "run_config.yaml").write_text(config)
    torch.save({"step": torch.tensor(7)}, step / "train_state.pt")
    torch.save({"step": torch.tensor(7)}, run / "latest_train_state.pt")
    (step / "hf").mkdir()
    shutil.copy(LLAMA / "config.json", step / "hf")
    shutil.copy(LLAMA / "truth.safetensors", step / "hf" / "model.safetensors")
    (step / "tokenizer").mkdir()
    (step / "tokenizer" / "tokenizer_config.json").write_text("{}")
    found = ckptkit.inspect(run)
    assert found.writer.startswith("Megatron-Bridge, Megatron-Core torch_dist")
    assert (found.step, found.model_type) == (7, "llama")
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 2), ("pipeline", 2)]
    ckptkit.consolidate(run, tmp_path / "out")
    out = {path.name for path in (tmp_path / "out").iterdir()}
    assert out == {"ckptkit.json", "config.json", "model.safetensors", "tokenizer_config.json"}
    ckptkit.consolidate(run, tmp_path / "copy", select="iter_0000007/hf")
    made, copied = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "copy"))
    assert made.keys() == copied.keys()
    assert all(torch.equal(made[name], copied[name]) for name in made)


def test_a_run_of_nemo(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (499, 999):
        step = run / "checkpoints" / NEMO.format(number)
        put(step / "weights", number)
        torch.save({"global_step": number}, step / "weights" / "common.pt")
        (step / "context" / "nemo_tokenizer").mkdir(parents=True)
        (step / "context" / "io.json").write_text("{}")
        (step / "context" / "nemo_tokenizer" / "tokenizer_config.json").write_text(
            json.dumps({"model_max_length": number})
        )
    found = ckptkit.inspect(run)
    assert found.path == str(run / "checkpoints" / NEMO.format(999))
    assert found.writer.startswith("NeMo 2, Megatron-Core torch_dist")
    assert found.step == 999
    older = run / "checkpoints" / NEMO.format(499) / "weights"
    assert ckptkit.inspect(older).step == 499
    ckptkit.consolidate(older, tmp_path / "out", base=LLAMA)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["model_max_length"] == 499
    (run / "checkpoints" / f"{NEMO.format(999)}-unfinished").touch()
    found = ckptkit.inspect(run)
    assert found.step == 499
    assert any("-unfinished' exists" in note for note in found.notes)


def test_a_run_of_slime(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "7", 7)
    args = argparse.Namespace(rollout_function_path="slime.rollout.sglang_rollout.generate")
    torch.save({"iteration": 7, "args": args}, run / "iter_0000007" / "common.pt")
    (run / "rollout").mkdir()
    torch.save({"sample_offset": 3}, run / "rollout" / "global_dataset_state_dict_7.pt")
    assert ckptkit.inspect(run).writer.startswith("slime, Megatron-Core torch_dist")


@pytest.mark.parametrize("models", [("actor",), ("actor", "critic")])
def test_a_run_of_verl(models: tuple[str, ...], tmp_path: Path) -> None:
    for step in (5, 7):
        for model in models:
            folder = tmp_path / "run" / f"global_step_{step}" / model
            put(folder / "dist_ckpt", step)
            (folder / "huggingface").mkdir()
            shutil.copy(LLAMA / "config.json", folder / "huggingface")
            (folder / "transformer_config.json").write_text("{}")
        torch.save({"_num_yielded": 1}, tmp_path / "run" / f"global_step_{step}" / "data.pt")
    (tmp_path / "run" / TRACKER).write_text("5")
    found = ckptkit.inspect(tmp_path / "run")
    assert found.writer.startswith("verl, Megatron-Core torch_dist")
    assert (found.step, found.model_type) == (5, "llama")
    select = "actor" if len(models) > 1 else None
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", select=select)
    made, truth = load_file(tmp_path / "out" / "model.safetensors"), LLAMA / "truth.safetensors"
    assert all(torch.equal(made[name], tensor) for name, tensor in load_file(truth).items())


STATED = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "num_layers": 2}
BESIDE = {
    "transformer_config.json": lambda values: json.dumps(values, indent=2),
    "context/model.yaml": lambda values: (
        "_target_: nemo.LlamaModel\nconfig:\n"
        + "".join(f"  {key}: {str(value).lower()}\n" for key, value in values.items())
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_verl_and_nemo_say_of_the_model_must_agree(name: str, tmp_path: Path) -> None:
    put(tmp_path / "step" / "dist_ckpt", 7)
    (tmp_path / "step" / "dist_ckpt" / "common.pt").unlink()
    beside = tmp_path / "step" / name
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(BESIDE[name](STATED | {"rotary_interleaved": False}))
    ckptkit.consolidate(tmp_path / "step", tmp_path / "out", base=LLAMA)
    for changed, message in (
        ({"num_query_groups": 4}, "num_key_value_heads is 4 in the checkpoint's own settings"),
        ({"rotary_interleaved": True}, "and the checkpoint says True"),
    ):
        beside.write_text(BESIDE[name]({**STATED, **changed}))
        with pytest.raises(CkptkitError, match=message):
            ckptkit.consolidate(tmp_path / "step", tmp_path / "refused", base=LLAMA)
    assert not (tmp_path / "refused").exists()
