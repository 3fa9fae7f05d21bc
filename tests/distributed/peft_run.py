"""Runs under torchrun: adapters of every method of PEFT, sharded by FSDP2 and FSDP1, and saved.

Usage: peft_run.py FOLDER VERSION:METHOD... Each step is FOLDER/VERSION/METHOD.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ckptkit.training import Checkpointer
from tests.peft_methods import build

WAIT = 60


def by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def save_all(version: str, folder: Path, methods: list[str]) -> None:
    shard, layout = ((by_fsdp1, "dcp"), (fully_shard, "accelerate"))[version == "fsdp2"]
    with Checkpointer(folder / version, layout=layout) as checkpointer:  # type: ignore[arg-type]
        for number, method in enumerate(methods):
            model = shard(build(method, folder / f"{method}-{dist.get_rank()}").model)
            checkpointer.save(number, {"model": model}, name=method).result(WAIT)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    cases = [case.split(":") for case in sys.argv[2:]]
    for version in ("fsdp2", "fsdp1"):
        save_all(version, Path(sys.argv[1]), [method for v, method in cases if v == version])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
