"""Commands in forked children of one process, which has imported all they need."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fork_host import Child, ForkHost

_WRITES = {"os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir"}
IMPORTED = (
    *("s3fs", "hf_xet", "huggingface_hub.hf_api", "ckptkit.hub.watch.watch"),
    *("ckptkit_cli._pages", "ckptkit_cli._progress", "ckptkit_cli.consolidate"),
    *("ckptkit_cli.watch", "ckptkit.conversion.job", "ckptkit.deltas.create"),
    *("ckptkit.runs.pruning", "tests.crash.forked_commands"),
)


class ForkedCommands:
    def __init__(self, host: ForkHost) -> None:
        self.host = host

    def start(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        die_at: int = 0,
        folder: Path | None = None,
        streams: Sequence[int] = (),
    ) -> Child:
        """Starts a command.

        It is killed when it changes something in the folder, that is `all` beside the log unless
        given, for the nth time.
        """
        place = str(folder or log.parent / "all")
        return self.host.start(command, [*arguments], die_at, place, log=log, streams=streams)


@contextmanager
def running_forks(**environment: str) -> Iterator[ForkedCommands]:
    with ForkHost(*IMPORTED, prepare=None, **{"HF_HUB_OFFLINE": "1"} | environment) as host:
        yield ForkedCommands(host)


def command(arguments: list[str], count: int, folder: str) -> int:
    from ckptkit_cli.main import main

    if count:
        die_at(count, folder)
    return main(arguments)


def die_at(count: int, folder: str) -> None:
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


def consolidate_in_parts(
    source: str, url: str, storage: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Weights go to the store in parts, as large ones do."""
    import ckptkit
    from ckptkit.storage.places import Place
    from ckptkit.storage.remote import s3

    s3.SMALL_BYTES = 2048
    ckptkit.consolidate(source, Place(url, storage), **options)
