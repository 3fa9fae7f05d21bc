"""Hidden directories of a run that a kill or a failed attempt left behind."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.runs.marks import MARKS_FOLDER
from ckptkit.storage.local.disk import LOCAL_DISK, Disk
from ckptkit.storage.local.names import WORK_INFIX
from ckptkit.writer.commit import OLD, TRASH

# A step's folder may have any name; what follows it tells that a save made the hidden one.
_HIDDEN = re.compile(
    rf"\.(?P<name>.+?){re.escape(WORK_INFIX)}"
    rf"(?:(?P<kind>{OLD}|{TRASH})-[0-9a-f-]+|[0-9a-f]+-\d+)"
)
_DESCRIPTIONS = re.compile(r"[0-9a-f]{8}")  # named after the job that made them
_TRIES = 3  # another rank may be adding to the folder at this moment, or removing it
_LOCK = ".lock"  # in the folders of other commands, which clear up after themselves


@dataclass(frozen=True, slots=True)
class Leftover:
    """A hidden directory in a run.

    Attributes:
        path: The directory.
        step: The name of the step that it was to be, or was.
        kind: `work`, `old` or `trash`.
    """

    path: Path
    step: str
    kind: str


def leftovers(run: Path) -> tuple[Leftover, ...]:
    """Lists the hidden directories that saves make in a run, those in use included."""
    found = []
    for path in sorted(run.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and not (path / _LOCK).exists():
            found.append(Leftover(path, match["name"], match["kind"] or "work"))
    return tuple(found)


def sweep(run: Path, disk: Disk = LOCAL_DISK) -> tuple[str, ...]:
    """Puts back a step whose replacement was interrupted, and removes all else that is left.

    Nothing may be saving into the run meanwhile.

    Args:
        run: The run's directory.
        disk: The file operations of the platform.

    Returns:
        What was done, and what could not be, for the log.
    """
    notes = []
    try:
        found = leftovers(run)
    except OSError as error:
        return (f"{run} could not be searched for what earlier jobs left: {error}",)
    # What was moved away comes first: it may be the only whole copy of its step.
    for leftover in sorted(found, key=lambda item: item.kind != OLD):
        try:
            notes.append(_settle(leftover, run / leftover.step))
        except OSError as error:
            notes.append(f"{leftover.path.name} could not be removed: {error}")
    if found:
        disk.sync_directory(run)
    return (*notes, *_sweep_descriptions(run / MARKS_FOLDER))


def discard(folder: str) -> tuple[str, ...]:
    """Removes the working folder of an attempt.

    Returns:
        Notes on what could not be removed.
    """
    path = Path(folder)
    match = _HIDDEN.fullmatch(path.name)
    if match is None or match["kind"] is not None:
        raise RefusedError(
            "a directory was to be removed that is no working folder of a save",
            where=folder,
            hint="this is a fault of ckptkit; please report it with this text",
        )
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return ()
        except OSError as error:
            problem = error
        else:
            return ()
    return (f"the working folder could not be removed: {problem}",) if problem else ()


def _sweep_descriptions(marks: Path) -> list[str]:
    """Removes what ended jobs kept to lie beside the shards of their steps."""
    notes = []
    for path in sorted(marks.iterdir()) if marks.is_dir() else ():
        if _DESCRIPTIONS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                shutil.rmtree(path)
            except OSError as error:
                notes.append(f"{path.name} could not be removed: {error}")
    return notes


def _settle(leftover: Leftover, final: Path) -> str:
    whole = (leftover.path / MANIFEST_NAME).is_file()
    if leftover.kind == OLD and whole and not os.path.lexists(final):
        leftover.path.rename(final)
        return f"{leftover.step} was put back, since its replacement was interrupted"
    shutil.rmtree(leftover.path)
    return f"{leftover.path.name} was removed, which an interrupted save had left"
