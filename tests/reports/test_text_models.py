"""The text model of a multimodal configuration is written as such, or put into the whole."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptkit
from ckptkit.consumers.class_facts import find_text_config
from ckptkit.core.errors import RefusedError, UsageError
from ckptkit_cli.main import main
from tests.reports.folders import REPORTS, notes_of, save, tensors_of
from tests.small_models import class_named, small_model_config

CASE = REPORTS / "11-qwen35-text"
PROMPT = torch.tensor([[1, 2, 3, 4]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=PROMPT).logits
    return found


def test_a_report_of_a_text_model_is_written_as_what_was_trained(tmp_path: Path) -> None:
    notes = notes_of(ckptkit.consolidate, CASE / "ckpt", tmp_path / "out", base=CASE / "base")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "vision_config" not in config
    assert any("--into-base" in note for note in notes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    truth = load_file(CASE / "truth.safetensors")
    live = model.state_dict()
    assert live.keys() == truth.keys()
    assert all(torch.equal(live[name], tensor) for name, tensor in truth.items())


def test_it_is_put_into_the_multimodal_base(tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = ckptkit.consolidate(CASE / "ckpt", out, base=CASE / "base", into_base=True)
    base, truth = (
        load_file(p) for p in (CASE / "base/model.safetensors", CASE / "truth.safetensors")
    )
    found = tensors_of(out)
    assert found.keys() >= base.keys()
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(out)
    live = model.state_dict()
    for name, tensor in truth.items():
        placed = name.replace("model.", "model.language_model.", 1)
        assert torch.equal(live[placed if name.startswith("model.") else name], tensor)
    visual = [name for name in base if "visual" in name]
    assert set(manifest.source["filled"]["tensors"]) == set(visual)
    assert all(torch.equal(found[name], base[name]) for name in visual)


# A multimodal class, and the class of its text model.
PAIRS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "LlavaForConditionalGeneration": "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "MllamaForConditionalGeneration": "MllamaForCausalLM",  # in no mapping of automatic classes
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.quick("Mistral3ForConditionalGeneration")
def test_text_models_of_families_behave_as_they_were_trained(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole_class = class_named(name)
    whole = whole_class(small_model_config(whole_class))
    base, out = tmp_path / "base", tmp_path / "out"
    whole.save_pretrained(base)
    text_class = class_named(PAIRS[name])
    config = whole.config.get_text_config()
    text = text_class(config)
    step = save(text.state_dict(), tmp_path / "step")
    assert main(["consolidate", str(step), str(out), "--base", str(base)]) == 0
    said = re.search(rf"transformers\.(\w+)\.from_pretrained\('{out}'\)", capfd.readouterr().out)
    assert said is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = getattr(transformers, said[1]).from_pretrained(out)
    assert type(loaded) is text_class
    assert all(torch.equal(t, text.state_dict()[n]) for n, t in loaded.state_dict().items())
    assert torch.allclose(logits(loaded), logits(text), atol=1e-5)  # other attention kernels
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "whole", base=base, into_base=True)
    assert not any("has no tensor" in note for note in notes)
    written = json.loads((tmp_path / "whole" / "config.json").read_text())
    flag = "tie_word_embeddings"
    added = tensors_of(tmp_path / "whole").keys() - tensors_of(base).keys()
    is_untied = getattr(whole.config, flag, False) and not getattr(config, flag)
    assert added == ({"lm_head.weight"} if is_untied else set())
    assert not (added and written[flag])
    joined = whole_class.from_pretrained(tmp_path / "whole")
    assert torch.allclose(logits(joined), logits(text), atol=1e-5)
    before, after = whole.state_dict(), joined.state_dict()
    towers = [n for n in before if "vision" in n or "visual" in n or "projector" in n]
    assert towers
    assert all(torch.equal(before[n], after[n]) for n in towers)


WRAPPED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "alone": ({}, {}),
    "model.": ({}, {}),
    "named": ({}, {"strip_prefix": "net."}),
    "included": ({"loss.weight": torch.ones(2)}, {"strip_prefix": "net.", "include": ["net.*"]}),
    "beside": ({"loss.weight": torch.ones(2)}, {"strip_prefix": "net.", "exclude": ["loss.*"]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", WRAPPED)
@pytest.mark.quick("alone", "named")
def test_a_wrapped_text_model_is_found_by_the_names_that_are_written(
    form: str, tmp_path: Path
) -> None:
    beside, options = WRAPPED[form]
    whole_class = class_named("Gemma3ForConditionalGeneration")
    whole = whole_class(small_model_config(whole_class))
    base = tmp_path / "base"
    whole.save_pretrained(base)
    text = class_named("Gemma3ForCausalLM")(whole.config.get_text_config())
    wrapper = form if form.endswith(".") else "net."
    state = {f"{wrapper}{name}": tensor for name, tensor in text.state_dict().items()}
    step = save(state | beside, tmp_path / "step")
    notes = notes_of(ckptkit.consolidate, step, tmp_path / "out", base=base, **options)
    assert not any("has no tensor" in note for note in notes)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(text)
    assert torch.allclose(logits(loaded), logits(text), atol=1e-5)
    into = tmp_path / "into"
    notes = notes_of(ckptkit.consolidate, step, into, base=base, into_base=True, **options)
    assert not any("has no tensor" in note for note in notes)
    joined = whole_class.from_pretrained(into)
    assert torch.allclose(logits(joined), logits(text), atol=1e-5)
    before, after = whole.state_dict(), joined.state_dict()
    assert tensors_of(into).keys() == tensors_of(base).keys()
    assert all(torch.equal(before[n], after[n]) for n in before if "vision" in n)
    if beside:
        with pytest.raises(RefusedError) as caught:
            ckptkit.consolidate(step, tmp_path / "hinted", base=base)
        (command,) = re.findall(r"`ckptkit ([^`]*)`", caught.value.hint)
        assert main(shlex.split(command)) == 0
        assert tensors_of(tmp_path / "hinted").keys() == tensors_of(tmp_path / "out").keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[("Gemma3ForConditionalGeneration", form) for form in ("live", "disk")],
        *[("LlavaForConditionalGeneration", form) for form in ("live", "disk")],
        ("Mistral3ForConditionalGeneration", "live"),
    ],
)
@pytest.mark.quick("LlavaForConditionalGeneration-live", "Gemma3ForConditionalGeneration-disk")
def test_the_text_model_is_taken_out_of_a_whole_one(name: str, form: str, tmp_path: Path) -> None:
    whole_class = class_named(name)
    whole = whole_class(small_model_config(whole_class))
    text = class_named(PAIRS[name])(whole.config.get_text_config())
    text.save_pretrained(tmp_path / "base")
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    state = whole.state_dict()
    if form == "disk":
        whole.save_pretrained(tmp_path / "whole")
        state = tensors_of(tmp_path / "whole")
    step, out = save(state, tmp_path / "step"), tmp_path / "out"
    notes = notes_of(ckptkit.consolidate, step, out, base=tmp_path / "base")
    assert any("multimodal" in note for note in notes)
    assert all(n.startswith(("model.", "lm_head.")) for n in tensors_of(out))
    loaded = type(text).from_pretrained(out)
    assert torch.allclose(logits(loaded), logits(text), atol=1e-5)


def test_a_whole_model_is_not_taken_for_its_text_model() -> None:
    config = {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text"},
        "vision_config": {},
    }
    whole = ["model.language_model.embed_tokens.weight", "model.visual.merger.weight"]
    assert find_text_config(config, whole) is None
    assert find_text_config(config, whole[:1]) is None
    assert find_text_config({"model_type": "llama"}, ["model.embed_tokens.weight"]) is None
    assert find_text_config(config, ["net.embed_tokens.weight"]) is None
    found = find_text_config(config, ["model.embed_tokens.weight"])
    assert found is not None
    assert found["architectures"] == ["Qwen3_5ForCausalLM"]


def test_what_is_no_text_model_of_the_base_is_not_put_into_it(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    step = save(model.state_dict(), tmp_path / "step")
    with pytest.raises(RefusedError, match="no text model"):
        ckptkit.consolidate(step, tmp_path / "out", base=tmp_path / "base", into_base=True)
    with pytest.raises(UsageError, match="none was named"):
        ckptkit.consolidate(step, tmp_path / "out", into_base=True)
