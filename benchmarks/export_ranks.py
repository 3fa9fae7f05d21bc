"""Exports a model from every rank, in turns with the bare writing of as many bytes.

Started by export.py under torchrun; prints one JSON line. The model has about a billion
parameters in float32, sharded by FSDP2; the output holds them in bfloat16.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_figures import hand_over
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

from ckptkit.training import Checkpointer

WIDE, VOCABULARY = 4_096, 32_003
BLOCK_BYTES, PAGE_BYTES = 8 << 20, 4_096
AFTER_SECONDS = 1.0  # left alone after each round, so that the next one meets an idle disk
WORDS = ("gather", "reduce", "broadcast", "scatter", "barrier", "send", "recv", "all_to_all")


def make_model(layers: int) -> nn.Module:
    """Makes a sharded model that never was in one place."""
    with torch.device("meta"):
        blocks = [nn.Linear(WIDE, WIDE) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDE), *blocks, nn.LayerNorm(WIDE))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()
    return model


def some_bytes(size_bytes: int) -> memoryview:
    """Returns memory in huge pages, which direct I/O likes best, filled with noise."""
    size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    noise = os.urandom(BLOCK_BYTES)
    for start in range(0, size, BLOCK_BYTES):
        memory[start : start + BLOCK_BYTES] = noise
    return memoryview(memory)


def bare_write(path: Path, data: memoryview, size_bytes: int) -> float:
    """Writes as many bytes past the page cache, durably, and returns the seconds.

    Args:
        path: The file.
        data: What is written, again from its start where it ends.
        size_bytes: How much.
    """
    size = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    dist.barrier()
    began = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(file, 0, size)
    for start in range(0, size, BLOCK_BYTES):
        block = data[start % len(data) :][: min(BLOCK_BYTES, size - start)]
        os.pwrite(file, block, start)
    os.fsync(file)
    os.close(file)
    return time.perf_counter() - began


@contextmanager
def counted() -> Iterator[list[str]]:
    """Notes the names of collectives that are issued."""
    issued: list[str] = []
    patches = [
        mock.patch.object(module, name, lambda *_, name=name, **__: issued.append(name))
        for module in (dist, distributed_c10d)
        for name in dir(module)
        if any(word in name for word in WORDS)
        and callable(getattr(module, name))
        and not isinstance(getattr(module, name), type)
    ]
    for patch in patches:
        patch.start()
    try:
        yield issued
    finally:
        for patch in reversed(patches):
            patch.stop()


def memory(field: str) -> int:
    """Returns a size from the kernel's account of this process, in bytes."""
    for row in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if row.startswith(f"{field}:"):
            return int(row.split()[1]) * 1024
    return 0


def read_back() -> int:
    """Returns how many bytes this process has had read from storage."""
    rows = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("read_bytes"))


def one_export(checkpointer: Checkpointer, state: dict[str, Any], out: Path) -> dict[str, Any]:
    """Exports once, and returns what it took."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, read = memory("VmRSS"), read_back()
    dist.barrier()
    with counted() as collectives:
        began = time.perf_counter()
        handle = checkpointer.export(out, state=state, dtype="bfloat16")
        durable = time.perf_counter() - began
        report = handle.report(300)
        committed = time.perf_counter() - began
    return {
        "durable": durable,
        "committed": committed,
        "memory": memory("VmHWM") - before,
        "read_back": read_back() - read,
        "collectives": len(collectives),
        "size_bytes": report.size_bytes,
        "total_bytes": report.total_bytes,
    }


def clear(folder: Path) -> None:
    """Removes what was written, and lets the disk come to rest."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    time.sleep(AFTER_SECONDS)
    dist.barrier()


def main() -> None:
    """Prints every rank's findings on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=52)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rounds = arguments.folder, []
    state = {"model": make_model(arguments.layers)}
    with Checkpointer(folder / "run") as checkpointer:
        size = one_export(checkpointer, state, folder / "out")["size_bytes"]
        clear(folder / "out")
        sources = {"bare": some_bytes(size), "bare_cached": some_bytes(BLOCK_BYTES)}
        for _ in range(arguments.rounds):
            found: dict[str, Any] = {}
            for name, data in sources.items():
                (folder / name).mkdir(exist_ok=True)
                found[name] = bare_write(folder / name / str(dist.get_rank()), data, size)
                clear(folder / name)
            found |= one_export(checkpointer, state, folder / "out")
            clear(folder / "out")
            rounds.append(found)
    hand_over(rounds)


if __name__ == "__main__":
    main()
