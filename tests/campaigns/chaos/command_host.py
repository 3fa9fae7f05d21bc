"""Runs commands, and the process that uploads, as forks of a process that has imported all of it.

One JSON document a line on standard input: `arguments` of the command, or `socket`, where the
process that uploads finds its trainer; `fault`; `output`, a file. The answer is the status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from tests.campaigns.chaos.system_calls import Fault, arm
from tests.s3_client import prepare_clients

IMPORTED = ("numpy", "s3fs", "hf_xet", "huggingface_hub.hf_api", "ckptkit.api")
PACKAGES = ("ckptkit_cli", "ckptkit.conversion", "ckptkit.engine", "ckptkit.formats", "ckptkit.hub")


def act(request: dict[str, Any]) -> NoReturn:
    """Does what is requested, with a fault in the middle of it; ends the process."""
    log = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        if "socket" in request:
            upload(request["socket"], Fault(**request["fault"]))
        else:
            status = command(request["arguments"], Fault(**request["fault"]))
    except BaseException:  # noqa: BLE001  the process must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def command(arguments: list[str], fault: Fault) -> int:
    from ckptkit_cli.main import main

    arm(fault)
    return main(arguments)


def upload(place: str, fault: Fault) -> None:
    from ckptkit.writer.upload.uploader import main

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    sys.argv = ["uploader", str(connection.detach()), "0"]
    arm(fault)
    main()


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not module.name.startswith("__"):
                importlib.import_module(f"{package}.{module.name}")
    prepare_clients()
    assert threading.active_count() == 1, threading.enumerate()  # no lock may be held by another
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            act(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
