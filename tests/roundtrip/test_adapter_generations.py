"""Adapters of fourteen releases of PEFT, from 0.7 to 0.21: taken out as saved, merged as merged.

`fixtures/generators/peft_generations.py` says how they were made, and what the releases differ in.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import AdapterError

GENERATIONS = Path(__file__).resolve().parents[2] / "fixtures" / "peft_generations"
FOLDERS = sorted(GENERATIONS.glob("peft_*/*"))
BASES = {
    "conv1d": "gpt2",
    "conv1d_dora": "gpt2",
    "dora_bf16": "llama_bf16",
    "dora_then_lora_bf16": "llama_bf16",
    "embedding_bf16": "llama_bf16",
    "experts": "llama4",
    "square_experts": "llama4_square",
    "tokens": "llama_tied",
    "transposed_experts": "gpt_oss",
}
# Its pattern begins with `^`, which meant nothing then and the beginning of a name now: PEFT of
# today cannot load it either.
REFUSED = {"peft_0_14/anchored_pattern"}
# What the release itself got wrong, or what nothing in its files tells; each has a test below.
DIFFERENT = {
    "peft_0_13/patterns_of_one_key",
    "peft_0_14/embedding_dora",
    "peft_0_14/lora_bias",
}
# Adapters were multiplied in bfloat16, without float32 in between.
MULTIPLIED_IN_16_BITS = {"peft_0_9/dora_bf16"}
# Rounded once, as the default does, where releases since then round twice.
ROUNDED_ONCE = {"peft_0_15/embedding_bf16"}
# PEFT rounds in between: the embedding's change, and what is merged so far of several adapters.
ROUNDED_IN_BETWEEN = {
    "peft_0_16/embedding_bf16",
    "peft_0_21/dora_then_lora_bf16",
    "peft_0_21/lora_then_dora",
    "peft_0_21/two_doras",
}
ODD = REFUSED | DIFFERENT | MULTIPLIED_IN_16_BITS
Q_PROJ = "model.layers.0.self_attn.q_proj"


def key(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def cases(*, without: set[str]) -> list[Path]:
    return [folder for folder in FOLDERS if key(folder) not in without]


def base_of(folder: Path) -> Path:
    return GENERATIONS / "bases" / BASES.get(folder.name, "llama")


def truth_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the merged model, in the dtypes of the base."""
    base = load_file(base_of(folder) / "model.safetensors")
    changed = load_file(folder / "merged.safetensors")
    return {name: changed.get(name, value).to(value.dtype) for name, value in base.items()}


def merged(folder: Path, out: Path, *, match_peft: bool) -> dict[str, torch.Tensor]:
    first, *further = sorted(folder.glob("adapter_*"))
    ckptkit.merge_adapter(first, out, base=base_of(folder), further=further, match_peft=match_peft)
    return load_file(out / "model.safetensors")


def differing(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> list[str]:
    assert set(ours) == set(truth)
    return [name for name, value in truth.items() if not torch.equal(ours[name], value)]


def test_there_are_adapters_of_fourteen_releases() -> None:
    assert len({folder.parent for folder in FOLDERS}) == 14


@pytest.mark.parametrize("folder", cases(without=REFUSED), ids=key)
@pytest.mark.quick(
    "peft_0_7/bias_all",
    "peft_0_9/dora",
    "peft_0_13/patterns_of_one_key",
    "peft_0_15/tokens",
    "peft_0_17/experts",
    "peft_0_20/lora_then_dora",
    "peft_0_21/lora",
)
def test_an_adapter_is_taken_out_as_its_release_saved_it(folder: Path, tmp_path: Path) -> None:
    for saved in sorted(folder.glob("adapter_*")):
        out = tmp_path / saved.name
        ckptkit.extract_adapter(saved, out)
        tensors = load_file(out / "adapter_model.safetensors")
        assert not differing(tensors, load_file(saved / "adapter_model.safetensors"))
        config = json.loads((out / "adapter_config.json").read_text())
        assert config == json.loads((saved / "adapter_config.json").read_text())


@pytest.mark.parametrize("folder", cases(without=ODD | ROUNDED_IN_BETWEEN), ids=key)
@pytest.mark.quick(
    "peft_0_7/conv1d",
    "peft_0_8/rslora",
    "peft_0_11/conv1d_dora",
    "peft_0_15/anchored_pattern",
    "peft_0_17/experts",
    "peft_0_21/transposed_experts",
)
def test_a_merge_is_the_one_of_its_release(folder: Path, tmp_path: Path) -> None:
    assert not differing(merged(folder, tmp_path / "out", match_peft=False), truth_of(folder))


@pytest.mark.parametrize("folder", cases(without=ODD | ROUNDED_ONCE), ids=key)
@pytest.mark.quick(
    "peft_0_7/lora",
    "peft_0_9/patterns",
    "peft_0_12/dora_bf16",
    "peft_0_15/tokens",
    "peft_0_16/embedding_dora",
    "peft_0_18/square_experts",
    "peft_0_21/two_doras",
)
def test_a_merge_that_matches_peft_is_the_one_of_its_release(folder: Path, tmp_path: Path) -> None:
    assert not differing(merged(folder, tmp_path / "out", match_peft=True), truth_of(folder))


@pytest.mark.parametrize("name", sorted(MULTIPLIED_IN_16_BITS))
def test_a_merge_in_16_bits_is_within_their_rounding(name: str, tmp_path: Path) -> None:
    folder = GENERATIONS / name
    ours = merged(folder, tmp_path / "out", match_peft=False)
    for tensor, truth in truth_of(folder).items():
        torch.testing.assert_close(ours[tensor], truth, rtol=0.02, atol=0.01)


def test_a_pattern_that_was_no_pattern_then_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"shape \[2, 16\] .* rank 3"):
        ckptkit.extract_adapter(
            GENERATIONS / "peft_0_14" / "anchored_pattern" / "adapter_0", tmp_path / "out"
        )


def test_alphas_are_looked_up_apart_from_ranks_as_since_0_14(tmp_path: Path) -> None:
    """Nothing in the file of 0.13 tells that its alpha was 5 for a module whose pattern says 7."""
    folder = GENERATIONS / "peft_0_13" / "patterns_of_one_key"
    base = load_file(base_of(folder) / "model.safetensors")[f"{Q_PROJ}.weight"]
    ours = merged(folder, tmp_path / "out", match_peft=False)[f"{Q_PROJ}.weight"]
    then = truth_of(folder)[f"{Q_PROJ}.weight"]
    torch.testing.assert_close(ours - base, (then - base) * 7 / 5)


def test_the_magnitude_of_an_embedding_is_merged_where_its_release_forgot_it(
    tmp_path: Path,
) -> None:
    """Its forward pass had it: what is merged is the function that was trained."""
    folder = GENERATIONS / "peft_0_14" / "embedding_dora"
    name = "model.embed_tokens.weight"
    direction = truth_of(folder)[name]
    adapter = load_file(folder / "adapter_0" / "adapter_model.safetensors")
    magnitude = adapter["base_model.model.model.embed_tokens.lora_magnitude_vector"]
    ours = merged(folder, tmp_path / "out", match_peft=True)[name]
    torch.testing.assert_close(ours, magnitude / direction.norm(dim=0) * direction)


def test_a_bias_of_lora_is_scaled_where_its_release_forgot_to(tmp_path: Path) -> None:
    folder = GENERATIONS / "peft_0_14" / "lora_bias"
    base = load_file(base_of(folder) / "model.safetensors")[f"{Q_PROJ}.bias"]
    ours = merged(folder, tmp_path / "out", match_peft=True)
    then = truth_of(folder)
    assert differing(ours, then) == [f"{Q_PROJ}.bias"]
    torch.testing.assert_close(
        ours[f"{Q_PROJ}.bias"] - base, (then[f"{Q_PROJ}.bias"] - base) * 5 / 2
    )


def test_what_an_adapter_replaces_has_the_type_of_the_base(tmp_path: Path) -> None:
    """PEFT loads float32 tensors of `modules_to_save` into a bfloat16 model as bfloat16."""
    saved = GENERATIONS / "peft_0_21" / "lora" / "adapter_0"
    ckptkit.merge_adapter(saved, tmp_path / "out", base=GENERATIONS / "bases" / "llama_bf16")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in ours.values()} == {torch.bfloat16}
    head = load_file(saved / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert head.dtype == torch.float32
    assert torch.equal(ours["lm_head.weight"], head.bfloat16())
