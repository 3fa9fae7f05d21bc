"""Runs under torchrun: FSDP2 saves to a URL; each rank is a node, or both are one.

Usage: uploads_run.py FOLDER URL OPTIONS CASE... Each case works in FOLDER/CASE and URL/CASE;
OPTIONS is the JSON of what the storage is told, by way of a file. Who watches the store ends the
last case with SIGKILL, for which the processes leave their numbers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from tests.crash import troubles
from tests.distributed.cases import end, full, in_trouble, same, start

LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Job:
    folder: Path
    url: str
    options: dict[str, Any]


def opened(job: Job, case: str, node: int, **options: Any) -> Checkpointer:
    local = job.folder / case / f"node{node}"
    return Checkpointer(f"{job.url}/{case}", local=local, storage_options=job.options, **options)


def normal(job: Job) -> None:
    """Steps are whole at the URL, on two nodes of which each uploads its own files."""
    rank = dist.get_rank()
    state = in_trouble(1, 12_000)
    with opened(job, "normal", rank, keep_last=2) as checkpointer:
        checkpointer.prepare(state)
        for step in (1, 2):
            troubles.train(state)
            checkpointer.save(step, state)
        troubles.train(state)
        truth = troubles.facts(state)
        handle = checkpointer.save(3, state)
        local = job.folder / f"normal/node{rank}/checkpoint-3"
        assert handle.local_result(LIMIT_SECONDS) == local
        assert handle.result(LIMIT_SECONDS) == f"{job.url}/normal/checkpoint-3"
        troubles.resumes(checkpointer, 3, truth, in_trouble(2, 12_000))
    weights = {n: full(p) for n, p in state["model"].state_dict().items()}
    dist.barrier()
    if rank == 0:
        place = Place(f"{job.url}/normal", job.options)
        assert ckptkit.verify(place).ok
        ckptkit.consolidate(place, job.folder / "whole", names="live")
        same(load_file(job.folder / "whole/model.safetensors"), weights)
    dist.barrier()


def killed(job: Job) -> None:
    """All processes are killed while a step is uploaded that is durable on their node."""
    state = in_trouble(1, 12_000)
    checkpointer = opened(job, "killed", 0)
    for step in (1, 2):
        troubles.train(state)
        handle = checkpointer.save(step, state)
        weights = {n: full(p) for n, p in state["model"].state_dict().items()}
        if dist.get_rank() == 0:
            save_file(weights, job.folder / f"weights-{step}.safetensors")
        handle.result(LIMIT_SECONDS)  # of the second one, which it does not live to see


def main() -> None:
    """Runs the cases that are named."""
    job = Job(Path(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
    start()
    (job.folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()), encoding="utf-8")
    for case in sys.argv[4:]:
        globals()[case](job)
        sys.stdout.write(f"{case}, rank {dist.get_rank()}: done\n")
        sys.stdout.flush()
    end(meets=False)


if __name__ == "__main__":
    main()
