"""Runs under torchrun: saves models whose weights lie congruent to their place in the folder.

Usage: congruent_run.py FOLDER CASE... Each case works in FOLDER/CASE, and leaves a run there, and
`truth.safetensors` with the names of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit.training import Checkpointer
from tests.distributed.cases import FULL, WRAPPERS, fsdp2, run_cases


class Net(nn.Module):
    """Rows of lengths that divide no block, in several types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 257)
        self.up = nn.Linear(257, 701)
        self.norm = nn.LayerNorm(701)
        self.down = nn.Linear(701, 513)
        self.stacked = nn.Parameter(torch.randn(9, 130, 131))
        self.head = nn.Linear(513, 1001, bias=False)


def make(kind: str) -> Any:
    torch.manual_seed(1)
    model: Any = Net()
    if kind == "tied":
        model.head = nn.Linear(257, 1001, bias=False)
        model.head.weight = model.embed.weight
    if kind == "frozen":
        model.embed.requires_grad_(requires_grad=False)
        model.head.requires_grad_(requires_grad=False)
    if kind == "llama":
        sizes = {"hidden_size": 312, "intermediate_size": 811, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "vocab_size": 1001, "tie_word_embeddings": True}
        return fsdp2(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))
    if kind == "mixed":
        model.down.to(torch.bfloat16)
        model.head.to(torch.float16)
        return WRAPPERS["fsdp2"](model)
    return WRAPPERS[kind if kind in WRAPPERS else "fsdp2"](model)


def save(folder: Path, kind: str) -> None:
    model = make(kind)
    truth: dict[str, Any] = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        tensors = {name: value.clone().contiguous() for name, value in truth.items()}
        save_file(tensors, folder / "truth.safetensors")
    limit = "1MiB" if kind == "waves" else None
    with Checkpointer(folder / "run", staging_limit=limit) as checkpointer:
        checkpointer.save(1, {"model": model}).result(120)


if __name__ == "__main__":
    run_cases({"save": save})
