"""Trains adapters over a frozen base and saves in turns with ckptkit and torch; prints JSON.

Started by frozen.py under torchrun. The base has 1 GB in float32 over two ranks; what is trained,
with the state of AdamW, is about a twentieth of that.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_figures import hand_over
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from ckptkit.training import Checkpointer

WIDTH, RANK = 2_048, 16
AFTER_SECONDS = 1.0  # left alone after each save, so that the next one meets an idle disk


class Block(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Adds what the adapter has learnt."""
        found: torch.Tensor = self.base(rows) + self.up(self.down(rows))
        return found


def size_of(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Loop:
    """The training, and its two savers."""

    def __init__(self, folder: Path, blocks: int) -> None:
        torch.manual_seed(dist.get_rank())
        self.folder = folder
        self.model = fully_shard(nn.Sequential(*(fully_shard(Block()) for _ in range(blocks))))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Takes one step."""
        self.model(torch.randn(2, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sizes(self) -> dict[str, int]:
        """Returns this rank's bytes: frozen, and trained with the optimizer's state."""
        every = list(self.model.parameters())
        trained: list[Any] = [*self.trained]
        for held in self.optimizer.state.values():
            trained += list(held.values())
        own = [getattr(tensor, "_local_tensor", tensor) for tensor in trained]
        frozen = [p._local_tensor for p in every if not p.requires_grad]  # noqa: SLF001
        return {
            "trained": sum(tensor.nbytes for tensor in own),
            "frozen": sum(tensor.nbytes for tensor in frozen),
        }

    def by_ckptkit(self, checkpointer: Checkpointer, step: int) -> dict[str, float]:
        """Saves once."""
        dist.barrier()
        report = checkpointer.save(step, self.state).report()
        return {
            "blocked": report.blocked_seconds,
            "durable": report.committed_seconds,
            "written": report.size_bytes,
            "linked": report.linked_bytes,
        }

    def by_dcp(self, step: int) -> dict[str, float]:
        """Saves once with stock torch, into one directory."""
        dist.barrier()
        began = time.perf_counter()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        place = self.folder / f"dcp-{step}"
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=place)
        took = time.perf_counter() - began
        dist.barrier()
        own = [path.stat().st_size for path in place.glob(f"__{dist.get_rank()}_*.distcp")]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)
        return {"blocked": took, "durable": took, "written": sum(own), "linked": 0}


def whole(loop: Loop, step: Path) -> bool:
    """Tells whether stock torch finds the live model in a step alone."""
    live = loop.model.state_dict()
    like = {name: torch.zeros_like(value) for name, value in live.items()}
    dcp.load({"model": like}, checkpoint_id=step / "pytorch_model_fsdp_0")
    return all(torch.equal(like[n].to_local(), live[n].to_local()) for n in live)


def main() -> None:
    """Measures, and prints what all ranks found."""
    folder, rounds, blocks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(folder, blocks)
    found: dict[str, Any] = {"ckptkit": [], "dcp.save": []}
    with Checkpointer(folder / "run", keep_last=1) as checkpointer:
        loop.step()
        checkpointer.prepare(loop.state)
        for step in range(1, rounds + 2):
            found["ckptkit"].append(loop.by_ckptkit(checkpointer, step))
            time.sleep(AFTER_SECONDS)
            found["dcp.save"].append(loop.by_dcp(step))
            time.sleep(AFTER_SECONDS)
            if step <= rounds:
                loop.step()
        found |= loop.sizes() | {"whole": whole(loop, folder / "run" / f"checkpoint-{rounds + 1}")}
    hand_over(found)


if __name__ == "__main__":
    main()
