"""Reports about adapters: what comes out is what PEFT, or the framework itself, makes of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
)

import ckptkit
from ckptkit.core.errors import AdapterError, CkptkitError, IncompleteCheckpointError, RefusedError
from tests.command_line import run_command
from tests.reports.folders import assert_same, save, tensors_of
from tests.sharded import write_sharded

FIXTURES = Path(__file__).parents[2] / "fixtures"
REPORTS = FIXTURES / "reports"
VERL = REPORTS / "05-verl-lora"
GATHERED = REPORTS / "05-verl-lora-dir"
IDS = torch.arange(12)[None]
Tensors = Mapping[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and Transformers' own
LLAMA: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {
    **LLAMA,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 8,
    "head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}


def with_adapter(base: Path, adapter: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Loads an adapter with PEFT, and makes sure that every tensor of its file is in the model."""
    model = PeftModel.from_pretrained(kind.from_pretrained(base), adapter)
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert_same(
        {name: t.float() for name, t in held.items()},
        {name: t.float() for name, t in tensors_of(adapter).items()},
    )
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS).logits.float()
    assert isinstance(found, torch.Tensor)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(found, dict)
    return found


class TestVerl:
    @pytest.mark.parametrize("name", ["05-verl-lora", "05-verl-lora-dir", "05-verl-lora-only"])
    @pytest.mark.quick("05-verl-lora")
    def test_rank_alpha_and_task_are_those_that_verl_recorded(
        self, name: str, tmp_path: Path
    ) -> None:
        source, base = REPORTS / name / "ckpt", REPORTS / "05-verl-lora-only" / "base"
        given: Any = {"base": base} if name.endswith("only") else {}
        ckptkit.merge_adapter(source, tmp_path / "merged", **given)
        truth = load_file(VERL / "truth.safetensors")
        assert_same(tensors_of(tmp_path / "merged"), truth)
        ckptkit.extract_adapter(source, tmp_path / "adapter")
        config = config_of(tmp_path / "adapter")
        assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 32, "CAUSAL_LM")
        model = with_adapter(base, tmp_path / "adapter")
        assert type(model).__name__ == "PeftModelForCausalLM"
        assert_same(dict(model.merge_and_unload().state_dict()), truth)

    def test_the_trainer_of_verl_records_them_beside_the_ranks(self, tmp_path: Path) -> None:
        step = tmp_path / "global_step_7"
        shutil.copytree(VERL / "ckpt" / "global_step_2" / "actor", step)
        ckptkit.merge_adapter(step, tmp_path / "merged")
        assert_same(tensors_of(tmp_path / "merged"), load_file(VERL / "truth.safetensors"))

    def test_the_adapter_and_its_gathered_copy_have_to_agree(self, tmp_path: Path) -> None:
        source = shutil.copytree(GATHERED / "ckpt", tmp_path / "ckpt")
        file = source / "global_step_2/actor/lora_adapter/adapter_model.safetensors"
        stored = load_file(file)
        save_file({name: t.to(torch.bfloat16) for name, t in stored.items()}, file)
        ckptkit.extract_adapter(source, tmp_path / "rounded")
        name = sorted(stored)[3]
        save_file({**stored, name: stored[name] + 1}, file)
        for make in (ckptkit.extract_adapter, ckptkit.merge_adapter):
            with pytest.raises(AdapterError, match="'actor' and 'actor/lora_adapter'") as caught:
                make(source, tmp_path / "out")
            assert name in caught.value.message
            assert "--select actor, or --select actor/lora_adapter" in caught.value.hint
        ckptkit.extract_adapter(source, tmp_path / "ranks", select="actor")
        ckptkit.extract_adapter(source, tmp_path / "copy", select="actor/lora_adapter")
        ranks, copy = tensors_of(tmp_path / "ranks"), tensors_of(tmp_path / "copy")
        assert_same(ranks, stored)
        assert not torch.equal(copy[name], ranks[name])
        save_file({n: t for n, t in stored.items() if n != name}, file)
        with pytest.raises(AdapterError, match="'actor/lora_adapter' are one adapter"):
            ckptkit.extract_adapter(source, tmp_path / "out")

    @pytest.mark.parametrize(
        ("changed", "options", "said"),
        [
            ({"r": 8}, {}, "rank 4 against 8"),
            ({"lora_alpha": 0}, {}, "do not show lora_alpha"),
            ({"lora_alpha": "32"}, {}, "lora_alpha '32'"),
            ({"r": True}, {}, "r True"),
            ({}, {"lora_alpha": 16}, "16 was given against 32"),
        ],
    )
    def test_records_that_contradict_or_say_nothing_are_refused(
        self, changed: dict[str, Any], options: Any, said: str, tmp_path: Path
    ) -> None:
        source = shutil.copytree(VERL / "ckpt", tmp_path / "ckpt")
        file = source / "global_step_2/actor/lora_train_meta.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
        with pytest.raises(CkptkitError, match=said):
            ckptkit.extract_adapter(source, tmp_path / "out", **options)

    def test_the_copy_may_not_have_another_alpha_than_the_record(self, tmp_path: Path) -> None:
        source = shutil.copytree(GATHERED / "ckpt", tmp_path / "ckpt")
        file = source / "global_step_2/actor/lora_adapter/adapter_config.json"
        document = json.loads(file.read_text())
        file.write_text(json.dumps({**document, "lora_alpha": 16}))
        with pytest.raises(AdapterError, match="lora_alpha is 16"):
            ckptkit.merge_adapter(source, tmp_path / "out")
        file.write_text(json.dumps({**document, "task_type": None}))
        ckptkit.extract_adapter(source, tmp_path / "out")
        assert config_of(tmp_path / "out")["task_type"] == "CAUSAL_LM"

    def test_rslora_can_be_given_where_the_record_does_not_say(self, tmp_path: Path) -> None:
        ckptkit.extract_adapter(VERL / "ckpt", tmp_path / "out", use_rslora=True)
        assert config_of(tmp_path / "out")["use_rslora"] is True

    def test_an_actor_and_a_critic_are_chosen_between(self, tmp_path: Path) -> None:
        step = tmp_path / "ckpt" / "global_step_2"
        for part in ("actor", "critic"):
            shutil.copytree(GATHERED / "ckpt" / "global_step_2" / "actor", step / part)
        refused = run_command("adapter", "extract", step, tmp_path / "out")
        assert "--select actor" in refused.stderr, refused.stderr
        for part in ("actor", "critic"):
            ckptkit.extract_adapter(step.parent, tmp_path / part, select=part)


class TestMegatron:
    @pytest.mark.parametrize("name", ["04-bridge-lora", "17-swift-lora"])
    def test_factors_of_megatron_modules_become_those_of_transformers(
        self, name: str, tmp_path: Path
    ) -> None:
        source, base = REPORTS / name / "ckpt", REPORTS / name / "base"
        ckptkit.extract_adapter(source, tmp_path / "adapter", base=base)
        found = tensors_of(tmp_path / "adapter")
        assert_same(found, load_file(REPORTS / name / "truth.safetensors"))
        config = config_of(tmp_path / "adapter")
        assert (config["r"], config["lora_alpha"]) == (2, 8)
        ckptkit.merge_adapter(source, tmp_path / "merged", base=base)
        truth = load_file(REPORTS / name / "truth_merged.safetensors")
        assert_same(tensors_of(tmp_path / "merged"), truth)
        adapted = with_adapter(base, tmp_path / "adapter")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        close = 1e-5 if name.startswith("17") else 0.1  # of float32 and bfloat16
        torch.testing.assert_close(logits(merged), logits(adapted), atol=close, rtol=close)

    @pytest.mark.parametrize("name", ["04-bridge-lora", "17-swift-lora", "25-torchtune-adapter"])
    def test_nothing_is_written_without_the_sizes_of_the_model(
        self, name: str, tmp_path: Path
    ) -> None:
        source = REPORTS / name / "ckpt"
        with pytest.raises(RefusedError, match="no configuration has them") as caught:
            ckptkit.extract_adapter(source, tmp_path / "out", lora_alpha=8)
        assert "--base" in caught.value.hint
        with pytest.raises(RefusedError, match="form"):
            ckptkit.consolidate(source, tmp_path / "out", base=REPORTS / name / "base")
        assert not (tmp_path / "out").exists()

    def test_the_configuration_of_megatron_bridge_may_be_beside_the_iterations(
        self, tmp_path: Path
    ) -> None:
        case, source = REPORTS / "04-bridge-lora", tmp_path / "ckpt"
        shutil.copytree(case / "ckpt", source)
        shutil.move(source / "iter_0000010" / "run_config.yaml", source)
        ckptkit.extract_adapter(source, tmp_path / "out", base=case / "base")
        assert config_of(tmp_path / "out")["lora_alpha"] == 8
        (source / "run_config.yaml").write_text("model:\n  alpha: 3\npeft:\n  dim: 2\nend: 1\n")
        with pytest.raises(CkptkitError, match="do not show lora_alpha"):
            ckptkit.extract_adapter(source, tmp_path / "unknown", base=case / "base")

    def test_a_base_that_the_configuration_names_is_enough(self, tmp_path: Path) -> None:
        case = REPORTS / "17-swift-lora"
        source = shutil.copytree(case / "ckpt", tmp_path / "ckpt")
        file = source / "iter_0000010" / "adapter_config.json"
        document = {**json.loads(file.read_text()), "base_model_name_or_path": str(case / "base")}
        file.write_text(json.dumps({**document, "use_rslora": True, "lora_alpha": 5}))
        ckptkit.extract_adapter(source, tmp_path / "out")
        assert_same(tensors_of(tmp_path / "out"), load_file(case / "truth.safetensors"))
        config = config_of(tmp_path / "out")
        assert (config["use_rslora"], config["lora_alpha"]) == (True, 5)

    def test_patterns_of_the_configuration_follow_their_modules(self, tmp_path: Path) -> None:
        case = REPORTS / "17-swift-lora"
        source = shutil.copytree(case / "ckpt", tmp_path / "ckpt")
        file = source / "iter_0000010" / "adapter_config.json"
        document = json.loads(file.read_text())
        patterns = {"r": 4, "rank_pattern": {"linear_.*": 2}, "alpha_pattern": {"1.*linear_qkv": 6}}
        file.write_text(json.dumps(document | patterns))
        ckptkit.extract_adapter(source, tmp_path / "out", base=case / "base")
        model = with_adapter(case / "base", tmp_path / "out")
        scaling = {
            name.removeprefix("base_model.model."): module.scaling["default"]
            for name, module in model.named_modules()
            if hasattr(module, "scaling") and isinstance(module.scaling, dict)
        }
        assert scaling["model.layers.1.self_attn.k_proj"] == 3
        assert scaling["model.layers.0.self_attn.k_proj"] == 4
        assert scaling["model.layers.1.mlp.up_proj"] == 4

    def test_a_layer_that_the_configuration_means_may_not_be_missing(self, tmp_path: Path) -> None:
        case, ranks = REPORTS / "17-swift-lora", tmp_path / "ckpt" / "iter_0000010"
        truth = _swift_factors(load_file(case / "truth.safetensors"), layers=(0,))
        write_sharded(ranks, truth, 1)
        config = json.loads((case / "ckpt" / "adapter_config.json").read_text())
        (ranks / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(IncompleteCheckpointError, match="layer 1"):
            ckptkit.extract_adapter(ranks, tmp_path / "out", base=case / "base")
        chosen = {**config, "layers_to_transform": [0]}
        (ranks / "adapter_config.json").write_text(json.dumps(chosen))
        ckptkit.extract_adapter(ranks, tmp_path / "out", base=case / "base")
        with_adapter(case / "base", tmp_path / "out")

    def test_rows_that_ranks_may_have_split_otherwise_are_refused(self, tmp_path: Path) -> None:
        case, step = REPORTS / "17-swift-lora", tmp_path / "iter_0000010"
        factors = _swift_factors(load_file(case / "truth.safetensors"), layers=(0, 1))
        write_sharded(step, factors, 2)
        config = (case / "ckpt" / "adapter_config.json").read_text()
        (step / "adapter_config.json").write_text(config)
        with pytest.raises(RefusedError, match=r"stored in 2 parts.* 1 ranks of tensor"):
            ckptkit.extract_adapter(step, tmp_path / "out", base=case / "base")

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("decoder.layers.0.self_attention.linear_qkv.adapter.weight_magnitude", "no rule"),
            ("decoder.layers.0.mlp.linear_fc9.adapter.linear_in.weight", "does not say"),
            ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.bias", "no rule of map"),
        ],
    )
    def test_what_no_rule_is_for_is_refused_by_name(
        self, name: str, said: str, tmp_path: Path
    ) -> None:
        case = REPORTS / "04-bridge-lora"
        inside = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_{}.weight"
        factors = {inside.format("in"): torch.ones(2, 16), inside.format("out"): torch.ones(32, 2)}
        write_sharded(tmp_path / "step", {**factors, name: torch.ones(32)}, 1)
        with pytest.raises(CkptkitError, match=said) as caught:
            ckptkit.merge_adapter(tmp_path / "step", tmp_path / "out", base=case / "base")
        assert name in str(caught.value)
        assert "export_adapter.py" in caught.value.hint

    def test_queries_keys_and_values_may_have_adapters_of_their_own(self, tmp_path: Path) -> None:
        """CanonicalLoRA of Megatron-Bridge; here without one for the keys."""
        case = REPORTS / "04-bridge-lora"
        truth, canonical = load_file(case / "truth.safetensors"), {}
        whose = {"q_proj": "linear_qkv.adapter.adapter_q", "v_proj": "linear_qkv.adapter.adapter_v"}
        whose |= {"gate_proj": "linear_fc1.adapter.adapter_gate"}
        kept = {n: t for n, t in truth.items() if n.split(".")[-3] in whose}
        for name, tensor in kept.items():
            _, _, _, _, layer, part, module, factor, _ = name.split(".")
            place = f"decoder.layers.{layer}.{'mlp' if part == 'mlp' else 'self_attention'}"
            end = {"lora_A": "linear_in", "lora_B": "linear_out"}[factor]
            canonical[f"{place}.{whose[module]}.{end}.weight"] = tensor
        write_sharded(tmp_path / "step", canonical, 1)
        options: Any = {"base": case / "base", "lora_alpha": 8}
        ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out", **options)
        assert_same(tensors_of(tmp_path / "out"), kept)


def _swift_factors(truth: Tensors, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Returns factors on Megatron's modules: B of gate and up one below the other."""
    found = {}
    for layer in layers:
        mlp = f"base_model.model.model.layers.{layer}.mlp"
        parts = [truth[f"{mlp}.{part}_proj.lora_B.weight"] for part in ("gate", "up")]
        name = f"decoder.layers.{layer}.mlp.linear_fc1.lora"
        found[f"{name}_B.default.weight"] = torch.cat(parts)
        found[f"{name}_A.default.weight"] = truth[f"{mlp}.gate_proj.lora_A.weight"]
        down = f"decoder.layers.{layer}.mlp.linear_fc2.lora"
        for factor in "AB":
            own = truth[f"{mlp}.down_proj.lora_{factor}.weight"]
            found[f"{down}_{factor}.default.weight"] = own
        attention = f"base_model.model.model.layers.{layer}.self_attn"
        q, k, v = (truth[f"{attention}.{p}_proj.lora_B.weight"] for p in "qkv")
        heads = [part.reshape(2, 8, -1) for part in (q, k, v)]
        qkv = f"decoder.layers.{layer}.self_attention.linear_qkv.lora"
        found[f"{qkv}_B.default.weight"] = torch.cat(heads, 1).reshape(48, -1)
        found[f"{qkv}_A.default.weight"] = truth[f"{attention}.q_proj.lora_A.weight"]
        out = f"decoder.layers.{layer}.self_attention.linear_proj.lora"
        for factor in "AB":
            own = truth[f"{attention}.o_proj.lora_{factor}.weight"]
            found[f"{out}_{factor}.default.weight"] = own
    return found


class TestTorchtune:
    @pytest.mark.parametrize(("name", "alpha"), [("llama_dora", 6), ("qwen2_lora", 8)])
    @pytest.mark.quick("llama_dora-6")
    def test_the_merged_model_is_the_one_that_torchtune_makes(
        self, name: str, alpha: int, tmp_path: Path
    ) -> None:
        case = FIXTURES / f"torchtune_{name}"
        options: Any = {"base": case / "base"}
        ckptkit.merge_adapter(
            case / "checkpoint", tmp_path / "merged", overrides={"lora_alpha": alpha}, **options
        )
        truth = load_file(case / "merged_truth.safetensors")
        found = tensors_of(tmp_path / "merged")
        assert found.keys() == truth.keys()
        for tensor, expected in truth.items():
            torch.testing.assert_close(found[tensor], expected, atol=1e-6, rtol=1e-6)
        out = tmp_path / "adapter"
        ckptkit.extract_adapter(case / "checkpoint", out, lora_alpha=alpha, **options)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        adapted = logits(with_adapter(case / "base", out))
        torch.testing.assert_close(logits(merged), adapted, atol=1e-5, rtol=1e-5)

    def test_the_reported_adapter_is_loaded_by_peft(self, tmp_path: Path) -> None:
        case = REPORTS / "25-torchtune-adapter"
        out = tmp_path / "adapter"
        ckptkit.extract_adapter(case / "ckpt", out, base=case / "base", lora_alpha=8)
        stored = torch.load(case / "ckpt" / "epoch_0" / "adapter_0.pt")  # noqa: TID251
        found = tensors_of(out)
        heads = stored["layers.1.attn.q_proj.lora_b.weight"].reshape(-1, 4, 2, 2)
        rows = heads.transpose(1, 2).reshape(16, 2)  # of head dimension 8
        prefix = "base_model.model.model.layers.1.self_attn"
        assert torch.equal(found[f"{prefix}.q_proj.lora_B.weight"], rows)
        for factor in "ab":
            own = stored[f"layers.1.attn.v_proj.lora_{factor}.weight"]
            assert torch.equal(found[f"{prefix}.v_proj.lora_{factor.upper()}.weight"], own)
        with_adapter(case / "base", out)

    def test_the_model_beside_an_adapter_has_it_already(self, tmp_path: Path) -> None:
        case, folder = FIXTURES / "torchtune_qwen2_lora", tmp_path / "epoch_0"
        shutil.copytree(case / "base", folder)
        truth = load_file(case / "merged_truth.safetensors")
        save_file(truth, folder / "model.safetensors", {"format": "pt"})
        ckptkit.extract_adapter(
            case / "checkpoint", tmp_path / "peft", base=case / "base", lora_alpha=8
        )
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(tmp_path / "peft" / name, folder)
        stored = case / "checkpoint" / "epoch_0" / "adapter_0.pt"
        shutil.copy(stored, folder / "adapter_model.pt")
        (folder / "adapter_model.pt").unlink()
        refused = run_command("consolidate", folder, tmp_path / "out")
        assert "adapter merge" not in refused.stderr
        chosen = re.search(r"--select (\S+);", refused.stderr)
        assert chosen is not None, refused.stderr
        ckptkit.consolidate(folder, tmp_path / "chosen", select=chosen[1])
        assert_same(tensors_of(tmp_path / "chosen"), truth)
        shutil.copy(stored, folder / "adapter_model.pt")
        written = run_command("consolidate", folder, tmp_path / "out")
        assert "has it merged already" in written.stderr
        assert_same(tensors_of(tmp_path / "out"), truth)
        with pytest.raises(RefusedError, match="has it merged already"):
            ckptkit.merge_adapter(folder, tmp_path / "twice", base=folder)
        ckptkit.merge_adapter(folder, tmp_path / "once", base=case / "base")
        assert_same(tensors_of(tmp_path / "once"), truth)

    @pytest.mark.parametrize("name", ["llama_dora", "qwen2_lora"])
    def test_a_whole_model_under_its_names_is_converted_too(
        self, name: str, tmp_path: Path
    ) -> None:
        case, stored = FIXTURES / f"torchtune_{name}", {}
        truth = load_file(case / "merged_truth.safetensors")
        for key, value in truth.items():
            *_, kind = module = key.removeprefix("model.").split(".")
            own = {"embed_tokens": "tok_embeddings", "lm_head": "output", "norm": "norm"}
            own |= {"input_layernorm": "sa_norm", "post_attention_layernorm": "mlp_norm"}
            own |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "self_attn": "attn"}
            parts = [{**own, "o_proj": "output_proj"}.get(part, part) for part in module]
            parts[-1] = "scale" if "norm" in parts[-2] else kind
            if "llama" in name and module[-2] in {"q_proj", "k_proj"}:  # neighbours, not halves
                halves = value.reshape(-1, 2, 4, value.shape[-1])
                stored[".".join(parts)] = halves.transpose(1, 2).reshape_as(value)
            else:
                stored[".".join(parts)] = value.clone()
        torch.save({"model": stored}, tmp_path / "model.pt")
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", base=case / "base")
        assert_same(tensors_of(tmp_path / "out"), truth)

    @pytest.mark.parametrize(
        "names",
        [
            ["model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"],
            ["blocks.0.q.lora_a.weight", "blocks.0.q.lora_b.weight"],
        ],
    )
    def test_factors_of_unknown_modules_are_neither_a_model_nor_an_adapter(
        self, names: list[str], tmp_path: Path
    ) -> None:
        torch.save({name: torch.ones(2, 2) for name in names}, tmp_path / "adapters.pt")
        shown = run_command("inspect", tmp_path / "adapters.pt")
        page = shown.stdout.split("\nNext\n")[1]
        assert "does not handle this form" in " ".join(page.split())
        for words in (["consolidate"], ["adapter", "extract"], ["adapter", "merge"]):
            base = [] if words == ["adapter", "extract"] else ["--base", VERL / "ckpt"]
            done = run_command(*words, tmp_path / "adapters.pt", tmp_path / "out", *base)
            assert done.returncode == 4, done.stderr
            assert names[0] in done.stderr
            assert "ckptkit consolidate" not in done.stderr


class TestTinker:
    CASE = REPORTS / "15-tinker-moe"

    def test_the_factors_of_experts_are_merged(self, tmp_path: Path) -> None:
        ckptkit.merge_adapter(self.CASE / "adapter", tmp_path / "out", base=self.CASE / "base")
        assert_same(tensors_of(tmp_path / "out"), load_file(self.CASE / "truth.safetensors"))

    def test_it_is_neither_extracted_nor_said_to_be_loaded_by_peft(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match="Tinker's form") as caught:
            ckptkit.extract_adapter(self.CASE / "adapter", tmp_path / "out")
        assert "tinker_cookbook.weights.build_lora_adapter" in caught.value.hint
        for base in ([], ["--base", self.CASE / "base"]):
            page = " ".join(run_command("inspect", self.CASE / "adapter", *base).stdout.split())
            assert "PEFT loads this folder as it is" not in page
            assert "LoRA in Tinker's form, which PEFT does not load" in page

    def test_an_adapter_of_a_dense_model_is_extracted_with_its_head(self, tmp_path: Path) -> None:
        case = REPORTS / "17-swift-lora"
        own = {n: t for n, t in load_file(case / "truth.safetensors").items() if "self_attn" in n}
        head = "base_model.model.model.unembed_tokens.lora_"
        factors = {f"{head}A.weight": torch.ones(2, 16), f"{head}B.weight": torch.ones(48, 2)}
        adapter = _write_tinker(tmp_path / "adapter", {**own, **factors})
        done = run_command("adapter", "extract", adapter, tmp_path / "out")
        assert "the adapter has Tinker's form: its 'unembed_tokens' is 'lm_head'\n" in done.stderr
        model = with_adapter(case / "base", tmp_path / "out")
        ckptkit.merge_adapter(adapter, tmp_path / "merged", base=case / "base")
        assert_same(tensors_of(tmp_path / "merged"), dict(model.merge_and_unload().state_dict()))

    def test_experts_that_the_base_has_in_one_tensor_are_refused_by_name(
        self, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        shutil.copytree(self.CASE / "base", base)
        stored = tensors_of(base)
        experts = {n: t for n, t in stored.items() if ".experts." in n}
        gates = [experts[f"model.layers.0.mlp.experts.{n}.gate_proj.weight"] for n in range(4)]
        fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.stack([*gates])}
        rest = {n: t for n, t in stored.items() if n not in experts}
        save_file({**rest, **fused}, base / "model.safetensors", {"format": "pt"})
        with pytest.raises(RefusedError, match="no weight for") as caught:
            ckptkit.merge_adapter(self.CASE / "adapter", tmp_path / "out", base=base)
        assert "build_lora_adapter" in caught.value.hint

    @pytest.mark.parametrize(
        ("shape_a", "shape_b"), [((1, 2, 16), (1, 8, 2)), ((3, 2, 16), (4, 8, 2))]
    )
    def test_numbers_of_experts_that_do_not_fit_are_refused(
        self, shape_a: tuple[int, ...], shape_b: tuple[int, ...], tmp_path: Path
    ) -> None:
        factor = "base_model.model.model.layers.0.mlp.experts.w1.lora_"
        factors = {
            f"{factor}A.weight": torch.ones(shape_a),
            f"{factor}B.weight": torch.ones(shape_b),
        }
        adapter = _write_tinker(tmp_path / "adapter", factors)
        with pytest.raises(RefusedError, match=r"w1\.lora_A\.weight"):
            ckptkit.merge_adapter(adapter, tmp_path / "out", base=self.CASE / "base")


def _write_tinker(folder: Path, factors: Tensors) -> Path:
    folder.mkdir()
    save_file(dict(factors), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _trained(model: Any, out: Path, **options: Any) -> Any:
    """Saves a LoRA of a model with random factors, and returns the model that PEFT wraps."""
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(model, LoraConfig(**{**settings, **options}))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(out)
    return wrapped.eval()


SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def _gemma3(*, tied: bool) -> Any:
    text = {**SIZES, **HEADS, "tie_word_embeddings": tied, "sliding_window": 8}
    settings = {"mm_tokens_per_image": 4, "tie_word_embeddings": tied}
    config = Gemma3Config(text_config=text, vision_config=TOWER, **settings)
    return Gemma3ForConditionalGeneration(config)


def _llava(*, tied: bool) -> Any:
    text = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    config = LlavaConfig(
        text_config=text, vision_config=SiglipVisionConfig(**TOWER), tie_word_embeddings=tied
    )
    return LlavaForConditionalGeneration(config)


def _qwen25_vl(*, tied: bool) -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**SIZES, **HEADS, "rope_parameters": rope, "tie_word_embeddings": tied}
    text.pop("head_dim")
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return Qwen2_5_VLForConditionalGeneration(config)


def _glm4_moe() -> Any:
    """As many layers as GLM-4.5-Air: the class leaves out the one with this number."""
    config = Glm4MoeConfig(
        **{**SIZES, "num_hidden_layers": 46}, **HEADS, moe_intermediate_size=8, n_group=1,
        n_routed_experts=2, num_experts_per_tok=1, topk_group=1
    )  # fmt: skip
    return Glm4MoeForCausalLM(config)


def _gemma3n() -> Any:
    config = Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4}, **HEADS, vocab_size_per_layer_input=48,
        hidden_size_per_layer_input=4, num_kv_shared_layers=2, laurel_rank=2, altup_num_inputs=2,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
        activation_sparsity_pattern=[0.0] * 4
    )  # fmt: skip
    return Gemma3nForCausalLM(config)


def _text_of(whole: Any, kind: Any, config: Any) -> Any:
    """The text model inside a multimodal one, in a class of its own."""
    text = kind(config)
    inside = whole.model.language_model.state_dict()
    state = {f"model.{name}": tensor for name, tensor in inside.items()}
    text.load_state_dict({**state, "lm_head.weight": whole.lm_head.weight})
    return text.eval()


class TestBasesWithMore:
    def test_an_adapter_of_the_text_model_is_placed_in_the_whole_one(self, tmp_path: Path) -> None:
        case = REPORTS / "11-qwen35-text"
        ckptkit.merge_adapter(case / "adapter", tmp_path / "out", base=case / "base")
        merged = with_adapter(case / "base", case / "adapter").merge_and_unload()
        live, found = dict(merged.state_dict()), tensors_of(tmp_path / "out")
        expected = {
            **tensors_of(case / "base"),
            **{n.replace("model.", "model.language_model.", 1): t for n, t in live.items()},
        }
        assert_same(found, expected)
        text = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(logits(text), logits(merged.eval()))
        shown = " ".join(
            run_command("inspect", case / "adapter", "--base", case / "base").stdout.split()
        )
        assert "PEFT loads this folder as it is" in shown

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["lm_head", "down_proj"]])
    @pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2.5-vl"])
    @pytest.mark.quick("gemma3-targets0-False", "qwen2.5-vl-targets1-True")
    def test_the_text_model_is_found_beside_a_tower_with_the_same_modules(
        self, family: str, targets: list[str], tied: bool, tmp_path: Path
    ) -> None:
        torch.manual_seed(0)
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        make, kind = {
            "gemma3": (_gemma3, Gemma3ForCausalLM),
            "llava": (_llava, LlamaForCausalLM),
            "qwen2.5-vl": (_qwen25_vl, Qwen2ForCausalLM),
        }[family]
        whole = make(tied=tied)
        whole.save_pretrained(base)
        config: Any = whole.config.text_config
        if family == "qwen2.5-vl":
            config = Qwen2Config(**SIZES, **HEADS, rms_norm_eps=1e-5, tie_word_embeddings=tied)
        text = _text_of(whole, kind, config)
        torch.testing.assert_close(logits(text), logits(whole.eval()), atol=1e-5, rtol=1e-5)
        trained = _trained(text, adapter, target_modules=targets)
        ckptkit.merge_adapter(adapter, tmp_path / "out", base=base)
        found, before = tensors_of(tmp_path / "out"), tensors_of(base)
        tower = [name for name in before if "vis" in name or "projector" in name]
        assert len(tower) > 10
        assert_same({n: found[n] for n in tower}, {n: before[n] for n in tower})
        merged = type(whole).from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(logits(merged), logits(trained), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("is_of_text", [True, False])
    @pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2.5-vl"])
    @pytest.mark.quick("gemma3-False", "llava-True")
    def test_modules_that_peft_does_not_place_in_the_whole_model_are_named(
        self, family: str, is_of_text: bool, tmp_path: Path
    ) -> None:
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        make, kind = {
            "gemma3": (_gemma3, Gemma3ForCausalLM),
            "llava": (_llava, LlamaForCausalLM),
            "qwen2.5-vl": (_qwen25_vl, Qwen2ForCausalLM),
        }[family]
        whole = make(tied=False)
        whole.save_pretrained(base)
        before = logits(whole.eval())
        config: Any = whole.config.text_config
        if family == "qwen2.5-vl":
            config = Qwen2Config(**SIZES, **HEADS, rms_norm_eps=1e-5)
        model = _text_of(whole, kind, config) if is_of_text else whole
        _trained(model, adapter, target_modules=r".*layers\.\d\.self_attn\.(q_proj|v_proj)")
        loaded = PeftModel.from_pretrained(type(whole).from_pretrained(base), adapter).eval()
        is_placed = not torch.equal(logits(loaded), before)
        shown = " ".join(run_command("inspect", adapter, "--base", base).stdout.split())
        assert is_placed == (not is_of_text)
        assert is_placed or "PEFT loads this folder as it is" not in shown
        assert ("PEFT would leave out 4 modules" in shown) == is_of_text
        command = f"adapter merge {adapter} OUT --base {base}"
        assert command in shown
        words = command.replace("OUT", str(tmp_path / "out")).split()
        assert run_command(*words).returncode == 0

    def test_layers_that_predict_further_tokens_have_no_adapter(self, tmp_path: Path) -> None:
        case = REPORTS / "12-mtp-adapter"
        ckptkit.merge_adapter(case / "adapter", tmp_path / "out", base=case / "base")
        assert_same(tensors_of(tmp_path / "out"), load_file(case / "truth.safetensors"))

    @pytest.mark.parametrize("kind", ["glm4_moe", "gemma3n"])
    @pytest.mark.quick("gemma3n")
    def test_nor_have_tensors_that_the_counts_of_a_configuration_leave_out(
        self, kind: str, tmp_path: Path
    ) -> None:
        """A further layer of GLM's files, and keys and values of layers that share them."""
        model, base = {"glm4_moe": _glm4_moe, "gemma3n": _gemma3n}[kind](), tmp_path / "base"
        model.save_pretrained(base)
        stored = tensors_of(base)
        chosen, number = re.compile(r"layers\.45\."), "layers.46."
        if kind == "gemma3n":
            chosen, number = re.compile(r"layers\.1\.(?=self_attn\.[kv]_)"), "layers.3."
        further = {chosen.sub(number, n): t.clone() for n, t in stored.items() if chosen.search(n)}
        assert further
        assert not further.keys() & stored.keys()
        save_file({**stored, **further}, base / "model.safetensors", {"format": "pt"})
        wrapped = _trained(model, tmp_path / "adapter", target_modules=["q_proj", "k_proj"])
        ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base)
        found = tensors_of(tmp_path / "out")
        assert_same({n: found[n] for n in further}, further)
        merged = dict(wrapped.merge_and_unload().state_dict())
        changed = [n for n in stored if not torch.equal(found[n], stored[n])]
        assert changed == [n for n in stored if ".q_proj.w" in n or ".k_proj.w" in n]
        for name in changed:
            torch.testing.assert_close(found[name], merged[name], atol=1e-6, rtol=1e-6)

    def test_a_layer_that_the_model_has_may_not_lack_its_adapter(self, tmp_path: Path) -> None:
        case, adapter = REPORTS / "12-mtp-adapter", tmp_path / "adapter"
        shutil.copytree(case / "adapter", adapter)
        file = adapter / "adapter_model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if "q_proj" in n}, file)
        config = config_of(adapter)
        named = {**config, "target_modules": ["q_proj", "out_proj"]}
        (adapter / "adapter_config.json").write_text(json.dumps(named))
        with pytest.raises(AdapterError, match="out_proj"):
            ckptkit.merge_adapter(adapter, tmp_path / "out", base=case / "base")

    @pytest.mark.parametrize(
        ("dtype", "truth"), [("keep", "truth_packed"), ("bfloat16", "truth_dequantized")]
    )
    def test_packed_experts_stay_as_they_are_or_are_unpacked(
        self, dtype: str, truth: str, tmp_path: Path
    ) -> None:
        case = REPORTS / "10-mxfp4-gpt-oss"
        out = tmp_path / "out"
        ckptkit.merge_adapter(case / "adapter", out, base=case / "base", dtype=dtype)
        expected = load_file(case / f"{truth}.safetensors")
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
        config = json.loads((out / "config.json").read_text())
        assert ("quantization_config" in config) == (dtype == "keep")


class TestModulesUnderAnAttribute:
    """The model was an attribute of the module that was trained, as `self.llm`."""

    def _case(self, folder: Path) -> tuple[Path, Path, Any]:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        model.save_pretrained(folder / "base")
        options = {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": False}
        trained = get_peft_model(model, LoraConfig(**options))
        trained.save_pretrained(folder / "adapter")
        file = folder / "adapter/adapter_model.safetensors"
        inside = {
            n.replace("base_model.model.", "base_model.model.llm.", 1): t
            for n, t in load_file(file).items()
        }
        save_file(inside, file)
        return folder / "adapter", folder / "base", trained

    def test_it_is_merged_into_the_base_without_that_prefix(self, tmp_path: Path) -> None:
        adapter, base, trained = self._case(tmp_path)
        done = run_command("adapter", "merge", adapter, tmp_path / "out", "--base", base)
        assert done.returncode == 0, done.stderr
        assert "the modules of the adapter begin with 'llm.'" in done.stderr
        merged = dict(trained.merge_and_unload().state_dict())
        found = tensors_of(tmp_path / "out")
        assert found.keys() == merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)

    def test_what_was_trained_beside_that_attribute_is_named(self, tmp_path: Path) -> None:
        _, base, trained = self._case(tmp_path)
        whole = torch.nn.ModuleDict({"llm": trained, "projector": torch.nn.Linear(2, 2)})
        save(whole.state_dict(), tmp_path / "step")
        config = tmp_path / "adapter/adapter_config.json"
        options = ["--base", base, "--adapter-config", config]
        done = run_command("adapter", "merge", tmp_path / "step", tmp_path / "out", *options)
        assert done.returncode == 0, done.stderr
        said = "2 tensors of the checkpoint, such as 'projector.bias', are not written"
        assert said in done.stderr
        assert not any("projector" in name for name in tensors_of(tmp_path / "out"))

    def test_peft_is_not_said_to_load_it(self, tmp_path: Path) -> None:
        adapter, base, _ = self._case(tmp_path)
        said = run_command("inspect", adapter, "--base", base).stdout
        assert "would leave out 2 modules, such as 'llm.model.layers.0" in " ".join(said.split())
        other = dict(LLAMA, num_hidden_layers=1)
        LlamaForCausalLM(LlamaConfig(**other)).save_pretrained(tmp_path / "other")
        with pytest.raises(RefusedError, match="2 modules of 2, such as 'llm"):
            ckptkit.extract_adapter(adapter, tmp_path / "out", base=tmp_path / "other")
        ckptkit.extract_adapter(adapter, tmp_path / "out")

    @pytest.mark.parametrize(
        "options",
        [
            {"target_modules": ["q_proj"], "rank_pattern": {"llm.model.layers.0.*": 4}},
            {"target_modules": ["q_proj"], "modules_to_save": ["llm.lm_head"]},
            {"target_modules": ["llm.model.layers.1.mlp.up_proj"], "use_dora": True},
            {"target_modules": r"llm\.model\.layers\.0\..*(q|v)_proj", "use_rslora": True},
            {"target_modules": ["v_proj"], "layers_to_transform": [1]},
        ],
    )
    @pytest.mark.quick(1)
    def test_an_extracted_adapter_has_the_names_of_the_base(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        class Whole(torch.nn.Module):
            def __init__(self, llm: Any) -> None:
                super().__init__()
                self.llm, self.config = llm, llm.config

        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        model.save_pretrained(tmp_path / "base")
        settings = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **options)
        trained = get_peft_model(Whole(model), settings)
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "modules_to_save" in name:
                    parameter.add_(0.5)
        trained.save_pretrained(tmp_path / "adapter")
        words = [tmp_path / "adapter", tmp_path / "out", "--base", tmp_path / "base"]
        done = run_command("adapter", "extract", *words)
        assert done.returncode == 0, done.stderr
        assert "begin with 'llm.'" in done.stderr
        loaded = with_adapter(tmp_path / "base", tmp_path / "out")
        assert torch.equal(logits(loaded.eval()), logits(trained.base_model.model.llm.eval()))


class TestWhatInspectSays:
    def _next(self, *words: object) -> str:
        shown = run_command("inspect", *words)
        assert shown.returncode == 0, shown.stderr
        return " ".join(shown.stdout.split("\nNext\n")[1].split())

    def _adapter(self, folder: Path, factors: Tensors, **config: Any) -> Path:
        folder.mkdir()
        save_file(dict(factors), folder / "adapter_model.safetensors")
        document = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(document | config))
        return folder

    def test_modules_are_compared_with_a_base_that_is_known(self, tmp_path: Path) -> None:
        case = REPORTS / "12-mtp-adapter"
        loads = "PEFT loads this folder as it is"
        said = self._next(case / "adapter")
        assert loads not in said
        assert "were not compared with those of the base: --base does" in said
        assert loads in self._next(case / "adapter", "--base", case / "base")
        other = REPORTS / "10-mxfp4-gpt-oss" / "base"
        said = self._next(case / "adapter", "--base", other)
        assert loads not in said
        assert "would leave out 2 modules, such as 'model.layers.1.self_attn.q_proj'" in said
        named = shutil.copytree(case / "adapter", tmp_path / "adapter")
        config = {**config_of(named), "base_model_name_or_path": str(other)}
        (named / "adapter_config.json").write_text(json.dumps(config))
        assert "would leave out" in self._next(named)

    def test_names_that_no_file_of_peft_has_are_not_said_to_load(self, tmp_path: Path) -> None:
        a, b = torch.ones(2, 16), torch.ones(16, 2)
        own = {"model.layers.0.self_attn.q_proj.lora_A.weight": a}
        own |= {"model.layers.0.self_attn.q_proj.lora_B.weight": b}
        live = {
            f"base_model.model.{n.replace('.weight', '.default.weight')}": t for n, t in own.items()
        }
        stacked = {f"base_model.model.{n}": t[None] for n, t in own.items()}
        good = {f"base_model.model.{n}": t for n, t in own.items()}
        for name, factors in {"bare": own, "live": live, "stacked": stacked}.items():
            said = self._next(self._adapter(tmp_path / name, factors))
            assert "PEFT loads this folder as it is" not in said, name
        said = self._next(self._adapter(tmp_path / "good", good))
        assert "this folder has the names of PEFT's files" in said

    def test_experts_one_by_one_are_no_modules_of_transformers(self, tmp_path: Path) -> None:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).save_pretrained(tmp_path / "base")
        name = "base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_"
        factors = {f"{name}A.weight": torch.ones(2, 16), f"{name}B.weight": torch.ones(8, 2)}
        adapter = self._adapter(tmp_path / "adapter", factors, target_modules=["gate_proj"])
        assert "would leave out 1 module" in self._next(adapter, "--base", tmp_path / "base")

    def test_factors_of_all_experts_are_not_said_to_be_left_out(self, tmp_path: Path) -> None:
        """PEFT joins them for some families, and for others not."""
        base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
        base.save_pretrained(tmp_path / "base")
        stored = tensors_of(tmp_path / "base")
        weights = [name for name in stored if ".experts." in name]
        parts = [n for n in weights if "gate" not in n]
        for names, is_lost in ((weights, False), (parts, True), (weights[1:], True)):
            factors = {}
            for name in names:
                module, (rows, columns) = name.removesuffix(".weight"), stored[name].shape
                factors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(2, columns)
                factors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(rows, 2)
            targets = ["gate_proj", "up_proj", "down_proj"]
            folder = tmp_path / f"adapter{len(names)}"
            adapter = self._adapter(folder, factors, target_modules=targets)
            said = self._next(adapter, "--base", tmp_path / "base")
            assert ("would leave out" in said) == is_lost
            assert "PEFT loads" not in said

    def test_the_folders_that_peft_loads_are_named(self, tmp_path: Path) -> None:
        base = LlamaForCausalLM(LlamaConfig(**LLAMA))
        base.save_pretrained(tmp_path / "base")
        for name in ("chosen", "reference"):
            options = {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": False}
            model = get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), LoraConfig(**options))
            model.save_pretrained(tmp_path / "step" / name)
        said = self._next(tmp_path / "step", "--base", tmp_path / "base")
        both = [str(tmp_path / "step" / name) for name in ("chosen", "reference")]
        assert f"PEFT loads each of {both[0]} and {both[1]} as it is" in said
        for folder in both:
            PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**LLAMA)), folder)
