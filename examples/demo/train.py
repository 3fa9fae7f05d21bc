"""Trains the tiny Llama with FSDP2 and leaves a sharded checkpoint, as any FSDP run would.

Started by torchrun on every rank; nothing in here knows of ckptkit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny import PROMPT, TEXT, make_config, make_tokenizer

STEPS = 60
WINDOW_TOKENS = 48
WINDOWS_PER_RANK = 8


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Fits the model to random windows of the text, a different set on every rank."""
    windows = tokens.repeat(4).unfold(0, WINDOW_TOKENS, 1)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        chosen = torch.randint(len(windows), (WINDOWS_PER_RANK,), generator=generator)
        batch = windows[chosen]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0 and step in {1, 10, 20, 30, 40, 50, STEPS}:
            print(
                f"     step {step:2}   loss {mean.item() / dist.get_world_size():.4f}", flush=True
            )


def save(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Saves every rank's part, in the layout of `accelerator.save_state`."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=folder / "optimizer_0")


def save_logits(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, destination: Path
) -> None:
    """Keeps what the live model says to the prompt; every rank takes part in computing it."""
    model.eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(prompt).logits
    if dist.get_rank() == 0:
        np.save(destination, logits.numpy())


def leave() -> None:
    """Ends this process at once: the teardown of gloo's threads now and then aborts it instead."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Trains, saves, and keeps the live model's logits for comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="where the checkpoint goes")
    run = parser.parse_args().run
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(make_config(tokenizer))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95))
    train(model, optimizer, tokenizer(TEXT, return_tensors="pt").input_ids[0])

    checkpoint = run / f"checkpoint-{STEPS}"
    save(model, optimizer, checkpoint)
    save_logits(model, tokenizer, run / "live_logits.npy")
    if dist.get_rank() == 0:
        model.config.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
