"""Trains the tiny Llama with FSDP2, saving as it goes; started again, it goes on where it was.

Started by torchrun on every rank. With --die-at one rank is killed in the middle of a save.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ckptkit.training import Checkpointer
from tiny import PROMPT, TEXT, make_config, make_tokenizer

STEPS = 60
SAVE_EVERY = 20
WINDOW_TOKENS = 48
WINDOWS_PER_RANK = 8


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, windows: torch.Tensor
) -> float:
    """Fits the model to random windows of the text, and returns the mean loss of all ranks."""
    batch = windows[torch.randint(len(windows), (WINDOWS_PER_RANK,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    return float(mean) / dist.get_world_size()


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


def say(text: str, rank: int = 0) -> None:
    """Prints on one rank."""
    if dist.get_rank() == rank:
        # print() writes the line and its end apart if Python is unbuffered, and ranks would mix.
        sys.stdout.write(f"     {text}\n")
        sys.stdout.flush()


def leave() -> None:
    """Ends this process at once: the teardown of gloo's threads now and then aborts it instead."""
    sys.stdout.flush()
    os._exit(0)


def run(folder: Path, die_at: int | None) -> None:
    """Trains to the last step, from wherever an earlier try got to."""
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(make_config(tokenizer))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # on a machine with GPUs too
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95))
    state = {"model": model, "optimizer": optimizer}
    torch.manual_seed(dist.get_rank())  # every rank draws its own windows
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids[0]
    windows = tokens.repeat(4).unfold(0, WINDOW_TOKENS, 1)

    sidecar = {"processing_class": tokenizer}
    with Checkpointer(folder, every=SAVE_EVERY, keep_last=2, sidecar=sidecar) as checkpointer:
        done = checkpointer.resume(state) or 0
        say(f"resumed from step {done}" if done else "no checkpoint yet: starting from scratch")
        checkpointer.prepare(state)
        for step in range(done + 1, STEPS + 1):
            loss = train_step(model, optimizer, windows)
            if step == done + 1 or step % 10 == 0:
                say(f"step {step:2}   loss {loss:.4f}")
            if checkpointer.should_save(step):
                handle = checkpointer.save(step, state, metrics={"loss": loss})
                say(f"step {step:2}   saving, blocked {handle.blocked_seconds * 1e3:.1f} ms")
            if step == die_at and not done and dist.get_rank() == 1:
                say("rank 1 is killed in the middle of this save", rank=1)
                os.kill(os.getpid(), signal.SIGKILL)
    save_logits(model, tokenizer, folder / "live_logits.npy")


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="where the checkpoints go")
    parser.add_argument("--die-at", type=int, help="kill rank 1 while this step is being saved")
    arguments = parser.parse_args()
    logging.basicConfig(format="     %(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    run(arguments.run, arguments.die_at)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
