"""Adapters of real PEFT models, taken out of every form of save and loaded by PEFT again."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import ckptkit
from ckptkit.core.errors import (
    AdapterError,
    AmbiguousSourceError,
    CannotPlanError,
    IncompleteCheckpointError,
)
from tests.small_adapters import (
    WIDTH,
    Convolutions,
    Tensors,
    assert_same,
    model_of,
    save_dcp,
    shake,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, on odd but legal configurations


def _llama(kind: str = "ForCausalLM", *, tied: bool = False) -> Any:
    return model_of(kind=kind, tie_word_embeddings=tied)


def _gpt2() -> Any:
    return model_of("GPT2", "LMHeadModel")


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    options: Mapping[str, Any]
    known: Mapping[str, Any] = field(default_factory=dict)

    def trained(self) -> tuple[nn.Module, Any]:
        """Returns the base, and a PEFT model of it."""
        torch.manual_seed(7)
        base = self.make()
        return base, train(base, **self.options)


_LM = {"task_type": "CAUSAL_LM"}
_ALPHA = {"lora_alpha": 8, "use_rslora": False}
CASES = {
    "linear": Case(_llama, {**_LM, "target_modules": ["q_proj", "down_proj"]}, _ALPHA),
    "patterns": Case(
        _llama,
        {
            **_LM,
            "target_modules": "all-linear",
            "use_rslora": True,
            "lora_alpha": 5,
            "rank_pattern": {"v_proj": 4, r"layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"k_proj": 32},
        },
        {"lora_alpha": 5, "use_rslora": True},
    ),
    "dora": Case(
        _gpt2,
        {**_LM, "target_modules": ["c_attn", "wte"], "use_dora": True, "fan_in_fan_out": True},
        _ALPHA,
    ),
    "convolutions": Case(
        Convolutions, {"target_modules": ["plane", "line", "end"], "use_dora": True}, _ALPHA
    ),
    "embeddings": Case(
        _llama, {**_LM, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}, _ALPHA
    ),
    "whole modules": Case(
        lambda: _llama("ForSequenceClassification"),
        {"task_type": "SEQ_CLS", "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        _ALPHA,
    ),
    "tokens": Case(
        lambda: _llama(tied=True),
        {**_LM, "target_modules": ["q_proj"], "trainable_token_indices": [3, 1, 30]},
        {**_ALPHA, "token_indices": [3, 1, 30]},
    ),
    "tokens of both ends": Case(
        _llama,
        {
            **_LM,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [2]},
        },
    ),
    "experts": Case(
        partial(model_of, "Mixtral"),
        {
            **_LM,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 4},
        },
        _ALPHA,
    ),
    "all biases": Case(_gpt2, {**_LM, "target_modules": ["c_fc"], "bias": "all"}),
    "biases of LoRA": Case(_llama, {**_LM, "target_modules": ["q_proj"], "bias": "lora_only"}),
    "biases of B": Case(_llama, {**_LM, "target_modules": ["q_proj"], "lora_bias": True}, _ALPHA),
    "both ends of GPT-2": Case(_gpt2, {**_LM, "target_modules": ["wte", "lm_head"]}),
    "rows of tied ends": Case(
        lambda: _llama(tied=True),
        {
            **_LM,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [3, 1]},
        },
    ),
    "tied by PEFT": Case(
        lambda: _llama(tied=True),
        {**_LM, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}


INFERABLE = [name for name, case in CASES.items() if case.known]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def trained(case: Case) -> tuple[nn.Module, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.trained()


def _saved_config(model: Any, folder: Path, adapter: str = "default") -> Path:
    folder.mkdir()
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(folder)
    return folder / "adapter_config.json"


def _assert_loads_like(live: Mapping[str, torch.Tensor], base: nn.Module, out: Path) -> None:
    assert_same(PeftModel.from_pretrained(copy.deepcopy(base), out).state_dict(), live)


def _file(out: Path) -> Tensors:
    return load_file(out / "adapter_model.safetensors")


@pytest.mark.quick("linear", "dora", "experts", "whole modules", "rows of tied ends")
def test_every_form_of_a_save_gives_the_adapter_bit_for_bit(
    trained: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    base, model = trained
    config = _saved_config(model, tmp_path / "config")
    own = get_peft_model_state_dict(model)
    save_dcp({"model": model.state_dict()}, tmp_path / "live")
    ckptkit.extract_adapter(tmp_path / "live", tmp_path / "out", adapter_config=config)
    assert_same(_file(tmp_path / "out"), own)
    _assert_loads_like(model.state_dict(), base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written == json.loads(config.read_text())
    save_dcp({"model": own}, tmp_path / "stripped")
    ckptkit.extract_adapter(tmp_path / "stripped", tmp_path / "again", adapter_config=config)
    assert_same(_file(tmp_path / "again"), own)
    torch.save(_trained_only(model), tmp_path / "pytorch_model_fsdp.bin")
    ckptkit.extract_adapter(
        tmp_path / "pytorch_model_fsdp.bin", tmp_path / "full", adapter_config=config
    )
    frozen = {name for name in own if name.endswith(".base_layer.weight")}  # of embeddings
    assert_same(_file(tmp_path / "full"), {n: t for n, t in own.items() if n not in frozen})


@pytest.mark.parametrize("case", INFERABLE, indirect=True)
@pytest.mark.quick("linear", "embeddings", "tokens")
def test_what_tensors_tell_makes_a_configuration_that_loads_the_same(
    case: Case, trained: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    base, model = trained
    save_dcp({"model": model.state_dict()}, tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(CannotPlanError, match=r"do not show lora_alpha, use_rslora"):
        ckptkit.extract_adapter(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out")
    ckptkit.extract_adapter(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out", **case.known)
    _assert_loads_like(model.state_dict(), base, tmp_path / "out")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    assert _scalings(loaded) == _scalings(model) or "alpha_pattern" in case.options


def _scalings(model: Any) -> dict[str, float]:
    return {
        name: module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }


def _trained_only(model: Any) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def plain() -> tuple[nn.Module, Any]:
    return CASES["linear"].trained()


def _write_bin(model: Any, folder: Path) -> None:
    torch.save(_trained_only(model), folder / "pytorch_model_fsdp.bin")


def _write_bin_in_a_container(model: Any, folder: Path) -> None:
    state = {"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}, "epoch": 1}
    torch.save(state, folder / "last.ckpt")


def _write_safetensors(model: Any, folder: Path) -> None:
    save_file(get_peft_model_state_dict(model), folder / "adapter_model.safetensors")


def _write_old_bin(model: Any, folder: Path) -> None:
    torch.save(get_peft_model_state_dict(model), folder / "adapter_model.bin")


def _write_stripped_dcp(model: Any, folder: Path) -> None:
    save_dcp({"model": get_peft_model_state_dict(model)}, folder / "pytorch_model_fsdp_0")


def _write_flat_dcp(model: Any, folder: Path) -> None:
    save_dcp(model.state_dict(), folder)


def _write_wrapped(model: Any, folder: Path) -> None:
    def wrapped(name: str) -> str:
        name = name.replace(
            "layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."
        )
        name = name.replace("layers.1.", "layers.1._orig_mod.")
        return f"module._orig_mod.{name}"

    torch.save({wrapped(k): v for k, v in model.state_dict().items()}, folder / "model.pt")


def _write_wrapped_inside(model: Any, folder: Path) -> None:
    state = {k.replace("layers.", "module.layers."): v for k, v in model.state_dict().items()}
    torch.save(state, folder / "model.pt")


WRITERS = [
    *(_write_bin, _write_bin_in_a_container, _write_safetensors, _write_old_bin, _write_flat_dcp),
    *(_write_stripped_dcp, _write_wrapped, _write_wrapped_inside),
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[7:])
@pytest.mark.quick("bin", "stripped_dcp", "wrapped")
def test_every_dialect_gives_the_same_adapter(
    write: Callable[[Any, Path], None], plain: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    base, model = plain
    folder = tmp_path / "saved"
    folder.mkdir()
    write(model, folder)
    ckptkit.extract_adapter(folder, tmp_path / "out", lora_alpha=8, use_rslora=False)
    _assert_loads_like(model.state_dict(), base, tmp_path / "out")


def test_adapters_that_transformers_added_get_the_names_of_peft(
    plain: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    base, model = plain
    prefix = "base_model.model."
    state = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    save_dcp({"model": state}, tmp_path / "saved")
    ckptkit.extract_adapter(tmp_path / "saved", tmp_path / "out", lora_alpha=8, use_rslora=False)
    _assert_loads_like(model.state_dict(), base, tmp_path / "out")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any, Path]:
    base, model = CASES["linear"].trained()
    model.add_adapter("poet", LoraConfig(r=3, lora_alpha=6, target_modules=["k_proj", "down_proj"]))
    shake(model, "poet")
    step = tmp_path_factory.mktemp("several") / "checkpoint-3"
    save_dcp({"model": model.state_dict()}, step / "pytorch_model_fsdp_0")
    (step / "ckptkit" / "adapters").mkdir(parents=True)
    _saved_config(model, step / "ckptkit" / "adapters" / "poet", "poet")
    config = _saved_config(model, step / "unused")
    config.rename(step / "ckptkit" / "adapter_config.json")
    return base, model, step


@pytest.mark.parametrize("name", ["default", "poet"])
def test_of_several_adapters_the_named_one_is_taken_with_its_own_record(
    name: str, several: tuple[nn.Module, Any, Path], tmp_path: Path
) -> None:
    base, model, step = several
    ckptkit.extract_adapter(step, tmp_path / "out", adapter=name)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out", adapter_name=name)
    own = {key: one for key, one in model.state_dict().items() if f".{name}." in key}
    state = loaded.state_dict()
    assert {key for key in state if f".{name}." in key} == own.keys()
    assert all(torch.equal(state[key], own[key]) for key in own)
    assert loaded.peft_config[name].lora_alpha == model.peft_config[name].lora_alpha


def test_of_several_adapters_none_is_taken_without_its_name(
    several: tuple[nn.Module, Any, Path], tmp_path: Path
) -> None:
    with pytest.raises(AmbiguousSourceError, match=r"2 adapters: 'default', 'poet'"):
        ckptkit.extract_adapter(several[2], tmp_path / "out")
    with pytest.raises(CannotPlanError, match=r"no adapter 'prose'; found 'default', 'poet'"):
        ckptkit.extract_adapter(several[2], tmp_path / "out", adapter="prose")


def test_folders_of_several_adapters_are_told_apart_by_their_names(
    several: tuple[nn.Module, Any, Path], tmp_path: Path
) -> None:
    base, model, _ = several
    model.save_pretrained(tmp_path / "saved")
    ckptkit.extract_adapter(tmp_path / "saved", tmp_path / "out", adapter="poet")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out", adapter_name="poet")
    assert loaded.peft_config["poet"].r == 3
    expected = load_file(tmp_path / "saved" / "poet" / "adapter_model.safetensors")
    assert_same(_file(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("make", "target", "brought"),
    [
        (_llama, "q_proj", {"model.embed_tokens.weight", "lm_head.weight"}),
        (_gpt2, "c_attn", {"transformer.wte.weight", "lm_head.weight"}),
        (
            *(partial(model_of, "Bert", "ForMaskedLM"), "query"),
            {
                "bert.embeddings.word_embeddings.weight",
                *(f"cls.predictions.decoder.{parameter}" for parameter in ("weight", "bias")),
            },
        ),
        (
            partial(model_of, "T5", "ForConditionalGeneration"),
            "q",
            {"shared.weight", "lm_head.weight"},
        ),
    ],
    ids=["llama", "gpt2", "bert", "t5"],
)
@pytest.mark.quick("llama", "t5")
def test_a_resized_vocabulary_brings_its_embeddings(
    make: Callable[[], Any], target: str, brought: set[str], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    base = make()
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(48)
    options = {"target_modules": [target], "fan_in_fan_out": target == "c_attn"}
    model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, **options))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    shake(model)
    model.save_pretrained(tmp_path / "peft")
    own = _file(tmp_path / "peft")
    assert {f"base_model.model.{name}" for name in brought} == {n for n in own if "lora" not in n}
    save_dcp({"model": model.state_dict()}, tmp_path / "live")
    config = tmp_path / "peft" / "adapter_config.json"
    for source in ("live", "peft"):
        out = tmp_path / f"{source} out"
        ckptkit.extract_adapter(tmp_path / source, out, adapter_config=config)
        assert_same(_file(out), own)


@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["lm_head"]], ids=" ".join)
@pytest.mark.quick("lm_head")
def test_whole_modules_that_peft_saves_twice_are_taken_once(
    saved: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    base: Any = _llama()
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(48)
    model: Any = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM"),
    )
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    shake(model)
    model.save_pretrained(tmp_path / "peft")
    model.save_pretrained(tmp_path / "asked", save_embedding_layers=True)
    assert_same(_file(tmp_path / "peft"), _file(tmp_path / "asked"))
    save_dcp({"model": model.state_dict()}, tmp_path / "live")
    config = tmp_path / "peft" / "adapter_config.json"
    (tmp_path / "live" / config.name).write_bytes(config.read_bytes())
    twice = "base_model.model.lm_head.modules_to_save.weight"
    own = {key: one for key, one in _file(tmp_path / "peft").items() if "modules_to" not in key}
    assert twice in _file(tmp_path / "peft")
    merged = PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload().state_dict()
    for source in ("peft", "live"):
        out, whole = tmp_path / f"{source} out", tmp_path / f"{source} whole"
        ckptkit.extract_adapter(tmp_path / source, out)
        assert_same(_file(out), own)
        ckptkit.merge_adapter(tmp_path / source, whole, base=tmp_path / "base", match_peft=True)
        assert_same(load_file(whole / "model.safetensors"), merged)
    changed = {**_file(tmp_path / "peft"), twice: torch.zeros(48, WIDTH)}
    save_file(changed, tmp_path / "peft" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"values differ from those of '.*lm_head\.weight'"):
        ckptkit.extract_adapter(tmp_path / "peft", tmp_path / "none")


def test_what_another_adapter_wraps_is_no_part_of_this_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    base: Any = _llama()
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=r".*\.q_proj", **_LM))
    model.add_adapter(
        "second", LoraConfig(r=2, target_modules=["lm_head"], modules_to_save=["embed_tokens"])
    )
    shake(model, "lora")
    save_dcp({"model": model.state_dict()}, tmp_path / "saved")
    for name in ("default", "second"):
        config = _saved_config(model, tmp_path / name, name)
        ckptkit.extract_adapter(
            tmp_path / "saved", tmp_path / f"{name} out", adapter=name, adapter_config=config
        )
        own = get_peft_model_state_dict(model, adapter_name=name)
        assert_same(_file(tmp_path / f"{name} out"), own)


def test_a_resized_embedding_that_another_adapter_wraps_has_its_own_name(tmp_path: Path) -> None:
    torch.manual_seed(3)
    base: Any = _llama()
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(48)
    model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"]))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    shake(model, "lora")
    save_dcp({"model": model.state_dict()}, tmp_path / "saved")
    config = _saved_config(model, tmp_path / "config")
    ckptkit.extract_adapter(
        tmp_path / "saved", tmp_path / "out", adapter="default", adapter_config=config
    )
    again: Any = model_of(vocab_size=48)
    loaded = PeftModel.from_pretrained(again, tmp_path / "out").state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(loaded[f"base_model.model.{name}"], base.state_dict()[name])


def test_an_adapter_that_was_saved_empty_is_told_from_its_optimizer(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-9"
    names = [f"base_model.model.q.lora_{factor}.default.weight" for factor in "AB"]
    moments = {name: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for name in names}
    save_dcp({"optimizer": {"state": moments}}, step / "optimizer_0")
    save_dcp({"model": {}}, step / "pytorch_model_fsdp_0")
    with pytest.raises(IncompleteCheckpointError, match="moments of 2 of its tensors") as caught:
        ckptkit.extract_adapter(step, tmp_path / "out")
    assert "PEFT 0.21" in caught.value.hint


def test_an_optimizer_beside_the_adapter_is_not_needed(
    plain: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    base, model = plain
    step = tmp_path / "checkpoint-9"
    save_dcp({"model": model.state_dict()}, step / "pytorch_model_fsdp_0")
    moments = {"q": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    save_dcp({"optimizer": {"state": moments}}, step / "optimizer_0")
    (step / "optimizer_0" / "__0_0.distcp").unlink()
    (step / "optimizer.bin").write_bytes(b"cut short")
    ckptkit.extract_adapter(step, tmp_path / "out", lora_alpha=8, use_rslora=False)
    _assert_loads_like(model.state_dict(), base, tmp_path / "out")
