"""Runs scripts on several ranks as forks of a process that has imported torch; see `ranks.py`.

Starting torchrun and its ranks takes seconds of imports each time. What is forked from must have
no threads, so the host of the store is a fork as well. A script is run by a fork, which imports
what the script imports, once for all ranks.
"""

from __future__ import annotations

import ast
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.fork_host import forked, freeze

IMPORTED = (
    *("numpy", "safetensors.torch", "torch", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim.adamw"),
    "torch._dynamo",  # what an optimizer imports at its first step
    "ckptkit.training",
    __name__,
)
TERMINATING_SECONDS = 30.0


def be_rank(rank: int, processes: int, listener: socket.socket) -> None:
    """Runs the script as torchrun would have started it."""
    port = listener.getsockname()[1]
    listener.close()
    os.setpgid(0, 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The store is hosted by a process of its own, as the agent of torchrun hosts it.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"}
    runpy.run_path(sys.argv[0], run_name="__main__")


def host_store(listener: socket.socket) -> NoReturn:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
    )
    while store is not None:
        time.sleep(3600)
    os._exit(0)


def wait_for(ranks: set[int], until: float) -> dict[int, int]:
    """Waits until all ranks have ended, or one has failed; returns the statuses."""
    statuses: dict[int, int] = {}
    while ranks - statuses.keys() and not any(statuses.values()) and time.monotonic() < until:
        for rank in ranks - statuses.keys():
            child, status = os.waitpid(rank, os.WNOHANG)
            if child:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return statuses


def import_for(script: Path) -> None:
    """Imports what a script imports; what fails is left to the ranks, which report it."""
    for statement in ast.parse(script.read_bytes()).body:
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if isinstance(statement, ast.Import | ast.ImportFrom) and not is_future:
            with suppress(Exception):
                exec(compile(ast.Module([statement], []), str(script), "exec"), {})  # noqa: S102
    freeze()


def run_script(words: list[str], processes: int, limit_seconds: float) -> int:
    """Runs a script on all ranks; returns 0 if all of them ended with 0.

    When a rank fails, the others are terminated, as torchrun does.
    """
    until = time.monotonic() + limit_seconds
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    import_for(Path(words[0]))
    listener = socket.create_server(("127.0.0.1", 0))
    store = forked(partial(host_store, listener))
    ranks = [forked(partial(be_rank, rank, processes, listener)) for rank in range(processes)]
    listener.close()
    statuses = wait_for(set(ranks), until)
    failed = len(statuses) < len(ranks) or any(statuses.values())
    end(set(ranks) - statuses.keys())
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return int(failed)


def end(left: set[int]) -> None:
    """Terminates ranks; kills those that do not end in time."""
    for kill, seconds in ((signal.SIGTERM, TERMINATING_SECONDS), (signal.SIGKILL, 60.0)):
        for rank in left:
            os.kill(rank, kill)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            left = left - wait_for(left, until).keys()
