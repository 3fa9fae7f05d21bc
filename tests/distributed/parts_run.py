"""Runs under torchrun: checkpoints whose files hold parts of tensors, as torch's own calls write.

Usage: parts_run.py OUT. Rank 0 writes `truth.safetensors`, the whole weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


class Pair(nn.Module):
    """A frozen layer, a trained one without a bias, and two of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 3)
        self.up = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(self.up(x))) + self.frozen(x).sum()
        return found


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Optimizers whose order proves the names, and one in whose groups a shape is twice."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.ndim > 1]
    vectors = [p for p in trained.values() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "lr": 0.2}]
    biases = [p for name, p in trained.items() if name.endswith("bias")]
    others = [p for name, p in trained.items() if not name.endswith("bias")]
    return {
        "plain": torch.optim.AdamW(model.parameters(), lr=0.1),
        "trained": torch.optim.AdamW(trained.values(), lr=0.1),
        "decay": torch.optim.AdamW(groups, lr=0.1),
        "named": torch.optim.AdamW(reversed(trained.items()), lr=0.1),
        "unproven": torch.optim.AdamW([{"params": biases}, {"params": others}], lr=0.1),
    }


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    model = Pair()
    fully_shard(model, mesh=mesh)
    state = get_model_state_dict(model)
    truth = {name: tensor.clone() for name, tensor in whole(state).items()}
    if rank == 0:
        out.mkdir()
        save_file(truth, out / "truth.safetensors")
    dist.barrier()
    writers = {
        "one_rank": HuggingFaceStorageWriter(str(out / "one_rank")),
        "two_files": HuggingFaceStorageWriter(
            str(out / "two_files"), {name: 1 + name.startswith("down") for name in state}
        ),
        "shards": HuggingFaceStorageWriter(str(out / "shards"), save_distributed=True),
        "consolidated": HuggingFaceStorageWriter(
            str(out / "consolidated"), save_distributed=True, enable_consolidation=True
        ),
    }
    for writer in writers.values():
        dcp.save(dict(state), storage_writer=writer)
    for name, optimizer in optimizers(model).items():
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stored = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(stored, checkpoint_id=str(out / f"dcp_{name}"))
        moments = {
            parameter: whole(dict(optimizer.state[p]))
            for parameter, p in model.named_parameters()
            if p in optimizer.state
        }
        weights = whole(model.state_dict())
        if rank == 0:
            flat = {f"{n}.{k}": v for n, own in moments.items() for k, v in own.items()}
            save_file(flat, out / f"{name}_states.safetensors")
            save_file(weights, out / f"{name}_weights.safetensors")
        if name == "trained":
            loops = {
                "loop": stored,
                "other_keys": {"net": stored["model"], "optim": stored["optimizer"], "step": 3},
                "extra_state": {**stored, "extra_state": {"lr": 0.1}},
                "bare": stored["model"],
            }
            for loop, content in loops.items():
                (out / loop).mkdir(exist_ok=True)
                torch.save(content, out / loop / f"model_world_size_2_rank_{rank}.pt")
    part = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
    held = {"pair": (part, part), "list": [part], "deep": ({"a": (1, part)},), "set": {part}}
    dcp.save({"model": whole(state), "ema": held}, checkpoint_id=str(out / "dcp_held"))
    dcp.save({"model": whole(state), "held": held}, checkpoint_id=str(out / "dcp_beside"))
    (out / "files_held").mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "held": held}, out / f"files_held/s_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
