"""Merges of real PEFT adapters: equal to `merge_and_unload`, and computing what was trained."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

import ckptkit
from ckptkit.core.errors import RefusedError
from tests.small_adapters import (
    Convolutions,
    Tensors,
    assert_same,
    model_of,
    save_dcp,
    train,
)
from tests.tensor_images import tensors_in

Make = Callable[[], Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, on odd but legal configurations


def _llama(*, tied: bool = False, kind: str = "ForCausalLM") -> Any:
    return model_of(kind=kind, tie_word_embeddings=tied)


def _gpt2() -> Any:
    return model_of("GPT2", "LMHeadModel")


@dataclass(frozen=True)
class Trained:
    """A base and an adapter in folders, and the PEFT model that they came from."""

    base: Path
    adapter: Path
    model: Any
    untrained: Any

    def merged(self) -> Tensors:
        """What PEFT makes of the files; the models are left as they are."""
        loaded = PeftModel.from_pretrained(copy.deepcopy(self.untrained), self.adapter)
        return dict(loaded.merge_and_unload().state_dict())


def _trained(
    make: Make, options: Mapping[str, Any], at: Path, *, dtype: torch.dtype = torch.float32
) -> Trained:
    torch.manual_seed(3)
    base = make().to(dtype)
    if hasattr(base, "save_pretrained"):
        base.save_pretrained(at / "base")
    else:
        (at / "base").mkdir(parents=True)
        save_file(dict(base.state_dict()), at / "base" / "model.safetensors")
    model = train(base, **{"lora_alpha": 5, **options})
    model.save_pretrained(at / "adapter")
    return Trained(at / "base", at / "adapter", model, base)


_LM = {"task_type": "CAUSAL_LM"}
_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
_LINEAR = {**_LM, "target_modules": ["q_proj", "down_proj"]}
EXACT: dict[str, tuple[Make, dict[str, Any]]] = {
    "linear": (_llama, _LINEAR),
    "rslora_and_patterns": (
        _llama,
        {
            **_LINEAR,
            "use_rslora": True,
            "rank_pattern": {"down_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 32},
        },
    ),
    "dora": (_llama, {**_LINEAR, "use_dora": True}),
    "embedding": (_llama, {**_LM, "target_modules": ["embed_tokens", "q_proj"]}),
    "embedding_dora": (_llama, {**_LM, "target_modules": ["embed_tokens"], "use_dora": True}),
    "modules_and_tokens": (
        _llama,
        {**_LINEAR, "modules_to_save": ["lm_head"], "trainable_token_indices": [1, 5]},
    ),
    "biases": (_llama, {**_LINEAR, "bias": "all"}),
    "lora_bias": (_llama, {**_LM, "target_modules": ["q_proj"], "lora_bias": True}),
    "lora_bias_upon_biases": (
        _llama,
        {**_LM, "target_modules": ["q_proj"], "bias": "all", "lora_bias": True},
    ),
    "conv1d_of_gpt2": (
        _gpt2,
        {**_LM, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "classifier": (
        partial(model_of, "Bert", "ForSequenceClassification"),
        {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]},
    ),
    "convolutions": (
        Convolutions,
        {"target_modules": ["plane", "point", "line", "space", "end"]},
    ),
    "convolutions_dora": (
        Convolutions,
        {"target_modules": ["plane", "point", "line", "space"], "use_dora": True},
    ),
}


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.quick(
    "linear", "conv1d_of_gpt2", "convolutions_dora", "embedding", "modules_and_tokens", "lora_bias"
)
def test_a_merge_equals_what_peft_merges(case: str, tmp_path: Path) -> None:
    make, options = EXACT[case]
    trained = _trained(make, options, tmp_path)
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=trained.base)
    found, expected = tensors_in(tmp_path / "out"), trained.merged()
    assert not found.keys() - expected.keys()
    tolerance = 1e-7 if case.startswith("convolutions") else 0
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        error = (tensor.double() - expected[name].double()).norm()
        assert error <= tolerance * expected[name].double().norm(), name


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_no_sign_of_another_base(bias: str, tmp_path: Path) -> None:
    trained = _trained(_llama, {**_LINEAR, "bias": bias}, tmp_path)
    live = tmp_path / "live"
    save_dcp({"model": trained.model.state_dict()}, live)
    shutil.copy(trained.adapter / "adapter_config.json", live)
    out = tmp_path / "out"
    ckptkit.merge_adapter(live, out, base=trained.base)
    found, expected = tensors_in(out), trained.merged()
    assert expected["model.layers.0.self_attn.q_proj.bias"].any()
    assert_same(found, {name: expected[name] for name in found})
    wrong = load_file(trained.base / "model.safetensors")
    wrong["model.layers.0.input_layernorm.weight"] += 1
    save_file(wrong, trained.base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"1 of \d+ weights differ.*input_layernorm"):
        ckptkit.merge_adapter(live, tmp_path / "other", base=trained.base)


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
    return found


def _as_trained(trained: Trained) -> torch.Tensor:
    return _logits(PeftModel.from_pretrained(copy.deepcopy(trained.untrained), trained.adapter))


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "lora_of_the_embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "lora_of_the_head": ({"target_modules": ["lm_head", "q_proj"]}, False),
    "loras_of_both": ({"target_modules": ["lm_head", "embed_tokens"]}, False),
    "one_lora_of_both": (
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        True,
    ),
    "whole_embedding": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        False,
    ),
    "one_module_for_both": (
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        True,
    ),
    "tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}, True),
    "tokens_of_the_head": (
        {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 5]}},
        False,
    ),
    "tokens_and_lora_of_the_head": (
        {"target_modules": ["lm_head", "q_proj"], "trainable_token_indices": [39, 1, 5]},
        False,
    ),
    "named_tokens_and_lora_of_the_head": (
        {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [1, 5]}},
        False,
    ),
    "whole_embedding_and_lora_of_the_head": (
        {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
        False,
    ),
    "nothing_tied": ({"target_modules": ["q_proj"]}, True),
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.quick("lora_of_the_head", "tokens", "whole_embedding")
def test_tied_embeddings_compute_what_was_trained(case: str, tmp_path: Path) -> None:
    options, stays_tied = TIED[case]
    trained = _trained(lambda: _llama(tied=True), {**_LM, **options}, tmp_path)
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=trained.base)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is stays_tied
    assert ("lm_head.weight" in tensors_in(tmp_path / "out")) is not stays_tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(loaded), _as_trained(trained), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: _llama(tied=True), _gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("case", [*TIED, "dora_of_the_embedding", "dora_of_the_head"])
@pytest.mark.quick(
    "dora_of_the_head-gpt2",
    "lora_of_the_embedding-llama",
    "nothing_tied-llama",
    "whole_embedding-llama",
    "tokens-llama",
)
def test_tied_embeddings_have_pefts_bytes_or_are_refused_where_these_are_wanted(
    case: str, make: Make, tmp_path: Path
) -> None:
    if case in TIED:
        options = dict(TIED[case][0])
    else:
        options = {"target_modules": ["embed_tokens" if "embed" in case else "lm_head"]}
        options["use_dora"] = True
    if make is _gpt2:
        names = {"embed_tokens": "wte", "q_proj": "c_attn", "lm_head": "lm_head"}
        for key in ("target_modules", "modules_to_save"):
            options |= {key: [names[name] for name in options[key]]} if key in options else {}
        if isinstance(options.get("trainable_token_indices"), dict):
            chosen = options["trainable_token_indices"].items()
            options["trainable_token_indices"] = {names[n]: rows for n, rows in chosen}
    trained = _trained(make, {**_LM, **options}, tmp_path)
    out = tmp_path / "out"
    of_one = {"embed_tokens", "wte", "lm_head"} & {*options["target_modules"]}
    if of_one or case == "tokens_of_the_head":
        with pytest.raises(RefusedError) as caught:
            ckptkit.merge_adapter(trained.adapter, out, base=trained.base, match_peft=True)
        assert "without --match-peft" in caught.value.hint
        ckptkit.merge_adapter(trained.adapter, out, base=trained.base)
        loaded = AutoModelForCausalLM.from_pretrained(out)
        torch.testing.assert_close(_logits(loaded), _as_trained(trained), rtol=1e-4, atol=1e-5)
        return
    ckptkit.merge_adapter(trained.adapter, out, base=trained.base, match_peft=True)
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert_same(found, trained.merged())


def test_a_lora_of_a_tied_head_is_added_to_trained_tokens(tmp_path: Path) -> None:
    options, _ = TIED["tokens_and_lora_of_the_head"]
    trained = _trained(lambda: _llama(tied=True), {**_LM, **options}, tmp_path)
    head = trained.model.base_model.model.lm_head
    rows = head.base_layer.weight.detach()  # merged when it is asked for
    expected = rows + head.get_delta_weight("default").detach()
    out = tmp_path / "out"
    ckptkit.merge_adapter(trained.adapter, out, base=trained.base)
    found = tensors_in(out)
    torch.testing.assert_close(found["lm_head.weight"], expected, rtol=0, atol=0)
    torch.testing.assert_close(found["model.embed_tokens.weight"], rows, rtol=0, atol=0)
    # PEFT's own merge loses the LoRA, so there is nothing to match.
    loaded: Any = PeftModel.from_pretrained(copy.deepcopy(trained.untrained), trained.adapter)
    torch.testing.assert_close(loaded.merge_and_unload().lm_head.weight, rows, rtol=0, atol=0)
    with pytest.raises(RefusedError, match=r"merge_and_unload leaves this LoRA out"):
        ckptkit.merge_adapter(trained.adapter, tmp_path / "o", base=trained.base, match_peft=True)


@pytest.mark.parametrize("is_head_first", [True, False])
@pytest.mark.quick("True")
def test_trained_tokens_are_beneath_the_lora_of_another_adapter(
    is_head_first: bool, tmp_path: Path
) -> None:
    head, tokens = (
        _trained(lambda: _llama(tied=True), {**_LM, **options}, tmp_path / name)
        for name, options in (
            ("head", {"target_modules": ["lm_head"]}),
            ("tokens", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
        )
    )
    # PEFT loads the two in this order only.
    both = PeftModel.from_pretrained(copy.deepcopy(head.untrained), head.adapter, "head")
    both.load_adapter(str(tokens.adapter), "tokens")
    both.base_model.set_adapter(["head", "tokens"])
    first, second = (head, tokens) if is_head_first else (tokens, head)
    ckptkit.merge_adapter(first.adapter, tmp_path / "out", base=head.base, further=[second.adapter])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(loaded), _logits(both), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.quick("dtype1-True")
def test_experts_on_disk_are_merged_with_the_parts_of_fused_ones(
    dtype: torch.dtype, use_rslora: bool, tmp_path: Path
) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options: dict[str, Any] = {**_LM, "target_modules": ["q_proj"], "target_parameters": targets}
    options["use_rslora"] = use_rslora
    trained = _trained(partial(model_of, "Qwen3Moe"), options, tmp_path, dtype=dtype)
    is_rounded = dtype is not torch.float32
    out = tmp_path / "out"
    ckptkit.merge_adapter(trained.adapter, out, base=trained.base, match_peft=is_rounded)
    assert tensors_in(tmp_path / "out").keys() == tensors_in(trained.base).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_same(loaded, trained.merged())


@pytest.mark.parametrize("saved", ["gate", "experts"])
def test_saved_modules_replace_those_that_have_other_names_on_disk(
    saved: str, tmp_path: Path
) -> None:
    """The modules with LoRA have the same names in both, and tell nothing of the others."""
    options = {**_LM, "target_modules": ["q_proj"], "modules_to_save": [saved]}
    trained = _trained(partial(model_of, "Mixtral"), options, tmp_path)
    out = tmp_path / "out"
    ckptkit.merge_adapter(trained.adapter, out, base=trained.base)
    assert tensors_in(out).keys() == tensors_in(trained.base).keys()
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert_same(loaded, trained.merged())


def test_sixteen_bits_are_rounded_once_or_where_peft_rounds(tmp_path: Path) -> None:
    options = {**_LM, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}
    trained = _trained(_llama, options, tmp_path, dtype=torch.bfloat16)
    expected = trained.merged()
    ckptkit.merge_adapter(trained.adapter, tmp_path / "peft", base=trained.base, match_peft=True)
    found = tensors_in(tmp_path / "peft")
    assert_same(found, {name: expected[name] for name in found})
    ckptkit.merge_adapter(trained.adapter, tmp_path / "once", base=trained.base)
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(trained.adapter / "adapter_model.safetensors")
    down, up = (
        factors[f"base_model.model.{name.replace('weight', part)}.weight"].double()
        for part in ("lora_A", "lora_B")
    )
    exact = trained.untrained.state_dict()[name].double() + 2.5 * up @ down
    assert tensors_in(tmp_path / "once")[name].equal(exact.bfloat16())


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"max_shard_size": "1GB"}])
def test_weights_stay_in_the_files_that_the_base_has(
    options: dict[str, Any], tmp_path: Path
) -> None:
    trained = _trained(_llama, _LINEAR, tmp_path)
    (trained.base / "model.safetensors").unlink()
    trained.untrained.save_pretrained(trained.base, max_shard_size="4KB")
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=trained.base, **options)
    held = {
        folder: {file.name: {*load_file(file)} for file in folder.glob("*.safetensors")}
        for folder in (trained.base, tmp_path / "out")
    }
    assert len(held[trained.base]) > 2
    is_one = "max_shard_size" in options
    assert (
        len(held[tmp_path / "out"]) == 1 if is_one else held[tmp_path / "out"] == held[trained.base]
    )
    assert type(trained.untrained).from_pretrained(tmp_path / "out") is not None


def test_a_packed_base_keeps_its_files_unless_it_is_unpacked(tmp_path: Path) -> None:
    trained = _trained(_llama, _LINEAR, tmp_path, dtype=torch.bfloat16)
    base = tmp_path / "packed"
    ckptkit.consolidate(trained.base, base, dtype="fp8-block", max_shard_size="4KB")
    for name, dtype in (("again", "keep"), ("unpacked", "bfloat16")):
        ckptkit.merge_adapter(
            trained.adapter, tmp_path / name, base=base, dtype=dtype, allow_other_base=True
        )
    held, again, unpacked = (
        {file.name: {*load_file(file)} for file in folder.glob("*.safetensors")}
        for folder in (base, tmp_path / "again", tmp_path / "unpacked")
    )
    assert len(held) > 1
    assert again == held
    assert list(unpacked) == ["model.safetensors"]


def test_files_of_a_base_are_not_kept_where_weights_become_wider(tmp_path: Path) -> None:
    trained = _trained(_llama, _LINEAR, tmp_path, dtype=torch.bfloat16)
    (trained.base / "model.safetensors").unlink()
    trained.untrained.save_pretrained(trained.base, max_shard_size="4KB")
    ckptkit.merge_adapter(
        trained.adapter, tmp_path / "out", base=trained.base, dtype="float32", cast_all=True
    )
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def test_a_head_that_the_base_lacks_is_written_and_named(tmp_path: Path) -> None:
    trained = _trained(
        lambda: _llama(kind="ForSequenceClassification"),
        {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]},
        tmp_path,
    )
    base = _llama()
    base.model.load_state_dict(trained.untrained.model.state_dict())
    base.save_pretrained(tmp_path / "causal")
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=tmp_path / "causal")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForSequenceClassification
    assert_same(loaded.state_dict(), trained.merged())


def test_a_head_in_a_run_beside_which_its_bases_configuration_lies_is_named(tmp_path: Path) -> None:
    causal = _llama()
    causal.save_pretrained(tmp_path / "causal")
    causal.config.num_labels = 3
    trained = _trained(
        lambda: LlamaForSequenceClassification(causal.config),
        {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]},
        tmp_path,
    )
    live = tmp_path / "live"
    save_dcp({"model": trained.model.state_dict()}, live)
    shutil.copy(tmp_path / "causal" / "config.json", live)
    known = trained.adapter / "adapter_config.json"
    ckptkit.merge_adapter(live, tmp_path / "out", adapter_config=known)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForSequenceClassification
    assert loaded.num_labels == 3


def test_a_larger_vocabulary_is_written_and_told(tmp_path: Path) -> None:
    torch.manual_seed(3)
    _llama(tied=True).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(43)
    options = {**_LINEAR, "r": 2, "trainable_token_indices": [40, 41]}
    trained = train(model, **options)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    ckptkit.merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == 43
    assert loaded.config.tie_word_embeddings
    torch.testing.assert_close(_logits(loaded), _logits(trained), rtol=1e-4, atol=1e-5)


def test_a_run_that_enlarged_its_vocabulary_may_have_the_old_configuration_beside_it(
    tmp_path: Path,
) -> None:
    _llama().config.save_pretrained(tmp_path / "live")
    model = _llama()
    model.resize_token_embeddings(43)
    trained = get_peft_model(model, LoraConfig(**_LINEAR, r=2, lora_alpha=2))
    torch.nn.init.ones_(trained.get_parameter(f"{_Q_PROJ}.lora_B.default.weight"))
    save_dcp({"model": trained.state_dict()}, tmp_path / "live")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2, "r": 2, **_LINEAR}))
    ckptkit.merge_adapter(tmp_path / "live", tmp_path / "out", adapter_config=config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == 43
    torch.testing.assert_close(_logits(loaded), _logits(trained), rtol=1e-4, atol=1e-5)


def test_a_headless_base_gets_the_prefix_of_the_model_trained(tmp_path: Path) -> None:
    """The repositories of GPT-2 and BERT lack it, and the head is tied to what they have."""
    options = {**_LM, "target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}
    trained = _trained(_gpt2, options, tmp_path)
    trained.untrained.transformer.save_pretrained(tmp_path / "other")
    shutil.copy(trained.base / "config.json", tmp_path / "other" / "config.json")
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=tmp_path / "other")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(loaded), _as_trained(trained), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_headless_model_fits_a_base_with_a_head(tmp_path: Path) -> None:
    trained = _trained(
        lambda: _llama().get_submodule("model"), {"target_modules": ["q_proj"]}, tmp_path
    )
    base = _llama()
    base.model.load_state_dict(trained.untrained.state_dict())
    base.save_pretrained(tmp_path / "other")
    ckptkit.merge_adapter(trained.adapter, tmp_path / "out", base=tmp_path / "other")
    loaded = type(trained.untrained).from_pretrained(tmp_path / "out").state_dict()
    assert_same(loaded, trained.merged())
