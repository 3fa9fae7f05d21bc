"""Where the objects of a run's steps lie, and in which order they come and go.

RUN/STEP/ckptkit.json         the manifest: a step is whole while it is there, so it is put last
                              and removed first
RUN/STEP/.ranks/uploading     put first: tells that a save of ours is under way, or was broken off
RUN/STEP/.ranks/R.json        the record of rank R, after its files; removed once the step is whole
RUN/.ckptkit/in-use/STEP/     marks of those that read a step, see ckptkit.storage.remote_run
RUN/.ckptkit/newest           names the step that became whole last, for listings may lag behind
RUN/.ckptkit/identity         tells the run from all others, also from an earlier one of its URL
RUN/.ckptkit/job              the nonce of the job that opened the run last
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from ckptkit.core.errors import OutputExistsError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.storage.run_marks import MARKS_FOLDER
from ckptkit.uploading.store import Store
from ckptkit.writer.record import FOLDER

UPLOADING = f"{FOLDER}/uploading"
_IDENTITY = f"{MARKS_FOLDER}/identity"
_JOB = f"{MARKS_FOLDER}/job"
_NEWEST = f"{MARKS_FOLDER}/newest"
_IDENTITY_BYTES = 8
IN_USE = f"{MARKS_FOLDER}/in-use"
MARK_SECONDS = 3600.0
"""After which a mark that was not renewed is that of a dead process."""


def claim_step(store: Store, step: str, attempt: str) -> None:
    """Makes a step's folder ready for the objects of a save; every rank may call this.

    A whole step that is replaced stops being one here, and not in the middle of what follows.

    Raises:
        OutputExistsError: If something lies there that no save of ours left.
        CkptkitError: If the store refuses.
    """
    manifest, mark = f"{step}/{MANIFEST_NAME}", f"{step}/{UPLOADING}"
    is_whole = store.look(manifest) is not None
    if not is_whole and store.entries(step) and store.look(mark) is None:
        raise OutputExistsError(
            f"something without a {MANIFEST_NAME} was found where the step was to go",
            where=store.where(step),
            hint="it may be another tool's checkpoint; move it away, or save to another URL",
        )
    # Before the manifest goes: other ranks look for one of the two.
    store.put(mark, attempt.encode())
    if is_whole:
        store.remove(manifest)


def is_in_use(store: Store, step: str) -> bool:
    """Tells whether somebody reads a step, or pushes it.

    Raises:
        CkptkitError: If the store refuses.
    """
    return store.has_younger(f"{IN_USE}/{step}", MARK_SECONDS)


def remove_step(store: Store, step: str) -> None:
    """Removes a step: first the manifest, so that no half of it looks whole.

    Raises:
        CkptkitError: If the store refuses.
    """
    store.remove(f"{step}/{MANIFEST_NAME}")
    store.remove_all(tuple(store.entries(step)))
    store.remove_all(store.folder_markers(step))


def remove_unfinished(store: Store, step: str) -> None:
    """Removes what a save of ours left of a step that it could not finish, if it did.

    Raises:
        CkptkitError: If the store refuses.
    """
    if store.look(f"{step}/{UPLOADING}") is None or store.look(f"{step}/{MANIFEST_NAME}"):
        return
    mark = f"{step}/{UPLOADING}"
    store.remove_all([path for path in store.entries(step) if path != mark])
    store.remove(mark)  # last: without it nobody would know whose the rest is


def unfinished_steps(paths: Collection[str]) -> list[str]:
    """Returns the folders, of those that paths name, in which a save of ours was broken off."""
    steps = {path.partition("/")[0] for path in paths if path.endswith(f"/{UPLOADING}")}
    return sorted(step for step in steps if f"{step}/{MANIFEST_NAME}" not in paths)


def note_newest(store: Store, step: str) -> None:
    """Notes that a step has just become whole.

    Raises:
        CkptkitError: If the store refuses.
    """
    store.put(_NEWEST, step.encode())


def newest_step(store: Store) -> str:
    """Returns the step that became whole last, if it still is; else an empty text.

    Raises:
        CkptkitError: If the store refuses.
    """
    step = (store.get(_NEWEST) or b"").decode(errors="replace").strip()
    return step if step and store.look(f"{step}/{MANIFEST_NAME}") is not None else ""


def run_identity(store: Store) -> str:
    """Returns what tells a run from all others; a run that has none is given one.

    Raises:
        CkptkitError: If the store refuses.
    """
    found = store.get(_IDENTITY)
    if found:
        return found.decode(errors="replace").strip()
    identity = secrets.token_hex(_IDENTITY_BYTES)
    store.put(_IDENTITY, identity.encode())
    return identity


def take_run(store: Store, nonce: str) -> None:
    """Notes which job writes to a run; an earlier one that still does will find that out.

    Raises:
        CkptkitError: If the store refuses.
    """
    store.put(_JOB, nonce.encode())


def check_run(store: Store, nonce: str) -> None:
    """Sees that no other job has opened a run since.

    Raises:
        RefusedError: If one has.
        CkptkitError: If the store refuses.
    """
    found = store.get(_JOB)
    if found is not None and found != nonce.encode():
        raise RefusedError(
            "another job has opened the run since, and saves to it",
            where=store.location,
            hint="give every job a URL of its own; this one's steps stay on the nodes' disks",
        )
