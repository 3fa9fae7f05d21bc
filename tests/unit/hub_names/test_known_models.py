"""What is known of a class without Transformers is what the class has, and nothing is guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptkit
from ckptkit.conversion.naming_program import NamingProgram
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.frameworks import recognise_by_tensors
from ckptkit.core.index import Fqn
from ckptkit.hub_names.known_models import DATA, find_tied, is_as_described, lay_out
from ckptkit.plan.load_report import LoadRequest, MisfitError
from tests.reports.folders import save
from tests.sampled import sampled
from tests.small_models import on_meta, small_model_config

ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
FAMILIES = {model_type: one for _, model_type, one in (row for row in ROWS if row[0] == "families")}
QUICK = ["llama", "gemma2", "gpt2", "qwen3"]
CUT = {"rembert"}  # small models of these have a size that may only have its default
SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 48, "num_hidden_layers": 2}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


def written(config: Any, name: str) -> dict[str, Any]:
    """Returns a configuration as `config.json` has it."""
    config.architectures = [name]
    document: dict[str, Any] = json.loads(config.to_json_string())
    return document


@pytest.mark.parametrize("model_type", sampled([one for one in FAMILIES if one not in CUT], QUICK))
def test_a_small_model_of_each_class_is_described(model_type: str) -> None:
    name = FAMILIES[model_type]["class"]
    model_class = getattr(transformers, name)
    try:
        config = small_model_config(model_class)
    except Exception as error:  # noqa: BLE001  defaults of some classes are too large
        pytest.skip(f"cannot be built: {error}")
    model = on_meta(model_class, config)
    document = {**written(config, name), "model_type": model_type}
    laid = lay_out(document)
    assert laid == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", True):
        assert find_tied(document) == set(model._tied_weights_keys or {})


def request_of(config: dict[str, Any], state: dict[str, torch.Tensor]) -> LoadRequest:
    dtype = dtype_named("float32")
    return LoadRequest(config, {Fqn(n): (dtype, tuple(t.shape)) for n, t in state.items()})


def llama(**changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
    model = transformers.LlamaForCausalLM(config)
    return written(config, "LlamaForCausalLM"), dict(model.state_dict())


def test_tensors_that_differ_in_anything_are_not_as_described() -> None:
    config, state = llama()
    assert is_as_described(request_of(config, state))
    first = next(iter(state))
    less = {name: t for name, t in state.items() if name != first}
    assert not is_as_described(request_of(config, less))
    assert not is_as_described(request_of(config, state | {"model.more.weight": torch.ones(1)}))
    assert not is_as_described(request_of(config, state | {first: torch.ones(3, 16)}))
    # Transformers 5 loads these two, and others do not.
    assert not is_as_described(request_of(config, {f"model.{n}": t for n, t in state.items()}))
    bare = {name.removeprefix("model."): t for name, t in state.items()}
    assert not is_as_described(request_of(config, bare))
    biased, _ = llama(attention_bias=True)
    assert not is_as_described(request_of(biased, state))


def test_a_tied_head_may_be_missing_and_no_other() -> None:
    config, state = llama(tie_word_embeddings=True)
    assert is_as_described(request_of(config, state))
    headless = {name: t for name, t in state.items() if name != "lm_head.weight"}
    assert is_as_described(request_of(config, headless))
    config["tie_word_embeddings"] = False
    assert not is_as_described(request_of(config, headless))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "xielu"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "a.B"}},
        {"hidden_size": "16"},
        {"hidden_size": True},
        {"hidden_size": 1 << 60},
        {"mlp_bias": None},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
        {"a_new_key": 1},
    ],
    ids=str,
)
def test_a_configuration_that_says_anything_else_is_not_described(change: dict[str, Any]) -> None:
    config, _ = llama()
    assert lay_out(config) is not None
    assert lay_out(config | change) is None


def test_a_first_conversion_of_a_known_family_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, state = llama()
    step = save(state, tmp_path / "step")
    (step / "config.json").write_text(json.dumps(config))
    asked: list[bytes] = []

    def ask(_program: NamingProgram, question: bytes) -> None:
        asked.append(question)
        raise AssertionError("a process was started")

    monkeypatch.setattr(NamingProgram, "ask", ask)
    ckptkit.consolidate(step, tmp_path / "out", dtype="bfloat16")
    assert not asked
    del state["model.norm.weight"]
    less = save(state, tmp_path / "less")
    (less / "config.json").write_text(json.dumps(config))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(MisfitError, match=r"model\.norm\.weight"):
        ckptkit.consolidate(less, tmp_path / "refused")


NAMES = Path(__file__).resolve().parents[3] / "fixtures" / "transformers_names.json.gz"
OF_THEIR_MODELS = {
    "decoder.layers.3.self_attention.linear_qkv.weight": "Megatron-Core",
    "layers.0.attention.qkv_linear.wq.weight": "torchtitan",
    "layers.12.attention.wk.bias": "torchtitan",
    "layers.0.attention.wkv_a.weight": "torchtitan",
    "layers.3.attn.wq.weight": "torchtitan",
    "model.layers.0.self_attn.q_proj.weight": "",
    "model.layers.0.attention.wqkv.weight": "",
}


@pytest.mark.parametrize("name", OF_THEIR_MODELS)
def test_a_framework_is_recognised_by_a_name(name: str) -> None:
    assert recognise_by_tensors(["norm.weight", name]) == OF_THEIR_MODELS[name]


def test_no_model_of_transformers_is_taken_for_one_of_another_framework() -> None:
    """The table has the last four parts of all names; a pattern may ask for more before them."""
    tails = json.loads(gzip.decompress(NAMES.read_bytes()))["tails"]
    assert len(tails) > 8000
    for before in ("", "layers.", "decoder.layers.0.", "decoder.layers."):
        for name in tails:
            assert not recognise_by_tensors([before + name]), (before, name)
