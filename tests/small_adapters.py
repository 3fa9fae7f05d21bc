"""Small models, and adapters of PEFT in which every trained tensor differs from its start."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

Tensors = dict[str, torch.Tensor]
TOKENS, WIDTH = 40, 16
_ALIKE = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_LLAMA = {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "Llama": _ALIKE | _LLAMA | {"pad_token_id": 0, "attention_bias": True},
    "GPT2": {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "bos_token_id": 1},
    "Bert": _ALIKE | {"max_position_embeddings": 16, "num_labels": 2},
    "T5": {"vocab_size": TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 12}
    | {"num_layers": 1, "num_heads": 2},
    "Mixtral": _ALIKE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 3},
    "Qwen3Moe": _ALIKE
    | _LLAMA
    | {"moe_intermediate_size": 20, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2},
}


def model_of(family: str = "Llama", kind: str = "ForCausalLM", **options: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**_SIZES[family], **options})
    return getattr(transformers, f"{family}{kind}")(config)


class Convolutions(nn.Module):
    """A net of every kind of convolution that PEFT targets, and no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(4, 8, 3)
        self.point = nn.Conv2d(8, 6, 1)
        self.line = nn.Conv1d(6, 5, 3)
        self.space = nn.Conv3d(2, 4, 2)
        self.end = nn.Linear(5, 7)


def shake(model: nn.Module, only: str = "") -> None:
    """Changes all that is trained, or what has a word in its name."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if only in name if only else parameter.requires_grad:
                noise = 0.2 * torch.randn_like(parameter)
                changed = parameter * (1 + noise) if "magnitude" in name else parameter + noise
                parameter.copy_(changed)


def train(base: nn.Module, **options: Any) -> Any:
    """Returns a PEFT model of a copy of the base."""
    chosen = {"r": 2, **copy.deepcopy(options)}  # PEFT adds to lists
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**chosen))
    shake(model)
    return model


def save_dcp(state: Mapping[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Demands that two state dicts are equal, bit by bit."""
    assert found.keys() == expected.keys()
    assert [n for n, one in expected.items() if found[n].dtype != one.dtype] == []
    assert [n for n, one in expected.items() if not torch.equal(found[n], one)] == []
