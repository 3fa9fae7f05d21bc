"""Runs under torchrun: loads a model cut by AutoTP, and saves its gathered weights.

python -m torch.distributed.run --nproc_per_node=2 deepspeed_gathered.py CONFIG SOURCE TARGET
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    config, source, target = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    known = deepspeed.ops.__compatible_ops__
    known.update(dict.fromkeys(known, False))  # else one is compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    engine, *_ = deepspeed.initialize(
        model=model.to(torch.bfloat16),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        dist_init_required=False,
    )
    engine.load_checkpoint(source, load_module_only=True)
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        torch.save(state, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
