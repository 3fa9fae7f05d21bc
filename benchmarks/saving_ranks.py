"""Trains on every rank and saves in turns with ckptkit and torch; prints one JSON line.

Started by saving.py under torchrun. The local state is that of 224 parameters of 384 x 1,024
with AdamW: 504 MiB on each of two ranks, in 672 tensors and 224 step counters.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_figures import hand_over
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from ckptkit.training import Checkpointer
from ckptkit.training import dcp as door

BLOCKS, PAIRS, WIDE, NARROW = 28, 4, 1_024, 384
TOKENS = 16
AFTER_SECONDS = 1.0  # left alone after each save, so that the next one meets an idle disk


def make_model(blocks: int) -> nn.Module:
    """Makes a chain of blocks of 8 parameters, each sharded over all ranks."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        pairs = [(nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False))]
        pairs += [(nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False))
                  for _ in range(PAIRS - 1)]  # fmt: skip
        block = nn.Sequential(*(layer for pair in pairs for layer in pair))
        layers.append(fully_shard(block))
    return fully_shard(nn.Sequential(*layers))


class Loop:
    """A training loop that can be asked how long its steps take."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = make_model(blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.batch = torch.randn(TOKENS, NARROW)

    def step(self) -> float:
        """Takes one step and returns its seconds."""
        began = time.perf_counter()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def together(self, flag: bool) -> bool:  # noqa: FBT001
        """Tells whether the flag is set on all ranks, so that all go on or none."""
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes)

    def local_tensors(self) -> list[torch.Tensor]:
        """Returns everything that a save copies on this rank."""
        tensors = [p._local_tensor for p in self.model.parameters()]  # noqa: SLF001
        for held in self.optimizer.state.values():
            tensors += [getattr(v, "_local_tensor", v) for v in held.values()]
        return [tensor.detach() for tensor in tensors]


class WarmCopy:
    """The bare copy of the same bytes into memory that was touched before."""

    def __init__(self, loop: Loop) -> None:
        self._sources = loop.local_tensors()
        self._copies = [tensor.clone() for tensor in self._sources]

    def seconds(self) -> float:
        """Copies once."""
        began = time.perf_counter()
        torch._foreach_copy_(self._copies, self._sources)
        return time.perf_counter() - began


class Ending:
    """When a save was durable, told by the saver itself and not by whoever asks."""

    def __init__(self) -> None:
        self.at = 0.0
        self.called = time.perf_counter()

    def call(self, state: dict[str, Any]) -> dict[str, Any]:
        """Notes that the call begins, once its argument is there."""
        self.called = time.perf_counter()
        return state

    def now(self, _: Any = None) -> None:
        """Notes that it is durable."""
        self.at = time.perf_counter()


Saver = Callable[[Path, Ending], None]


def savers(
    loop: Loop, checkpointer: Checkpointer, reports: list[Any], endings: list[Ending]
) -> dict[str, Saver]:
    """Returns what is compared."""
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        return {"model": model, "optimizer": optimizer}

    def by_ckptkit(_: Path, ending: Ending) -> None:
        endings.append(ending)
        reports.append(checkpointer.save(len(reports) + 1, loop.state))

    def by_door(folder: Path, ending: Ending) -> None:
        given = ending.call(state())
        future = door.async_save(given, checkpoint_id=folder, process_group=group)
        future.add_done_callback(ending.now)

    def by_dcp(folder: Path, ending: Ending) -> None:
        dcp.save(state(), checkpoint_id=folder)
        ending.now()

    def by_thread(folder: Path, ending: Ending) -> None:
        given = ending.call(state())
        future = dcp.async_save(given, checkpoint_id=folder, process_group=group)
        future.add_done_callback(ending.now)

    def by_process(folder: Path, ending: Ending) -> None:
        kind, given = AsyncCheckpointerType.PROCESS, ending.call(state())
        future = dcp.async_save(
            given, checkpoint_id=folder, process_group=group, async_checkpointer_type=kind
        )
        future.add_done_callback(ending.now)

    return {
        "ckptkit": by_ckptkit,
        "ckptkit.training.dcp": by_door,
        "dcp.save": by_dcp,
        "dcp.async_save, thread": by_thread,
        "dcp.async_save, process": by_process,
    }


def one_save(loop: Loop, save: Saver, folder: Path, copy: WarmCopy) -> dict[str, Any]:
    """Saves once, trains on until all is durable, and measures every step."""
    gc.collect()
    os.sync()
    quiet = [loop.step() for _ in range(5)][1:]
    dist.barrier()
    warm = statistics.median(copy.seconds() for _ in range(3))
    dist.barrier()
    ending = Ending()
    began = time.perf_counter()
    save(folder, ending)
    ended = time.perf_counter()
    during: list[float] = []
    while not loop.together(flag=bool(ending.at)):
        during.append(loop.step())
    dist.barrier()
    time.sleep(AFTER_SECONDS)
    return {
        "warm": warm,
        "blocked": ended - began,
        "call": ended - ending.called,
        "durable": ending.at - began,
        "quiet": quiet,
        "during": during,
    }


def compare(loop: Loop, folder: Path, rounds: int, wanted: list[str]) -> dict[str, Any]:
    """All savers in turns, after one save each that is not counted but for its blocked time."""
    reports: list[Any] = []
    found: dict[str, Any] = {"first": {}, "rounds": []}
    copy = WarmCopy(loop)
    endings: list[Ending] = []
    options: Any = {"keep_last": 1, "listener": lambda _: endings[-1].now()}
    with Checkpointer(folder / "run", **options) as checkpointer:
        checkpointer.prepare(loop.state)
        compared = savers(loop, checkpointer, reports, endings)
        compared = {name: compared[name] for name in wanted}
        for name, save in compared.items():
            found["first"][name] = one_save(loop, save, folder / "peer", copy)
            clear(folder / "peer")
        for number in range(rounds):
            names = list(compared)
            names = names[number % len(names) :] + names[: number % len(names)]
            result = {}
            for name in names:
                result[name] = one_save(loop, compared[name], folder / "peer", copy)
                clear(folder / "peer")
            found["rounds"].append(result)
        found["reports"] = [report_of(handle) for handle in reports]
        found["memory"] = memory_of(checkpointer)
    return found


def report_of(handle: Any) -> dict[str, float]:
    """Returns what ckptkit itself says of a save."""
    report = handle.report(60)
    return {
        "blocked": report.blocked_seconds,
        "durable": report.durable_seconds,
        "committed": report.committed_seconds,
        "cpu": report.writer_cpu_seconds,
        "size_bytes": report.size_bytes,
    }


def memory_of(checkpointer: Checkpointer) -> dict[str, int]:
    """Returns the private memory of the writer, and the size of the buffer."""
    slot = checkpointer._slots[0]  # noqa: SLF001
    pid = slot._writer.pid  # noqa: SLF001
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    private = sum(int(row.split()[1]) for row in rollup if row.startswith("Private_"))
    return {"writer_private_bytes": private * 1024, "buffer_bytes": slot._buffer.size_bytes}  # noqa: SLF001


def long_run(loop: Loop, folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Trains with a save every so often; what a save costs is what its steps lose."""
    copy = WarmCopy(loop)
    times: list[float] = []
    blocked: dict[int, float] = {}
    in_flight: list[bool] = []
    with Checkpointer(folder / "long", keep_last=1) as checkpointer:
        checkpointer.prepare(loop.state)
        handle = None
        warm = statistics.median(copy.seconds() for _ in range(5))
        for step in range(1, steps + 1):
            in_flight.append(handle is not None and not handle.done())
            times.append(loop.step())
            if step % every == 0:
                handle = checkpointer.save(step, loop.state)
                blocked[step] = handle.blocked_seconds
    return {"warm": warm, "steps": times, "in_flight": in_flight, "blocked": blocked}


def resume(loop: Loop, folder: Path, rounds: int) -> dict[str, Any]:
    """Reads the same state back in turns, by ckptkit and by dcp.load."""
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "peer")
    found: dict[str, list[float]] = {"ckptkit": [], "dcp.load": []}
    with Checkpointer(folder / "resume") as checkpointer:
        checkpointer.save(1, loop.state).result(300)
        for _ in range(rounds):
            dist.barrier()
            began = time.perf_counter()
            checkpointer.resume(loop.state)
            dist.barrier()
            found["ckptkit"].append(time.perf_counter() - began)
            began = time.perf_counter()
            model, optimizer = get_state_dict(loop.model, loop.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "peer")
            dist.barrier()
            found["dcp.load"].append(time.perf_counter() - began)
    return found


def load(loop: Loop, folder: Path, rounds: int) -> dict[str, Any]:
    """Loads one checkpoint in turns, by the door and by dcp.load, as it is cut and otherwise."""
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state = {"model": model, "optimizer": optimizer}
    door.save(state, checkpoint_id=folder / "peer")
    found: dict[str, list[float]] = {}
    for cut, into in (("rows", state), ("columns", tree_map(by_columns, state))):
        peers = [("ckptkit.training.dcp", door.load), ("dcp.load", dcp.load)]
        for number in range(rounds + 1):
            for name, load_by in peers if number % 2 else reversed(peers):
                dist.barrier()
                began = time.perf_counter()
                load_by(into, checkpoint_id=folder / "peer")
                if number:  # the first one warms up
                    found.setdefault(f"{cut}, {name}", []).append(time.perf_counter() - began)
    return found


def urls(loop: Loop, _: Path, rounds: int) -> dict[str, Any]:
    """Saves to a bucket and loads from it in turns, by the door and by torch."""
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state = {"model": model, "optimizer": optimizer}
    group = dist.new_group(backend="gloo")
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        peers = [("ckptkit.training.dcp", door), ("torch", dcp)]
        for name, by in peers if number % 2 else reversed(peers):
            url = f"{os.environ['CKPTKIT_BENCHMARK_URL']}/{by.__name__}/step-{number}"
            dist.barrier()
            began = time.perf_counter()
            future = by.async_save(state, checkpoint_id=url, process_group=group)
            returned = time.perf_counter()
            future.result()
            dist.barrier()
            durable = time.perf_counter()
            by.load(state, checkpoint_id=url)
            dist.barrier()
            loaded = time.perf_counter()
            times = {
                "blocked": returned - began,
                "durable": durable - began,
                "load": loaded - durable,
            }
            for what, seconds in times.items():
                if number:  # the first one warms up
                    found.setdefault(f"{what}, {name}", []).append(seconds)
    return found


def by_columns(value: Any) -> Any:
    """Returns a tensor of other elements that is cut by its second dimension."""
    if not isinstance(value, DTensor) or value.ndim < 2:  # noqa: PLR2004
        return value
    empty = torch.zeros(value.shape, dtype=value.dtype)
    return distribute_tensor(empty, value.device_mesh, [Shard(1)], src_data_rank=None)


def many(loop: Loop, folder: Path, saves: int) -> dict[str, Any]:
    """Saves again and again by each saver, and says what the rank and its children hold."""
    with Checkpointer(folder / "run") as checkpointer:
        compared = savers(loop, checkpointer, [], [])
    found: dict[str, Any] = {}
    for name in ("ckptkit.training.dcp", "dcp.async_save, thread"):
        rows = found[name] = {}
        for number in range(1, saves + 1):
            ending = Ending()
            compared[name](folder / "peer", ending)
            while not loop.together(flag=bool(ending.at)):
                time.sleep(0.002)
            clear(folder / "peer")
            if number in {5, 20, 50, 100, saves}:
                gc.collect()
                rows[number] = held_bytes()
    return found


def held_bytes() -> int:
    """Returns the memory of this process and its children, shared memory once."""
    pids = [os.getpid()]
    for task in Path("/proc/self/task").iterdir():
        pids += map(int, (task / "children").read_text(encoding="ascii").split())
    rows = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii") for pid in pids]
    return sum(int(line.split()[1]) << 10 for text in rows for line in text.splitlines()
               if line.startswith("Pss:"))  # fmt: skip


def clear(folder: Path) -> None:
    """Removes what a peer wrote."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def main() -> None:
    """Runs what the command line asks for, and prints every rank's findings on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["compare", "load", "long", "many", "resume", "urls"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--savers", default="ckptkit;dcp.save", help="separated by semicolons")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(arguments.blocks)
    for _ in range(3):
        loop.step()
    if arguments.what == "compare":
        found = compare(loop, arguments.folder, arguments.rounds, arguments.savers.split(";"))
    elif arguments.what == "load":
        found = load(loop, arguments.folder, arguments.rounds)
    elif arguments.what == "urls":
        found = urls(loop, arguments.folder, arguments.rounds)
    elif arguments.what == "many":
        found = many(loop, arguments.folder, arguments.steps)
    elif arguments.what == "long":
        found = long_run(loop, arguments.folder, arguments.steps, 30)
    else:
        found = resume(loop, arguments.folder, arguments.rounds)
    hand_over(found)


if __name__ == "__main__":
    main()
