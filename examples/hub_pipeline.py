"""Trains, and publishes each step on the Hub: one commit a step, with the tag `step-N`.

    torchrun --nproc-per-node=2 examples/hub_pipeline.py runs/pushed org/pushed

The token is that of `hf auth login`, or of the variable HF_TOKEN. Training does not wait for the
pushes; the program does at its end, for ten minutes. Kill it at any time and run the same command
again: it resumes from the newest complete step, and pushes the steps that were not pushed yet.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import toy
from ckptkit.training import Checkpointer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> PreTrainedModel:
    """Makes the model, the same on all ranks, and shards it."""
    model = toy.model().to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: PreTrainedModel, arguments: argparse.Namespace) -> None:
    """Trains to the last step, from the newest complete one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer}
    windows = toy.windows(16).to(DEVICE)
    torch.manual_seed(dist.get_rank())  # each rank draws its own batches
    with Checkpointer(
        arguments.run,
        every=arguments.save_every,
        keep_last=2,
        sidecar={"processing_class": toy.tokenizer()},
        push_to_hub=arguments.repository,
        hub_strategy="every_save",
        hub_timeout_seconds=600,  # at the end of the program
    ) as checkpointer:
        done = checkpointer.resume(state) or 0
        for step in range(done + 1, arguments.steps + 1):
            batch = windows[torch.randint(len(windows), (8,))]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.should_save(step):
                checkpointer.save(step, state, metrics={"loss": loss.item()})


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("repository", help="its id on the Hub; a new one is private")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = make_model()
    train(model, arguments)
    # The model refers to the process group. A thread of gloo that outlives Python aborts.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
