"""Runs under torchrun: fills live models from a bucket; the ranks share what they download.

Usage: share_run.py FOLDER CASE. FOLDER/store.json has the URL and the options of the bucket,
FOLDER/model.safetensors the values. Each rank leaves FOLDER/result_RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs  # noqa: F401  imported once, for all ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.errors import PartlyFilledError
from ckptkit.storage.places import Place
from ckptkit.training import load_into
from ckptkit.training.load import node_sharing
from tests.built_modules import local, part_of, same_bits
from tests.distributed.cases import fsdp2, grid, start

WIDTH, LAYERS = 512, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)


def make_model(layers: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(layers)))


def tp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


WRAP: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": lambda model: fsdp2(model, *model),
    "hsdp": lambda model: fsdp2(model, mesh=grid()),
    "tp": tp,
}


def check(model: nn.Module, truth: dict[str, torch.Tensor]) -> None:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    own = plain.state_dict()
    assert set(own) == set(truth)
    for name, value in own.items():
        assert same_bits(local(value), part_of(truth[name], value)), name


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    kind, _, fault = case.partition(":")
    start()
    rank = dist.get_rank()
    # On a busy machine ranks take longer; what they wait for is bounded in the same way. Where a
    # rank is to fail, the others need not wait long for it.
    patience = (1.0, 2.0) if fault else (30.0, 60.0)
    node_sharing._ROOM_SECONDS, node_sharing._OWNER_SECONDS = patience
    node_sharing._START_SECONDS, node_sharing._LOCK_SECONDS = 10.0 if fault else 30.0, 5.0
    torch.manual_seed(1)
    store: dict[str, Any] = json.loads((folder / "store.json").read_text())
    model = WRAP[kind](make_model(store["layers"]))
    truth: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which ranks get after another was killed
    dist.barrier()
    if fault == "late" and rank == 1:
        while not (folder / "downloads").exists():
            time.sleep(0.05)
    place = Place(store["url"], store["options"])
    if fault == "changed":
        with pytest.raises(PartlyFilledError, match="filled"):
            load_into(model, place)
        write_result(folder, rank, {})
        os._exit(0)
    began = time.monotonic()
    result = load_into(model, place)
    seconds = time.monotonic() - began
    check(model, truth)
    again = {"read": result.bytes_read, "shared": result.bytes_shared, "seconds": seconds}
    write_result(folder, rank, again)
    os._exit(0)


def write_result(folder: Path, rank: int, result: dict[str, float]) -> None:
    """Leaves a result, whole at once: the test looks for it meanwhile."""
    part = folder / f"part_{rank}.json"
    part.write_text(json.dumps(result))
    part.rename(folder / f"result_{rank}.json")


if __name__ == "__main__":
    main()
