"""Runs under torchrun: saves through the Checkpointer and checks on every rank what came of it.

Usage: saving_run.py FOLDER CASE... Each case works in FOLDER/CASE.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckptkit.core.errors import UsageError
from ckptkit.training import Checkpointer
from tests.distributed.cases import FULL, WRAPPERS, full, names, nobody_talks, run_cases, same


class Net(nn.Module):
    """Sizes that divide by no number of ranks, tied weights, buffers, and a row too few."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 6)
        self.up = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 1)
        self.head = nn.Linear(6, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).mean(1)
        loss: torch.Tensor = self.down(self.norm(torch.relu(self.up(hidden)))).pow(2).mean()
        loss += self.head(hidden).pow(2).mean()
        return loss


KEPT: dict[Any, Any] = {1: 0.5, "1": [{}, {None: torch.Size([2])}], False: Counter({3: 1})}


class Average:
    """An object whose state has tensors, sharded ones too, under keys that are no texts."""

    def __init__(self, model: nn.Module) -> None:
        self.held: Any = {1: {n: p.detach().clone() for n, p in model.named_parameters()}}

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


class Data:
    """A dataloader that knows where it is."""

    def __init__(self) -> None:
        self.at = 10 * (dist.get_rank() + 1)

    def __iter__(self) -> Iterator[int]:
        yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


def make(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = WRAPPERS[kind](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=seed + 8.0),
        "dataloader": Data(),
        "progress": {"tokens": seed, "kept": KEPT if seed == 1 else None},
    }


def with_average(state: dict[str, Any], kind: str) -> dict[str, Any]:
    return state | ({"average": Average(state["model"])} if kind == "fsdp2" else {})


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.randint(0, 23, (4, 5))).backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
        state["dataloader"].at += 4


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: S311


def seed_ranks() -> None:
    random.seed(100 + dist.get_rank())
    np.random.seed(200 + dist.get_rank())
    torch.manual_seed(300 + dist.get_rank())


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns model and optimizer by flat names, gathered by torch itself."""
    weights, held = get_state_dict(state["model"], state["optimizer"], options=FULL)
    found = {f"model.{k}": v.clone() for k, v in weights.items() if isinstance(v, torch.Tensor)}
    states: Any = held["state"]
    for name, values in states.items():
        for key, value in values.items():
            found[f"optimizer.{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def keep_truth(folder: Path, truth: Mapping[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in truth.items()}, folder / "truth.safetensors")


def save_and_resume(folder: Path, kind: str) -> None:
    """The first save ever, without prepare, with everything that communicates raising."""
    state = with_average(make(kind, 1), kind)
    train(state, 3)
    truth = gathered(state)
    keep_truth(folder, truth)
    average = {n: full(t) for n, t in state["average"].held[1].items()} if kind == "fsdp2" else {}
    with Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.resume(make(kind, 2)) is None
        seed_ranks()
        with nobody_talks():
            handle = checkpointer.save(3, state, metrics={"loss": 0.5})
            expected = draw()
            spoil(state)
            path = handle.result(120)
        assert path == folder.absolute() / "run" / "checkpoint-3"
        assert handle.blocked_seconds > 0
        other = with_average(make(kind, 2), kind)
        random.seed(0)
        assert checkpointer.resume(other) == 3
        assert draw() == expected
        same(gathered(other), truth)
        assert other["dataloader"].at == 10 * (dist.get_rank() + 1) + 12
        assert repr(other["progress"]) == repr({"tokens": 1, "kept": KEPT})
        for name, tensor in other["average"].held[1].items() if kind == "fsdp2" else ():
            assert torch.equal(tensor.full_tensor(), average[name]), name
        assert other["scheduler"].last_epoch == 3
        assert other["scaler"].state_dict()["scale"] == 9.0


def spoil(state: dict[str, Any]) -> None:
    """Changes everything that could have been saved."""
    with torch.no_grad():
        for tensor in [*state["model"].parameters(), *state["model"].buffers()]:
            (tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor).fill_(7)
        for held in state["optimizer"].state.values():
            for value in held.values():
                (value._local_tensor if hasattr(value, "_local_tensor") else value).fill_(7)
    state["progress"]["tokens"] = -1
    state["dataloader"].at = -1


STOPPED_SECONDS = {0: 5.0, 1: 60.0}


def stopped_rank(folder: Path, rank: str) -> None:
    """One rank is stopped before its save; `save` returns on the others all the same."""
    state = make("fsdp2", 1)
    train(state, 2)
    truth = gathered(state)
    stopped, seconds = dist.get_rank() == int(rank), STOPPED_SECONDS[int(rank)]
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.prepare(state)
        dist.barrier()
        if stopped:
            sleep_for(seconds)
        began = time.monotonic()
        handle = checkpointer.save(2, state)
        took = time.monotonic() - began
        assert took < 2, took
        assert stopped or not handle.done()
        handle.result(seconds + 60)
        other = make("fsdp2", 2)
        assert checkpointer.resume(other) == 2
        same(gathered(other), truth)


def sleep_for(seconds: float) -> None:
    """Stops this process, and has another one continue it."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def wide(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: Any = fully_shard(nn.Linear(700, 1_500))
    return {"model": model}


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in state["model"].state_dict().items()}


def waves(folder: Path, _: str) -> None:
    """A buffer far smaller than the state, and the layout of plain DCP."""
    state = wide(1)
    truth = weights(state)
    with Checkpointer(folder / "run", staging_limit="1MiB", layout="dcp") as checkpointer:
        checkpointer.prepare(state)
        with nobody_talks():
            handle = checkpointer.save(1, state)
            for tensor in state["model"].parameters():
                tensor._local_tensor.data.fill_(0)
            report = handle.report(120)
        assert len(list(report.path.glob("__0_*.distcp"))) > 2
        other = wide(2)
        assert checkpointer.resume(other) == 1
        same(weights(other), truth)


def retention(folder: Path, kind: str) -> None:
    """The newest and the best step stay; the same step may be saved twice."""
    state = make(kind, 1)
    run = folder / "run"
    with Checkpointer(run, keep_last=1, keep_best="loss", every=2) as checkpointer:
        for step in range(1, 9):
            train(state, 1)
            if checkpointer.should_save(step):
                checkpointer.save(step, state, metrics={"loss": abs(step - 4.0)})
        checkpointer.save(8, state, metrics={"loss": 4.0}).result(120)
    dist.barrier()
    assert names(run) == ["checkpoint-4", "checkpoint-8"]
    assert [p for p in run.iterdir() if "ckptkit-" in p.name] == []
    with pytest.raises(UsageError, match="closed"):
        checkpointer.save(1, state)


def skipping(folder: Path, kind: str) -> None:
    """All ranks skip the same saves, and the newest one that was not skipped is whole."""
    state = make(kind, 1)
    train(state, 1)
    truth = gathered(state)
    with Checkpointer(folder / "run", in_flight="skip") as checkpointer:
        handles = [checkpointer.save(step, state) for step in range(10, 20)]
        skipped = [handle.wait(120) and handle.skipped for handle in handles]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, skipped)
        assert all(other == skipped for other in everywhere), everywhere
        assert not skipped[0]
        assert any(skipped)
        other = make(kind, 3)
        newest = max(h.step for h, left in zip(handles, skipped, strict=True) if not left)
        assert checkpointer.resume(other) == newest
        same(gathered(other), truth)


def mistakes(folder: Path, kind: str) -> None:
    """What one rank does wrong is told to all at once, and the next save works."""
    state, rank = make(kind, 1), dist.get_rank()
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"keep_last: .*5 on rank 1 and 4 on rank 0"):
        Checkpointer(folder / "run", keep_last=4 + rank)
    with Checkpointer(folder / "run", timeout_seconds=300) as checkpointer:
        if rank:
            with pytest.raises(UsageError, match="no state_dict"):
                checkpointer.save(1, {**state, "odd": 3})
        else:
            error = checkpointer.save(1, state).exception(240)
            assert isinstance(error, UsageError), error
            assert "rank 1: odd" in str(error)
        checkpointer.save(2, state).result(240)
        handle = checkpointer.save(3 + rank, state)  # rank 1 leaves step 3 out
        if rank == 0:
            error = handle.exception(240)
            assert "rank 1 is at the save of step 4" in str(error), error
            handle = checkpointer.save(4, state)
        assert handle.result(240).name == "checkpoint-4"
        checkpointer.save(5, state).result(240)
    assert time.monotonic() - began < 150  # on a busy machine; nothing waited for the timeout


class Uneven(nn.Module):
    """Two weights of one shape, of which the ranks hold other numbers of rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, cut in {"one": 5, "two": 2}.items():
            self.register_parameter(name, self.part_of(cut, declared=kind != "undeclared"))
        if kind != "silent":
            self.register_state_dict_post_hook(Uneven.gather_shapes)  # type: ignore[no-untyped-call]
        self.refuses = kind == "extra"

    def part_of(self, cut: int, *, declared: bool) -> nn.Parameter:
        whole = torch.arange(21.0).view(7, 3) + cut
        start, stop = (cut, 7) if dist.get_rank() else (0, cut)
        local, cuts = whole[start:stop].clone(), [Shard(0)]
        part = DTensor.from_local(
            local, self.mesh, cuts, run_check=False, shape=whole.shape, stride=(3, 1)
        )
        parameter: Any = nn.Parameter(part)
        if declared:
            chunk = ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((stop - start, 3)))
            parameter._local_tensor.__create_chunk_list__ = lambda: [chunk]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def gather_shapes(self, *_: Any) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, len(list(self.parameters())))

    def get_extra_state(self) -> torch.Tensor:
        if self.refuses:
            self.gather_shapes()
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        pass


def talkative(folder: Path, kind: str) -> None:
    """A module whose `state_dict()` asks the other ranks, which may look at another moment."""
    module, path = Uneven(kind), folder
    with Checkpointer(folder / "run", layout="dcp", timeout_seconds=30) as checkpointer:
        for step in (1, 2):
            if dist.get_rank() == 0:  # so that this rank alone looks anew
                module.one.requires_grad_(step == 1)
            began = time.monotonic()
            if kind in {"undeclared", "extra"}:
                found = "one" if kind == "undeclared" else "module 'Uneven'"
                error = checkpointer.save(step, {"model": module}).exception(60)
                assert found in str(error), error
                assert time.monotonic() - began < 15
                return
            with nobody_talks() if kind == "silent" else nullcontext():
                path = checkpointer.save(step, {"model": module}).result(60)
    loaded = {"model": {"one": torch.zeros(7, 3), "two": torch.zeros(7, 3)}}
    dcp.load(loaded, checkpoint_id=path)
    for name, cut in {"one": 5, "two": 2}.items():
        assert torch.equal(loaded["model"][name], torch.arange(21.0).view(7, 3) + cut)


CASES: dict[str, Callable[[Path, str], None]] = {
    "talkative": talkative,
    "save": save_and_resume,
    "stopped": stopped_rank,
    "waves": waves,
    "retention": retention,
    "skipping": skipping,
    "mistakes": mistakes,
}


if __name__ == "__main__":
    run_cases(CASES, kind="fsdp2")
