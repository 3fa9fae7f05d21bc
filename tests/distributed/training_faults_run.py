"""Runs under torchrun: what goes wrong on one rank is told on every rank, and the next save works.

Usage: training_faults_run.py FOLDER CASE... Each case works in FOLDER/CASE.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ckptkit.core.errors import (
    CkptkitError,
    MissingFileError,
    NoSpaceError,
    OutputError,
    PeerError,
    RefusedError,
    WriterError,
)
from ckptkit.training import Checkpointer
from ckptkit.training.save import saver as saves
from ckptkit.training.save.staging import MemoryPlaces, SharedBuffer
from tests.crash import troubles
from tests.distributed.cases import end, in_trouble, names, start

ABSENT_SECONDS = 3.0


class Drill:
    """Saves step 1; more saves fail; resumes from step 1, saves step 90, and resumes from that."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.run = folder / "run"
        self.trouble = troubles.Trouble(folder / f"trouble-{dist.get_rank()}")
        with self.trouble.writers():
            self.checkpointer = Checkpointer(self.run, **options)
        self.state = in_trouble(1)
        self.truth = troubles.saved(self.checkpointer, 1, self.state)
        self.failed = 0

    def fails(self, kind: type[CkptkitError], text: str) -> None:
        """Saves a step in vain, and trains on meanwhile."""
        troubles.train(self.state)
        handle = self.checkpointer.save(2 + self.failed, self.state)
        assert handle.blocked_seconds < 2
        troubles.train(self.state)
        self.told(handle, kind, text)

    def told(self, handle: Any, kind: type[CkptkitError], text: str) -> None:
        """Checks that a save failed, with the same text on all ranks."""
        error = troubles.fails(handle, kind, text)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, texts
        self.failed += 1

    def recovers(self) -> None:
        troubles.resumes(self.checkpointer, 1, self.truth, in_trouble(2))
        truth = troubles.saved(self.checkpointer, 90, self.state)
        troubles.resumes(self.checkpointer, 90, truth, in_trouble(3))
        self.checkpointer.close()
        dist.barrier()
        assert names(self.run) == ["checkpoint-1", "checkpoint-90"]


def on(rank: int, context: Any) -> Any:
    """Enters a context on one rank alone."""
    return context if dist.get_rank() == rank else nullcontext()


@contextmanager
def everywhere(drill: Drill, kind: str, *, ranks: tuple[int, ...]) -> Iterator[None]:
    """Gets the writers of some ranks into trouble, for as long as all ranks are in here."""
    with drill.trouble.of(kind if dist.get_rank() in ranks else ""):
        dist.barrier()
        yield
        dist.barrier()


def full(folder: Path) -> None:
    """The disk fills up in the middle, on one rank and on all."""
    drill = Drill(folder)
    with everywhere(drill, "full", ranks=(1,)):
        drill.fails(NoSpaceError, r"^rank 1: /.*/__1_0\.distcp: the disk or the quota is full")
    with everywhere(drill, "full", ranks=(0, 1)):
        drill.fails(NoSpaceError, r"^rank 0 and 1 more: /.*__0_0\.distcp: the disk")
    drill.recovers()


def hung(folder: Path) -> None:
    """A writer is stopped, and storage hangs, on one rank."""
    drill = Drill(folder, stall_seconds=2.0, timeout_seconds=5.0)
    if dist.get_rank() == 1:
        os.kill(drill.checkpointer._slots[0]._writer.pid or 0, signal.SIGSTOP)
    drill.fails(WriterError, "^rank 1: writer: gave no sign of life for 2 s")
    with everywhere(drill, "stuck", ranks=(0,)):
        drill.fails(WriterError, "^rank 0: writer: gave no further byte in 5 s")
    drill.recovers()


def absent(folder: Path) -> None:
    """A rank that never comes to a save, and one that comes late."""
    drill = Drill(folder, timeout_seconds=ABSENT_SECONDS)
    here = dist.get_rank() == 0
    if here:
        handle = drill.checkpointer.save(2, drill.state)
        error = troubles.fails(handle, PeerError, "^rank 1 did not answer within 3 s .*step 2")
        assert "log of that rank" in error.hint
    troubles.train(drill.state)
    dist.barrier()
    drill.truth = troubles.saved(drill.checkpointer, 1, drill.state)  # the next one works
    time.sleep(0 if here else 2 * ABSENT_SECONDS)
    handle = drill.checkpointer.save(4, drill.state)
    drill.told(handle, PeerError, "^rank 1 did not answer within 3 s .*step 4")
    drill.recovers()


def late(folder: Path) -> None:
    """Files of another rank are seen late, or never."""
    drill = Drill(folder, timeout_seconds=10.0)
    with everywhere(drill, "late", ranks=(1,)):
        began = time.monotonic()
        drill.truth = troubles.saved(drill.checkpointer, 1, drill.state)
        assert time.monotonic() - began > 2 * troubles.LATE_SECONDS
    with everywhere(drill, "lost", ranks=(1,)):
        drill.fails(MissingFileError, r"/\.ranks/1\.json: it was written, but not seen within 5 s")
    drill.recovers()


def memory(folder: Path) -> None:
    """There is no memory for the buffer of one rank."""
    places = MemoryPlaces(anonymous=False, memory_folder=None, disk_folder=folder / "none")
    buffer = partial(SharedBuffer, places)
    with on(1, mock.patch.object(saves, "SharedBuffer", buffer)):
        checkpointer = Checkpointer(folder / "run")
    state = in_trouble(1)
    troubles.train(state)
    for _ in range(2):
        handle = checkpointer.save(1, state)
        error = troubles.fails(handle, NoSpaceError, "^rank 1: .*/none' cannot be used")
        assert "staging_limit" in error.hint
    (folder / "none").mkdir(exist_ok=True)
    dist.barrier()
    truth = troubles.saved(checkpointer, 2, state)
    troubles.resumes(checkpointer, 2, truth, in_trouble(2))
    checkpointer.close()


def twice(folder: Path) -> None:
    """The same step is saved again while it is being saved, and after."""
    drill = Drill(folder, max_in_flight=2)
    for _ in range(3):
        troubles.train(drill.state)
        drill.truth = troubles.facts(drill.state)
        drill.checkpointer.save(1, drill.state)
    drill.recovers()


def occupied(folder: Path) -> None:
    """Another job, which is not of these ranks, has the directory."""
    began = time.monotonic()
    with pytest.raises(RefusedError, match="another job is writing to the run: process") as caught:
        Checkpointer(folder / "run")
    assert time.monotonic() - began < 10
    assert caught.value.hint


def unusable(folder: Path) -> None:
    """One rank alone cannot use the directory."""
    path = folder / "run"
    if dist.get_rank() == 1:
        (folder / "file").touch()
        path = folder / "link"
        path.symlink_to(folder / "file")
    name = folder / "name"
    with (
        mock.patch.object(Path, "absolute", lambda self: path if self == name else self),
        pytest.raises(
            OutputError, match=r"^rank 1: .*/link: expected the directory of a run, found a file"
        ) as caught,
    ):
        Checkpointer(name)
    assert caught.value.hint


CASES: dict[str, Callable[[Path], None]] = {
    "full": full,
    "hung": hung,
    "absent": absent,
    "late": late,
    "memory": memory,
    "twice": twice,
    "occupied": occupied,
    "unusable": unusable,
}


def main() -> None:
    folder, *cases = sys.argv[1:]
    start()
    with troubles.listening() as log:
        for case in cases:
            place = Path(folder) / case
            place.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            began = time.monotonic()
            CASES[case](place)
            dist.barrier()
            for level in (logging.WARNING, logging.ERROR):
                for line in log.lines(level):
                    sys.stdout.write(f"{case}, rank {dist.get_rank()}: {line}\n")
            log.records.clear()
            sys.stdout.write(f"{case} took {time.monotonic() - began:.1f} s\n")
    end()


if __name__ == "__main__":
    main()
