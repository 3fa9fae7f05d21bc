"""Runs under torchrun: saves that are durable on the nodes' own disks first; each rank is a node.

Usage: tiers_run.py FOLDER CASE... Each case works in FOLDER/CASE; the last one may be `killed`,
which ends with SIGKILL.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import MissingFileError, UsageError
from ckptkit.training import Checkpointer
from ckptkit.training.tiers.save import TieredCommitter
from tests.crash import troubles
from tests.distributed.cases import in_trouble, names, run_cases

LIMIT_SECONDS = 60
UNIT = "pytorch_model_fsdp_0"


def opened(folder: Path, *, node: int | None = None, **options: Any) -> Checkpointer:
    own = dist.get_rank() if node is None else node
    return Checkpointer(folder / "run", local=folder / f"node{own}", **options)


def drain_of(checkpointer: Checkpointer) -> int:
    backend = checkpointer._committer
    assert isinstance(backend, TieredCommitter)
    pid = backend._drain_process.pid
    assert pid is not None
    return pid


@contextmanager
def stopped(checkpointer: Checkpointer) -> Iterator[None]:
    """The shared place takes nothing, for as long as all ranks are in here."""
    os.kill(drain_of(checkpointer), signal.SIGSTOP)
    dist.barrier()
    yield
    dist.barrier()
    os.kill(drain_of(checkpointer), signal.SIGCONT)


def normal(folder: Path, _: str) -> None:
    """Both tiers hold what they should; the shared one is stock."""
    state = in_trouble(1)
    with opened(folder, keep_last=2) as checkpointer:
        checkpointer.prepare(state)
        for step in (1, 2):
            troubles.saved(checkpointer, step, state)
        truth = troubles.saved(checkpointer, 3, state)
        handle = checkpointer.save(4, state, metrics={"loss": 1.0}, files={})
        assert handle.local_result(LIMIT_SECONDS) == folder / f"node{dist.get_rank()}/checkpoint-4"
        report = handle.report(LIMIT_SECONDS)
        assert report.durable_seconds <= report.local_seconds <= report.committed_seconds
        checkpointer.save(0, state, name="best").result(LIMIT_SECONDS)
        troubles.resumes(checkpointer, 4, truth, in_trouble(2))
    dist.barrier()
    assert names(folder / "run") == ["best", "checkpoint-3", "checkpoint-4"]
    assert names(folder / f"node{dist.get_rank()}") == ["best"]
    loaded = {"model": in_trouble(3)["model"].state_dict()}
    dcp.load(loaded, checkpoint_id=folder / "run/checkpoint-4" / UNIT)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(loaded["model"][name].to_local(), tensor.to_local())


def united(folder: Path, _: str) -> None:
    """The copies of all nodes are read as one, and one alone is refused."""
    state = in_trouble(1)
    with opened(folder) as checkpointer:
        troubles.saved(checkpointer, 7, state)
    dist.barrier()
    if dist.get_rank() != 0:
        return
    own, other = folder / "node0", folder / "node1"
    assert [path.name for path in (own / "checkpoint-7" / UNIT).iterdir()] == ["__0_0.distcp"]
    with pytest.raises(MissingFileError, match="files of rank 1 of 2 are not in") as caught:
        ckptkit.consolidate(own, folder / "alone", names="live")
    assert "--also" in str(caught.value)
    ckptkit.consolidate(own, folder / "parts", names="live", also=[other])
    ckptkit.consolidate(folder / "run", folder / "whole", names="live", also=[other])
    files = [folder / out / "model.safetensors" for out in ("parts", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ckptkit.verify(other, also=[own]).ok
    inspection = ckptkit.inspect(own, also=[other])
    assert inspection.problems == ()
    assert (inspection.step, inspection.world_size, inspection.writer) == (7, 2, "ckptkit")


def together(folder: Path, _: str) -> None:
    """Ranks that share a disk find that out, and their step is whole there."""
    with opened(folder, node=0, sidecar={"notes": _notes(folder)}) as checkpointer:
        state = in_trouble(1)
        truth = troubles.saved(checkpointer, 1, state)
        troubles.resumes(checkpointer, 1, truth, in_trouble(2))
        with stopped(checkpointer):
            checkpointer.save(2, state).local_result(LIMIT_SECONDS)
            dist.barrier()
            weights = {n: p.full_tensor() for n, p in state["model"].state_dict().items()}
            if dist.get_rank() == 0:  # as a kill would leave it
                for place in ("run", "node0"):
                    shutil.copytree(folder / place, folder.with_name("spread") / place)
                save_file(weights, folder.with_name("spread") / "weights.safetensors")
    dist.barrier()
    assert ckptkit.verify(folder / "node0").ok
    with pytest.raises(UsageError, match="directory of the run, or inside of it"):
        Checkpointer(folder / "run", local=folder / "run")


def slow(folder: Path, _: str) -> None:
    """A slow shared place holds up the save after the next one, and nothing is lost."""
    state = in_trouble(1)
    with opened(folder, in_flight="skip") as checkpointer:
        troubles.saved(checkpointer, 1, state)
        with stopped(checkpointer):
            handles = []
            for step in (2, 3):
                troubles.train(state)
                handles.append(checkpointer.save(step, state))
                handles[-1].local_result(LIMIT_SECONDS)
                assert not handles[-1].done()
            assert handles[0].freed
            assert not handles[1].freed
            assert checkpointer.save(4, state).skipped
            assert names(folder / "run") == ["checkpoint-1"]
            assert names(folder / f"node{dist.get_rank()}") == ["checkpoint-2", "checkpoint-3"]
        assert [handle.result(LIMIT_SECONDS).name for handle in handles] == [
            "checkpoint-2",
            "checkpoint-3",
        ]
    dist.barrier()
    assert names(folder / f"node{dist.get_rank()}") == ["checkpoint-3"]


def full(folder: Path, _: str) -> None:
    """A node's disk is full: the save goes to the shared place; later ones are local again."""
    small = folder / "node0"  # where the files beside the shards would lie as well
    if dist.get_rank() == 1:
        small.mkdir(parents=True)
        if not _mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", small):
            small.rmdir()
    dist.barrier()
    if not small.is_dir():
        return
    state = in_trouble(1)
    try:
        with opened(folder) as checkpointer, troubles.listening() as log:
            truth = troubles.saved(checkpointer, 1, state)
            troubles.resumes(checkpointer, 1, truth, in_trouble(2))
            warned = [line for line in log.lines(logging.WARNING) if "at once" in line]
            assert len(warned) == (dist.get_rank() == 0), warned
            assert names(folder / "node1") == names(small) == []
            dist.barrier()
            if dist.get_rank() == 1:
                assert _mounted("-o", "remount,size=8m", small)
            dist.barrier()
            truth = troubles.saved(checkpointer, 2, state)
            assert names(folder / "node1") == names(small) == ["checkpoint-2"]
            troubles.resumes(checkpointer, 2, truth, in_trouble(2))
    finally:
        dist.barrier()
        if dist.get_rank() == 1:
            subprocess.run(["/bin/umount", str(small)], check=True)


def _mounted(*arguments: object) -> bool:
    command = ["/bin/mount", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def killed(folder: Path, _: str) -> None:
    """All processes are killed between the nodes' own step and its drain."""
    state = in_trouble(1)
    checkpointer = opened(folder, sidecar={"notes": _notes(folder)})
    for step in (1, 2):
        if step == 2:
            os.kill(drain_of(checkpointer), signal.SIGSTOP)
        troubles.train(state)
        truth = troubles.facts(state)
        handle = checkpointer.save(step, state)
        (handle.result if step == 1 else handle.local_result)(LIMIT_SECONDS)
        (folder / f"truth-{step}-{dist.get_rank()}").write_text(repr(truth))
    dist.barrier()
    assert names(folder / "run") == ["checkpoint-1"]
    dist.barrier()
    os.kill(drain_of(checkpointer), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _notes(folder: Path) -> Path:
    path = folder / "notes.txt"
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("beside")
    dist.barrier()
    return path


def _goes_on(folder: Path, step: int, node: int | None = None) -> list[str]:
    """Resumes after the kill and saves once more; returns the warnings."""
    with troubles.listening() as log, opened(folder, node=node) as checkpointer:
        state = in_trouble(5)
        assert checkpointer.resume(state) == step
        truth = (folder / f"truth-{step}-{dist.get_rank()}").read_text()
        assert repr(troubles.facts(state)) == truth
        again = troubles.saved(checkpointer, 3, state)
        troubles.resumes(checkpointer, 3, again, in_trouble(6))
        warned: list[str] = log.lines(logging.WARNING)
    dist.barrier()
    own = dist.get_rank() if node is None else node
    assert names(folder / f"node{own}") == ["checkpoint-3"]
    assert ckptkit.verify(folder / f"run/checkpoint-{step}").ok
    numbers = [ckptkit.inspect(folder / f"run/checkpoint-{number}").step for number in (1, step, 3)]
    assert numbers == [1, step, 3]
    return warned


def restarted(folder: Path, _: str) -> None:
    """The same nodes: what was durable on them is not lost."""
    assert _goes_on(folder, 2) == []
    assert (folder / "run/checkpoint-2/ckptkit/notes.txt").read_text() == "beside"


def moved(folder: Path, _: str) -> None:
    """The same nodes, with other ranks on them."""
    assert _goes_on(folder, 2, node=1 - dist.get_rank()) == []


def spread(folder: Path, _: str) -> None:
    """The ranks had one node, and have two, each with a copy of all that lay there."""
    with opened(folder, sidecar={"notes": _notes(folder)}) as checkpointer:
        state = in_trouble(5)
        assert checkpointer.resume(state) == 2
    assert (folder / "run/checkpoint-2/ckptkit/notes.txt").read_text() == "beside"
    for name, tensor in load_file(folder / "weights.safetensors").items():
        assert torch.equal(state["model"].state_dict()[name].full_tensor(), tensor)


def lost(folder: Path, _: str) -> None:
    """One of the nodes is another one: the newest step of the shared place is taken."""
    warned = _goes_on(folder, 1)
    if dist.get_rank() == 0:
        assert len(warned) == 1, warned
        assert "checkpoint-2" in warned[0]
        assert "files of rank 1" in warned[0]


CASES = {
    case.__name__: case
    for case in (
        *(normal, united, together, slow, full),
        *(killed, restarted, moved, spread, lost),
    )
}


if __name__ == "__main__":
    run_cases(CASES)
