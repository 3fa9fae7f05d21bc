"""Runs `ckptkit` again and again in forked children, which kill themselves on request.

One line of JSON on standard input asks for a run: `arguments` for the command, and `die_at`, the
number of the write to the state or to what is built at which the child is killed; 0 for none. The
answers are lines of JSON, too: first the child's `pid`, then its `status`, which has to be asked
for with the `pid` if the request says that others run `beside`. Modules that all children need can
be named as arguments; `s3fs` has them ready to make clients, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

# What every child needs is imported once, before it is forked.
import hf_xet  # noqa: F401
import huggingface_hub.hf_api  # noqa: F401

import ckptkit.hub.watch.watch  # noqa: F401
import ckptkit_cli.watch  # noqa: F401
from ckptkit_cli.main import main

_WRITES = {"os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir"}


def die_at(count: int, folder: str) -> None:
    """Has this process killed when it changes something below the folder for the nth time."""
    left = [count]

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event in _WRITES or (event == "open" and _writes(arguments))
        if not is_write or folder not in str(arguments[0]):
            return
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def run(request: dict[str, Any]) -> int:
    if request["die_at"]:
        die_at(request["die_at"], request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return main(request["arguments"])


def prepare(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    if "s3fs" in modules:
        from tests.s3_client import prepare_clients

        prepare_clients()
    gc.freeze()


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            tell_status(request["pid"])
            continue
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = run(request)
            finally:
                os._exit(status)
        say({"pid": pid})
        if not request.get("beside"):
            tell_status(pid)


def tell_status(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    say({"status": os.waitstatus_to_exitcode(status)})


def say(document: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    prepare(sys.argv[1:])
    serve()
