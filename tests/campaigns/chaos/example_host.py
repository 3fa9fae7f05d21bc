"""Runs examples as forks of a process that has imported what they import; see `example_client.py`.

Usage: example_host.py SOCKET. A rank lives as long as its client: it is killed when that is. It is
armed as ckpt-chaos arms a program that it starts. The examples leave Python's and NumPy's random
numbers to chance; saves have them, so that two runs that are compared need the same.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
from ckpt_chaos.targets.common import arm_from_env

IMPORTED = (
    *("safetensors.torch", "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp", "torch.optim.adamw", "accelerate", "transformers.trainer", "peft"),
    *("transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "ckptkit.training"),
    *("ckptkit.integrations.accelerate", "ckptkit.integrations.transformers", "ckptkit.run"),
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def become_rank(connection: socket.socket) -> NoReturn:
    """Does what the client was started for; ends the process."""
    size_bytes = int.from_bytes(connection.recv(8), "little")
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    data = b""
    while len(data) < size_bytes:
        data += connection.recv(size_bytes - len(data))
    connection.close()
    request = json.loads(data)
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ |= request["environment"]
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    script, *sys.argv[1:] = request["arguments"]
    sys.path[0] = str(EXAMPLES)
    status = 1
    try:
        arm_from_env(rank, lazy=True)
        run(script)
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


def run(script: str) -> None:
    by_module = script == "ckptkit.run"
    sys.argv[by_module] = str(EXAMPLES / (sys.argv[1] if by_module else script))
    importlib.import_module("on_cpu").prepare_for(sys.argv)  # as examples/on_cpu.py does
    if by_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def serve(listener: socket.socket) -> None:
    clients: dict[int, tuple[socket.socket, int]] = {}  # and the rank of each
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLIN)  # closed when the campaign has ended, in whatever way
    while True:
        for descriptor, _ in poll.poll(20):
            if descriptor == 0:
                return
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                rank = os.fork()
                if rank == 0:
                    listener.close()
                    become_rank(connection)
                clients[connection.fileno()] = connection, rank
                poll.register(connection, select.POLLHUP | select.POLLRDHUP)
            else:
                os.kill(clients[descriptor][1], signal.SIGKILL)
        for descriptor, (connection, rank) in list(clients.items()):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                with suppress(OSError):  # the client was killed
                    connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
                poll.unregister(descriptor)
                connection.close()
                del clients[descriptor]


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()  # no rank looks through what was imported here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        serve(listener)
    os._exit(0)


if __name__ == "__main__":
    main()
