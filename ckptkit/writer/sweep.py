"""Removes hidden folders of a run that a kill or a failed attempt left behind."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from msgspec import Struct

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import OLD, TRASH, remove_tree
from ckptkit.storage.locations import MARKS_FOLDER, STAGED_FILES, WORK_INFIX

# A step's folder may have any name; what follows it shows that a save made the hidden folder.
_HIDDEN = re.compile(
    rf"\.(?P<name>.+?){re.escape(WORK_INFIX)}"
    rf"(?:(?P<kind>{OLD}|{TRASH})-[0-9a-f-]+|[0-9a-f]+-\d+)"
)
_SIDECARS = re.compile(r"[0-9a-f]{8}")  # folders named after the nonce of a job
_STALE_SECONDS = 86_400.0  # without a write: no save that goes on
_LOCK = ".lock"  # in work folders of other commands, which sweep them themselves


class Leftover(Struct, frozen=True):
    """A hidden directory in a run."""

    path: Path  # the directory
    step: str  # the name of its step
    kind: str  # `work`, `old` or `trash`


def leftovers(run: Path, step: str = "") -> tuple[Leftover, ...]:
    """Lists the hidden folders of saves in a run, including those in use.

    If a step is named, those of others are left out unless nothing was written to them for a day.
    """
    folders = []
    for path in sorted(run.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink() or (path / _LOCK).exists():
            continue
        if match["name"] == (step or match["name"]) or _is_stale(path):
            folders.append(Leftover(path, match["name"], match["kind"] or "work"))
    return tuple(folders)


def _is_stale(folder: Path) -> bool:
    newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - newest > _STALE_SECONDS


def sweep(run: Path, step: str = "") -> tuple[str, ...]:
    """Restores a step whose replacement was interrupted, and removes all other leftovers.

    Nothing may be saving into the run, or the step if one is named, at the same time; of other
    steps, only what nothing was written to for a day is removed.

    Returns:
        Notes for the log.
    """
    notes = []
    try:
        folders = leftovers(run, step)
    except OSError as error:
        return (f"{run} could not be searched for leftovers of earlier jobs: {error}",)
    # Replaced steps come first: one may be the only complete copy of its step.
    for leftover in sorted(folders, key=lambda item: item.kind != OLD):
        path, final = leftover.path, run / leftover.step
        try:
            whole = (path / MANIFEST_NAME).is_file()
            if leftover.kind == OLD and whole and not os.path.lexists(final):
                path.rename(final)
                notes.append(f"{final.name} was restored, since its replacement was interrupted")
            else:
                shutil.rmtree(path)
                notes.append(f"{path.name}, left by an interrupted save, was removed")
        except OSError as error:
            notes.append(f"{path.name} could not be removed: {error}")
    if folders:
        LOCAL_DISK.sync_directory(run)
    marks = run / MARKS_FOLDER
    for path in sorted(marks.iterdir()) if marks.is_dir() and not step else ():
        # The sidecar folder of a job that has ended.
        if _SIDECARS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                shutil.rmtree(path)
            except OSError as error:
                notes.append(f"{path.name} could not be removed: {error}")
    return tuple(notes)


def discard(folder: str) -> tuple[str, ...]:
    """Removes the working folder of an attempt; returns notes on what could not be removed."""
    path = Path(folder)
    path = path.parent if path.name == STAGED_FILES else path
    match = _HIDDEN.fullmatch(path.name)
    if match is None or match["kind"] is not None:
        raise RefusedError(
            "not removed: the directory is no working folder of a save",
            where=folder,
            hint="this is a bug of ckptkit; please report it with this text",
        )
    try:
        remove_tree(path)
    except OSError as error:
        return (f"the working folder could not be removed: {error}",)
    return ()
