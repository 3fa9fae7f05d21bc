"""A rank's training with a Checkpointer whose writers come to harm at a chosen moment."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptkit
from ckptkit.training import Checkpointer, checkpointer, run_folders
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save import saver as saves
from ckptkit.training.save.writer_process import WriterTimeouts, writer_command
from ckptkit.training.tiers import save as tiered_saves
from tests.crash.writer_programs import writer_running
from tests.dataloaders import Data

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60.0
WRITERS = ("writer", "committer")

# In one of the requests that are of interest, every call that makes, changes, syncs, renames or
# removes something counts, and so does the answer. Before one of them something happens.
PROGRAM = """
import os, signal, time
requests = calls = 0
def deadly(call):
    def counted(*arguments, **options):
        global calls
        calls += 1
        if requests == {request} and calls == {call}:
            {act}
        return call(*arguments, **options)
    return counted
for name in ("open", "write", "pwrite", "fsync", "ftruncate", "posix_fallocate", "mkdir", "rename",
             "unlink", "rmdir"):
    setattr(os, name, deadly(getattr(os, name)))
from ckptkit.storage.local import disk
from ckptkit.writer import process as main
from ckptkit.writer import messages
disk.Disk.exchange_folders = deadly(disk.Disk.exchange_folders)
messages.Channel.send = deadly(messages.Channel.send)
do = main.RequestHandler.do
def noted(self, message, tally):
    global requests, calls
    if type(message).__name__ in {kinds}:
        requests, calls = requests + 1, 0
    return do(self, message, tally)
main.RequestHandler.do = noted
main.main()
"""
KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"
KILL_ITS_RANK = "os.kill(os.getppid(), signal.SIGKILL)"
KILL_ALL = f"os.killpg(os.getpgid(os.getppid()), signal.SIGKILL); {KILL_ITSELF}"
TERM_ITS_RANK = "os.kill(os.getppid(), signal.SIGTERM)"
TERM_ALL = "os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)"
PAUSE = "time.sleep(1.0)"


@dataclass
class Doom:
    """A command for writers to which something happens in the middle of a request."""

    act: str
    call: int  # at which call
    # In the how manieth request of these kinds; in the second, the first save is well.
    request: int = 2
    kinds: tuple[str, ...] = ("Persist", "Commit")  # names of messages
    rising: int = 0  # by how many calls later it happens in every further process

    def command(self, descriptor: int) -> Sequence[str]:
        program = PROGRAM.format(
            call=self.call, act=self.act, request=self.request, kinds=self.kinds
        )
        self.call += self.rising
        return writer_running(program, descriptor)


@contextmanager
def doomed(
    *,
    writer: Doom | None = None,
    committer: Doom | None = None,
    keeper: Doom | None = None,
    drain: Doom | None = None,
) -> Iterator[None]:
    """Gives Checkpointers that are made meanwhile such writers, and such a committer.

    Where nodes' disks come first, the keeper is what commits there, and the drain what copies.
    """

    def drain_command(descriptor: int, niceness: int) -> Sequence[str]:
        return writer_command(descriptor, niceness) if drain is None else drain.command(descriptor)

    def timeouts(doom: Doom | None) -> Callable[..., WriterTimeouts]:
        return partial(WriterTimeouts, command=writer_command if doom is None else doom.command)

    with (
        mock.patch.object(saves, "WriterTimeouts", timeouts(writer)),
        mock.patch.object(checkpointer, "WriterTimeouts", timeouts(committer)),
        mock.patch.object(tiered_saves, "WriterTimeouts", timeouts(keeper)),
        mock.patch.object(run_folders, "writer_command", drain_command),
    ):
        yield


@dataclass(frozen=True)
class Point:
    """When a rank comes to harm."""

    victim: int
    # In the trainer: `before`, `staging`, `returned`, `waiting`; or `writer` or `committer`, whose
    # `call` it is.
    phase: str
    call: int = 0  # at which call
    act: str = KILL_ITS_RANK  # what its writer does to it
    rank_0_hosts: bool = False  # see `Pair`

    @property
    def name(self) -> str:
        parts = [f"rank{self.victim}", self.phase, str(self.call)]
        parts += ["term"] * (self.act == TERM_ITS_RANK) + ["hosts"] * self.rank_0_hosts
        return "_".join(parts)

    @property
    def dooms(self) -> dict[str, Doom]:
        return {self.phase: Doom(self.act, self.call)} if self.phase in WRITERS else {}

    @property
    def ends(self) -> tuple[int, int]:
        number = signal.SIGTERM if self.act == TERM_ITS_RANK else signal.SIGKILL
        return (-number, 0) if self.victim == 0 else (0, -number)


def make(seed: int, width: int = 5) -> dict[str, Any]:
    """Returns a state, and random numbers that differ between ranks."""
    for sow in (random.seed, np.random.seed, torch.manual_seed):
        sow(seed)
    model: Any = nn.Sequential(nn.Linear(7, width), nn.Linear(width, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for sow in (random.seed, np.random.seed, torch.manual_seed):
        sow(100 * seed + dist.get_rank())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=seed + 8.0),
        "dataloader": Data(10 * dist.get_rank()),
        "progress": {"tokens": seed},
    }


def train(state: dict[str, Any]) -> None:
    scaler = state["scaler"]
    loss = state["model"](torch.randn(2, 7) * random.random() + float(np.random.rand()))  # noqa: S311
    scaler.scale(loss.pow(2).mean()).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    scaler.update(scaler.get_scale() + 1)
    state["dataloader"].at += 2
    state["progress"]["tokens"] += 14


def snapshot(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns copies of all that this rank has, random numbers included."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    for number, held in enumerate(state["optimizer"].state_dict()["state"].values()):
        found |= {f"optimizer.{number}.{name}": tensor for name, tensor in held.items()}
    numpy_state: Any = np.random.get_state()
    found |= {
        "rates": torch.tensor([group["lr"] for group in state["optimizer"].param_groups]),
        "scheduler": torch.tensor(state["scheduler"].last_epoch),
        "scaler": torch.tensor(state["scaler"].get_scale()),
        "dataloader": torch.tensor(state["dataloader"].at),
        "progress": torch.tensor(state["progress"]["tokens"]),
        "random": torch.tensor(random.getstate()[1]),
        "numpy": torch.tensor([*numpy_state[1].tolist(), numpy_state[2]]),
        "torch": torch.get_rng_state(),
    }
    return {
        name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in found.items()
    }


class Life:
    """One rank's training, which keeps beside the run what it saved."""

    def __init__(self, folder: Path, *, seed: int = 1, width: int = 5, **options: Any) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.run = folder / "run"
        self.state = make(seed, width)
        self.step = 0
        dist.barrier()  # the ranks are given little time to wait for one another
        self.checkpointer = Checkpointer(self.run, **options)

    def save(self, *, again: bool = False) -> SaveHandle:
        """Trains a step and saves it, as the same step again or the next one."""
        train(self.state)
        self.step += not again
        save_file(snapshot(self.state), self._truth())
        return self.checkpointer.save(self.step, self.state)

    def save_well(self) -> None:
        path = self.save().result(WAIT_SECONDS)
        assert path == self.run.absolute() / f"checkpoint-{self.step}"

    def resume(self) -> int:
        """Resumes, and checks that everything is as it was when it was saved."""
        found = self.checkpointer.resume(self.state)
        assert found is not None
        assert found == max(steps(self.run))
        self.step = found
        truth, here = load_file(self._truth()), snapshot(self.state)
        assert here.keys() == truth.keys(), here.keys() ^ truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(here[name], tensor), f"{name} of step {found} on rank {self.rank}"
        return found

    def _truth(self) -> Path:
        tokens = self.state["progress"]["tokens"]  # tells two saves of a step apart
        return self.folder / f"truth-{self.step}-{tokens}-{self.rank}.safetensors"


def visible(run: Path) -> list[int]:
    """Returns the steps that anybody would take for whole, after seeing that they are."""
    for path in run.iterdir():
        if not path.name.startswith("."):
            assert (path / "ckptkit.json").is_file(), path
            assert ckptkit.verify(path).ok, path
    return steps(run)


def steps(run: Path) -> list[int]:
    """Returns what has the name of a step; nothing else may be visible."""
    found = [path.name for path in run.iterdir() if not path.name.startswith(".")]
    return [int(name.removeprefix("checkpoint-")) for name in found]


def hidden(run: Path) -> list[str]:
    return [path.name for path in run.glob(".checkpoint-*")]


def spoil(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in state["model"].parameters():
            tensor.to_local().fill_(7)
    for held in state["optimizer"].state.values():
        held["step"].fill_(7)
    train(state)
