"""Commands, and the process that uploads, in forks of a process that has imported all of it."""

from __future__ import annotations

import importlib
import pkgutil
import socket
import sys
from typing import Any

from tests.campaigns.chaos.system_calls import Fault, arm

IMPORTED = ("numpy", "s3fs", "hf_xet", "huggingface_hub.hf_api", "ckptkit.api")
PACKAGES = ("ckptkit_cli", "ckptkit.conversion", "ckptkit.engine", "ckptkit.formats", "ckptkit.hub")


def import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not module.name.startswith("__"):
                importlib.import_module(f"{package}.{module.name}")


def command(fault: dict[str, Any], arguments: list[str]) -> int:
    from ckptkit_cli.main import main

    arm(Fault(**fault))
    return main(arguments)


def upload(fault: dict[str, Any], place: str) -> None:
    from ckptkit.writer.upload.uploader import main

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    sys.argv = ["uploader", str(connection.detach()), "0"]
    arm(Fault(**fault))
    main()
