"""Makes the input of `deepspeed_parallel.py`: two ranks of DeepSpeed save after one step.

    python -m torch.distributed.run --nproc_per_node=2 benchmarks/make_deepspeed.py autotp OUT

`autotp` is a Llama cut by AutoTP, `experts` a layer with eight experts on two ranks; both in
bfloat16 with ZeRO-1. `--gigabytes` is the size of the weights. Needs an environment with DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_VOCABULARY, _HIDDEN, _EXPERTS = 1024, 1024, 8
_BYTES = 2  # of an element
TAG = "global_step1"


class _Experts(nn.Module):
    def __init__(self, elements: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        width = elements // (2 * _HIDDEN * _EXPERTS)
        self.embed = nn.Embedding(_VOCABULARY, _HIDDEN)
        self.moe = MoE(
            hidden_size=_HIDDEN,
            expert=nn.Sequential(
                nn.Linear(_HIDDEN, width, bias=False),
                nn.ReLU(),
                nn.Linear(width, _HIDDEN, bias=False),
            ),
            num_experts=_EXPERTS,
            ep_size=2,
            drop_tokens=False,
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made, auxiliary, _ = self.moe(self.embed(tokens))
        return made.float().pow(2).mean() + auxiliary


class _Llama(nn.Module):
    def __init__(self, elements: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        per_layer = 4 * _HIDDEN**2 + 3 * _HIDDEN * 4 * _HIDDEN
        layers = max(1, (elements - 2 * _VOCABULARY * _HIDDEN) // per_layer)
        self.config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=_HIDDEN,
            intermediate_size=4 * _HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=16,
        )
        self.model = LlamaForCausalLM(self.config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("autotp", "experts"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=0.3)
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    known = deepspeed.ops.__compatible_ops__
    known.update(dict.fromkeys(known, False))  # else one is compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    elements = int(options.gigabytes * 1e9 / _BYTES)
    torch.manual_seed(1)
    kind = _Llama if options.kind == "autotp" else _Experts
    model: Any = kind(elements).to(torch.bfloat16)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "name": "all"}]
    if options.kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **({"tensor_parallel": {"autotp_size": 2}} if options.kind == "autotp" else {}),
        },
        dist_init_required=False,
    )
    engine.backward(engine(torch.arange(16).reshape(1, 16)))
    engine.step()
    engine.save_checkpoint(str(options.out), tag=TAG)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
