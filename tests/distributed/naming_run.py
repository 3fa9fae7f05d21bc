"""Runs under torchrun: ranks that name different directories, or one in different ways.

Usage: naming_run.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.core.errors import UsageError
from ckptkit.training import Checkpointer

PATIENCE_SECONDS = 60.0
SOON_SECONDS = 1.0  # most of it is needed by a save, which writes first; all else takes 0.02 s
TRIES = 3  # the best one counts: other programs may keep the machine busy


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def fails_soon(what: str, call: Callable[[], object]) -> None:
    """Makes a call on all ranks, which fails on each of them within a second, and says why."""
    took: list[float] = []
    while not took or (took[-1] >= SOON_SECONDS and len(took) < TRIES):
        dist.barrier()
        began = time.monotonic()
        text = ""
        try:
            call()
        except UsageError as error:
            text = str(error)
        slowest = torch.tensor(time.monotonic() - began)
        assert all(part in text for part in (what, "rank 0", "rank 1")), (what, text)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        took.append(slowest.item())
    assert min(took) < SOON_SECONDS, (what, took)


def opened(folder: str | Path, **options: object) -> Checkpointer:
    return Checkpointer(folder, timeout_seconds=PATIENCE_SECONDS, **options)  # type: ignore[arg-type]


def opens(rank: int, folder: Path) -> None:
    fails_soon("'run1'", lambda: opened(f"run{rank}"))
    fails_soon("layout", lambda: opened("options", layout=("dcp", "trainer")[rank]))
    spelled: list[tuple[str | Path, str | Path]] = [
        ("spelled", folder / "spelled"),
        (f"{folder}/spelled/", "spelled"),
        ("real/run", "link/run"),
        (folder / "real", Path("link")),
        ("./real/../spelled", "spelled"),
    ]
    for number, one in enumerate(spelled):
        with opened(one[rank], layout="dcp") as checkpointer:
            checkpointer.save(number, {"model": model()}).result(PATIENCE_SECONDS)
            checkpointer.resume({"model": model()})


def saves_and_resumes(rank: int, folder: Path) -> None:
    with opened("real") as checkpointer:
        state = {"model": model()}
        named = f"name{rank}"
        saved = partial(checkpointer.save, 7, state, name=named)
        fails_soon("'name1'", lambda: saved().result(PATIENCE_SECONDS))
        for step in (8, 9):
            checkpointer.save(step, state).result(PATIENCE_SECONDS)
        fails_soon("is 9 on rank 1", lambda: checkpointer.resume(state, step=8 + rank))
        name = f"checkpoint-{8 + rank}"
        fails_soon("folder", lambda: checkpointer.resume(state, folder=folder / "real" / name))
        mixed: tuple[Callable[[], object], ...] = (
            lambda: checkpointer.resume(state),
            lambda: checkpointer.resume(state, folder=folder / "real" / "checkpoint-9"),
        )
        fails_soon("rank 1 resumes from a folder", mixed[rank])
        fails_soon("rank 0 resumes from a folder", mixed[1 - rank])
        same = ("link/checkpoint-9", folder / "real" / "checkpoint-9")
        assert checkpointer.resume(state, folder=same[rank]) == 9


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    os.chdir(folder)
    (folder / "real").mkdir(exist_ok=True)
    if rank == 0:
        (folder / "link").symlink_to(folder / "real")
    dist.barrier()
    opens(rank, folder)
    saves_and_resumes(rank, folder)
    os.chdir(folder / "real" if rank else folder)
    fails_soon("'run'", lambda: opened("run"))
    (folder / f"done{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
