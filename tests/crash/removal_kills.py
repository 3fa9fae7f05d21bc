"""Kills `--delete-source` before each change that it makes to its source, and runs it again."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.engine.outcome import Event, OutputCommitted

CHANGES = {"os.remove", "os.rmdir", "os.rename"}
SOURCE, OUT = "run", "out"


def convert(folder: Path, options: dict[str, Any], **others: Any) -> None:
    given = {"to": "hf", "names": "live", **options, **others}
    ckptkit.convert(folder / SOURCE, folder / OUT, delete_source=True, **given)


def die_before(change: int, source: Path | str = "") -> None:
    left = [change]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(str(source)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def die_once_committed(event: Event) -> None:
    if isinstance(event, OutputCommitted):
        os.kill(os.getpid(), signal.SIGKILL)


def is_killed(folder: Path, options: dict[str, Any], change: int) -> bool:
    """Runs in a process of its own until it has made some changes; -1 is until the commit."""
    process = os.fork()
    if process == 0:
        if change < 0:
            convert(folder, options, listener=die_once_committed)
        die_before(change, folder / SOURCE)
        convert(folder, options)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def run_again(folder: Path, options: dict[str, Any], stays: set[str], times: int) -> list[str]:
    """Returns what is wrong after the same command was run again."""
    wrong = []
    for _ in range(times):
        try:
            convert(folder, options)
        except CkptkitError as error:
            wrong.append(f"{type(error).__name__}: {error}")
        wrong += sorted(files(folder / SOURCE) ^ stays)
    verified = ckptkit.verify(folder / OUT)
    return [*wrong, *map(str, verified.problems)]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def kill_everywhere(checkpoint: str, place: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of kills, and the faults found after each, of which none is expected."""
    folder = Path(place)
    whole = folder / "whole"
    shutil.copytree(checkpoint, whole / SOURCE)
    convert(whole, options)
    stays = files(whole / SOURCE)
    found, change, killed = {}, -1, True
    while killed:
        case = folder / str(change)
        shutil.copytree(checkpoint, case / SOURCE)
        killed = is_killed(case, options, change)
        # One more run leaves the same files after each kill: a second one is tried after the first
        # kill, and where nothing was left to kill.
        wrong = run_again(case, options, stays, times=1 if killed and change >= 0 else 2)
        if wrong:
            found[change] = wrong
        shutil.rmtree(case)
        change += 1
    return {"kills": change - 1, "stays": sorted(stays), "wrong": found}
