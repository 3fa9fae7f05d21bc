"""Merges into packed bases: what no adapter touches keeps its bytes, the rest is packed again."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.plan.packed_forms import FORMS
from tests.command_line import run_command
from tests.reports.folders import change_quantization, notes_of
from tests.small_adapters import shake

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of what they replace
Tensors = dict[str, torch.Tensor]
Q_PROJ, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, an adapter of its q_proj and down_proj, and the model in every packed form."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "plain")
    save_adapter(model, folder / "adapter", target_modules=["q_proj", "down_proj"])
    for form in FORMS:
        ckptkit.consolidate(folder / "plain", folder / form, dtype=form)
    return folder


def save_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    chosen = LoraConfig(r=4, lora_alpha=2, task_type="CAUSAL_LM", **options)
    wrapped = get_peft_model(copy.deepcopy(model), chosen)
    shake(wrapped)
    wrapped.save_pretrained(folder)
    # The plain model is not the packed one.
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))


def copy_base(models: Path, form: str, folder: Path, **changed: torch.Tensor | None) -> Path:
    """Copies a packed model, some of its tensors changed or left out."""
    shutil.copytree(models / form, folder)
    (folder / "ckptkit.json").unlink()
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantization_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def refusal(adapter: Path, base: Path, out: Path, **options: Any) -> str:
    """Returns why an adapter is not merged; nothing is written."""
    with pytest.raises(CkptkitError) as caught:
        ckptkit.merge_adapter(adapter, out, base=base, **options)
    assert not out.exists()
    return f"{caught.value}\n{caught.value.hint}"


def assert_same_bits(actual: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    assert set(actual) == set(expected)
    for name, value in actual.items():
        other = expected[name].contiguous()
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert torch.equal(value.view(torch.uint8), other.view(torch.uint8)), name


def is_touched(name: str) -> bool:
    return ".q_proj." in name or ".down_proj." in name


@pytest.mark.parametrize("form", FORMS)
def test_what_is_touched_is_that_of_merging_unpacked_and_packing(
    models: Path, form: str, tmp_path: Path
) -> None:
    ckptkit.merge_adapter(models / "adapter", tmp_path / "out", base=models / form)
    assert ckptkit.verify(tmp_path / "out").ok
    assert quantization_of(tmp_path / "out") == quantization_of(models / form)
    ckptkit.consolidate(models / form, tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.merge_adapter(models / "adapter", tmp_path / "merged", base=tmp_path / "unpacked")
    ckptkit.consolidate(tmp_path / "merged", tmp_path / "expected", dtype=form)
    base = load_file(models / form / "model.safetensors")
    again = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {n: again[n] if is_touched(n) else value for n, value in base.items()}
    assert_same_bits(found, expected)
    assert any(not torch.equal(found[n], base[n]) for n in found if is_touched(n))


@pytest.mark.parametrize("form", ["fp8-block", "int4-group"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_type_unpacks_the_whole_model(
    models: Path, form: str, dtype: Any, tmp_path: Path
) -> None:
    ckptkit.merge_adapter(models / "adapter", tmp_path / "out", base=models / form, dtype=dtype)
    assert quantization_of(tmp_path / "out") is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    ckptkit.consolidate(models / form, tmp_path / "unpacked", dtype=dtype)
    ckptkit.merge_adapter(models / "adapter", tmp_path / "merged", base=tmp_path / "unpacked")
    assert_same_bits(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "merged" / "model.safetensors"),
    )


def test_an_fp8_base_becomes_what_the_libraries_make_of_it(models: Path, tmp_path: Path) -> None:
    """Unpacked by Transformers, merged by PEFT, packed by Transformers."""
    ckptkit.merge_adapter(
        models / "adapter", tmp_path / "out", base=models / "fp8-block", match_peft=True
    )
    packed = load_file(models / "fp8-block" / "model.safetensors")
    dequantize = Fp8Dequantize(SimpleNamespace())._dequantize_one
    plain = AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
    plain.load_state_dict(
        {
            name: dequantize(value, packed[f"{name}_scale_inv"], torch.bfloat16)
            if f"{name}_scale_inv" in packed
            else value
            for name, value in packed.items()
            if not name.endswith("_scale_inv")
        }
    )
    merged = PeftModel.from_pretrained(plain, models / "adapter").merge_and_unload()
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    expected = dict(packed)
    for name, value in merged.state_dict().items():
        if is_touched(name):
            made = quantizer._quantize_one("weight", value)
            expected[name] = made["weight"]
            expected[f"{name}_scale_inv"] = made["weight_scale_inv"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(found, expected)
    tokens = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    shutil.copytree(tmp_path / "out", tmp_path / "theirs")
    save_file(expected, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto")
    assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
    near, far = merged(tokens).logits, plain_logits(models, tokens)
    distance = (loaded(tokens).logits - near).norm()
    assert distance < 0.1 * (far - near).norm()


def plain_logits(models: Path, tokens: torch.Tensor) -> Any:
    model = AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
    return model(tokens).logits


@pytest.mark.parametrize("form", FORMS)
def test_what_packing_changed_is_measured(models: Path, form: str, tmp_path: Path) -> None:
    base = models / form
    manifest = ckptkit.merge_adapter(models / "adapter", tmp_path / "out", base=base)
    ckptkit.merge_adapter(models / "adapter", tmp_path / "exact", base=base, dtype="bfloat16")
    ckptkit.consolidate(tmp_path / "out", tmp_path / "restored", dtype="float32")
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    restored = load_file(tmp_path / "restored" / "model.safetensors")
    losses = manifest.source["packed_again"]
    assert set(losses) == {name for name in exact if is_touched(name)}
    for name, loss in losses.items():
        value = exact[name].float()
        expected = (restored[name] - value).abs().max() / value.abs().max()
        # Other forms are rounded to bfloat16 when they are unpacked.
        rounding = 1e-6 if form == "fp8-block" else 2**-8
        assert loss == pytest.approx(float(expected), abs=rounding)


def test_notes_say_what_was_rounded_twice_and_how_far_it_is(models: Path, tmp_path: Path) -> None:
    base = models / "fp8-block"
    options = "--base", str(base)
    shown = run_command("adapter", "merge", models / "adapter", tmp_path / "out", *options)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stderr.split())
    assert "10 packed weights of the base left as stored, 4 weights packed again, which" in text
    assert "rounds a second time: 'model.layers.0.mlp.down_proj.weight'" in text
    assert "packing again changed numbers by up to 0.0" in text
    merge = ckptkit.merge_adapter, models / "adapter"
    notes = notes_of(*merge, tmp_path / "again", base=base)
    assert sum("changed numbers by up to" in note for note in notes) == 1
    notes = notes_of(*merge, tmp_path / "wide", base=base, dtype="float32")
    assert "14 weights unpacked: fine-grained FP8" in notes


@pytest.mark.parametrize(("dtype", "done"), [("keep", "packed again"), ("float16", "dequantized")])
def test_a_report_says_what_became_of_packed_weights(
    models: Path, dtype: str, done: str, tmp_path: Path
) -> None:
    """It said that they were kept."""
    options = "--base", models / "fp8-block", "--dtype", dtype, "--report", "--json"
    shown = run_command("adapter", "merge", models / "adapter", tmp_path / "out", *options)
    assert shown.returncode == 0, shown.stderr
    layers = json.loads(shown.stdout)["layers"]
    assert len(layers) == 4
    assert {layer["base"] for layer in layers} == {done}


@pytest.mark.parametrize("use_dora", [False, True])
def test_dora_is_merged_into_a_packed_base(models: Path, use_dora: bool, tmp_path: Path) -> None:
    plain = LlamaForCausalLM.from_pretrained(models / "plain", dtype="auto")
    save_adapter(plain, tmp_path / "adapter", target_modules=["k_proj"], use_dora=use_dora)
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=models / "nvfp4")
    ckptkit.consolidate(models / "nvfp4", tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "unpacked")
    ckptkit.consolidate(tmp_path / "merged", tmp_path / "expected", dtype="nvfp4")
    found = load_file(tmp_path / "out" / "model.safetensors")
    again = load_file(tmp_path / "expected" / "model.safetensors")
    for name, value in found.items():
        if ".k_proj." in name:
            assert torch.equal(value.view(torch.uint8), again[name].view(torch.uint8)), name


def test_whole_modules_of_an_adapter_are_packed_as_the_base_has_them(
    models: Path, tmp_path: Path
) -> None:
    """A new head is not packed, and the configuration says so."""
    plain = LlamaForCausalLM.from_pretrained(models / "plain", dtype="auto")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["up_proj", "lm_head"]}
    save_adapter(plain, tmp_path / "adapter", **options)
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=models / "int8-channel")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert found[UP].dtype == torch.int8
    base = load_file(models / "int8-channel" / "model.safetensors")
    assert not torch.equal(found[UP], base[UP])
    assert quantization_of(tmp_path / "out") == quantization_of(models / "int8-channel")


def test_scales_of_activations_stay(models: Path, tmp_path: Path) -> None:
    scales = {f"{Q_PROJ.removesuffix('weight')}input_scale": torch.ones(1)}
    base = copy_base(models, "fp8-channel", tmp_path / "base", **scales)
    ckptkit.merge_adapter(models / "adapter", tmp_path / "out", base=base)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(load_file(base / "model.safetensors"))


def save_qwen3_moe(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=41,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=3,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("form", ["fp8-block", "nvfp4", "int4-group"])
def test_experts_that_are_fused_in_memory_are_packed_again_one_by_one(
    form: str, tmp_path: Path
) -> None:
    """In some forms no tensor of the folder has the name that the experts have unpacked."""
    model = save_qwen3_moe(tmp_path / "plain")
    ckptkit.consolidate(tmp_path / "plain", tmp_path / "base", dtype=form)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    save_adapter(model, tmp_path / "adapter", target_modules=[], target_parameters=parameters)
    manifest = ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert len(manifest.source["packed_again"]) == 9
    ckptkit.consolidate(tmp_path / "base", tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "unpacked")
    ckptkit.consolidate(tmp_path / "merged", tmp_path / "expected", dtype=form)
    base = load_file(tmp_path / "base" / "model.safetensors")
    again = load_file(tmp_path / "expected" / "model.safetensors")
    expected = {n: again[n] if ".experts." in n else value for n, value in base.items()}
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), expected)
    changed = [
        name
        for name, value in base.items()
        if not torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8))
    ]
    assert len(changed) >= 9


def test_a_change_of_experts_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    """It was lost: in memory their tensor has a shape, and no file has a part of it."""
    model = save_qwen3_moe(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if not re.search(r"experts.*down_proj", n)}
    save_file(kept, path, metadata={"format": "pt"})
    parameters = ["mlp.experts.down_proj"]
    save_adapter(model, tmp_path / "adapter", target_modules=[], target_parameters=parameters)
    options = "--base", tmp_path / "base", "--allow-other-base"
    shown = run_command("adapter", "merge", tmp_path / "adapter", tmp_path / "out", *options)
    assert shown.returncode == 4
    assert "'model.layers.0.mlp.experts.down_proj' is changed, and no tensor" in shown.stderr
    assert "pass the model that the adapter was trained on with --base" in shown.stderr
    assert not (tmp_path / "out").exists()


def save_gpt_oss(folder: Path) -> PreTrainedModel:
    """Writes a model with random MXFP4 experts, and returns the one that has them unpacked."""
    config = GptOssConfig(
        vocab_size=41,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_scaling=None,
    )
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        experts, columns, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(100, 140, blocks.shape[:3], dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    return model


def test_experts_of_gpt_oss_stay_and_are_not_packed_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = save_gpt_oss(tmp_path / "base")
    save_adapter(model, tmp_path / "attention", target_modules=["q_proj"])
    ckptkit.merge_adapter(tmp_path / "attention", tmp_path / "out", base=tmp_path / "base")
    found = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    changed = {name for name, value in found.items() if not torch.equal(value, base[name])}
    assert changed == {Q_PROJ}
    assert found.keys() == base.keys()
    assert quantization_of(tmp_path / "out") == {"quant_method": "mxfp4"}
    parameters = ["mlp.experts.down_proj"]
    save_adapter(model, tmp_path / "experts", target_parameters=parameters, target_modules=[])
    said = refusal(tmp_path / "experts", tmp_path / "base", tmp_path / "no")
    assert "down_proj' cannot be packed as it is there (MXFP4)" in said
    ckptkit.merge_adapter(
        tmp_path / "experts", tmp_path / "wide", base=tmp_path / "base", dtype="bfloat16"
    )
    ckptkit.consolidate(tmp_path / "base", tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.merge_adapter(tmp_path / "experts", tmp_path / "two", base=tmp_path / "unpacked")
    assert_same_bits(
        load_file(tmp_path / "wide" / "model.safetensors"),
        load_file(tmp_path / "two" / "model.safetensors"),
    )


def test_a_checkpoint_that_holds_its_packed_base_is_merged_unpacked(
    models: Path, tmp_path: Path
) -> None:
    folder, packed = tmp_path / "step", load_file(models / "fp8-block" / "model.safetensors")
    shutil.copytree(models / "adapter", folder)
    held = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    live = {name.replace(".weight", ".default.weight"): value for name, value in held.items()}
    for name, value in packed.items():
        wrapped = name.replace("_proj.weight", "_proj.base_layer.weight")
        live[f"base_model.model.{wrapped if is_touched(name) else name}"] = value
    save_file(live, folder / "model.safetensors")
    shutil.copy(models / "fp8-block" / "config.json", folder)
    ckptkit.merge_adapter(folder, tmp_path / "out", dtype="bfloat16")
    ckptkit.merge_adapter(
        models / "adapter", tmp_path / "expected", base=models / "fp8-block", dtype="bfloat16"
    )
    assert_same_bits(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "expected" / "model.safetensors"),
    )
    with pytest.raises(CkptkitError) as caught:
        ckptkit.merge_adapter(folder, tmp_path / "no")
    assert "is written under another name" in str(caught.value)
    assert "pass --dtype bfloat16" in caught.value.hint


def test_an_adapter_of_a_packed_base_is_merged_into_it_alone(models: Path, tmp_path: Path) -> None:
    """The record of an extracted adapter says that its base was packed in FP8."""
    folder = tmp_path / "step"
    shutil.copytree(models / "adapter", folder)
    shutil.copy(models / "fp8-block" / "config.json", folder)
    ckptkit.extract_adapter(folder, tmp_path / "extracted")
    assert "fp8" in (tmp_path / "extracted" / "ckptkit.json").read_text()
    ckptkit.merge_adapter(tmp_path / "extracted", tmp_path / "out", base=models / "fp8-block")
    said = refusal(tmp_path / "extracted", models / "plain", tmp_path / "no")
    assert "trained on packed weights (fp8)" in said


# --- what is refused ---


def test_a_scale_that_is_missing_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    base = copy_base(models, "fp8-block", tmp_path / "base", **{f"{UP}_scale_inv": None})
    said = refusal(models / "adapter", base, tmp_path / "out")
    assert f"'{UP}_scale_inv' is missing" in said


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_scale_without_a_meaning_is_refused_where_it_is_read(
    models: Path, value: float, tmp_path: Path
) -> None:
    changed = {f"{Q_PROJ}_scale_inv": torch.full((2, 2), value)}
    base = copy_base(models, "fp8-block", tmp_path / "base", **changed)
    said = refusal(models / "adapter", base, tmp_path / "out")
    assert f"'{Q_PROJ}_scale_inv' has the scale {value:g}" in said


def save_shards(models: Path, folder: Path) -> Path:
    """Splits q_proj of a packed model over two files, as tensor parallelism does."""
    shutil.copytree(models / "fp8-block", folder)
    (folder / "ckptkit.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for rank in range(2):
        held = dict(tensors) if rank == 0 else {}
        places = {name: {"saved_offsets": [0] * value.dim()} for name, value in held.items()}
        for name, rows in ((Q_PROJ, 128), (f"{Q_PROJ}_scale_inv", 1)):
            held[name] = tensors[name][rank * rows : (rank + 1) * rows].clone()
            places[name] = {"saved_offsets": [rank * rows, 0]}
        header = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        save_file(held, folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", header)
    return folder


def test_packed_tensors_of_shards_are_refused(models: Path, tmp_path: Path) -> None:
    base = save_shards(models, tmp_path / "base")
    said = refusal(models / "adapter", base, tmp_path / "out")
    assert f"'{Q_PROJ}' is packed and split over 2 pieces" in said


def with_other_scales(models: Path, folder: Path) -> Path:
    scale = load_file(models / "fp8-block" / "model.safetensors")[f"{Q_PROJ}_scale_inv"]
    return copy_base(models, "fp8-block", folder, **{f"{Q_PROJ}_scale_inv": scale.bfloat16()})


def with_powers_of_two(models: Path, folder: Path) -> Path:
    base = copy_base(models, "fp8-block", folder)
    change_quantization(base, scale_fmt="ue8m0")
    return base


def with_zero_points(models: Path, folder: Path) -> Path:
    name = Q_PROJ.removesuffix(".weight")
    zeros = torch.zeros(32, 2, dtype=torch.int32)
    return copy_base(models, "int4-group", folder, **{f"{name}.weight_zero_point": zeros})


def with_order(models: Path, folder: Path) -> Path:
    name = Q_PROJ.removesuffix(".weight")
    index = torch.arange(256, dtype=torch.int32) // 128
    return copy_base(models, "int4-group", folder, **{f"{name}.weight_g_idx": index})


@pytest.mark.parametrize(
    "make", [with_other_scales, with_powers_of_two, with_zero_points, with_order]
)
def test_what_cannot_be_packed_again_is_refused_with_what_unpacks_it(
    models: Path, make: Any, tmp_path: Path
) -> None:
    base = make(models, tmp_path / "base")
    said = refusal(models / "adapter", base, tmp_path / "out")
    assert f"'{Q_PROJ}' cannot be packed as it is there" in said or "down_proj" in said
    assert "pass --dtype bfloat16, which unpacks the whole model" in said
    options = "--base", str(base), "--dtype", "bfloat16"
    shown = run_command("adapter", "merge", models / "adapter", tmp_path / "out", *options)
    assert shown.returncode == 0, shown.stderr


def test_what_only_a_file_of_modelopt_describes_is_merged_unpacked(
    models: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "plain", base)
    tensors: Tensors = {}
    for name, value in load_file(base / "model.safetensors").items():
        tensors[name] = value
        if "_proj" in name:
            scale = value.float().abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    said = {"quantization": {"quant_algo": "FP8"}}
    (base / "hf_quant_config.json").write_text(json.dumps(said))
    assert "no config.json says how" in refusal(models / "adapter", base, tmp_path / "no")
    ckptkit.merge_adapter(models / "adapter", tmp_path / "out", base=base, dtype="bfloat16")
    ckptkit.consolidate(base, tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.merge_adapter(models / "adapter", tmp_path / "expected", base=tmp_path / "unpacked")
    assert_same_bits(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "expected" / "model.safetensors"),
    )


def test_what_cannot_be_packed_is_kept_where_no_adapter_touches_it(
    models: Path, tmp_path: Path
) -> None:
    base = with_zero_points(models, tmp_path / "base")
    plain = LlamaForCausalLM.from_pretrained(models / "plain", dtype="auto")
    save_adapter(plain, tmp_path / "adapter", target_modules=["down_proj"])
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base)
    found = load_file(tmp_path / "out" / "model.safetensors")
    stored = load_file(base / "model.safetensors")
    assert_same_bits(
        {n: v for n, v in found.items() if "down_proj" not in n},
        {n: v for n, v in stored.items() if "down_proj" not in n},
    )
