"""Runs under torchrun on four ranks: saves models whose replicas are equal, or are not.

Usage: replicas_run.py FOLDER SAVED... `ddp 0` is saved without options, `ddp 1` with one, and
`buffers 0` has what no wrapper keeps equal. Rank 0 prints one line for each save: its name, and
what was logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptkit.training import Checkpointer

LIMIT_BYTES = 1 << 20


class Log(logging.Handler):
    """Keeps the warnings since it was last read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def read(self) -> str:
        texts, self.texts = self.texts, []
        return " | ".join(texts)


def make(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    # The first weight is cut in two by the limit, and leaves no room beside samples.
    layers = [nn.Linear(300, 1200), nn.Linear(1200, 300), *(nn.Linear(300, 300) for _ in range(6))]
    model: nn.Module = nn.Sequential(*layers, nn.BatchNorm1d(300))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any]) -> None:
    """Takes a step on rows that differ between the ranks, as buffers then do."""
    torch.manual_seed(dist.get_rank())
    state["model"](torch.randn(3, 300)).pow(2).mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def saves(kind: str, folder: Path, **options: Any) -> Iterator[str]:
    """Saves, and yields the name of what the save had."""
    with Checkpointer(folder / kind / str(len(options)), **options) as checkpointer:
        state = make(kind)
        train(state)
        checkpointer.save(1, state).report(60)
        yield "equal"
        for moments in state["optimizer"].state.values():
            moments["exp_avg"].add_(dist.get_rank() // 2)
        checkpointer.save(2, state).report(60)
        yield "optimizer"
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.add_(dist.get_rank() // 2)
        checkpointer.save(3, state).report(60)
        yield "model"
        assert checkpointer.resume(state) == 3
        yield "resumed"


def of_buffers(folder: Path) -> Iterator[str]:
    """Saves what no wrapper keeps equal: the vectors of spectral norm, and a plain parameter."""
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(300, 300))
    model: Any = nn.Sequential(layer, nn.BatchNorm1d(300))
    fully_shard(model)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(folder / "buffers") as checkpointer:
        train(state)
        for name, buffer in layer.named_buffers():
            buffer.copy_(torch.ones(300) * (len(name)))
        checkpointer.save(1, state).report(60)
        yield "equal"
        for buffer in layer.buffers():
            buffer.add_(dist.get_rank() // 2)
        checkpointer.save(2, state).report(60)
        yield "differ"
        assert checkpointer.resume(state) == 2
        yield "resumed"
    plain = {"model": nn.Linear(2, 2)}
    with torch.no_grad():
        plain["model"].weight.fill_(dist.get_rank())
        plain["model"].bias.fill_(0)
    with Checkpointer(folder / "plain") as checkpointer:
        checkpointer.save(1, plain).report(60)
        yield "plain"


def main() -> None:
    dist.init_process_group("gloo")
    log = Log()
    logging.getLogger("ckptkit").addHandler(log)
    folder = Path(sys.argv[1])
    for saved in sys.argv[2:]:
        kind, count = saved.split()
        if kind == "buffers":
            for name in of_buffers(folder):
                if dist.get_rank() == 0:
                    sys.stdout.write(f"{kind} {name}: {log.read()}\n")
            continue
        options: dict[str, Any] = {"staging_limit": LIMIT_BYTES} if int(count) else {}
        for name in saves(kind, folder, **options):
            if dist.get_rank() == 0:
                sys.stdout.write(f"{kind} {len(options)} {name}: {log.read()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
