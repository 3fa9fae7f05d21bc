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
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.live_truth import refuse

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


def stored(case: Path) -> Tensors:
    """The tensors of a checkpoint, as torch's own reader gives them."""
    folder = case / "checkpoint/step-10"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


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


@pytest.mark.parametrize("model", MODELS)
def test_a_model_becomes_what_torchtitans_adapter_makes_of_it(model: str, tmp_path: Path) -> None:
    case, out = FIXTURES / model, tmp_path / "out"
    assert converted(case / "checkpoint", case, out) == []
    manifest = json.loads((out / "ckptkit.json").read_text())
    assert "map torchtitan-" in json.dumps(manifest)
    ckptkit.verify(out)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_what_was_written(model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    case, out = FIXTURES / model, tmp_path / "out"
    ckptkit.consolidate(case / "checkpoint", out, base=case)
    sees_images = (json.loads((case / "config.json").read_text())).get("vision_config")
    kind = "AutoModelForImageTextToText" if sees_images else "AutoModelForCausalLM"
    _, report = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


@pytest.mark.parametrize("model", [model for model in MODELS if not model.endswith(OF_ONE_VERSION)])
def test_names_of_earlier_versions_are_taken(model: str, tmp_path: Path) -> None:
    case, state = FIXTURES / model, {}
    for name, tensor in stored(case).items():
        for now, before in EARLIER:
            name = name.replace(now, before)  # noqa: PLW2901
        state[name] = tensor
    assert "output.weight" in state
    source = saved(tmp_path / "source", {**state, "freqs_cis": torch.zeros(3, 2)})
    assert converted(source, case, tmp_path / "out") == []


def test_weights_are_taken_out_of_a_whole_step(tmp_path: Path) -> None:
    """As `CheckpointManager` lays out a step that is not of the model only."""
    state = stored(LLAMA)
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


def test_slices_write_the_same_model(tmp_path: Path) -> None:
    whole, sliced = tmp_path / "whole", tmp_path / "sliced"
    options = ["--base", MOE, "--max-shard-size", "8KB"]
    assert run_command("consolidate", MOE / "checkpoint", whole, *options).returncode == 0
    for number in range(2):
        part = ["--slice", f"{number}/2"]
        result = run_command("consolidate", MOE / "checkpoint", sliced, *options, *part)
        assert result.returncode == 0, result.stderr
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        assert (sliced / name).read_bytes() == (whole / name).read_bytes()


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    result = run_command("consolidate", MOE / "checkpoint", tmp_path / "out", "--base", MOE)
    said = " ".join((result.stdout + result.stderr).split())
    assert "left out: 'layers.0.moe.expert_bias_E'" in said


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    case = FIXTURES / "torchtitan_family_deepseek_v3"
    further = {"mtp_layers.0.eh_proj.weight": torch.ones(2, 4)}
    source = saved(tmp_path / "source", {**stored(case), **further})
    assert converted(source, case, tmp_path / "out") == []


REFUSED: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a family that torchtitan does not have": (
        {"model_type": "bloom"},
        {},
        "for the model type .bloom.",
    ),
    "a map of another family": ({}, {"map": "torchtitan-qwen3"}, "no rule of map .* takes tensor"),
    "further experts": ({"num_experts": 5}, {}, "expected 5 along the axis of 'expert'"),
    "fewer experts": ({"num_experts": 3}, {}, "expected 3 along the axis of 'expert'"),
    "further layers": ({"num_hidden_layers": 3}, {}, "layer 2 is missing"),
    "fewer layers": ({"num_hidden_layers": 1}, {}, "layer 1 is one too many"),
    "wider experts": ({"moe_intermediate_size": 24}, {}, "other shapes than the model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    changed, options, message = REFUSED[what]
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((MOE / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changed))
    refuse(message, MOE / "checkpoint", tmp_path / "out", base=base, **options)


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
    state = stored(MOE)
    del state[lacking]
    source = saved(tmp_path / "source", state)
    refuse(r"layer 1 is missing|has no tensor for", source, tmp_path / "out", base=MOE)


def test_without_a_configuration_it_is_refused_and_names_can_be_kept(tmp_path: Path) -> None:
    refuse(r"names of torchtitan .* no configuration", LLAMA / "checkpoint", tmp_path / "out")
    ckptkit.consolidate(LLAMA / "checkpoint", tmp_path / "out", map="none")
    assert differences(load_file(tmp_path / "out/model.safetensors"), stored(LLAMA)) == []
