"""Small models, and checkpoints of them, for what compares names with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
State = dict[str, Any]


def model_of(family: str = "Llama", kind: str = "ForCausalLM", **values: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SIZES | values))
    model = getattr(transformers, f"{family}{kind}")(config)
    model.config.architectures = [type(model).__name__]
    return model


def trained(folder: Path, state: State, config: Any = None) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    if config is not None:
        config.save_pretrained(folder)
    return folder
