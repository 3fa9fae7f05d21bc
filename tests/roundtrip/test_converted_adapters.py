"""LoRA of experts in the layouts of PEFT and vLLM: each loads it, and every product stays."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import AdapterError, CkptkitError, RefusedError
from tests.command_line import run_command
from tests.small_adapters import Tensors, assert_same, model_of, shake

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own

FIXTURES = Path(__file__).parents[2] / "fixtures"
VLLM = FIXTURES / "vllm_moe_lora"
TINKER = FIXTURES / "reports" / "15-tinker-moe"
PREFIX = "base_model.model."
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = ("Mixtral", "Qwen3Moe", "GptOss")


def _base(family: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    if family == "GptOss":
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.GptOssConfig(**sizes, num_local_experts=3)
        config.layer_types = ["full_attention"] * 2
        base = transformers.GptOssForCausalLM(config)
    else:
        base = model_of(family, **options)
    base.save_pretrained(folder)
    return base


def _train(base: Any, folder: Path, **options: Any) -> Any:
    chosen = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    config = LoraConfig(**copy.deepcopy({**chosen, **options}), task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    shake(model)
    model.save_pretrained(folder)
    return model


def _merged(base: Any, folder: Path) -> Tensors:
    return dict(
        PeftModel.from_pretrained(copy.deepcopy(base), folder).merge_and_unload().state_dict()
    )


def _merged_by_ckptkit(adapter: Path, base: Path, out: Path) -> Tensors:
    ckptkit.merge_adapter(adapter, out, base=base)
    return dict(transformers.AutoModelForCausalLM.from_pretrained(out).state_dict())


def _tensors(folder: Path) -> Tensors:
    return load_file(folder / "adapter_model.safetensors")


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())  # type: ignore[no-any-return]


def _write(folder: Path, tensors: Tensors, **options: Any) -> Path:
    folder.mkdir()
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "peft_version": "0.21.2", **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _single(ranks: list[int], *, sizes: tuple[int, int] = (16, 20)) -> Tensors:
    """Returns factors of the experts of one layer, which are small whole numbers."""
    torch.manual_seed(4)
    hidden, width = sizes
    made: Tensors = {}
    for expert, rank in enumerate(ranks):
        for name in ("gate_proj", "up_proj", "down_proj"):
            out, inner = (hidden, width) if name == "down_proj" else (width, hidden)
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            made[f"{module}.lora_A.weight"] = torch.randint(-8, 9, (rank, inner)).float()
            made[f"{module}.lora_B.weight"] = torch.randint(-8, 9, (out, rank)).float()
    return made


SINGLE = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_loader_of_vllm_stacks_the_factors_that_peft_trained(
    family: str, tmp_path: Path
) -> None:
    """`stacked.safetensors` is what vLLM 0.33 made of `converted`, with the scaling in B."""
    case = VLLM / family
    ckptkit.convert_adapter(case / "adapter", tmp_path / "out", to="vllm", base=case / "config")
    assert_same(_tensors(tmp_path / "out"), _tensors(case / "converted"))
    assert _config(tmp_path / "out") == _config(case / "converted")
    trained, stacked = _tensors(case / "adapter"), load_file(case / "stacked.safetensors")
    is_fused = family == "gpt_oss"
    for layer in range(2):
        home = f"{PREFIX}model.layers.{layer}.mlp.experts"
        for inner, rank, places in ((".base_layer", 2, [0] if is_fused else [0, 2]), ("", 3, [1])):
            down = trained[f"{home}{inner}.lora_A.weight"].reshape(3, rank, -1)
            up = trained[f"{home}{inner}.lora_B.weight"]
            up = up.reshape(len(up), rank, 3).permute(2, 0, 1) * (5 / rank)
            ups = up.chunk(len(places), dim=1)
            for place, part in zip(places, ups, strict=True):
                assert torch.equal(stacked[f"layers.{layer}.{place}.a"], down)
                assert torch.equal(stacked[f"layers.{layer}.{place}.b"], part)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_goes_to_vllm_and_back_and_peft_merges_each_alike(
    family: str, use_rslora: bool, tmp_path: Path
) -> None:
    base = _base(family, tmp_path / "base")
    options: dict[str, Any] = {"rank_pattern": {"down_proj": 4}, "use_rslora": use_rslora}
    merged = dict(_train(base, tmp_path / "peft", **options).merge_and_unload().state_dict())
    for to, source in (("vllm", "peft"), ("back", "vllm"), ("again", "peft")):
        layout: Any = "vllm" if to == "vllm" else "peft"
        ckptkit.convert_adapter(tmp_path / source, tmp_path / to, to=layout, base=tmp_path / "base")
        found = _merged_by_ckptkit(tmp_path / to, tmp_path / "base", tmp_path / f"merged {to}")
        assert_same(found, merged)
    for to in ("back", "again"):
        assert_same(_tensors(tmp_path / to), _tensors(tmp_path / "peft"))
        assert_same(_merged(base, tmp_path / to), merged)


_SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_THREE = {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SHARED = {"shared_expert_intermediate_size": 12, "layer_types": ["full_attention"] * 2}
_OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**_ROUTED, **_LATENT, "v_head_dim": 8, "first_k_dense_replace": 0},
    "DeepseekV3": {**_ROUTED, **_LATENT, "v_head_dim": 8, "first_k_dense_replace": 1},
    "Dots1": {**_ROUTED, "head_dim": 8, "first_k_dense_replace": 0, "n_shared_experts": 1},
    "Ernie4_5_Moe": {"moe_num_experts": 3, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    "FlexOlmo": {"num_experts": 3},
    "Glm4Moe": {**_ROUTED, "head_dim": 8, "first_k_dense_replace": 1},
    "Glm4MoeLite": {**_ROUTED, **_LATENT, "v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "MiniMaxM2": {"num_local_experts": 3, "head_dim": 8},
    "Olmoe": {"num_experts": 3},
    "Qwen3Next": {**_THREE, **_SHARED},
    "Qwen3_5Moe": {**_THREE, **_SHARED},
}


@pytest.mark.parametrize("family", _OTHERS)
def test_other_models_have_known_layouts(family: str, tmp_path: Path) -> None:
    name = f"{family}TextConfig" if family == "Qwen3_5Moe" else f"{family}Config"
    config = getattr(transformers, name)(**_SMALL, **_TOKENS, **_OTHERS[family])
    base = getattr(transformers, f"{family}ForCausalLM")(config)
    base.save_pretrained(tmp_path / "base")
    model = _train(base, tmp_path / "peft", target_modules=["o_proj"])
    for to, source in (("vllm", "peft"), ("back", "vllm")):
        options: Any = {"to": "vllm" if to == "vllm" else "peft", "base": tmp_path / "base"}
        ckptkit.convert_adapter(tmp_path / source, tmp_path / to, **options)
    assert_same(_tensors(tmp_path / "back"), _tensors(tmp_path / "peft"))
    assert_same(_merged(base, tmp_path / "back"), dict(model.merge_and_unload().state_dict()))
    for to in ("peft", "vllm"):
        out = tmp_path / f"merged {to}"
        ckptkit.merge_adapter(tmp_path / to, out, base=tmp_path / "base")
    one, two = (
        load_file(tmp_path / f"merged {to}" / "model.safetensors") for to in ("peft", "vllm")
    )
    assert_same(two, one)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parameter", EXPERTS)
def test_one_of_two_parameters_is_enough(family: str, parameter: str, tmp_path: Path) -> None:
    """vLLM wants all matrices of an expert: the others have factors of zeros."""
    base = _base(family, tmp_path / "base")
    model = _train(base, tmp_path / "peft", target_parameters=[parameter])
    merged = dict(model.merge_and_unload().state_dict())
    ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "vllm", to="vllm", base=tmp_path / "base")
    kinds = 2 if family == "GptOss" else 3 * 3
    assert sum(".experts" in name for name in _tensors(tmp_path / "vllm")) == 2 * 2 * kinds
    found = _merged_by_ckptkit(tmp_path / "vllm", tmp_path / "base", tmp_path / "merged")
    assert_same(found, merged)
    ckptkit.convert_adapter(
        tmp_path / "peft", tmp_path / "again", to="peft", base=tmp_path / "base"
    )
    assert_same(_tensors(tmp_path / "again"), _tensors(tmp_path / "peft"))
    assert_same(_merged(base, tmp_path / "again"), merged)


def test_gates_with_an_a_of_their_own_stand_in_blocks(tmp_path: Path) -> None:
    base = _base("Qwen3Moe", tmp_path / "base", num_hidden_layers=1)
    single = _write(tmp_path / "single", _single([2, 2, 2]), **SINGLE)
    done = run_command(
        "adapter", "convert", single, tmp_path / "peft", "--to", "peft", "--base", tmp_path / "base"
    )
    assert "gate and up have an A of their own" in done.stderr
    made = _tensors(tmp_path / "peft")
    assert made[f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight"].shape == (12, 16)
    merged = _merged(base, tmp_path / "peft")
    assert_same(merged, _merged(base, single))  # which PEFT converts as it loads
    assert_same(_merged_by_ckptkit(single, tmp_path / "base", tmp_path / "one"), merged)
    assert_same(_merged_by_ckptkit(tmp_path / "peft", tmp_path / "base", tmp_path / "two"), merged)
    ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "vllm", to="vllm", base=tmp_path / "base")
    assert_same(_tensors(tmp_path / "vllm"), _tensors(single))


def test_ranks_of_experts_are_filled_up_where_one_scaling_can_be_had(tmp_path: Path) -> None:
    base = _base("Qwen3Moe", tmp_path / "base", num_hidden_layers=1)
    ranks = {r"experts\.1\..*_proj": 4}
    single = _write(tmp_path / "single", _single([2, 4, 2]), rank_pattern=ranks, **SINGLE)
    expected = _merged_by_ckptkit(single, tmp_path / "base", tmp_path / "merged")
    for to in ("peft", "vllm"):
        options: Any = {"to": to, "base": tmp_path / "base"}
        ckptkit.convert_adapter(single, tmp_path / to, **options)
        found = _merged_by_ckptkit(tmp_path / to, tmp_path / "base", tmp_path / f"merged {to}")
        assert_same(found, expected)
    assert_same(_merged(base, tmp_path / "peft"), expected)
    ranks = {r"experts\.1\..*_proj": 3}
    other = _write(tmp_path / "other", _single([2, 3, 2]), rank_pattern=ranks, **SINGLE)
    with pytest.raises(RefusedError, match=r"expert 1 .* scaling 2\.66667 against 4 of others"):
        ckptkit.convert_adapter(other, tmp_path / "no", to="peft", base=tmp_path / "base")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("to", ["peft", "vllm"])
def test_some_experts_alone_are_filled_up_with_zeros(to: Any, tmp_path: Path) -> None:
    _base("Qwen3Moe", tmp_path / "base", num_hidden_layers=1)
    some = {n: t for n, t in _single([2, 2]).items() if "experts.1" in n and "up_proj" not in n}
    options = {"target_modules": ["gate_proj", "down_proj"]}
    single = _write(tmp_path / "single", some, **options)
    with pytest.raises(RefusedError, match="nothing shows how many") as caught:
        ckptkit.convert_adapter(single, tmp_path / "out", to=to)
    assert "--base" in caught.value.hint
    ckptkit.convert_adapter(single, tmp_path / "out", to=to, base=tmp_path / "base")
    expected = _merged_by_ckptkit(single, tmp_path / "base", tmp_path / "one")
    assert_same(_merged_by_ckptkit(tmp_path / "out", tmp_path / "base", tmp_path / "two"), expected)


@pytest.mark.parametrize("to", ["peft", "vllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_some_layers_may_have_factors(family: str, to: Any, tmp_path: Path) -> None:
    base = _base(family, tmp_path / "base")
    model = _train(base, tmp_path / "peft", target_parameters=[f"layers.1.{n}" for n in EXPERTS])
    options: dict[str, Any] = {"to": to, "base": tmp_path / "base"}
    ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "out", **options)
    found = _merged_by_ckptkit(tmp_path / "out", tmp_path / "base", tmp_path / "merged")
    merged = dict(model.merge_and_unload().state_dict())
    assert_same(found, merged)
    if to == "peft":
        assert_same(_merged(base, tmp_path / "out"), merged)


@pytest.mark.parametrize("to", ["peft", "vllm"])
def test_the_stacked_factors_of_tinker_are_converted(to: Any, tmp_path: Path) -> None:
    adapter, base = TINKER / "adapter", TINKER / "base"
    ckptkit.convert_adapter(adapter, tmp_path / "out", to=to, base=base)
    ckptkit.merge_adapter(tmp_path / "out", tmp_path / "merged", base=base)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert_same(found, load_file(TINKER / "truth.safetensors"))


def test_what_extract_refuses_can_be_converted(tmp_path: Path) -> None:
    adapter, base = TINKER / "adapter", TINKER / "base"
    with pytest.raises(RefusedError) as caught:
        ckptkit.extract_adapter(adapter, tmp_path / "out", base=base)
    words = caught.value.hint.split("`")
    command = next(text for text in words if text.startswith("ckptkit adapter convert"))
    put = {"OUT": str(tmp_path / "out"), "ORG/NAME": str(base)}
    done = run_command(*(put.get(word, word) for word in command.split()[1:]))
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    merged = {n: t.bfloat16() for n, t in _merged(model, tmp_path / "out").items()}
    ckptkit.merge_adapter(adapter, tmp_path / "merged", base=base)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert [n for n in merged if (merged[n] - found[n]).abs().max() > 2**-8] == []


def test_factors_of_megatron_are_converted_by_the_map_of_their_model(tmp_path: Path) -> None:
    _base("Qwen3Moe", tmp_path / "base", num_hidden_layers=1)
    tensors: Tensors = {}
    for expert in range(3):
        for name, (out, inner) in {"linear_fc1": (40, 16), "linear_fc2": (16, 20)}.items():
            module = f"decoder.layers.0.mlp.experts.local_experts.{expert}.{name}.adapter"
            tensors[f"{module}.linear_in.weight"] = torch.randn(2, inner)
            tensors[f"{module}.linear_out.weight"] = torch.randn(out, 2)
    save_file(tensors, tmp_path / "adapter.safetensors")
    options: dict[str, Any] = {"base": tmp_path / "base"}
    known: dict[str, Any] = {"overrides": {"lora_alpha": 4}}
    ckptkit.merge_adapter(tmp_path / "adapter.safetensors", tmp_path / "one", **options, **known)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for to in ("peft", "vllm"):
        chosen: Any = {**options, "to": to, "lora_alpha": 4}
        ckptkit.convert_adapter(tmp_path / "adapter.safetensors", tmp_path / to, **chosen)
        ckptkit.merge_adapter(tmp_path / to, tmp_path / f"merged {to}", **options)
        assert_same(load_file(tmp_path / f"merged {to}" / "model.safetensors"), expected)


def test_factors_of_peft_before_0_19_are_turned(tmp_path: Path) -> None:
    """It took every parameter for [experts, in, out], so that A had the outputs."""
    base = _base("Qwen3Moe", tmp_path / "base")
    merged = dict(_train(base, tmp_path / "new").merge_and_unload().state_dict())
    old: Tensors = {}
    tensors = {n.removeprefix(PREFIX): t for n, t in _tensors(tmp_path / "new").items()}
    for name, tensor in tensors.items():
        if "experts" in name and "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            turned = up.reshape(len(up), 2, 3).permute(2, 1, 0).reshape(6, -1)
            old[name] = turned
            down = tensor.reshape(3, 2, -1).permute(2, 1, 0).reshape(-1, 6)
            old[name.replace("lora_A", "lora_B")] = down
        elif "experts" not in name:
            old[name] = tensor
    config = {**_config(tmp_path / "new"), "peft_version": "0.18.0"}
    _write(tmp_path / "old", old, **config)
    for to in ("peft", "vllm"):
        options: Any = {"to": to, "base": tmp_path / "base"}
        ckptkit.convert_adapter(tmp_path / "old", tmp_path / to, **options)
    assert_same(_tensors(tmp_path / "peft"), _tensors(tmp_path / "new"))
    assert_same(_merged(base, tmp_path / "peft"), merged)
    found = _merged_by_ckptkit(tmp_path / "vllm", tmp_path / "base", tmp_path / "merged")
    assert_same(found, merged)


def test_routers_and_whole_modules_stay_for_peft(tmp_path: Path) -> None:
    base = _base("Mixtral", tmp_path / "base")
    options: dict[str, Any] = {"target_parameters": [*EXPERTS, "gate.weight"]}
    model = _train(base, tmp_path / "peft", **options, modules_to_save=["lm_head"])
    merged = dict(model.merge_and_unload().state_dict())
    ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "out", to="peft", base=tmp_path / "base")
    assert_same(_tensors(tmp_path / "out"), _tensors(tmp_path / "peft"))
    assert_same(_merged(base, tmp_path / "out"), merged)
    with pytest.raises(RefusedError, match="modules_to_save lm_head, which vLLM does not load"):
        ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "no", to="vllm")
    assert not (tmp_path / "no").exists()


def test_routers_have_the_names_of_vllm(tmp_path: Path) -> None:
    base = _base("Mixtral", tmp_path / "base")
    options: dict[str, Any] = {"target_parameters": [*EXPERTS, "gate.weight"]}
    model = _train(base, tmp_path / "peft", **options)
    ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "out", to="vllm", base=tmp_path / "base")
    assert f"{PREFIX}model.layers.0.block_sparse_moe.gate.lora_A.weight" in _tensors(
        tmp_path / "out"
    )
    merged = dict(model.merge_and_unload().state_dict())
    ckptkit.convert_adapter(tmp_path / "out", tmp_path / "back", to="peft", base=tmp_path / "base")
    assert_same(_tensors(tmp_path / "back"), _tensors(tmp_path / "peft"))
    assert_same(_merged(base, tmp_path / "back"), merged)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("experts", "factors of 3 experts of 'model.layers.0.mlp', and the base has 4"),
        ("layers", "factors of 'model.layers.1.mlp', and the base has 1 layers"),
        ("width", "matrix of shape .* expected"),
        ("dense", "the base has no weights of 'model.layers.1.mlp.experts'"),
    ],
)
def test_an_adapter_of_another_base_is_refused(case: str, words: str, tmp_path: Path) -> None:
    _train(_base("Qwen3Moe", tmp_path / "base"), tmp_path / "peft")
    others: dict[str, dict[str, Any]] = {
        "experts": {"num_experts": 4},
        "layers": {"num_hidden_layers": 1},
        "width": {"moe_intermediate_size": 12},
        "dense": {"mlp_only_layers": [1]},
    }
    _base("Qwen3Moe", tmp_path / "other", **others[case])
    for to in ("peft", "vllm"):
        options: Any = {"to": to, "base": tmp_path / "other"}
        with pytest.raises(AdapterError, match=words) as caught:
            ckptkit.convert_adapter(tmp_path / "peft", tmp_path / "out", **options)
        assert "--base" in caught.value.hint
        assert not (tmp_path / "out").exists()


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    _base("Qwen3Moe", tmp_path / "base", mlp_only_layers=[1])
    tensors = _single([2, 2, 2])
    sizes = {n.rpartition(".lora_B")[0]: len(t) for n, t in tensors.items() if "lora_B" in n}
    dora = {f"{name}.lora_magnitude_vector": torch.ones(size) for name, size in sizes.items()}
    q_proj = "model.layers.0.self_attn.q_proj.lora_"
    plain = {f"{q_proj}A.weight": torch.ones(2, 16), f"{q_proj}B.weight": torch.ones(16, 2)}
    dense = {
        n.replace("layers.0.mlp.experts.0", "layers.1.mlp"): t
        for n, t in _single([2], sizes=(16, 24)).items()
    }
    cases: dict[str, tuple[Tensors, dict[str, Any], str]] = {
        "dora": ({**tensors, **dora}, {**SINGLE, "use_dora": True}, "has use_dora"),
        "plain": (plain, {"target_modules": ["q_proj"]}, "no factors of experts"),
        "pissa": (tensors, {**SINGLE, "init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        "dense": ({**tensors, **dense}, SINGLE, "takes modules of this name"),
    }
    for name, (held, options, words) in cases.items():
        adapter = _write(tmp_path / name, held, **options)
        for to in ("peft", "vllm"):
            if (name, to) == ("dense", "vllm"):
                continue
            chosen: Any = {"to": to, "base": tmp_path / "base"}
            with pytest.raises(CkptkitError, match=words) as caught:
                ckptkit.convert_adapter(adapter, tmp_path / "out", **chosen)
            assert caught.value.hint
            assert not (tmp_path / "out").exists()


def test_shared_experts_stay_beside_the_others(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_experts": 3}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12}
    config = transformers.Qwen2MoeConfig(**sizes, num_experts_per_tok=2)
    base = transformers.Qwen2MoeForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "shared_expert.gate_proj", "shared_expert.down_proj"]
    model = _train(base, tmp_path / "peft", target_modules=targets)
    merged = dict(model.merge_and_unload().state_dict())
    for to, source in (("vllm", "peft"), ("back", "vllm")):
        options: Any = {"to": "vllm" if to == "vllm" else "peft", "base": tmp_path / "base"}
        ckptkit.convert_adapter(tmp_path / source, tmp_path / to, **options)
        found = _merged_by_ckptkit(tmp_path / to, tmp_path / "base", tmp_path / f"merged {to}")
        assert_same(found, merged)
    assert_same(_merged(base, tmp_path / "back"), merged)


def test_without_a_configuration_fused_factors_are_refused_and_base_helps(tmp_path: Path) -> None:
    base = _base("GptOss", tmp_path / "base")
    _train(base, tmp_path / "peft")
    failed = run_command("adapter", "convert", tmp_path / "peft", tmp_path / "out", "--to", "vllm")
    assert "do not show which rows are of the gate" in failed.stderr
    assert "--base" in failed.stderr
    options = ("--to", "vllm", "--base", tmp_path / "base")
    planned = run_command(
        "adapter", "convert", tmp_path / "peft", tmp_path / "out", *options, "--dry-run"
    )
    assert planned.stdout
    assert not (tmp_path / "out").exists()
    done = run_command("adapter", "convert", tmp_path / "peft", tmp_path / "out", *options)
    assert "12 tensors" in done.stdout
    assert ckptkit.verify(tmp_path / "out")


def test_names_of_other_models_are_refused_without_their_configuration(tmp_path: Path) -> None:
    named = {n.replace("mlp", "feed_forward"): t for n, t in _single([2, 2, 2]).items()}
    adapter = _write(tmp_path / "adapter", named, **SINGLE)
    with pytest.raises(RefusedError, match="do not show how the model has its experts") as caught:
        ckptkit.convert_adapter(adapter, tmp_path / "out", to="peft")
    assert "--base" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_model_type_without_known_layouts_is_refused_by_name(tmp_path: Path) -> None:
    _train(_base("Qwen3Moe", tmp_path / "base"), tmp_path / "peft")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": "dbrx"}))
    with pytest.raises(RefusedError, match="not known for the model type 'dbrx'"):
        ckptkit.convert_adapter(
            tmp_path / "peft", tmp_path / "out", to="vllm", base=tmp_path / "base"
        )
