"""Folders of accelerate's: which may be replaced as a whole, and which is the newest to load."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError, ResumeError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.dcp import METADATA
from ckptkit.integrations.accelerator_state import AUTOMATIC_PREFIX, Target
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.run_marks import MARKS_FOLDER
from ckptkit.training import names
from ckptkit.training.run_folder import saved_steps


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be loaded.

    Attributes:
        folder: The directory.
        ours: Whether ckptkit wrote it.
        newest: Whether it was chosen as the newest of a run, so that an older one may serve.
    """

    folder: Path
    ours: bool
    newest: bool = False


def obstacle(target: Target) -> str:
    """Tells why a folder cannot be replaced as a whole; empty where it can.

    It can if nothing is lost: if it is not there or empty, or holds what ckptkit wrote and
    nothing else.
    """
    folder = target.folder
    if folder.name.startswith(".") or folder == folder.parent:
        return f"{folder} has a name that is none for a step"
    if folder.is_symlink() or folder.is_mount():
        return f"{folder} is a link or a mount point"
    if not folder.exists():
        return ""
    extra = _not_ours(folder)
    return f"{folder} holds {extra}, which ckptkit did not write" if extra else ""


def _not_ours(folder: Path) -> str:
    """Returns the name of something in a folder that is no part of a save of ours."""
    try:
        there = {path.relative_to(folder).as_posix() for path in _files_below(folder)}
        ours = set(read_manifest(folder).files) if MANIFEST_NAME in there else set()
    except (OSError, CkptkitError) as error:
        return f"what cannot be read ({error})"
    return min(there - ours - {MANIFEST_NAME}, default="") if ours else min(there, default="")


def _files_below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return [folder]
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def given_folder(folder: Path) -> Chosen | None:
    """Returns what lies in a folder that the user has named; None if no sharded model does.

    Raises:
        ResumeError: If it is not there.
    """
    if not folder.is_dir():
        raise ResumeError("no such directory was found", where=str(folder))
    if not (folder / names.model_unit(0) / METADATA).is_file():
        return None
    return Chosen(folder, ours=(folder / MANIFEST_NAME).is_file())


def newest_folder(run: Path, models: int, optimizers: int) -> Chosen:
    """Returns the newest complete folder among those that accelerate has named by itself.

    One that stock accelerate wrote counts as complete if all is there that it writes before the
    random states, which come last.

    Args:
        run: The directory above them.
        models: How many models there are.
        optimizers: How many optimizers there are.

    Raises:
        ResumeError: If there is none.
    """
    units = [names.model_unit(i) for i in range(models)]
    units += [names.optimizer_unit(i) for i in range(optimizers)]
    needed = [f"{unit}/{METADATA}" for unit in units] + [names.random_states_file(0)]
    found = saved_steps(run, AUTOMATIC_PREFIX) if run.is_dir() else ()
    for saved in reversed(found):
        if saved.complete:
            return Chosen(saved.path, ours=True, newest=True)
        is_ours = (saved.path / MANIFEST_NAME).exists()
        if not is_ours and all((saved.path / name).is_file() for name in needed):
            return Chosen(saved.path, ours=False)
    raise ResumeError(
        "no complete folder of automatic_checkpoint_naming was found",
        where=str(run),
        hint="name the folder to load",
    )


def remove_marks(runs: set[Path]) -> None:
    """Removes what a Checkpointer leaves beside the folders of runs, and forgets the runs.

    Args:
        runs: The directories of runs in which no Checkpointer is open any more.
    """
    while runs:
        marks = runs.pop() / MARKS_FOLDER
        with suppress(OSError):
            for path in marks.iterdir():
                if path.is_file():
                    path.unlink()
            marks.rmdir()
