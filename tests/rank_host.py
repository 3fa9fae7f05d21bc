"""Runs scripts on several ranks, over and over, as forks of a process that has imported torch.

Starting torchrun and its ranks takes seconds of imports each time. This process takes commands
from its input, one JSON document a line: `arguments` (the script first), `processes`,
`environment`, `folder` (for `stdout` and `stderr`), `limit_seconds`. It answers with the status:
0, or 1 when a rank failed, in which case the others are terminated, as torchrun does. What is
forked from must have no threads, so the host of the store is a fork as well.

Each command is run by a fork, which imports what the script imports, once for all ranks. What
the scripts of all commands import can be given as arguments, names of modules.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    *("numpy", "safetensors.torch", "torch", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim.adamw"),
    "torch._dynamo",  # what an optimizer imports at its first step
    "ckptkit.training",
)
TERMINATING_SECONDS = 30.0


def become_rank(rank: int, port: int, command: dict[str, Any]) -> NoReturn:
    """Runs the script as torchrun would have started it."""
    os.setpgid(0, 0)
    processes = str(command["processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The store is hosted by a process of its own, as the agent of torchrun hosts it.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"}
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  shown, and visible in the status
        traceback.print_exc()
    finally:
        # As at the end of any program. The teardown of gloo's threads, which may abort, is left
        # out by os._exit.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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


def forked() -> int:
    sys.stdout.flush()
    return os.fork()


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
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()  # no rank looks through what was imported here


def run(command: dict[str, Any]) -> int:
    """Runs a script on all ranks; returns 0 if all of them ended with 0."""
    child = forked()
    if child:
        return int(os.waitpid(child, 0)[1] != 0)
    status = 1
    try:
        os.environ.clear()
        os.environ |= command["environment"]
        sys.argv = list(command["arguments"])
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        status = run_ranks(command)
    except BaseException:  # noqa: BLE001  shown, and visible in the status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run_ranks(command: dict[str, Any]) -> int:
    until = time.monotonic() + command["limit_seconds"]
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = os.open(
            Path(command["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.dup2(file, number)
        os.close(file)
    import_for(Path(sys.argv[0]))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = forked()
    if store == 0:
        host_store(listener)
    ranks = []
    for rank in range(command["processes"]):
        ranks.append(forked())
        if ranks[-1] == 0:
            listener.close()
            become_rank(rank, port, command)
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


def main() -> None:
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()  # no rank looks through what was imported here
    answer("ready")
    for line in sys.stdin:
        answer(run(json.loads(line)))


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
