"""Trains a tiny Llama with FSDP2 on the CPU, and saves it every 20 steps."""

import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit.training import Checkpointer

STEPS = 100
TEXT = b"Each rank writes its part of the model. No rank waits for another. "


def make_model() -> LlamaForCausalLM:
    """Makes the same model on each rank, and shards it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: LlamaForCausalLM) -> None:
    """Trains to the last step, from the newest one that was saved."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # each rank draws its own data
    windows = torch.tensor(list(TEXT * 3)).unfold(0, 64, 1)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer("runs/tutorial", every=20, keep_last=3) as checkpointer:
        done = checkpointer.resume(state) or 0
        for step in range(done + 1, STEPS + 1):
            batch = windows[torch.randint(len(windows), (8,))]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
            if checkpointer.should_save(step):
                checkpointer.save(step, state)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(make_model())
    gc.collect()  # the model uses the process group
    dist.destroy_process_group()
