"""Checkpoints of Megatron-FSDP beside the weights of all ranks."""

from __future__ import annotations

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from tests.live_truth import refuse

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DENSE, MOE = "megatron_fsdp_llama_tp2", "megatron_fsdp_gpt_oss_ep2"
GROUPED = re.compile(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")


def is_truth(out: Path, name: str) -> bool:
    got = load_file(out / "model.safetensors")
    truth = load_file(FIXTURES / name / "truth.safetensors")
    return got.keys() == truth.keys() and all(
        got[n].dtype == tensor.dtype and torch.equal(got[n], tensor) for n, tensor in truth.items()
    )


def test_a_run_says_who_wrote_it_and_on_how_many_ranks() -> None:
    found = ckptkit.inspect(FIXTURES / DENSE / "checkpoint")
    assert found.writer.startswith("Megatron-Core fsdp_dtensor, torch.distributed.checkpoint")
    assert (found.step, found.world_size, found.problems) == (7, 4, ())
    assert [(d.name, d.size) for d in found.mesh] == [("tensor", 2), ("pipeline", 1), ("expert", 1)]


def save(path: Path, weights: dict[str, torch.Tensor], **values: Any) -> Path:
    """As Megatron-LM saves them, on one rank and without DTensors."""
    args = argparse.Namespace(expert_model_parallel_size=2)
    model = {f"module.{name}": tensor for name, tensor in weights.items()}
    plain = {"args": args, "checkpoint_version": 3.0, "iteration": 7, **values}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        dcp.save({"model": model, **plain}, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    with ckptkit.open(FIXTURES / MOE / "checkpoint", map="none") as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


def grouped(name: str) -> str:
    """The name where Transformer Engine holds the experts of a layer together."""
    match = re.fullmatch(r"(.*)(_[wv])", name)
    stem, half = (match[1], match[2]) if match else (name, "")
    return GROUPED.sub(r"\2\1", stem) + half


def test_grouped_experts_are_numbered_at_the_end_of_their_names(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    renamed = {grouped(name): tensor for name, tensor in weights.items()}
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight3_w" in renamed
    path = save(tmp_path / "iter_0000007", renamed)
    ckptkit.consolidate(path, tmp_path / "out", base=FIXTURES / MOE)
    assert is_truth(tmp_path / "out", MOE)


def test_sizes_are_read_from_a_run_configuration(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = save(tmp_path / "iter_0000007", weights, args=None, iteration=9)
    (path / "run_config.yaml").write_text("model:\n  expert_model_parallel_size: 2\n")
    found = ckptkit.inspect(path)
    assert found.writer.startswith("Megatron-Bridge, Megatron-Core fsdp_dtensor")
    assert ([(d.name, d.size) for d in found.mesh], found.step) == ([("expert", 2)], 9)


REFUSED = {
    "one half": (("linear_fc1.weight_w",), "linear_fc1.weight_v"),
    "an expert": (("local_experts.2.",), "expert|of 4|2"),
    "a projection": (("linear_proj.weight",), "linear_proj.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_missing_is_refused(
    what: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    parts, message = REFUSED[what]
    rest = {n: t for n, t in weights.items() if not any(part in n for part in parts)}
    assert len(rest) < len(weights)
    path = save(tmp_path / "iter_0000007", rest)
    refuse(message, path, tmp_path / "out", base=FIXTURES / MOE)


def test_another_iteration_than_that_of_the_folder_is_a_problem(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = save(tmp_path / "iter_0000009", weights)
    (problem,) = ckptkit.inspect(path).problems
    assert problem.message == "is of iteration 7, in the folder 'iter_0000009'"
