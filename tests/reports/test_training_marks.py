"""What training leaves in a configuration is put right, or said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptkit
from ckptkit.consumers.folder_truth import FolderTexts, tell_truth
from tests.reports.folders import REPORTS, notes_of, save
from tests.small_models import class_named, small_model_config

CASE = REPORTS / "14-use-cache"
SMALL = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def write_step(folder: Path, **values: Any) -> Path:
    """Writes a step with values in its configuration, as they are."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    save(model.state_dict(), folder)
    model.config.architectures = ["LlamaForCausalLM"]
    document = {**model.config.to_dict(), **values}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("options", [{}, {"base": CASE / "base"}])
def test_a_report_of_slow_generation(
    options: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    notes = notes_of(ckptkit.consolidate, CASE / "ckpt", out, **options)
    assert config_of(out)["use_cache"] is True
    assert sum("use_cache" in note for note in notes) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    computed: list[int] = []
    forward = type(model).forward

    def counted(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        computed.append(int(input_ids.shape[1]))
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(type(model), "forward", counted)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert computed == [3, 1, 1, 1]


@pytest.mark.parametrize(("of_base", "written"), [(True, True), (None, True), (False, False)])
def test_a_cache_is_what_the_base_says(of_base: bool | None, written: bool, tmp_path: Path) -> None:
    step = write_step(tmp_path / "step", use_cache=False)
    base = write_step(tmp_path / "base", use_cache=of_base)
    if of_base is None:
        document = config_of(base)
        del document["use_cache"]
        (base / "config.json").write_text(json.dumps(document))
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=base)
    assert config_of(tmp_path / "out")["use_cache"] is written
    assert any("use_cache" in note for note in notes)


def test_a_model_type_without_a_cache_is_left_without_one(tmp_path: Path) -> None:
    config = transformers.MptConfig(d_model=8, n_heads=1, n_layers=1, vocab_size=24)
    model = transformers.MptForCausalLM(config)
    save(model.state_dict(), tmp_path / "step")
    config.save_pretrained(tmp_path / "step")
    ckptkit.consolidate(tmp_path / "step", tmp_path / "out")
    assert config_of(tmp_path / "out")["use_cache"] is False


@pytest.mark.parametrize(
    "name",
    [
        *("LlamaForCausalLM", "Gemma2ForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM"),
        *("MixtralForCausalLM", "BertForMaskedLM", "LlamaForSequenceClassification"),
        *("T5ForConditionalGeneration", "LlamaModel", "Qwen2_5_VLForConditionalGeneration"),
    ],
)
@pytest.mark.quick("LlamaForCausalLM", "LlamaModel", "OPTForCausalLM")
def test_a_configuration_without_a_class_gets_it_or_a_warning(name: str, tmp_path: Path) -> None:
    kind = class_named(name)
    torch.manual_seed(0)
    model = kind(small_model_config(kind))
    save(model.state_dict(), tmp_path / "step")
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, tmp_path / "step", tmp_path / "out")
    written = config_of(tmp_path / "out").get("architectures")
    warned = [note for note in notes if "names no class in 'architectures'" in note]
    assert (written or [], len(warned)) == (([name], 0) if "CausalLM" in name else ([], 1))
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(model.state_dict()[n], t) for n, t in loaded.state_dict().items())


def test_a_model_that_generates_nothing_needs_no_cache(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=16, **sizes)
    model = transformers.T5EncoderModel(config)
    save(model.state_dict(), tmp_path / "step")
    config.architectures, config.use_cache = ["T5EncoderModel"], False
    config.save_pretrained(tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, tmp_path / "step", tmp_path / "out")
    assert config_of(tmp_path / "out")["use_cache"] is False
    assert not any("use_cache" in note for note in notes)


def test_a_part_that_generates_is_looked_at_too(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    step = write_step(folder)
    document = config_of(step)
    document["text_config"] = {"model_type": "qwen2_vl_text", "use_cache": False}
    texts = FolderTexts(config=document)
    changed = tell_truth(texts, None, []).changed
    assert json.loads(changed["config.json"])["text_config"]["use_cache"] is True


@pytest.mark.parametrize("path", ["output/checkpoint-5", "checkpoint-500", "runs/step_10/"])
def test_a_step_of_a_run_is_no_name_on_the_hub(path: str, tmp_path: Path) -> None:
    step = write_step(tmp_path / "step", _name_or_path=path)
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out")
    assert "_name_or_path" not in config_of(tmp_path / "out")
    assert any("_name_or_path" in note for note in notes)


def test_marks_of_training_are_left_out_or_said(tmp_path: Path) -> None:
    marks = {
        "_attn_implementation": "flash_attention_2",
        "gradient_checkpointing": True,
        "output_hidden_states": True,
        "attention_dropout": 0.0,
        "_name_or_path": "/home/me/llama",
    }
    step = write_step(tmp_path / "step", **marks)
    base = write_step(tmp_path / "base", attention_dropout=0.1)
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=base)
    found = config_of(tmp_path / "out")
    assert {"_attn_implementation", "gradient_checkpointing", "_name_or_path"}.isdisjoint(found)
    assert found["output_hidden_states"] is False
    assert all(any(key in note for note in notes) for key in marks)
    assert any("0.0 against 0.1" in note for note in notes)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_without_a_base_only_what_training_explains_is_changed(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step", output_hidden_states=True, _name_or_path="org/llama")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert found["output_hidden_states"] is True
    assert found["_name_or_path"] == "org/llama"
    assert any("output_hidden_states" in note for note in notes)


def test_a_configuration_without_marks_is_written_without_a_note(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step")
    assert notes_of(ckptkit.consolidate, step, tmp_path / "out") == []


def test_the_type_of_parts_follows_the_weights(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step", dtype="float32", rope_parameters_of={"dtype": "float32"})
    ckptkit.consolidate(step, tmp_path / "out", dtype="bfloat16")
    found = config_of(tmp_path / "out")
    assert found["dtype"] == "bfloat16"
    assert found["rope_parameters_of"]["dtype"] == "bfloat16"
