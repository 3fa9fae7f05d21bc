"""What the forks of a soak do: ranks, the stores that they meet in, commands."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

MARK = "CKPTKIT_SOAK"  # of the environment; shows which processes belong to a soak


def _begin() -> None:
    os.setpgid(0, 0)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)


def rank(spec: str, number: int) -> int:
    from tests.campaigns.soak.ranks import live

    _begin()
    return live(spec, number)


def tool(arguments: list[str]) -> int:
    from ckptkit_cli.main import main

    _begin()
    return main(arguments)


def store(file: str) -> NoReturn:
    """Hosts a store; writes its port to a file."""
    from torch._C._distributed_c10d import TCPStore

    _begin()
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    draft = Path(file).with_suffix(".draft")
    draft.write_text(str(hosted.port))
    draft.rename(file)
    while True:
        time.sleep(3600)
