"""Runs scripts on two ranks, over and over, in processes that have the heavy imports behind them.

A process that has imported torch, Transformers and TRL, or torch alone if its argument is `light`,
takes commands from its input, one a line:
`{"module": NAME or null, "arguments": [SCRIPT, …], "folder": WHERE}`. For each it forks two ranks,
says their process ids, and when both have ended, their exit statuses (negative for signals). What
they say is in `rank0.log` and `rank1.log` of the folder.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import logging
import os
import runpy
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

RANKS = 2
IS_LIGHT = sys.argv[1:] == ["light"]
LIGHT = ("torch.distributed.fsdp", "torch._dynamo", "ckptkit.training")
HEAVY = ("accelerate", "datasets", "peft", "transformers.trainer", "trl")
LAZY = {  # taken out of modules that import when they are asked for something
    "transformers": ("LlamaForCausalLM", "PreTrainedTokenizerFast", "Trainer"),
    "trl": ("SFTConfig", "SFTTrainer"),
}


def run(module: str | None, arguments: list[str]) -> None:
    """Runs a script as Python would, or as `python -m MODULE SCRIPT` would."""
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    if not IS_LIGHT:  # what examples/on_cpu.py does before it runs a script
        importlib.import_module("on_cpu").prepare_for(arguments)
    if module is None:
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv.insert(0, module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def be_rank(rank: int, port: int, command: dict[str, Any]) -> NoReturn:
    """Becomes a rank as torchrun would start it; its end is not left to threads of gloo."""
    log = os.open(
        Path(command["folder"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = logging.getLogger("ckptkit")
    logs.addHandler(logging.StreamHandler())
    logs.setLevel(logging.INFO)
    status = 1
    try:
        run(command["module"], command["arguments"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  shown, and told by the status
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as at the end of any program; what os._exit leaves out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        port = free_port()
        ids = []
        for rank in range(RANKS):
            identity = os.fork()
            if identity == 0:
                be_rank(rank, port, command)
            ids.append(identity)
        say(ids)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(identity, 0)[1]) for identity in ids]
        say(statuses)


def main() -> None:
    for name in LIGHT if IS_LIGHT else (*LIGHT, *HEAVY):
        importlib.import_module(name)
    if not IS_LIGHT:
        for name, parts in LAZY.items():
            for part in parts:
                getattr(importlib.import_module(name), part)
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()  # no rank looks through what was imported here
    say("ready")
    serve()


if __name__ == "__main__":
    main()
