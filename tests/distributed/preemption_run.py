"""Runs under torchrun: ranks that drift apart ask for saves in all ways, and save in concert.

Usage: preemption_run.py RUN. Each rank writes RUN/rank-R.json: the steps it saved and stopped at.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckptkit.training.agree.peers import Peers, open_peers
from ckptkit.training.agree.save_requests import SaveRequestWatcher
from ckptkit.training.run_folders import RunFolder
from ckptkit.training.settings import Interval
from tests.distributed.cases import end

DRIFT_SECONDS = 0.004
BARRIER_EVERY = 5
LIMIT_SECONDS = 30.0
STOPPED_RANK = 3
STOPPED_SECONDS = 4.0
STOPPED_LIMIT_SECONDS = 1.0


class Training:
    """A loop that only polls, and whose ranks meet every few steps as collectives make them."""

    def __init__(self, requests: SaveRequestWatcher, rank: int) -> None:
        self.requests = requests
        self.step = 0
        self.saved: list[int] = []
        self.stopped: list[int] = []
        self._dice = random.Random(rank)  # noqa: S311  no secret

    def until(self, ended: Callable[[], bool]) -> None:
        """Trains until all ranks have seen the same save, at a step that all of them stop at."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            self.poll()
            if self.step % BARRIER_EVERY == 0:
                everywhere: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, ended())
                if all(everywhere):
                    return
            assert time.monotonic() < deadline, (self.step, self.saved)

    def poll(self) -> None:
        self.step += 1
        time.sleep(DRIFT_SECONDS * self._dice.random())
        stopping = self.requests.stop_requested
        if self.requests.should_save(self.step):
            self.saved.append(self.step)
        if self.requests.stop_requested and not stopping:
            self.stopped.append(self.step)


def check_agreement(peers: Peers) -> None:
    """Talks over the real store: many rounds, a large value, a second session."""
    for number in range(20):
        values = peers.agree("numbers", [peers.rank, number], list, timeout_seconds=30)
        assert values == [[rank, number] for rank in range(peers.world_size)]
    large = peers.agree("large", "x" * 1_000_000, lambda texts: texts[3], timeout_seconds=30)
    assert len(large) == 1_000_000
    second = open_peers("run", timeout_seconds=30)
    assert second.nonce != peers.nonce
    second.close()


def check_a_stopped_rank(run: RunFolder, rank: int) -> None:
    """Stops a rank for a while; the others are held up for a bounded time, and train on."""
    peers = open_peers("run", timeout_seconds=60)
    requests = SaveRequestWatcher(peers, run, signals=(), timeout_seconds=STOPPED_LIMIT_SECONDS)
    dist.barrier()
    if rank == STOPPED_RANK:
        wake = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        time.sleep(0.5)
        requests.request_save(stop=True)
    longest, step, began = 0.0, 0, time.monotonic()
    while time.monotonic() < began + STOPPED_SECONDS:
        step += 1
        asked = time.monotonic()
        assert not requests.should_save(step)
        longest = max(longest, time.monotonic() - asked)
        time.sleep(0.01)
    assert not requests.stop_requested
    if rank != STOPPED_RANK:
        assert 0.5 < longest < 2 * STOPPED_LIMIT_SECONDS, longest
        assert step > 50, step
    dist.barrier()
    requests.close()
    peers.close()


def ask_by_command(run: Path) -> None:
    command = [sys.executable, "-m", "ckptkit_cli", "save-now", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["asked"]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    peers = open_peers("run", timeout_seconds=60)
    check_agreement(peers)
    run = RunFolder(sys.argv[1])
    lock = run.lock() if rank == 0 else None
    requests = SaveRequestWatcher(peers, run, interval=Interval(), signals=("SIGUSR2",))
    training = Training(requests, rank)
    dist.barrier()

    if rank == 2:
        requests.request_save()
    training.until(lambda: len(training.saved) >= 1)
    if rank == 1:
        ask_by_command(run.path)  # the others train on meanwhile, as far as they get
    training.until(lambda: len(training.saved) >= 2)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGUSR2)
    training.until(lambda: requests.stop_requested)

    report = {"saved": training.saved, "stopped": training.stopped, "steps": training.step}
    (run.path / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    requests.close()
    peers.close()
    check_a_stopped_rank(run, rank)
    if lock is not None:
        lock.close()
    end(meets=False)


if __name__ == "__main__":
    main()
