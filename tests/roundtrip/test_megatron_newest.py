"""Megatron-Core 0.19: HybridModel, layers for further tokens, Mamba, gates.

`fixtures/generators/megatron_newest.py` made them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptkit
from ckptkit.training import load_into
from tests.command_line import run_command
from tests.live_truth import base_with, is_truth, refuse
from tests.tensor_images import stored_in_dcp

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = sorted(
    path.name for kind in ("hybrid", "mtp") for path in FIXTURES.glob(f"megatron_{kind}_*")
)
LLAMA = FIXTURES / "megatron_hybrid_llama_pp2"
GLM = FIXTURES / "megatron_mtp_glm4_moe_pp2"
DEEPSEEK = FIXTURES / "megatron_hybrid_deepseek_v3"
BAMBA = FIXTURES / "megatron_hybrid_bamba"
NEMOTRON = FIXTURES / "megatron_hybrid_nemotron_h_pp2"
QWEN = FIXTURES / "megatron_mtp_qwen3_next"


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_what_the_live_ranks_held(case: str, tmp_path: Path) -> None:
    folder, out = FIXTURES / case, tmp_path / "out"
    ckptkit.consolidate(folder / "checkpoint", out, base=folder)
    assert is_truth(out, folder)


@pytest.mark.parametrize("case", CASES)
def test_the_way_back_gives_the_same_model(case: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(FIXTURES / case / "truth.safetensors", model / "model.safetensors")
    shutil.copy(FIXTURES / case / "config.json", model)
    ckptkit.convert(model, tmp_path / "there", to="megatron")
    ckptkit.consolidate(tmp_path / "there", tmp_path / "back")
    assert is_truth(tmp_path / "back", FIXTURES / case)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", [GLM, NEMOTRON, QWEN])
def test_the_way_back_has_the_tensors_that_megatron_core_stored(case: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(case / "truth.safetensors", model / "model.safetensors")
    shutil.copy(case / "config.json", model)
    ckptkit.convert(model, tmp_path / "out", to="megatron")
    theirs = stored_in_dcp(case / "checkpoint/iter_0000007")
    ours = stored_in_dcp(tmp_path / "out" / "release")
    stacked = {name for name in theirs if re.sub(r"layers\.\d+", "layers", name) in ours}
    assert theirs.keys() <= {*ours, *stacked}
    for name in theirs.keys() & ours.keys():
        rows = slice(0, len(ours[name]))  # without the padding of vocabularies
        if name.endswith("out_norm.weight"):  # to which 1 was added, and taken away again
            torch.testing.assert_close(ours[name], theirs[name])
        else:
            assert torch.equal(ours[name], theirs[name][rows]), name


@pytest.mark.parametrize("case", [DEEPSEEK, QWEN, NEMOTRON])
def test_a_live_model_is_filled_without_layers_for_further_tokens(
    case: Path, tmp_path: Path
) -> None:
    ckptkit.consolidate(case / "checkpoint", tmp_path / "out", base=case)
    auto = transformers.AutoModelForCausalLM
    expected = auto.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.device("meta"):
        model = auto.from_config(expected.config, dtype=expected.dtype)
    load_into(model, case / "checkpoint")
    found = model.state_dict()
    assert all(torch.equal(found[n], value) for n, value in expected.state_dict().items())


def logits_of_megatron() -> ModuleType:
    path = FIXTURES / "generators/megatron_newest_logits.py"
    spec = importlib.util.spec_from_file_location("megatron_newest_logits", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_megatron_core_computed(case: str, tmp_path: Path) -> None:
    folder, out = FIXTURES / case, tmp_path / "out"
    ckptkit.consolidate(folder / "checkpoint", out, base=folder)
    theirs = load_file(folder / "logits.safetensors")
    found = logits_of_megatron().compute(str(out), theirs.pop("input_ids"))
    assert found.keys() == theirs.keys()
    for name, logits in found.items():
        of_megatron = theirs[name][:, : logits.shape[1]]
        assert (logits - of_megatron).abs().max() < 1e-5 * of_megatron.abs().max(), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("pattern", ["'*-|*-'", '"*-*-"', "*-*-*-"])
def test_a_pattern_in_a_run_configuration_counts_the_layers(pattern: str, tmp_path: Path) -> None:
    tensors = stored_in_dcp(LLAMA / "checkpoint/iter_0000007")
    source = tmp_path / "iter_0000007"
    torch.distributed.checkpoint.save(tensors, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    text = f"model:\n  hybrid_layer_pattern: {pattern}\n  num_layers: 4\n"
    (source / "run_config.yaml").write_text(text)
    out = tmp_path / "out"
    if pattern == "*-*-*-":
        message = "num_hidden_layers is 3 in the checkpoint's own settings, 2 in the configuration"
        refuse(message, source, out, base=LLAMA)
    else:
        ckptkit.consolidate(source, out, base=LLAMA)
        assert is_truth(out, LLAMA)


def test_a_common_state_inside_of_the_checkpoint_and_digests_are_read(tmp_path: Path) -> None:
    source = tmp_path / "run"
    shutil.copytree(LLAMA / "checkpoint", source)
    with ckptkit.open(source) as checkpoint:
        run = checkpoint.run
    assert run.step == 7
    assert dict(run.mesh) == {"tensor": 1, "pipeline": 2, "expert": 1}
    assert ckptkit.verify(source).ok
    path = source / "iter_0000007" / "metadata.json"
    path.write_text(path.read_text() + " ")
    assert not ckptkit.verify(source).ok


WRONG: dict[str, tuple[Path, dict[str, Any], str]] = {
    "more layers than the pattern": (
        *(LLAMA, {"num_hidden_layers": 3}),
        "num_hidden_layers is 2.* in the checkpoint's own settings, 3 in the configuration",
    ),
    "as many layers as halves": (
        *(LLAMA, {"num_hidden_layers": 4}),
        "num_hidden_layers is 2.* in the checkpoint's own settings, 4 in the configuration",
    ),
    "other layers of Mamba": (
        *(NEMOTRON, {"mamba_num_heads": 8}),
        r"mixer.in_proj.weight.z.*a part has shape \[32, 16\].*expected \[64, 16\]",
    ),
    "another order of Mamba and attention": (
        *(NEMOTRON, {"layers_block_type": ["full_attention", "mlp", "linear_attention", "moe"]}),
        "would be missing",
    ),
    "more layers of Mamba": (
        *(BAMBA, {"num_hidden_layers": 3}),
        "num_hidden_layers is 2 in the checkpoint's own settings, 3",
    ),
    "more layers for further tokens": (
        *(GLM, {"num_nextn_predict_layers": 2}),
        "has 1 mtp layers, and num_nextn_predict_layers is 2 in the configuration",
    ),
    "no Mamba": (
        *(NEMOTRON, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        r"pattern '\?-\*-': 0 is missing or of another kind, expected '\*'",
    ),
    "no layers for further tokens": (
        *(DEEPSEEK, {"num_nextn_predict_layers": 0}),
        "has 1 mtp layers, and num_nextn_predict_layers is 0 in the configuration",
    ),
    "layers for further tokens that it does not count": (
        *(DEEPSEEK, {"num_nextn_predict_layers": None}),
        "has 1 mtp layers, and num_nextn_predict_layers is not in the configuration",
    ),
    "other heads of keys": (
        *(QWEN, {"linear_num_key_heads": 4}),
        r"in_proj.weight.*a part has shape",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_configuration_of_another_model_is_refused(what: str, tmp_path: Path) -> None:
    case, changed, message = WRONG[what]
    base = base_with(tmp_path / "base", case, **changed)
    refuse(f"(?s){message}", case / "checkpoint", tmp_path / "out", base=base)


@pytest.mark.parametrize("count", [0, None])
@pytest.mark.parametrize("case", [GLM, DEEPSEEK])
def test_layers_for_further_tokens_are_left_out_as_the_message_says(
    case: Path, count: int | None, tmp_path: Path
) -> None:
    base = base_with(tmp_path / "base", case, num_nextn_predict_layers=count)
    caught = refuse(
        "leave them out with --exclude 'mtp.*'", case / "checkpoint", tmp_path / "out", base=base
    )
    assert "mtp" in str(caught.value)
    out = tmp_path / "without"
    ckptkit.consolidate(case / "checkpoint", out, base=base, exclude=("mtp.*",))
    truth, found = load_file(case / "truth.safetensors"), load_file(out / "model.safetensors")
    layers = json.loads((case / "config.json").read_text())["num_hidden_layers"]
    assert {*truth} - {*found} == {n for n in truth if f"model.layers.{layers}." in n}
    assert all(torch.equal(found[name], truth[name]) for name in found)


def test_promised_layers_for_further_tokens_that_nobody_stored_are_named(tmp_path: Path) -> None:
    out, base = str(tmp_path / "out"), str(GLM)
    done = run_command(
        "consolidate", str(GLM / "checkpoint"), out, "--base", base, "--exclude", "mtp.*"
    )
    assert "promises 1 layer for further tokens" in done.stderr


LOST = {
    "an expert of a further layer": "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1",
    "the projection": "mtp.layers.0.eh_proj.weight",
    "attention of a further layer": "mtp.layers.0.transformer_layer.self_attention.linear_qkv.w",
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_further_layer_that_is_not_whole_is_refused(what: str, tmp_path: Path) -> None:
    tensors = stored_in_dcp(GLM / "checkpoint/iter_0000007")
    lost = next(name for name in tensors if name.startswith(LOST[what]))
    if "expert" in what:
        tensors[lost] = tensors[lost][:-1].clone()
    else:
        del tensors[lost]
    source = tmp_path / "source"
    torch.distributed.checkpoint.save(tensors, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    refuse(
        "expected 4 along the axis of 'expert'|has no tensor", source, tmp_path / "out", base=GLM
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pattern_that_no_model_of_the_family_has_is_refused(tmp_path: Path) -> None:
    tensors = stored_in_dcp(LLAMA / "checkpoint/iter_0000007")
    swapped = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}
    moved = {
        re.sub(r"layers\.[12]\.", lambda found: swapped[found[0]], name): tensor
        for name, tensor in tensors.items()
    }
    source = tmp_path / "source"
    torch.distributed.checkpoint.save(moved, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    message = r"halves of layers in the pattern '\*\*--': 1 is '\*', expected '-'"
    refuse(message, source, tmp_path / "out", base=LLAMA)
    ckptkit.consolidate(source, tmp_path / "kept", map="none")
    assert load_file(tmp_path / "kept/model.safetensors").keys() == moved.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", [QWEN, GLM])
def test_any_family_is_read_with_a_number_for_each_half_of_a_layer(
    case: Path, tmp_path: Path
) -> None:
    def in_halves(name: str) -> str:
        second = re.search(r"\.(pre_)?mlp", name) is not None
        name = re.sub(
            r"^decoder\.layers\.(\d+)",
            lambda found: f"decoder.layers.{2 * int(found[1]) + second}",
            name.replace("decoder.final_layernorm", "decoder.final_norm"),
        )
        return name.replace(".transformer_layer.", f".mtp_model_layer.layers.{second:d}.")

    tensors = stored_in_dcp(case / "checkpoint/iter_0000007")
    source = tmp_path / "source"
    moved = {in_halves(name): tensor for name, tensor in tensors.items()}
    torch.distributed.checkpoint.save(moved, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    ckptkit.consolidate(source, tmp_path / "out", base=case)
    assert is_truth(tmp_path / "out", case)
