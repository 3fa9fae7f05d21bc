"""A training loop of one's own: DeepSpeed ZeRO-3 in bf16, saved by DeepSpeed.

    torchrun --nproc-per-node=2 examples/deepspeed_zero.py runs/zero
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/deepspeed_zero.py runs/zero

The second line is for machines without a GPU.

The script does not use ckptkit. Kill it between two saves and run the same command again: it
resumes from the newest save, and reaches the same final loss. After a kill in the middle of a save,
the file `latest` may name a save that lacks files. `ckptkit inspect` shows the newest complete one:
write its name there.

DeepSpeed stores no configuration of the model: the script puts it into a folder, with the
tokenizer. Neither DeepSpeed nor a GPU is needed to make a model that Transformers loads, in bf16,
or in float32 from the optimizer's copies:

    ckptkit consolidate runs/zero runs/zero-model --base runs/zero-base
    ckptkit consolidate runs/zero runs/zero-float32 --base runs/zero-base --dtype float32
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import toy

BATCH = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 1_000,  # else all of so small a model stays whole
    },
    "steps_per_print": 20,
}


def loss_of(engine: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss over these windows."""
    inputs = inputs.to(engine.device)
    loss: torch.Tensor = engine(input_ids=inputs, labels=inputs).loss
    return loss


def train(engine: Any, windows: torch.Tensor, arguments: argparse.Namespace) -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    if Path(arguments.run, "latest").exists():
        engine.load_checkpoint(arguments.run)
    while engine.global_steps < arguments.steps:
        # Each rank draws windows and dropout of its own, in each step the same ones each time.
        torch.manual_seed(engine.global_steps * dist.get_world_size() + dist.get_rank())
        drawn = torch.randint(len(windows), (BATCH,))
        engine.backward(loss_of(engine, windows[drawn]))
        engine.step()
        if engine.global_steps % arguments.save_every == 0:
            engine.save_checkpoint(arguments.run)


def main() -> None:
    """Reads the command line, trains, and evaluates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        toy.write_base(f"{arguments.run}-base")
    model = toy.model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    windows = toy.windows()
    train(engine, windows, arguments)

    engine.eval()
    with torch.no_grad():
        loss = loss_of(engine, windows[:8]).item()
    if dist.get_rank() == 0:
        print(f"final loss {loss:.10f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
