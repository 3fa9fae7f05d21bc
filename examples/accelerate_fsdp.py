"""accelerate with FSDP: `save_state` and `load_state` go through ckptkit after one line.

    torchrun --nproc-per-node=2 examples/accelerate_fsdp.py runs/accelerate
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/accelerate_fsdp.py runs/accelerate

The second line is for machines without a GPU.

`accelerate launch` does as well as torchrun. Kill it at any time and type the same command again:
it goes on from the newest checkpoint, all of which are whole, and comes to the same final loss.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.utils.data import DataLoader

import toy
from ckptkit.integrations.accelerate import install


class Progress:
    """Counts steps; accelerate saves and loads it with everything else."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """Returns what is saved."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes what was saved."""
        self.steps = state["steps"]


def make_accelerator(run: str) -> Accelerator:
    """Sets up FSDP, and a folder in which checkpoints are numbered."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    project = ProjectConfiguration(run, automatic_checkpoint_naming=True, total_limit=2)
    # An epoch that was broken off has to be shuffled as before.
    shuffling = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(fsdp_plugin=plugin, project_config=project, dataloader_config=shuffling)


def resume(accelerator: Accelerator, progress: Progress, save_every: int) -> None:
    """Loads the newest checkpoint, where there is one."""
    if any(Path(accelerator.project_dir, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.steps // save_every  # of the next
        accelerator.print(f"goes on from step {progress.steps}")


def train(accelerator: Accelerator, steps: int, save_every: int) -> Any:
    """Trains to the last step, from wherever an earlier try got to."""
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draws = torch.Generator()  # or the loader would draw from the numbers of dropout
    loader = DataLoader(toy.Windows(), batch_size=4, shuffle=True, drop_last=True, generator=draws)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    resume(accelerator, progress, save_every)

    while progress.steps < steps:
        epoch, position = divmod(progress.steps, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, position):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.steps += 1
            if progress.steps % save_every == 0:
                accelerator.save_state()
            if progress.steps == steps:
                break
    return model


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=6)
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    accelerator = make_accelerator(arguments.run)
    install(accelerator)
    set_seed(0)
    model = train(accelerator, arguments.steps, arguments.save_every)

    model.eval()
    with torch.no_grad():
        windows = toy.windows(16).to(accelerator.device)
        loss = model(input_ids=windows, labels=windows).loss
    accelerator.print(f"final loss {loss.item():.10f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
