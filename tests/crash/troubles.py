"""A small training, and writers whose storage is in trouble for a while.

The kind of trouble lies in a file, so that one and the same process gets into it, and out again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from ckptkit.core.errors import CkptkitError
from ckptkit.training import Checkpointer, checkpointer
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save import saver as saves
from ckptkit.training.save.writer_process import WriterTimeouts
from tests.crash.writer_programs import writer_running
from tests.dataloaders import Data

LIMIT_SECONDS = 60.0
SLOW_SECONDS = 0.06  # for each write of 4 KiB
LATE_SECONDS = 1.0  # for each of two files

PROGRAM = """
import errno, fcntl, os, threading, time
from ckptkit.writer import persist as images
from ckptkit.writer import process as main
from ckptkit.writer import persist
images.STRIDE_BYTES = 4096
if {bare}:
    main.Disk = main.Disk.portable

def trouble():
    try:
        with open({file!r}) as file:
            return file.read()
    except FileNotFoundError:
        return ""

written = 0
def pwrite(descriptor, data, at, call=os.pwrite):
    global written
    kind = trouble()
    written += len(data)
    if kind == "full" and written > 16384:
        written = 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "slow":
        time.sleep({slow})
    if kind == "stuck":
        time.sleep(600)
    if kind == "buffered" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return call(descriptor, data, at)
os.pwrite = pwrite

def hidden(self, request, tally, call=persist.Persister.persist):
    answer = call(self, request, tally)
    kind = trouble()
    if kind in ("late", "lost") and request.record is not None:
        names = [request.record_path, request.images[0].path]
        paths = [os.path.join(request.folder, name) for name in names]
        for path in paths:
            os.rename(path, path + "~")
        if kind == "late":
            threading.Thread(target=appear, args=(paths,)).start()
    return answer

def appear(paths):
    for path in paths:
        time.sleep({late})
        os.rename(path + "~", path)

persist.Persister.persist = hidden
main.main()
"""


class Trouble:
    """The storage of the writers of Checkpointers that are made inside of `writers`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @contextmanager
    def writers(self, *, bare: bool = False) -> Iterator[None]:
        """Starts such writers; bare ones use only what every platform has."""
        program = PROGRAM.format(
            file=str(self._file), bare=bare, slow=SLOW_SECONDS, late=LATE_SECONDS
        )

        timeouts = partial(WriterTimeouts, command=partial(writer_running, program))
        with (
            mock.patch.object(saves, "WriterTimeouts", timeouts),
            mock.patch.object(checkpointer, "WriterTimeouts", timeouts),
        ):
            yield

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Gets them into trouble: full, slow, stuck, buffered, late, lost; empty for none."""
        if not kind:
            yield
            return
        self._file.write_text(kind)
        try:
            yield
        finally:
            self._file.unlink()


def state_of(model: nn.Module, seed: int) -> dict[str, Any]:
    """Returns a training of a model that takes 24 numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=seed + 8.0),
        "dataloader": Data(),
    }


def network(seed: int, width: int = 500) -> nn.Module:
    """Returns a model of 96 KiB, or more; the state is three times as large."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, 23))


def train(state: Mapping[str, Any], steps: int = 1) -> None:
    for _ in range(steps):
        state["model"](torch.rand(4, 24)).pow(2).mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
        state["dataloader"].at += 4
        random.random()  # noqa: S311
        np.random.rand()


def facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all that a save has to hold of this rank, copied."""
    names = {p: name for name, p in state["model"].named_parameters()}
    held = {f"model.{name}": _local(p) for p, name in names.items()}
    for parameter, values in state["optimizer"].state.items():
        for key, value in values.items():
            held[f"{names[parameter]}.{key}"] = _local(value)
    return {
        **{name: tensor.numpy().tobytes() for name, tensor in held.items()},
        "scheduler": repr(state["scheduler"].state_dict()),
        "scaler": repr(state["scaler"].state_dict()),
        "dataloader": state["dataloader"].at,
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().clone()


def saved(checkpointer: Checkpointer, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Trains, saves, waits; returns what was saved."""
    train(state)
    truth = facts(state)
    handle = checkpointer.save(step, state)
    assert handle.result(LIMIT_SECONDS).name == f"checkpoint-{step}"
    return truth


def resumes(
    checkpointer: Checkpointer, step: int, truth: Mapping[str, Any], fresh: Mapping[str, Any]
) -> None:
    """Resumes into another state, and finds the step in it, bit by bit."""
    random.seed(0)
    found = checkpointer.resume(fresh)
    assert found == step, found
    there = facts(fresh)
    assert there.keys() == truth.keys()
    assert [name for name in truth if truth[name] != there[name]] == []


def fails(handle: SaveHandle, kind: type[CkptkitError], text: str) -> CkptkitError:
    """Waits for a save that fails, and checks that its error is one for a person."""
    with pytest.raises(CkptkitError, match=text) as caught:
        handle.result(LIMIT_SECONDS)
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.where or kind.__name__ == "PeerError"
    assert not error.message.endswith(".")
    assert error.hint
    return error


def working_folders(run: Path) -> list[str]:
    return [path.name for path in run.iterdir() if path.name.startswith(".checkpoint")]


class Log(logging.Handler):
    """What ckptkit has logged; a person wants one line an event, and no stack."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self, level: int) -> list[str]:
        """Returns the lines of a level, and checks that there are no stacks."""
        assert [record.exc_text or "" for record in self.records if record.exc_info] == []
        found = [record.getMessage() for record in self.records if record.levelno == level]
        assert all("\n" not in line for line in found)
        return found


@contextmanager
def listening() -> Iterator[Log]:
    logger = logging.getLogger("ckptkit")
    log = Log()
    logger.addHandler(log)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield log
    finally:
        logger.setLevel(before)
        logger.removeHandler(log)
