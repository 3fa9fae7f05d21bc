"""A cast leaves in float32 what the class of the model, or its base, keeps so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.consumers.class_facts import DATA, find_kept_by_transformers
from ckptkit.core.dtypes import dtype_named
from ckptkit.training import Checkpointer
from tests.reports.folders import REPORTS, assert_same, notes_of, save, tensors_of
from tests.sampled import sampled
from tests.small_models import class_named, small_model_config

GLM, T5 = REPORTS / "02-keep-fp32-glm4moe", REPORTS / "02-keep-fp32-t5-float16"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
ROWS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
LISTED = [row[1] for row in ROWS if row[0] == "classes" and {"always", "float16"} & set(row[2])]
QUICK = ("Glm4MoeForCausalLM", "T5ForConditionalGeneration", "LlamaForCausalLM")


def test_a_correction_bias_stays_in_float32_with_one_note(tmp_path: Path) -> None:
    notes = notes_of(
        ckptkit.consolidate, GLM / "ckpt", tmp_path / "out", base=GLM / "base", dtype="bfloat16"
    )
    assert_same(tensors_of(tmp_path / "out"), load_file(GLM / "truth.safetensors"))
    kept = [note for note in notes if "float32" in note]
    assert len(kept) == 1
    assert "1 tensor stays" in kept[0]
    assert BIAS in kept[0]
    assert "--cast-all" in kept[0]


def test_all_is_cast_where_that_is_asked_for(tmp_path: Path) -> None:
    notes = notes_of(
        *(ckptkit.consolidate, GLM / "ckpt", tmp_path / "out"),
        base=GLM / "base",
        dtype="bfloat16",
        cast_all=True,
    )
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    assert not any("stays" in note for note in notes)


@pytest.mark.parametrize(("dtype", "kept"), [("float16", 2), ("bfloat16", 0), ("float32", 0)])
def test_t5_keeps_its_output_layers_in_float16_alone(dtype: str, kept: int, tmp_path: Path) -> None:
    ckptkit.consolidate(T5 / "ckpt", tmp_path / "out", base=T5 / "base", dtype=dtype)
    found = tensors_of(tmp_path / "out")
    if dtype == "float16":
        assert_same(found, load_file(T5 / "truth.safetensors"))
    wide = [name for name, tensor in found.items() if tensor.dtype == torch.float32]
    assert len(wide) == (len(found) if dtype == "float32" else kept)


def test_an_average_and_a_conversion_keep_it_too(tmp_path: Path) -> None:
    first, second = GLM / "ckpt", tmp_path / "second"
    shutil.copytree(first, second)
    ckptkit.average([first, second], tmp_path / "mean", base=GLM / "base", dtype="bfloat16")
    truth = load_file(GLM / "truth.safetensors")
    assert_same(tensors_of(tmp_path / "mean"), truth)
    ckptkit.convert(first, tmp_path / "pt", to="torch", base=GLM / "base", dtype="bfloat16")
    with ckptkit.open(tmp_path / "pt") as stored:
        assert [n for n in stored if stored.read(n).dtype == torch.float32] == [BIAS]


def test_a_name_map_keeps_what_the_class_keeps(tmp_path: Path) -> None:
    case = REPORTS.parent / "megatron_model_deepseek_v3_pp2_ep2"
    ckptkit.consolidate(case / "checkpoint", tmp_path / "out", base=case, dtype="bfloat16")
    found = tensors_of(tmp_path / "out")
    biases = {n: t for n, t in found.items() if n.endswith("e_score_correction_bias")}
    assert biases
    assert {tensor.dtype for tensor in biases.values()} == {torch.float32}
    others = {tensor.dtype for name, tensor in found.items() if name not in biases}
    assert others == {torch.bfloat16}
    truth = load_file(case / "truth.safetensors")
    assert all(torch.equal(tensor, truth[name]) for name, tensor in biases.items())


def test_a_merge_keeps_it(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(GLM / "base", base)
    state = {n: t.float() for n, t in load_file(base / "model.safetensors").items()}
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    out_size, in_size = state["model.layers.0.self_attn.o_proj.weight"].shape
    factors = {
        f"{name}.lora_A.weight": torch.randn(2, in_size),
        f"{name}.lora_B.weight": torch.randn(out_size, 2),
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    only = r".*\.0\.self_attn\.o_proj"
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": only}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    ckptkit.merge_adapter(adapter, tmp_path / "out", base=base, dtype="bfloat16")
    found = tensors_of(tmp_path / "out")
    assert [n for n, t in found.items() if t.dtype == torch.float32] == [BIAS]
    ckptkit.merge_adapter(adapter, tmp_path / "all", base=base, dtype="bfloat16", cast_all=True)
    assert {t.dtype for t in tensors_of(tmp_path / "all").values()} == {torch.bfloat16}


def test_what_a_base_of_halves_has_in_float32_stays_so(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, vocab_size=40)
    model = transformers.LlamaForCausalLM(config)
    wide = "model.norm.weight"
    base = tmp_path / "base"
    model.save_pretrained(base)
    halves = {
        name: tensor if name == wide else tensor.bfloat16()
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(halves, base / "model.safetensors", metadata={"format": "pt"})
    source = save(model.state_dict(), tmp_path / "ckpt")
    ckptkit.consolidate(source, tmp_path / "out", base=base, dtype="bfloat16")
    found = tensors_of(tmp_path / "out")
    assert [n for n, t in found.items() if t.dtype == torch.float32] == [wide]
    # A base that is float32 altogether says nothing.
    model.save_pretrained(base)
    ckptkit.consolidate(source, tmp_path / "plain", base=base, dtype="bfloat16")
    assert {t.dtype for t in tensors_of(tmp_path / "plain").values()} == {torch.bfloat16}


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_an_export_keeps_what_the_live_class_keeps(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(GLM / "base")
    model = transformers.Glm4MoeForCausalLM(config)
    with Checkpointer(tmp_path / "run") as checkpointer:
        out, state = tmp_path / "out", {"model": model}
        checkpointer.export(out, state=state, dtype="bfloat16").wait()
        checkpointer.export(tmp_path / "all", state=state, dtype="bfloat16", cast_all=True).wait()
    wide = [n for n, t in tensors_of(out).items() if t.dtype == torch.float32]
    assert wide == [BIAS]
    assert {t.dtype for t in tensors_of(tmp_path / "all").values()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sampled(["LlamaForCausalLM", *LISTED], QUICK))
@pytest.mark.quick("LlamaForCausalLM-float16", "T5ForConditionalGeneration-float16")
def test_a_cast_writes_the_types_that_save_pretrained_writes(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model_class = class_named(name)
    try:
        model = model_class(small_model_config(model_class)).float()
    except Exception as error:  # noqa: BLE001  a class may want libraries that are not here
        pytest.skip(f"cannot be built: {error}")
    model.save_pretrained(tmp_path / "float32")
    try:
        halved = model_class.from_pretrained(tmp_path / "float32", dtype=getattr(torch, dtype))
    except AttributeError as error:  # as of InklingAudioModel, which sets itself up in part
        pytest.skip(f"cannot be loaded: {error}")
    halved.save_pretrained(tmp_path / "halved")
    source = save(model.state_dict(), tmp_path / "ckpt")
    shutil.copy(tmp_path / "float32" / "config.json", source)
    ckptkit.consolidate(source, tmp_path / "out", dtype=dtype)
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "halved")
    # Transformers makes a float of a counter that is in a module of such a list.
    theirs = {n: t.to(ours[n].dtype) if "batches_tracked" in n else t for n, t in theirs.items()}
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())


@pytest.mark.parametrize(
    ("document", "tensor", "wanted", "kept"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "x.wo.weight", "float16", True),
        ({"architectures": ["T5ForConditionalGeneration"]}, "x.wo.weight", "bfloat16", False),
        ({"architectures": ["T5ForConditionalGeneration"]}, "x.wi.weight", "float16", False),
        # A class that Transformers does not have, of a type that it has.
        ({"architectures": ["Mine"], "model_type": "glm4_moe"}, BIAS, "bfloat16", True),
        # A part that the class does not have by default.
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": {"model_type": "glm4_moe"},
            },
            BIAS,
            "bfloat16",
            True,
        ),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, BIAS, "bfloat16", False),
        ({}, BIAS, "bfloat16", False),
    ],
)
def test_what_is_kept_follows_from_the_class_and_its_parts(
    document: dict[str, Any], tensor: str, wanted: str, kept: bool
) -> None:
    found = find_kept_by_transformers(document)
    assert found.holds(tensor, dtype_named(wanted)) is kept
