"""What a soak must not leave: processes, sockets, shared memory, and files that nothing needs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it
# Of a run: what says to whom it belongs, and what a watch has pushed.
_MARKS = re.compile(r"\.ckptkit(/(lock|identity|job|newest|watch(/.*)?))?")


def processes(variable: str, mark: str) -> list[int]:
    """Returns the processes that were started with a mark in their environment and go on."""
    word = f"{variable}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and word in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill(variable: str, mark: str) -> None:
    """Kills all processes with a mark, until no new one comes."""
    while left := processes(variable, mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def outliving(variable: str, mark: str, seconds: float, spared: Collection[int] = ()) -> list[str]:
    """Waits until only some processes are left; returns the others, described."""
    until = time.monotonic() + seconds
    while left := [pid for pid in processes(variable, mark) if pid not in spared]:
        if time.monotonic() > until:
            return [_description(pid) for pid in left]
        time.sleep(0.01)
    return []


def _description(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"process {pid} ({state}): {' '.join(words.split())[:160]}"
    return f"process {pid}"


def shared_memory() -> set[str]:
    return {path.name for path in MEMORY.iterdir()} if MEMORY.is_dir() else set()


def sockets() -> set[str]:
    """Returns the abstract sockets of ckptkit that no living process has open."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    except OSError:
        return set()
    fields = [line.split(maxsplit=7) for line in lines]
    ours = {field[6]: field[7] for field in fields if len(field) > 7 and "@ckptkit" in field[7]}
    for link in Path("/proc").glob("[0-9]*/fd/*") if ours else ():
        with suppress(OSError):
            ours.pop(str(link.readlink()).removeprefix("socket:[").removesuffix("]"), None)
    return set(ours.values())


def stray_files(run: Path, names: Collection[str]) -> list[str]:
    """Returns what is in a run at rest beside its steps and their marks."""
    found = []
    for path in sorted(run.rglob("*")) if run.is_dir() else ():
        place = path.relative_to(run).as_posix()
        top = place.partition("/")[0]
        is_hidden = path.name.startswith(".") and "ckptkit-" in path.name
        if is_hidden if top in names else not _MARKS.fullmatch(place):
            found.append(place)
    return found
