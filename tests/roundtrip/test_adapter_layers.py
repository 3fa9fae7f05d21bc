"""Every kind of layer, task and bias: the extracted folder is what PEFT saves, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import RefusedError

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", minversion="0.21")
transformers = pytest.importorskip("transformers", minversion="5")
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from transformers import BertConfig, GPT2Config, LlamaConfig  # noqa: E402

from tests.small_adapters import assert_same, train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about biases and small models
LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
}
BERT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
CLASSES = {
    "LlamaForCausalLM": ("CAUSAL_LM", LlamaConfig, LLAMA, ["q_proj"], ["norm"]),
    "LlamaForSequenceClassification": ("SEQ_CLS", LlamaConfig, LLAMA, ["q_proj"], ["norm"]),
    "LlamaForTokenClassification": ("TOKEN_CLS", LlamaConfig, LLAMA, ["q_proj"], ["norm"]),
    "LlamaForQuestionAnswering": ("QUESTION_ANS", LlamaConfig, LLAMA, ["q_proj"], ["norm"]),
    "BertForSequenceClassification": ("SEQ_CLS", BertConfig, BERT, ["query"], ["dense"]),
    "BertForTokenClassification": ("TOKEN_CLS", BertConfig, BERT, ["query"], ["dense"]),
    "BertModel": (None, BertConfig, BERT, ["query", "word_embeddings"], ["dense"]),
    "RobertaForSequenceClassification": (
        *("SEQ_CLS", transformers.RobertaConfig, BERT | {"max_position_embeddings": 40}),
        *(["query"], None),  # its head is a module of several, which has a `dense` too
    ),
    "GPT2ForSequenceClassification": ("SEQ_CLS", GPT2Config, GPT2, ["c_attn"], ["ln_f"]),
}
QUICK = ("LlamaForSequenceClassification", "GPT2ForSequenceClassification")
LAYERS = {
    "linear and embedding": ["embedding", "linear"],
    "convolutions": ["conv1", "conv2", "conv3"],
    "groups": ["grouped1", "grouped2", "grouped3"],
    "depthwise": ["depthwise"],
    "attention": ["attention"],
    "all": ["embedding", "linear", "conv2", "grouped2", "attention"],
}


class Net(nn.Module):
    """A module of every kind that LoRA adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.conv1, self.conv2 = nn.Conv1d(8, 8, 3), nn.Conv2d(8, 12, 3)
        self.conv3 = nn.Conv3d(8, 8, 3)
        self.grouped1 = nn.Conv1d(8, 8, 3, groups=2)
        self.grouped2 = nn.Conv2d(8, 12, 3, groups=4)
        self.grouped3 = nn.Conv3d(8, 8, 3, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.attention, self.parameter = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 3)


def check(model: Any, home: Path) -> None:
    """Compares what is extracted, of the live model and of PEFT's own folder, with the latter."""
    model.save_pretrained(home / "peft")
    truth = load_file(home / "peft" / "adapter_model.safetensors")
    (home / "live").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, home / "live" / "model.pt")
    for source in ("live", "peft"):
        out = home / f"{source} out"
        config = home / "peft" / "adapter_config.json"
        ckptkit.extract_adapter(home / source, out, adapter_config=config)
        found = load_file(out / "adapter_model.safetensors")
        assert_same(found, truth)


def model_cases() -> Iterator[Any]:
    for name, (task, config, sizes, targets, whole) in CLASSES.items():
        for bias in ("none", "all", "lora_only"):
            for modules in (None, whole) if whole is not None else (None,):
                options: dict[str, Any] = {"task_type": task, "bias": bias}
                options |= {"target_modules": targets}
                options |= {"modules_to_save": modules, "fan_in_fan_out": config is GPT2Config}
                label = f"{name}-{bias}-{modules}"
                is_quick = name in QUICK or (bias, modules) == ("all", whole)
                marks = () if is_quick else pytest.mark.slow
                yield pytest.param(name, config, sizes, options, id=label, marks=marks)


@pytest.mark.parametrize(("name", "config", "sizes", "options"), list(model_cases()))
@pytest.mark.quick(
    "BertForSequenceClassification-all-['dense']",
    "GPT2ForSequenceClassification-lora_only-None",
    "LlamaForCausalLM-all-['norm']",
    "LlamaForSequenceClassification-none-None",
)
def test_heads_and_biases_are_those_that_peft_saves(
    name: str, config: Any, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = getattr(transformers, name)(config(pad_token_id=0, **sizes))
    check(train(base, r=4, **options), tmp_path)


@pytest.mark.parametrize(
    "modules", [None, pytest.param(["classifier"], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.quick(
    "all-lora_only-None",
    "attention-none-None",
    "convolutions-all-None",
    "linear and embedding-none-None",
)
def test_all_kinds_of_layers_are_those_that_peft_saves(
    layers: str, bias: str, modules: list[str] | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    options = {"bias": bias, "modules_to_save": modules, "target_modules": LAYERS[layers]}
    check(train(Net(), r=8 if layers == "depthwise" else 4, **options), tmp_path)


@pytest.mark.parametrize("layers", ["linear and embedding", "convolutions", "groups"])
def test_dora_of_all_kinds_of_layers_is_that_which_peft_saves(layers: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(train(Net(), r=4, use_dora=True, target_modules=LAYERS[layers]), tmp_path)


@pytest.mark.parametrize("targets", [["attention"], ["linear", "embedding", "conv2"]], ids=str)
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.quick("all-['attention']")
def test_a_merge_is_that_of_peft(targets: list[str], bias: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Net()
    (tmp_path / "base").mkdir()
    torch.save(base.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    options = {"target_modules": targets, "modules_to_save": ["classifier"], "bias": bias}
    model = train(base, r=4, **options)
    model.save_pretrained(tmp_path / "peft")
    merged = model.merge_and_unload().state_dict()
    ckptkit.merge_adapter(tmp_path / "peft", tmp_path / "out", base=tmp_path / "base")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == merged.keys()
    for name, tensor in merged.items():
        assert torch.allclose(tensor, found[name], rtol=0, atol=1e-6), name


def test_a_grouped_convolution_has_no_merged_form(tmp_path: Path) -> None:
    base = Net()
    (tmp_path / "base").mkdir()
    torch.save(base.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    model = train(base, r=4, target_modules=["grouped1"])
    model.save_pretrained(tmp_path / "peft")
    with pytest.raises(NotImplementedError):
        model.merge_and_unload()
    with pytest.raises(RefusedError, match="'grouped1' is a convolution of 2 groups"):
        ckptkit.merge_adapter(tmp_path / "peft", tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()
