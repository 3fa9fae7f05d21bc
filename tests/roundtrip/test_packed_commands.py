"""Commands that measure, compare, join and load models, on models whose weights are packed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.plan.packed_forms import FORMS
from ckptkit.training import load_into
from tests.command_line import run_command
from tests.small_adapters import shake

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of what they replace
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, a later step of it, and both in every packed form."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("first", 0), ("second", 1)):
        torch.manual_seed(seed)
        make_model().save_pretrained(folder / name / "plain")
        for form in FORMS:
            ckptkit.consolidate(folder / name / "plain", folder / name / form, dtype=form)
    return folder


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(CkptkitError) as caught:
        call(*arguments, **options)
    return f"{caught.value}\n{caught.value.hint}"


@pytest.mark.parametrize("form", FORMS)
def test_stats_see_through_packing(models: Path, form: str, tmp_path: Path) -> None:
    ckptkit.consolidate(models / "first" / form, tmp_path / "wide", dtype="float32")
    expected = {one.name: one for one in ckptkit.stats(tmp_path / "wide").tensors}
    found = {one.name: one for one in ckptkit.stats(models / "first" / form, unpacked=True).tensors}
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert (one.norm, one.minimum, one.maximum) == (
            expected[name].norm,
            expected[name].minimum,
            expected[name].maximum,
        )
    stored = {one.name for one in ckptkit.stats(models / "first" / form).tensors}
    assert len(stored) > len(found)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_packed_weights_are_compared(models: Path, form: str) -> None:
    plain, packed = models / "first" / "plain", models / "first" / form
    shown = run_command("diff", plain, packed, "--numeric", "--unpacked", "--json")
    found = json.loads(shown.stdout)
    assert shown.returncode == 6
    assert (found["only_in_a"], found["only_in_b"], found["reshaped"]) == ([], [], {})
    changed = {one["name"] for one in found["changed"]}
    assert changed == {name for name in load_file(plain / "model.safetensors") if "_proj" in name}
    assert all(one["cosine"] > 0.98 for one in found["numeric"])
    assert not ckptkit.diff(plain, packed, numeric=True).same


@pytest.mark.parametrize("form", FORMS)
def test_live_names_change_nothing_of_what_is_unpacked(
    models: Path, form: str, tmp_path: Path
) -> None:
    packed = models / "first" / form
    ckptkit.consolidate(packed, tmp_path / "expected", dtype="float16")
    ckptkit.consolidate(packed, tmp_path / "live", dtype="float16", names="live")
    assert ckptkit.diff(tmp_path / "expected", tmp_path / "live").same
    config = json.loads((tmp_path / "live" / "config.json").read_text())
    assert "quantization_config" not in config
    ckptkit.consolidate(packed, tmp_path / "kept", names="live")
    assert ckptkit.diff(packed, tmp_path / "kept").same


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", ["auto", "live"])
def test_what_no_configuration_describes_is_not_left_packed_under_another_type(
    models: Path, form: str, names: Any, tmp_path: Path
) -> None:
    packed = models / "first" / form
    (tmp_path / "bare").mkdir()
    shutil.copy(packed / "model.safetensors", tmp_path / "bare")
    for dtype in ("bfloat16", "float16"):
        options = {"dtype": dtype, "names": names}
        told = refusal(ckptkit.consolidate, tmp_path / "bare", tmp_path / "out", **options)
        assert f"or a scale of one that is; --dtype {dtype} cannot unpack it" in told
        assert "pass with --config the configuration that says how" in told
        ckptkit.consolidate(tmp_path / "bare", tmp_path / dtype, config=packed, **options)
        ckptkit.consolidate(packed, tmp_path / f"{dtype}-expected", dtype=dtype)
        assert ckptkit.diff(tmp_path / dtype, tmp_path / f"{dtype}-expected").same


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", ["auto", "live"])
def test_a_model_of_any_form_fills_what_is_missing(
    models: Path, form: str, names: Any, tmp_path: Path
) -> None:
    packed = models / "first" / form
    ckptkit.consolidate(packed, tmp_path / "expected", dtype="bfloat16")
    part, options = tmp_path / "part", {"dtype": "bfloat16", "names": names}
    ckptkit.consolidate(tmp_path / "expected", part, names="live", exclude=["*.mlp.*"])
    ckptkit.consolidate(part, tmp_path / "found", fill_from=packed, **options)
    assert ckptkit.diff(tmp_path / "expected", tmp_path / "found").same


@pytest.mark.parametrize("form", FORMS)
def test_any_range_of_a_packed_model_is_read_without_writing_it(models: Path, form: str) -> None:
    plain, written = models / "first" / "plain", models / "first" / form
    files = fsspec.filesystem("ckptkit", src=plain, dtype=form, skip_instance_cache=True)
    expected = {path.name: path.read_bytes() for path in written.iterdir()}
    del expected["ckptkit.json"]
    try:
        weights = expected["model.safetensors"]
        starts = list(range(0, len(weights), 9_999))
        for start in (*starts[::-2], *starts[1::2]):
            stop = start + 12_345
            found = files.cat_file("model.safetensors", start, stop)
            assert found == weights[start:stop]
        assert {name: files.cat_file(name) for name in files.find("")} == expected
    finally:
        files.invalidate_cache()


def test_a_packed_model_is_that_of_its_unpacked_copy(models: Path, tmp_path: Path) -> None:
    packed = models / "first" / "fp8-block"
    ckptkit.consolidate(packed, tmp_path / "wide", dtype="float32")
    assert ckptkit.diff(packed, tmp_path / "wide", numeric=True, unpacked=True).same


def test_bits_of_unpacked_weights_are_not_compared(models: Path) -> None:
    folder = models / "first" / "plain"
    assert "pass --numeric with it" in refusal(ckptkit.diff, folder, folder, unpacked=True)


def test_what_no_configuration_describes_is_not_measured(models: Path, tmp_path: Path) -> None:
    packed = models / "first" / "fp8-block"
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    said = refusal(ckptkit.stats, tmp_path, unpacked=True)
    assert "belongs to a packed weight (no configuration says how)" in said
    assert ckptkit.stats(tmp_path, unpacked=True, base=packed).tensors
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "(as 'hqq'), which is not unpacked" in refusal(ckptkit.stats, tmp_path, unpacked=True)


@pytest.mark.parametrize("form", FORMS)
def test_packed_numbers_are_not_averaged(models: Path, form: str, tmp_path: Path) -> None:
    sources = [models / "first" / form, models / "second" / form]
    said = refusal(ckptkit.average, sources, tmp_path / "out")
    assert "an average of packed numbers is none of the weights" in said
    assert "`ckptkit consolidate SRC OUT --dtype bfloat16`" in said
    assert not (tmp_path / "out").exists()
    for number, source in enumerate(sources):
        ckptkit.consolidate(source, tmp_path / str(number), dtype="bfloat16")
    ckptkit.average([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    first, second, mean = (load_file(tmp_path / n / "model.safetensors") for n in ("0", "1", "out"))
    assert torch.equal(mean[UP], ((first[UP].float() + second[UP].float()) / 2).bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_deltas_of_packed_models_are_those_of_their_bytes(
    models: Path, form: str, tmp_path: Path
) -> None:
    first, second = models / "first" / form, models / "second" / form
    ckptkit.create_delta(first, second, tmp_path / "delta")
    ckptkit.apply_delta(first, tmp_path / "delta", tmp_path / "out")
    expected = load_file(second / "model.safetensors")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8))


def test_a_delta_from_packed_to_plain_is_refused_with_what_unpacks(
    models: Path, tmp_path: Path
) -> None:
    packed, plain = models / "first" / "fp8-block", models / "second" / "plain"
    said = refusal(ckptkit.create_delta, packed, plain, tmp_path / "delta")
    assert "one of the two is packed: pass --dtype bfloat16, which unpacks it" in said
    ckptkit.create_delta(packed, plain, tmp_path / "delta", dtype="bfloat16")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strict", [True, False])
def test_packed_weights_are_not_loaded_into_a_plain_model(
    models: Path, form: str, strict: bool, tmp_path: Path
) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = refusal(load_into, model, models / "first" / form, strict=strict)
    assert "belongs to a packed weight, and the model has" in said
    assert "`ckptkit consolidate SRC OUT --dtype bfloat16`" in said
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ckptkit.consolidate(models / "first" / form, tmp_path / "out", dtype="bfloat16")
    load_into(model, tmp_path / "out", strict=strict)


def test_what_the_class_keeps_in_float32_stays_so_whatever_is_packed(tmp_path: Path) -> None:
    """The router's bias of DeepSeek V3, which no form of packed weights changes."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=41,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    path, bias = (
        tmp_path / "plain" / "model.safetensors",
        "model.layers.0.mlp.gate.e_score_correction_bias",
    )
    tensors = {**load_file(path), bias: torch.full((4,), 0.1)}
    save_file(tensors, path, metadata={"format": "pt"})
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"]))
    shake(adapter)
    adapter.save_pretrained(tmp_path / "adapter")
    packed = tmp_path / "packed"
    ckptkit.consolidate(tmp_path / "plain", packed, dtype="fp8-block")
    ckptkit.consolidate(packed, tmp_path / "unpacked", dtype="bfloat16")
    ckptkit.consolidate(tmp_path / "unpacked", tmp_path / "like", like=packed)
    for dtype in ("keep", "bfloat16"):
        ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / dtype, base=packed, dtype=dtype)
    for name in ("packed", "unpacked", "like", "keep", "bfloat16"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(found[bias], tensors[bias]), name
        numbers = found["model.layers.0.mlp.experts.0.up_proj.weight"]
        is_packed = name in {"packed", "like", "keep"}
        assert numbers.dtype == (torch.float8_e4m3fn if is_packed else torch.bfloat16)
    shutil.rmtree(tmp_path / "bfloat16")
    ckptkit.merge_adapter(
        *(tmp_path / "adapter", tmp_path / "bfloat16"), base=packed, dtype="bfloat16", cast_all=True
    )
    found = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert found[bias].dtype == torch.bfloat16
