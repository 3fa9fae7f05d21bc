"""Pairs of ranks as forks of a process that has imported torch already, which saves seconds each.

What is forked from must be without threads, so the host of the store is a fork as well.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

LIMIT_SECONDS = 100  # of one process's life; a rank that hangs dies of SIGALRM
LEAVE_SECONDS = 10.0  # that writers have to notice that their rank is gone
RANKS = 2
Job = Callable[[int], None]


def forked(job: Callable[[], None]) -> int:
    """Runs a job in a child; returns its number. An exception is printed and gives status 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_SECONDS)
    try:
        job()
    except BaseException:  # noqa: BLE001  whatever it is, the child must not go on as its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # The teardown of gloo's threads now and then aborts a process that is done.
    sys.stdout.flush()
    os._exit(0)


def ended(child: int) -> int:
    """Waits for a child; returns its status, minus the signal where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True)
class Pair:
    """Two ranks that do the same job, in a group of processes of their own."""

    job: Job  # what each rank does; it is given its rank
    ends: tuple[int, int] = (0, 0)  # the statuses with which the ranks have to end
    # Whether the store lives in rank 0, and ends with it; else it outlives both, as that of
    # torchrun does.
    rank_0_hosts: bool = False

    def run(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        first = forked(lambda: self._live(0, listener))
        os.setpgid(first, first)
        second = forked(lambda: self._live(1, listener, first))
        host = None if self.rank_0_hosts else forked(lambda: _host(listener))
        listener.close()
        try:
            found = ended(first), ended(second)
        finally:
            if host is not None:
                os.kill(host, signal.SIGKILL)
                ended(host)
        assert found == self.ends, f"the ranks ended with {found} and not {self.ends}"
        deadline = time.monotonic() + LEAVE_SECONDS
        while left := _alive_in(first):
            assert time.monotonic() < deadline, f"{left} outlived their ranks"
            time.sleep(0.05)

    def _live(self, rank: int, listener: socket.socket, group: int = 0) -> None:
        os.setpgid(0, group)
        hosts = self.rank_0_hosts and rank == 0
        port = listener.getsockname()[1]
        store = _store(listener) if hosts else TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.job(rank)


def _store(listener: socket.socket) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
    )


def _alive_in(group: int) -> list[int]:
    """Lists the processes of a group, without those that nobody has taken note of."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            # A thread that is still ending has the files, and thereby the locks, of the process.
            is_gone = state == "Z" and len([*(entry / "task").iterdir()]) == 1
        except OSError:  # it has just gone
            continue
        if int(of_group) == group and not is_gone:
            found.append(int(entry.name))
    return found


def _host(listener: socket.socket) -> None:
    store = _store(listener)
    while store is not None:
        time.sleep(LIMIT_SECONDS)


def side_by_side(jobs: Mapping[str, Callable[[], None]], at_once: int) -> None:
    """Runs jobs in forks, some at a time, and says in the end which of them failed."""
    left = list(jobs.items())
    running: dict[int, str] = {}
    failed: list[str] = []
    while left or running:
        while left and len(running) < at_once:
            name, job = left.pop(0)
            running[forked(job)] = name
        child, status = os.wait()
        if os.waitstatus_to_exitcode(status):
            failed.append(running[child])
        del running[child]
    assert not failed, failed
