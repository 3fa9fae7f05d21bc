"""Parameters in MaxText's layout, saved by Orbax, beside what MaxText's own hooks make of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ckptkit
from tests.live_truth import FIXTURES, base_with, refuse, truth_of
from tests.tensor_images import images

CASES = (
    "maxtext_qwen3_scanned",
    "maxtext_qwen2_layers",
    "maxtext_llama_scanned",
    "maxtext_llama_layers",
    "maxtext_gemma_scanned",
    "maxtext_gemma_layers",
    "maxtext_gemma2_scanned",
    "maxtext_gemma2_layers",
    "maxtext_gemma3_scanned",
    "maxtext_gemma3_layers",
)


@pytest.mark.parametrize("case", CASES)
def test_names_and_matrices_are_those_that_maxtext_itself_exports(
    case: str, tmp_path: Path
) -> None:
    source, out = FIXTURES / case / "checkpoint", tmp_path / "out"
    ckptkit.consolidate(source, out, base=FIXTURES / case)
    assert images(out / "model.safetensors") == truth_of(case)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    with ckptkit.open(source, map="auto", base=FIXTURES / case) as checkpoint:
        assert set(checkpoint.keys()) == set(truth_of(case))


def test_a_configuration_of_other_heads_or_layers_is_refused(tmp_path: Path) -> None:
    case = FIXTURES / "maxtext_qwen3_scanned"
    source = case / "checkpoint"
    for number, changed in enumerate(({"num_hidden_layers": 4}, {"num_attention_heads": 8})):
        base = base_with(tmp_path / f"base{number}", case, **changed)
        refuse("params.params.decoder.layers|shape|layer", source, tmp_path / "out", base=base)
    layers = FIXTURES / "maxtext_qwen2_layers"
    base = base_with(tmp_path / "more", layers, num_hidden_layers=4)
    refuse("layer", layers / "checkpoint", tmp_path / "out", base=base)
    for name, number, message in (
        ("gemma2_scanned", 5, "layer 5 is one too many"),
        ("gemma2_layers", 6, "layer 4, 5 is missing"),
        ("gemma3_scanned", 13, "layer 13 is one too many"),
        ("gemma3_scanned", 15, "layer 14 is missing"),
    ):
        case = FIXTURES / f"maxtext_{name}"
        base = base_with(tmp_path / f"{name}{number}", case, num_hidden_layers=number)
        refuse(message, case / "checkpoint", tmp_path / "out", base=base)


def test_a_family_without_a_map_is_named(tmp_path: Path) -> None:
    case = FIXTURES / "maxtext_qwen2_layers"
    base = base_with(tmp_path / "base", case, model_type="mixtral")
    caught = refuse("no map has names of MaxText", case / "checkpoint", tmp_path / "out", base=base)
    assert "--map none" in str(caught.value.hint)
    ckptkit.consolidate(case / "checkpoint", tmp_path / "out", map="none", names="live")
    assert "params.params.decoder.decoder_norm.scale" in images(tmp_path / "out/model.safetensors")


def test_a_configuration_beside_the_steps_is_found(tmp_path: Path) -> None:
    case = FIXTURES / "maxtext_qwen3_scanned"
    run = Path(shutil.copytree(case / "checkpoint", tmp_path / "run"))
    (run / "config.json").write_text(json.dumps(json.loads((case / "config.json").read_text())))
    ckptkit.consolidate(run, tmp_path / "out")
    assert images(tmp_path / "out" / "model.safetensors") == truth_of(case.name)
