"""Runs under torchrun: trains, saves with stock tools in accelerate's layout, or resumes.

Usage: resume_run.py RUN ACTION KIND [OUTCOME]. `save` trains a few steps, writes
RUN/checkpoint-3 and the whole truth beside it; `resume` builds another model, resumes and
compares everything; `refuse` expects an error on every rank.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptkit.core.errors import CkptkitError
from ckptkit.core.manifest import FileRecord, Manifest
from ckptkit.training.agree.peers import open_peers
from ckptkit.training.resume.resume import resume
from ckptkit.training.state.collect import bind
from tests.distributed.cases import FULL, end, fsdp1, fsdp2, grid, start

STEP = 3
LIMIT_SECONDS = 60.0


class Rotary(nn.Module):
    """Owns a buffer that no checkpoint holds."""

    inverse: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inverse.copy_(torch.tensor([1.0, 0.5, 0.25], device=self.inverse.device))


class Net(nn.Module):
    """Sizes that divide by no number of ranks, a convolution, a tied pair, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 6)
        self.rotary = Rotary()
        self.up = nn.Linear(6, 13)
        self.conv = nn.Conv1d(1, 5, 3)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 6)
        self.head = nn.Linear(6, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).mean(1) * self.rotary.inverse.repeat(2)
        hidden = self.norm(torch.relu(self.up(hidden)))
        hidden = hidden + self.conv(hidden[:, None]).mean((1, 2))[:, None]
        loss: torch.Tensor = self.head(self.down(hidden)).pow(2).mean()
        return loss


def build(kind: str) -> nn.Module:
    device = "meta" if "meta" in kind else "cpu"
    with torch.device(device):
        net = Net()
    if kind.startswith("plain"):
        return net
    if kind.startswith("fsdp1"):
        return fsdp1(net, "up", "conv", orig="orig" in kind)
    return fsdp2(net, net.up, net.conv, mesh=grid() if kind.startswith("hsdp") else None)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if "flat" in kind or "one" in kind:  # a flat parameter cannot be split into groups
        return torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.02}], lr=9)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups["up" in name].append(parameter)
    order = (True, False) if "meta" in kind else (False, True)
    return torch.optim.AdamW(
        [{"params": groups[part], "weight_decay": 0.01 + part} for part in order], lr=9
    )


def state_of(kind: str) -> dict[str, Any]:
    torch.manual_seed(7 if not kind.startswith("plain") else 8)
    model = build(kind)
    optimizer = optimizer_of(model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counts": {"a": 0}}


def train(state: dict[str, Any], steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for group in state["optimizer"].param_groups:
        group["lr"] = 0.01
    for _ in range(steps):
        state["model"](torch.randint(0, 23, (4, 5), generator=generator)).backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gathers model and optimizer with torch's own tools."""
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=FULL)
    found = {f"model.{k}": v for k, v in model.items()}
    states: Any = optimizer["state"]
    for name, values in states.items():
        found |= {f"state.{name}.{k}": v for k, v in values.items()}
    return {k: v.clone().contiguous() for k, v in found.items() if isinstance(v, torch.Tensor)}


def save(run: Path, kind: str) -> None:
    state = state_of(kind)
    train(state, STEP)
    folder = run / f"checkpoint-{STEP}"
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
    rank = dist.get_rank()
    numbers = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(numbers, folder / f"random_states_{rank}.pkl")
    truth = whole(state)
    if rank == 0:
        torch.save(state["scheduler"].state_dict(), folder / "scheduler.bin")
        torch.save({"a": 4, "b": torch.ones(2)}, folder / "custom_checkpoint_0.pkl")
        save_file(truth, run / "truth.safetensors")
        groups = state["optimizer"].state_dict()["param_groups"]
        (run / "lr.json").write_text(json.dumps(groups[0]["lr"]))
    dist.barrier()
    if rank == 0:
        files = {
            str(path.relative_to(folder)): FileRecord(path.stat().st_size)
            for path in folder.rglob("*")
            if path.is_file()
        }
        source = {
            "step": STEP,
            "layout": "accelerate",
            "world_size": dist.get_world_size(),
            "attempt": "abc-1",
        }
        manifest = Manifest("training", source, {}, {}, {}, files=files)
        (folder / "ckptkit.json").write_bytes(manifest.to_json())


def check(run: Path, kind: str, found: int | None, state: dict[str, Any]) -> None:
    assert found == STEP, found
    truth = load_file(run / "truth.safetensors")
    now = whole(state)
    assert now.keys() == truth.keys(), now.keys() ^ truth.keys()
    for name, tensor in now.items():
        assert torch.equal(tensor, truth[name]), (kind, name)
    lr = json.loads((run / "lr.json").read_text())
    for group in state["optimizer"].param_groups:
        assert group["lr"] == lr
    assert state["scheduler"].last_epoch == STEP
    assert state["counts"].keys() == {"a", "b"}
    assert state["counts"]["a"] == 4
    buffers = {name.rpartition(".")[2]: b for name, b in state["model"].named_buffers()}
    assert buffers["inverse"].tolist() == [1.0, 0.5, 0.25]
    for parameter in state["model"].parameters():
        assert not parameter.is_meta
    train(state, 1)


def main() -> None:
    run, action, *kinds = Path(sys.argv[1]), *sys.argv[2:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    start()
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        if action == "save":
            random.seed(rank)
            save(run, kind)
            continue
        state = state_of(kind)
        if action == "refuse":
            state["model"].register_parameter("extra", nn.Parameter(torch.ones(2)))
        bound = bind(state, layout="accelerate", rank=rank, world_size=world)
        peers = open_peers(f"{run}", timeout_seconds=LIMIT_SECONDS)
        try:
            found = resume(bound, run, peers, timeout_seconds=LIMIT_SECONDS)
        except CkptkitError as error:
            sys.stdout.write(f"ERROR {rank} {type(error).__name__} {error}\n")
        else:
            sys.stdout.write(f"RESUMED {rank} {kind} {found}\n")
            if action == "resume":
                check(run, kind, found, state)
        peers.close()
        dist.barrier()
    end()


if __name__ == "__main__":
    main()
