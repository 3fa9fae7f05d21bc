"""Runs under torchrun: accelerate without FSDP, its files saved by ckptkit.

Usage: accelerate_whole_run.py FOLDER [dies]. Each line that it prints on rank 0 is one thing that
was compared.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn

import ckptkit
from ckptkit.core.errors import UsageError
from ckptkit.integrations.accelerate import close, install, load_state, save_state
from ckptkit.training.state.objects import is_same
from ckptkit.writer.record import RECORDS_FOLDER
from tests.distributed.accelerate_run import WIDTH, Counter, Net, Odd

WIDE = 300  # so that the files of tensors are too large for a message


class Wide(Net):
    """With a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDE)
        self.back = nn.Linear(WIDE, WIDTH)
        self.tied = self.wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.back(self.wide(x)))


class Refusing(Counter):
    """Fails where it is saved, on the last rank."""

    def state_dict(self) -> dict[str, Any]:
        if rank() == world() - 1:
            raise RuntimeError("no state today")
        return super().state_dict()


def rank() -> int:
    return int(os.environ["RANK"])


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def say(what: str) -> None:
    meet()
    sys.stdout.write(f"{what}\n" * (rank() == 0))


def names(folder: Path) -> list[str]:
    meet()
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    ours = [name for name in found if name.split("/")[0] in {"ckptkit", "ckptkit.json"}]
    assert not ours or ckptkit.verify(folder).ok
    return sorted(set(found) - set(ours))


def contents(folder: Path) -> dict[str, Any]:
    """What is in each file."""
    return {
        name: load_file(folder / name)
        if name.endswith(".safetensors")
        else torch.load(folder / name, weights_only=False)  # noqa: TID251  by whom it is for
        for name in names(folder)
        if name.endswith((".safetensors", ".bin", ".pt", ".pkl"))
    }


class Training:
    """All that an accelerate script has."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(
                project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
            ),
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        )
        torch.manual_seed(3)
        model = Wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rows = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].repeat(1, WIDTH) / 64)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, batches: int) -> None:
        for _, (rows,) in zip(range(batches), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(rows + torch.rand(1)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.batches += 1

    def state(self) -> Any:
        return [
            {name: value.clone() for name, value in self.model.state_dict().items()},
            [{k: v.clone() for k, v in s.items()} for s in self.optimizer.state.values()],
            self.scheduler.state_dict(),
            self.counter.state_dict(),
            self.accelerator.step,
            torch.get_rng_state(),
        ]


def same_files(training: Training, folder: Path) -> None:
    """What stock writes and what ckptkit writes, in both forms, with another state right after."""
    accelerator = training.accelerator
    accelerator.project_configuration.automatic_checkpoint_naming = False
    for safe, weights in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        training.train(3)
        stock, ours = folder / f"stock_{safe}", folder / f"ours_{safe}"
        Accelerator.save_state(accelerator, str(stock), safe)
        truth = contents(stock)
        assert weights in truth
        assert accelerator.save_state(str(ours), safe) == ours
        training.train(2)  # which the save must not see
        close(accelerator)
        found = contents(ours)
        assert found.keys() == truth.keys(), (found.keys(), truth.keys())
        wrong = [name for name in truth if not is_same(found[name], truth[name])]
        assert not wrong, wrong
        say(f"the files are those of accelerate: {' '.join(truth)}")


def resumes(training: Training, folder: Path) -> None:
    accelerator = training.accelerator
    training.train(1)
    truth = training.state()
    Accelerator.save_state(accelerator, str(folder / "before"))
    save_state(accelerator, folder / "after")
    training.train(2)
    meet()
    load_state(accelerator, folder / "after")  # which waits for it
    assert is_same(training.state(), truth)
    training.train(2)
    close(accelerator)
    meet()
    Accelerator.load_state(accelerator, str(folder / "after"))
    assert is_same(training.state(), truth)
    say("accelerate resumed from what ckptkit wrote")
    training.train(2)
    accelerator.load_state(str(folder / "before"))
    assert is_same(training.state(), truth)
    say("what accelerate wrote was loaded")


def automatic_names(training: Training, run: Path) -> None:
    config = training.accelerator.project_configuration
    config.automatic_checkpoint_naming, config.iteration = True, 0
    for _ in range(3):
        training.train(1)
        training.accelerator.save_state()
    truth = training.state()
    training.train(1)
    training.accelerator.load_state()
    assert is_same(training.state(), truth)
    meet()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    say("the oldest went, and the newest was loaded after its save")
    config.automatic_checkpoint_naming = False


def hooks_and_objects(training: Training, folder: Path) -> None:
    """A hook writes a file on all ranks; and what only a pickle can hold is saved as well."""
    accelerator = training.accelerator

    def write(_models: list[Any], weights: list[Any], place: str) -> None:
        assert weights
        Path(place, "note.txt").write_text("from a hook" * WIDE**2, encoding="utf-8")

    hook = accelerator.register_save_state_pre_hook(write)
    accelerator.register_for_checkpointing(Odd())
    for _ in range(2):  # the second replaces the first
        save_state(accelerator, folder / "odd").result()
    hook.remove()
    accelerator._custom_objects.pop()
    meet()
    assert "note.txt" in names(folder / "odd")
    assert (folder / "odd/note.txt").read_text() == "from a hook" * WIDE**2
    assert isinstance(contents(folder / "odd")["custom_checkpoint_1.pkl"]["batches"], Counter)
    say("hooks and objects were saved as in accelerate")


def failing(training: Training, folder: Path) -> None:
    accelerator = training.accelerator
    accelerator.register_for_checkpointing(Refusing())
    with pytest.raises(UsageError, match="no state today"):
        save_state(accelerator, folder / "refused").result()
    accelerator._custom_objects.pop()
    save_state(accelerator, folder / "next").result()
    meet()
    assert not (folder / "refused").exists()
    assert contents(folder / "next")
    say("what failed on one rank failed on all, and the next save went well")


def by_accelerate(training: Training, folder: Path) -> None:
    save_state(training.accelerator, folder / "cut", staging_limit="64MB").result()
    meet()
    assert not (folder / "cut/ckptkit.json").exists()
    say("accelerate itself saved where files would have to be cut")


def two_tiers(training: Training, folder: Path) -> None:
    """Each rank is a node; a step that was not drained before the job ended is on their disks."""
    accelerator, node = training.accelerator, folder / f"node{rank()}"
    config = accelerator.project_configuration
    install(accelerator, local=node)
    for automatic in (False, True):
        config.automatic_checkpoint_naming, config.iteration = automatic, 7
        place = None if automatic else str(folder / "shared/mine")
        training.train(1)
        truth = training.state()
        step = accelerator.save_state(place)
        close(accelerator)
        assert contents(step)
        meet()
        if rank() == 0:  # as a kill would leave it
            shutil.rmtree(step)
        (node / step.name / RECORDS_FOLDER / "drained").unlink()
        meet()
        training.train(2)
        accelerator.load_state(place)
        assert is_same(training.state(), truth)
    config.automatic_checkpoint_naming = False
    install(accelerator)
    say("steps were loaded that only the nodes' own disks had")


def in_the_current_directory(training: Training, folder: Path) -> None:
    here = folder / "here"
    here.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(here)
    assert training.accelerator.save_state(".") == here
    training.train(1)
    truth = training.state()
    assert training.accelerator.save_state(".") == here
    training.train(1)
    training.accelerator.load_state(".")
    assert is_same(training.state(), truth)
    assert Path.cwd() == here
    os.chdir(before)
    say("accelerate itself saved to the directory that the program runs in")


def dies(training: Training, folder: Path) -> None:
    """Ends in the middle of the second save, which the last rank has not begun."""
    training.train(1)
    save_state(training.accelerator).result()
    training.train(1)
    if rank() == 0:
        training.accelerator.save_state()
    while not list(folder.glob(".checkpoint_1.*/optimizer.bin")):
        time.sleep(0.001)
    meet()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    training = Training(folder)
    install(training.accelerator)
    if sys.argv[2:] == ["dies"]:
        dies(training, folder / "checkpoints")
    if sys.argv[2:] == ["again"]:
        training.accelerator.load_state()
        assert training.counter.batches == 1
        say("the step before was loaded")
    else:
        same_files(training, folder)
        resumes(training, folder)
        automatic_names(training, folder / "checkpoints")
        hooks_and_objects(training, folder)
        failing(training, folder)
        by_accelerate(training, folder)
        in_the_current_directory(training, folder)
        two_tiers(training, folder)
    training.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
