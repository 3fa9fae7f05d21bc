"""What a save costs a training on one device, against a bare copy of the same bytes."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptkit.training import Checkpointer

PAIR_SIZE = 4 * 3  # bytes of a parameter in float32, with the two moments of AdamW
LEAST_STEPS = 5


@dataclass
class Figures:
    """Seconds of one saver, an entry for each save."""

    call: list[float] = field(default_factory=list)  # until its call returned
    # Until nothing of the device was read any more, where that was waited for.
    staged: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)  # until it was on the disk
    # Steps from the call until then, where nothing was waited for.
    meanwhile: list[float] = field(default_factory=list)


@dataclass
class Costs:
    """All that was measured."""

    size_bytes: int  # of one save
    # Seconds of copies of the same bytes into pinned memory, with nothing else running.
    bare: list[float]
    quiet: list[float]  # seconds of steps without a save
    # Of the first save after `prepare`: until its call returned, and was staged.
    first: tuple[float, float]
    savers: dict[str, Figures]
    # How much more memory of the device was in use after the last save than before the first one.
    grown_bytes: int


class Loop:
    """A training whose steps are measured."""

    def __init__(self, device: torch.device, gigabytes: float) -> None:
        torch.manual_seed(0)
        width = 4096 if gigabytes >= 1 else 256
        count = max(2, round(gigabytes * 1e9 / (width * width * PAIR_SIZE)))
        layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
        self.device = device
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.batch = torch.randn(2048 if gigabytes >= 1 else 32, width, device=device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> float:
        """Takes one step, and returns its seconds."""
        began = time.perf_counter()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronize()
        return time.perf_counter() - began

    def state_dicts(self) -> dict[str, Any]:
        """Returns the state as stock torch saves it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def tensors(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach() for tensor in [*self.model.parameters(), *states]]


class BareCopy:
    """Copies of the same bytes into pinned memory that was touched before."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sources = loop.tensors()
        pin = loop.device.type == "cuda"
        self._copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=pin and t.device.type == "cuda")
            for t in self._sources
        ]
        self.seconds()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._sources)

    def seconds(self) -> float:
        self._loop.synchronize()
        began = time.perf_counter()
        for copy, source in zip(self._copies, self._sources, strict=True):
            copy.copy_(source, non_blocking=True)
        self._loop.synchronize()
        return time.perf_counter() - began


@dataclass(frozen=True)
class Started:
    """A save that was begun: what waits until it is staged, and whether it is durable."""

    wait_staged: Callable[[], None]
    is_durable: Callable[[], bool]


def measure(device: torch.device, folder: Path, gigabytes: float, rounds: int) -> Costs:
    """Measures savers in turns, with a bare copy and quiet steps before each save."""
    loop = Loop(device, gigabytes)
    for _ in range(3):
        loop.step()
    bare = BareCopy(loop)
    costs = Costs(bare.size_bytes, [], [], (0.0, 0.0), {}, 0)
    steps = iter(range(1_000_000))
    with Checkpointer(folder / "run", keep_last=1) as saver:
        saver.prepare(loop.state)

        def by_ckptkit() -> Started:
            handle = saver.save(next(steps), loop.state)
            return Started(handle.wait_staged, lambda: handle.wait(0))

        def by_dcp() -> Started:
            shutil.rmtree(folder / "peer", ignore_errors=True)
            future: Any = dcp.async_save(loop.state_dicts(), checkpoint_id=folder / "peer")
            return Started(lambda: None, future.done)

        savers = {"ckptkit": by_ckptkit, "dcp.async_save": by_dcp}
        first = Figures()
        one_save(loop, by_ckptkit, first)
        costs.first = first.call[0], first.staged[0]
        one_save(loop, by_dcp, Figures())
        before = used_bytes(device)
        for _ in range(rounds):
            for name, save in savers.items():
                costs.bare.append(bare.seconds())
                costs.quiet += [loop.step() for _ in range(LEAST_STEPS)]
                figures = costs.savers.setdefault(name, Figures())
                one_save(loop, save, figures)
                one_save(loop, save, figures, waits=False)
        costs.grown_bytes = used_bytes(device) - before
    return costs


def one_save(
    loop: Loop, save: Callable[[], Started], figures: Figures, *, waits: bool = True
) -> None:
    """Saves once, and trains on until it is durable: at once, or when all is staged."""
    gc.collect()
    loop.synchronize()
    began = time.perf_counter()
    started = save()
    figures.call.append(time.perf_counter() - began)
    if waits:
        started.wait_staged()
        figures.staged.append(time.perf_counter() - began)
    steps = []
    while not started.is_durable():
        steps.append(loop.step())
    figures.meanwhile += [] if waits else steps
    figures.durable.append(time.perf_counter() - began)


def used_bytes(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def rows_of(costs: Costs) -> Iterator[tuple[object, ...]]:
    bare, quiet = statistics.median(costs.bare), statistics.median(costs.quiet)
    for name, figures in costs.savers.items():
        call, staged, durable = map(
            statistics.median, (figures.call, figures.staged, figures.durable)
        )
        steps = statistics.median(figures.meanwhile) / quiet if figures.meanwhile else 0.0
        yield (
            name,
            f"{call:.4f}",
            f"{staged:.4f}",
            f"{max(call, staged) / bare:.2f}",
            f"{durable:.2f}",
            f"{steps:.3f} ({len(figures.meanwhile)})" if steps else "none",
        )
