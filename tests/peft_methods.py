"""Every method that the installed PEFT registers, built on a tiny Llama."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.save_and_load import get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

_TEXT = {"task_type": "CAUSAL_LM"}
_PROMPT = _TEXT | {"num_virtual_tokens": 4}
_MASK = [1, 1, 1]
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": _TEXT | {"adapter_len": 4, "adapter_layers": 1},
    "C3A": {"block_size": 8},
    "CARTRIDGE": _PROMPT,
    "CPT": _TEXT | {"cpt_token_ids": [1, 2, 3], "cpt_mask": _MASK, "cpt_tokens_type_mask": _MASK},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": _PROMPT | {"num_tasks": 2},
    "POLY": {"r": 2, "n_tasks": 2, "n_skills": 2},
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": {"r": 4},
    "P_TUNING": _PROMPT | {"encoder_hidden_size": 16},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 8, "vector_length": 8, "r": 2, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
}


@dataclass(frozen=True)
class Built:
    """A PEFT model."""

    model: Any  # the model, wrapped
    own: dict[str, torch.Tensor]  # the state dict that PEFT's files hold


def tiny_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, max_position_embeddings=64, use_cache=False, **sizes, **heads)
    )


def build(method: str, folder: Path) -> Built:
    """Builds a PEFT model of a method; `folder` is for what it is made from."""
    options: dict[str, Any] = dict(OPTIONS.get(method, {}))
    if method == "XLORA":
        experts = LoraConfig(r=2, target_modules=["q_proj"], **_TEXT)
        get_peft_model(tiny_llama(), experts).save_pretrained(folder / "expert")
        places = {"0": str(folder / "expert"), "1": str(folder / "expert")}
        options = {"hidden_size": 16, "adapters": places, **_TEXT}
    elif options.get("task_type") is None:
        options.setdefault("target_modules", ["q_proj", "v_proj"])
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)](**options)
    model = get_peft_model(tiny_llama(), config)
    own = get_peft_model_state_dict(model)
    return Built(model, {name: tensor.detach().clone() for name, tensor in own.items()})
