"""Models of frameworks with names of their own: bit by bit, and what both forwards compute.

`fixtures/generators/litgpt_models.py` and others made the cases: the truth has the weights under
the names of Transformers, `logits.safetensors` what the framework's own model computes of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptkit
from ckptkit.core import olmo_core
from ckptkit.core.errors import CkptkitError, RefusedError
from tests.command_line import run_command

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = sorted(
    path.parent.name
    for path in FIXTURES.glob("*/logits.safetensors")
    if Path(path.parent, "truth.safetensors").exists()
    if path.parent.name.startswith(("litgpt_", "olmo_core_", "torchtune_family_", "stacked_"))
    if not Path(path.parent, "merged.pth").exists()
)
LLAMA, LORA = FIXTURES / "litgpt_llama", FIXTURES / "litgpt_llama_lora"
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def stored(file: Path) -> Tensors:
    state = torch.load(file, weights_only=True)  # noqa: TID251
    return dict(state.get("model", state))


def assert_logits(folder: Path, case: Path, model: Any = None) -> None:
    expected = load_file(case / "logits.safetensors")
    model = model or AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        found = model.float().eval()(expected["input_ids"]).logits
    torch.testing.assert_close(found, expected["logits"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_the_one_that_the_framework_computes_with(name: str, tmp_path: Path) -> None:
    """That of OLMo-core says enough of the model, so that it needs no configuration."""
    case, out = FIXTURES / name, tmp_path / "out"
    has_base = Path(case, "base").exists() and "olmo_core" not in name
    ckptkit.consolidate(case / "checkpoint", out, base=case / "base" if has_base else None)
    found, truth = load_file(out / "model.safetensors"), load_file(case / "truth.safetensors")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in truth.items()}
    assert [n for n in truth if not torch.equal(found[n], truth[n])] == []
    assert_logits(out, case)


class TestLitGPT:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(LLAMA / "checkpoint", tmp_path / "lit"))

    def test_without_a_configuration_a_base_is_asked_for(
        self, folder: Path, tmp_path: Path
    ) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(RefusedError, match="names of LitGPT are converted by the sizes") as e:
            ckptkit.consolidate(folder, tmp_path / "out")
        assert "--base" in str(e.value.hint)
        assert not (tmp_path / "out").exists()
        truth = load_file(LLAMA / "truth.safetensors")  # with a map, its own sizes are enough
        ckptkit.consolidate(folder, tmp_path / "weights", map="litgpt-llama")
        found = load_file(tmp_path / "weights/model.safetensors")
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
        ckptkit.consolidate(folder, tmp_path / "out", base=LLAMA / "checkpoint")
        assert_logits(tmp_path / "out", LLAMA)

    def test_sizes_of_its_own_configuration_are_those_of_the_model(
        self, folder: Path, tmp_path: Path
    ) -> None:
        own = folder / "model_config.yaml"
        own.write_text(own.read_text().replace("n_head: 4", "n_head: 8"))
        with pytest.raises(RefusedError, match="num_attention_heads is 8 in the checkpoint's own"):
            ckptkit.consolidate(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("before", "after", "words"),
        [
            ("transformer.h.1.mlp.fc_1.weight", "", "layer 1 is missing"),
            ("transformer.h.1.attn.qkv.weight", "", "layer 1 is missing"),
            ("transformer.h.1.attn.qkv.weight", "transformer.h.2.attn.qkv.weight", "layer 1 is mi"),
            ("transformer.h.1.attn.qkv.weight", "transformer.h.1.attn.attn.weight", "is missing"),
            ("transformer.ln_f.weight", "", "has no tensor for"),
            ("transformer.ln_f.weight", "transformer.ln_f.gain", "no rule of map 'litgpt-llama'"),
        ],
    )
    def test_a_model_that_is_not_whole_is_refused(
        self, before: str, after: str, words: str, folder: Path, tmp_path: Path
    ) -> None:
        state = stored(folder / "lit_model.pth")
        tensor = state.pop(before)
        state |= {after: tensor} if after else {}
        torch.save(state, folder / "lit_model.pth")
        with pytest.raises(CkptkitError, match=words):
            ckptkit.consolidate(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_padding_of_the_vocabulary_is_left_out_with_a_note(
        self, folder: Path, tmp_path: Path
    ) -> None:
        state = stored(folder / "lit_model.pth")
        for name in ("lm_head.weight", "transformer.wte.weight"):
            state[name] = torch.cat([state[name], torch.zeros(16, 16)])
        torch.save({"model": state}, folder / "lit_model.pth")
        result = run_command("consolidate", folder, tmp_path / "out")
        assert "rows 48 to 63 of 'lm_head.weight' are padding: left out" in result.stderr
        assert_logits(tmp_path / "out", LLAMA)

    def test_a_head_that_was_trained_apart_is_kept(self, tmp_path: Path) -> None:
        """LitGPT ties nothing; its own converter leaves out the head of Gemma."""
        folder = Path(shutil.copytree(FIXTURES / "litgpt_gemma/checkpoint", tmp_path / "lit"))
        state = stored(folder / "lit_model.pth")
        state["lm_head.weight"] = state["lm_head.weight"] * 2
        torch.save(state, folder / "lit_model.pth")
        result = run_command("consolidate", folder, tmp_path / "out")
        assert "tie_word_embeddings is set to false" in result.stderr
        found = load_file(tmp_path / "out/model.safetensors")
        assert torch.equal(found["lm_head.weight"], state["lm_head.weight"])


class TestAdaptersOfLitGPT:
    @pytest.mark.parametrize("name", ["litgpt_llama_lora", "litgpt_qwen2_lora"])
    def test_merged_and_extracted_they_are_what_litgpt_makes(
        self, name: str, tmp_path: Path
    ) -> None:
        case, merged = FIXTURES / name, tmp_path / "merged"
        ckptkit.merge_adapter(case / "checkpoint", merged, base=case / "base")
        assert_logits(merged, case)
        folder = Path(shutil.copytree(case / "base", tmp_path / "lit"))
        shutil.copy(case / "merged.pth", folder / "lit_model.pth")
        ckptkit.consolidate(folder, tmp_path / "truth")
        found, truth = (load_file(p / "model.safetensors") for p in (merged, tmp_path / "truth"))
        assert found.keys() == truth.keys()
        for key, tensor in truth.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-7, rtol=1e-6)
        ckptkit.extract_adapter(case / "checkpoint", tmp_path / "peft", base=case / "base")
        ckptkit.consolidate(case / "base", tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert_logits(merged, case, PeftModel.from_pretrained(base, tmp_path / "peft"))

    def test_the_model_beside_an_adapter_has_it_already(self, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(LORA / "checkpoint", tmp_path / "final"))
        shutil.copy(LORA / "merged.pth", folder / "lit_model.pth")
        result = run_command("consolidate", folder, tmp_path / "out")
        assert "has it merged already" in result.stderr
        assert_logits(tmp_path / "out", LORA)
        with pytest.raises(RefusedError, match="has it merged already"):
            ckptkit.merge_adapter(folder, tmp_path / "twice", base=folder)

    def test_shapes_that_fit_several_matrices_need_the_options_of_the_run(
        self, tmp_path: Path
    ) -> None:
        case = FIXTURES / "litgpt_qwen2_lora"  # its q, k and v have one size
        folder = Path(shutil.copytree(case / "checkpoint", tmp_path / "lit"))
        options = folder / "hyperparameters.yaml"
        options.unlink()
        given: Any = {"base": case / "base", "overrides": {"lora_alpha": 6}}
        with pytest.raises(RefusedError, match="lora_query, lora_key, lora_value of the run") as e:
            ckptkit.merge_adapter(folder, tmp_path / "out", **given)
        assert not (tmp_path / "out").exists()
        assert str(e.value.hint) == "copy 'hyperparameters.yaml' of the run beside the adapter"
        shutil.copy(case / "checkpoint/hyperparameters.yaml", options)
        ckptkit.merge_adapter(folder, tmp_path / "out", base=case / "base")
        assert_logits(tmp_path / "out", case)

    def test_where_shapes_say_it_alpha_alone_is_needed(self, tmp_path: Path) -> None:
        """Queries have more rows than keys and values, so that these two are alike."""
        folder = Path(shutil.copytree(LORA / "checkpoint", tmp_path / "lit"))
        (folder / "hyperparameters.yaml").unlink()
        state = stored(folder / "lit_model.pth.lora")
        for layer in range(2):
            names = [f"transformer.h.{layer}.attn.qkv.lora_{factor}" for factor in "AB"]
            for name, rows in zip(names, (2, 16), strict=True):
                state[name] = state[name][:rows].clone()
        torch.save({"model": state}, folder / "lit_model.pth.lora")
        given: Any = {"base": LORA / "base"}
        with pytest.raises(CkptkitError, match="do not show lora_alpha"):
            ckptkit.extract_adapter(folder, tmp_path / "out", **given)
        ckptkit.extract_adapter(folder, tmp_path / "out", lora_alpha=6, **given)
        found = load_file(tmp_path / "out/adapter_model.safetensors")
        attention = "base_model.model.model.layers.1.self_attn"
        key = "transformer.h.1.attn.qkv.lora_B"
        assert torch.equal(found[f"{attention}.q_proj.lora_B.weight"], state[key])
        assert not any("v_proj" in name for name in found)

    def test_what_transformers_has_in_one_matrix_is_left_to_litgpt(self, tmp_path: Path) -> None:
        case = FIXTURES / "litgpt_pythia_lora"
        folder = Path(shutil.copytree(case / "checkpoint", tmp_path / "lit"))
        with pytest.raises(RefusedError, match="which Transformers has in one") as e:
            ckptkit.merge_adapter(folder, tmp_path / "out", base=case / "base")
        assert "`litgpt merge_lora` makes a `lit_model.pth`" in str(e.value.hint)
        shutil.copy(case / "merged.pth", folder / "lit_model.pth")  # which it made
        ckptkit.consolidate(folder, tmp_path / "out")
        assert_logits(tmp_path / "out", case)


class TestOlmoCore:
    CASE = FIXTURES / "olmo_core_flex_olmo"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(self.CASE / "checkpoint", tmp_path / "run"))

    @staticmethod
    def change(folder: Path, *keys: str, value: Any) -> None:
        file = folder / "step1/config.json"
        document = json.loads(file.read_text())
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        file.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        ("keys", "value"),
        [
            (("block_overrides",), {"1": {}}),
            (("embed_scale",), 2.0),
            (("block", "layer_norm", "name"), "default"),
            (("block", "sequence_mixer", "rope", "scaling"), {"factor": 8}),
            (("block", "sequence_mixer", "n_heads"), "4"),
            (("block", "sequence_mixer", "name"), "normalized"),
            (("block", "feed_forward_moe", "shared_mlp"), {"hidden_size": 4}),
            (("block", "feed_forward_moe", "router", "normalize_expert_weights"), 1.0),
        ],
    )
    def test_a_configuration_that_says_more_or_less_than_transformers_needs_a_base(
        self, keys: tuple[str, ...], value: Any, folder: Path, tmp_path: Path
    ) -> None:
        self.change(folder, "model", *keys, value=value)
        with pytest.raises(RefusedError, match="names of OLMo-core are converted by the sizes"):
            ckptkit.consolidate(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        ckptkit.consolidate(folder, tmp_path / "out", base=self.CASE / "base")
        assert_logits(tmp_path / "out", self.CASE)

    def test_without_its_configuration_the_layout_of_experts_is_asked_for(
        self, folder: Path, tmp_path: Path
    ) -> None:
        (folder / "step1/config.json").unlink()
        given: Any = {"base": self.CASE / "base"}
        with pytest.raises(RefusedError, match="does not say dropless, by which the maps") as e:
            ckptkit.consolidate(folder, tmp_path / "out", **given)
        assert "pass --map olmo-core-flex-olmo, or the other one" in str(e.value.hint)
        ckptkit.consolidate(folder, tmp_path / "out", map="olmo-core-flex-olmo", **given)
        assert_logits(tmp_path / "out", self.CASE)
        with pytest.raises(CkptkitError, match=r"shape \[48, 8\]; expected|axis 0|would not load"):
            ckptkit.consolidate(
                folder, tmp_path / "other", map="olmo-core-flex-olmo-dropless", **given
            )
        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize(
        ("keys", "value", "words"),
        [
            (("model", "block", "name"), "moe", "map 'olmo-core-flex-olmo' is for norms_after"),
            (("model", "block", "sequence_mixer", "rope", "name"), "complex", "rope_interleaved"),
            (("model", "block", "feed_forward_moe", "name"), "dropless", "shape"),
        ],
    )
    def test_a_form_that_is_not_that_of_the_map_is_refused(
        self, keys: tuple[str, ...], value: str, words: str, folder: Path, tmp_path: Path
    ) -> None:
        """Names and shapes are the same where norms or rotary embeddings are others."""
        self.change(folder, *keys, value=value)
        with pytest.raises(CkptkitError, match=words):
            ckptkit.consolidate(folder, tmp_path / "out", base=self.CASE / "base")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", [None, 3, [], "reordered_norm"])
    def test_a_hostile_configuration_is_none(self, name: Any) -> None:
        assert (
            olmo_core.make_config({"model": {"block": {"name": name, "sequence_mixer": 3}}}) is None
        )
        olmo_core.read_settings({"model": {"block": {"name": name, "feed_forward_moe": 3}}})


class TestTorchtune:
    def test_the_newest_of_its_distributed_saves_is_taken(self, tmp_path: Path) -> None:
        case = FIXTURES / "torchtune_family_llama"
        for epoch in (2, 10):
            shutil.copytree(
                case / "checkpoint/dist_epoch_0", tmp_path / "run" / f"dist_epoch_{epoch}"
            )
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=case / "base")
        assert_logits(tmp_path / "out", case)
        assert ckptkit.inspect(tmp_path / "run", base=case / "base").step == 10

    def test_the_model_beside_its_own_adapter_has_it_already(self, tmp_path: Path) -> None:
        """`FullModelTorchTuneCheckpointer` writes both into one folder."""
        case = FIXTURES / "torchtune_family_qwen2"
        folder = Path(shutil.copytree(case / "checkpoint/epoch_0", tmp_path / "epoch_0"))
        adapter = FIXTURES / "torchtune_qwen2_lora/checkpoint/epoch_0/adapter_0.pt"
        shutil.copy(adapter, folder / "adapter_model.pt")
        result = run_command("consolidate", folder, tmp_path / "out", "--base", case / "base")
        assert "has it merged already" in result.stderr
        assert_logits(tmp_path / "out", case)

    @pytest.mark.parametrize(
        ("name", "other", "words"),
        [
            ("gemma2", "gemma", "no rule of map 'torchtune-llama' takes tensor"),
            ("gemma", "gemma2", "has no tensor for map torchtune-gemma2"),
        ],
    )
    def test_a_model_of_another_family_is_refused(
        self, name: str, other: str, words: str, tmp_path: Path
    ) -> None:
        base = FIXTURES / f"torchtune_family_{other}" / "base"
        source = FIXTURES / f"torchtune_family_{name}" / "checkpoint"
        with pytest.raises(CkptkitError, match=words):
            ckptkit.consolidate(source, tmp_path / "out", base=base)
        assert not (tmp_path / "out").exists()
