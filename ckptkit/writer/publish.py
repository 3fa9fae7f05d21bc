"""Giving a finished working folder the name of its step, and clearing away what it replaces."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.layouts.dcp_metadata import METADATA_NAME
from ckptkit.storage.step_marks import claim
from ckptkit.storage.syscalls import Capabilities, exchange, sync_directory
from ckptkit.writer.durable import OLD, TRASH, hidden_beside, remove_whole

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def publish(folder: Path, final: Path, capabilities: Capabilities) -> Path | None:
    """Renames a working folder to its step, durably; a complete step of that name is replaced.

    Args:
        folder: The working folder, all of it durable.
        final: The step's directory, beside it.
        capabilities: What the platform offers.

    Returns:
        Where the replaced step lies now, hidden, or None where nothing was replaced.

    Raises:
        OutputExistsError: If something lies there that is no complete step of ours.
        OSError: If it cannot be renamed; then the previous step is in its place.
    """
    replaced = None
    try:
        folder.rename(final)  # an empty directory is replaced too
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        _refuse_strangers(final)
        replaced = _replace(folder, final, capabilities)
    sync_directory(final.parent, capabilities)
    return replaced


def clear(replaced: Path | None, steps: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Removes the replaced step and retired ones, as far as that is possible.

    A retired step that somebody reads stays: it is retired once more by the next save.

    Returns:
        The retired steps that are gone, and notes on what could not be removed.
    """
    removed: list[Path] = []
    notes: list[str] = []
    if replaced is not None:
        try:
            shutil.rmtree(replaced)
        except OSError as error:
            notes.append(f"what was replaced could not be removed: {error}")
    for step in steps:
        try:
            is_gone = _remove_unread(step)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{step.name} could not be removed: {error}")
            continue
        if is_gone:
            removed.append(step)
        else:
            notes.append(f"{step.name} is being read, and stays until a later save")
    return removed, notes


def _remove_unread(step: Path) -> bool:
    mark = claim(sorted(step.glob(f"*/{METADATA_NAME}")) + sorted(step.glob(METADATA_NAME)))
    if mark is None:
        return False
    with mark:
        remove_whole(step)
    return True


def _refuse_strangers(final: Path) -> None:
    if final.is_dir() and not final.is_symlink() and (final / MANIFEST_NAME).is_file():
        return
    raise OutputExistsError(
        f"something without a {MANIFEST_NAME} was found where the step was to go",
        where=str(final),
        hint="it may be another tool's checkpoint; move it away, or save into another directory",
    )


def _replace(folder: Path, final: Path, capabilities: Capabilities) -> Path:
    trash = hidden_beside(final, TRASH)
    if exchange(folder, final, capabilities):
        with suppress(OSError):  # it is hidden under its present name as well
            folder.rename(trash)
            return trash
        return folder
    old = hidden_beside(final, OLD)
    final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        old.rename(final)
        raise
    old.rename(trash)
    return trash
