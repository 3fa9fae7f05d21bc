"""Checkpoints of torchtitan's models beside what its own adapters make of them.

The way back, `--to torchtitan`, is in test_for_frameworks.py.
`fixtures/generators/torchtitan_models.py` made them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.live_truth import refuse
from tests.tensor_images import stored_in_dcp

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("torchtitan_family_*/config.json"))
LLAMA, MOE = FIXTURES / "torchtitan_family_llama", FIXTURES / "torchtitan_family_qwen3_moe"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
Tensors = dict[str, torch.Tensor]
OF_ONE_VERSION = ("llama4", "qwen3_5", "qwen3_5_moe", "kimi", "muse_glimmer")
# What torchtitan up to 0.2 called the same tensors.
EARLIER = (
    ("qkv_linear.", ""),
    ("lm_head.", "output."),
    ("routed_experts.inner_experts.", "experts."),
    ("_EFD", ""),
    ("_EDF", ""),
    ("_EGD", ""),
    ("_EG", ""),
    ("_ED", ""),
    ("expert_bias_E", "expert_bias"),
)


def saved(folder: Path, state: Mapping[str, Any]) -> Path:
    dcp.save(dict(state), checkpoint_id=folder / "step-10", no_dist=True)
    return folder


def differences(got: Tensors, truth: Tensors) -> list[str]:
    shared = got.keys() & truth.keys()
    return sorted(got.keys() ^ truth.keys()) + [
        name
        for name in sorted(shared)
        if got[name].dtype != truth[name].dtype or not torch.equal(got[name], truth[name])
    ]


def converted(source: Path, case: Path, out: Path, **options: Any) -> list[str]:
    """Returns what differs from the truth of a case."""
    ckptkit.consolidate(source, out, base=case, **options)
    return differences(load_file(out / "model.safetensors"), load_file(case / "truth.safetensors"))


@pytest.mark.parametrize("model", [model for model in MODELS if not model.endswith(OF_ONE_VERSION)])
@pytest.mark.quick("torchtitan_family_llama_tied", "torchtitan_family_qwen3_moe")
def test_names_of_earlier_versions_are_taken(model: str, tmp_path: Path) -> None:
    case, state = FIXTURES / model, {}
    for name, tensor in stored_in_dcp(case / "checkpoint/step-10").items():
        for now, before in EARLIER:
            name = name.replace(now, before)  # noqa: PLW2901
        state[name] = tensor
    assert "output.weight" in state
    source = saved(tmp_path / "source", {**state, "freqs_cis": torch.zeros(3, 2)})
    assert converted(source, case, tmp_path / "out") == []


def test_weights_are_taken_out_of_a_whole_step(tmp_path: Path) -> None:
    """As `CheckpointManager` lays out a step that is not of the model only."""
    state = stored_in_dcp(LLAMA / "checkpoint/step-10")
    moments = {f"state.{name}.exp_avg": tensor * 2 for name, tensor in state.items()}
    rest = {
        "optimizer": {**moments, **{f"param_groups.{name}.lr": 0.1 for name in state}},
        "lr_scheduler": {"last_epoch": 10},
        "dataloader": {"dp_rank_0": b"state", "world_size": 1},
        "train_state": {"step": torch.tensor(10), "ntokens_seen": torch.tensor(240)},
    }
    source = saved(tmp_path / "source", {**state, **rest})
    assert converted(source, LLAMA, tmp_path / "out") == []


def test_the_command_finds_the_map_by_itself_and_takes_a_name(tmp_path: Path) -> None:
    for number, options in enumerate([[], ["--map", "torchtitan-qwen3-moe"]]):
        out = tmp_path / str(number)
        result = run_command("consolidate", MOE / "checkpoint", out, "--base", MOE, *options)
        assert result.returncode == 0, result.stderr
        assert "torchtitan-qwen3-moe" in result.stdout + result.stderr
        truth = load_file(MOE / "truth.safetensors")
        assert differences(load_file(out / "model.safetensors"), truth) == []


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    result = run_command("consolidate", MOE / "checkpoint", tmp_path / "out", "--base", MOE)
    said = " ".join((result.stdout + result.stderr).split())
    assert "left out: 'layers.0.moe.expert_bias_E'" in said


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    case = FIXTURES / "torchtitan_family_deepseek_v3"
    further = {"mtp_layers.0.eh_proj.weight": torch.ones(2, 4)}
    source = saved(tmp_path / "source", {**stored_in_dcp(case / "checkpoint/step-10"), **further})
    assert converted(source, case, tmp_path / "out") == []


def test_other_heads_of_llama_are_refused(tmp_path: Path) -> None:
    """A wrong number would put the rows of q and k in another order, silently."""
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((LLAMA / "config.json").read_text())
    for heads in (2, 8, 3):
        changed = {"num_attention_heads": heads, "num_key_value_heads": heads}
        (base / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CkptkitError, match=r"does not consist of|do not divide"):
            ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", base=base)


@pytest.mark.parametrize("lacking", ["layers.1.moe.router.gate.weight", "norm.weight"])
def test_a_tensor_that_is_missing_is_named(lacking: str, tmp_path: Path) -> None:
    state = stored_in_dcp(MOE / "checkpoint/step-10")
    del state[lacking]
    source = saved(tmp_path / "source", state)
    refuse(r"layer 1 is missing|has no tensor for", source, tmp_path / "out", base=MOE)


def test_names_are_kept_where_no_map_is_wanted(tmp_path: Path) -> None:
    ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", map="none")
    assert (
        differences(
            load_file(tmp_path / "out/model.safetensors"),
            stored_in_dcp(LLAMA / "checkpoint/step-10"),
        )
        == []
    )
