"""What another user of the machine can do: code that runs with the number of nobody."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"
)


def as_nobody(act: Callable[[], Any]) -> Any:
    """Calls a function as another user, in a fork; returns its result, which is JSON."""
    receiving, sending = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(receiving)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with os.fdopen(sending, "wb") as answer:
                answer.write(json.dumps(act()).encode())
            status = 0
        except BaseException:  # noqa: BLE001  shown, and visible in the status
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as answer:
        data = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return json.loads(data)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yields a folder such as `/tmp`, in which every user can make files."""
    folder = Path(tempfile.mkdtemp(prefix="ckptkit-everybody-", dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def can_be_read(path: Path) -> bool:
    """Returns whether another user can list a folder, or read a file."""

    def read() -> bool:
        try:
            os.listdir(path) if path.is_dir() else path.read_bytes()  # noqa: PTH208
        except PermissionError:
            return False
        return True

    return bool(as_nobody(read))
