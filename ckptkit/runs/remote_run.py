"""A run in an object store, which has no renames, and no locks that end with their process.

RUN/.ckptkit/in-use/STEP/NONCE.json   written by a reader of a step, and renewed while it reads
RUN/.ckptkit/removing/STEP.json       written by a process that removes a step: the files it listed

A reader writes its mark, then checks whether the step is being removed; a remover writes its mark,
then checks for readers. At least one of the two sees the other, and gives up.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from ckptkit.core.errors import CkptkitError, MissingFileError, OutputError, RefusedError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.threads import repeat
from ckptkit.formats.discovery import name_step, parse_step, parse_step_file
from ckptkit.runs.steps import StoredFile
from ckptkit.storage.locations import MARKS_FOLDER, is_read_only
from ckptkit.storage.places import PathLike, Place, place_of
from ckptkit.storage.remote.errors import as_input_error, describe_error
from ckptkit.storage.remote.store import ObjectInfo, RemoteFolder

logger = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
_IN_USE = f"{MARKS_FOLDER}/in-use"
_REMOVING = f"{MARKS_FOLDER}/removing"
_LIFE_SECONDS = 3600.0  # a mark that was not renewed for so long belongs to a dead process
_RENEWAL_SECONDS = 600.0
_CLAIM_SECONDS = 600.0  # a claim after which no removal has begun belongs to a dead process
_TRIES = 5
_TRY_SECONDS = 0.2
_NONCE_BYTES = 8
# Without these files no reader takes a step as complete, so they are removed first, in this order.
_FIRST = (MANIFEST_NAME, ".metadata", ".index.json", "trainer_state.json", "random_states_0.pkl")


def run_and_step(step: PathLike) -> tuple[Place, str]:
    """Splits the URL of a step into that of its run and the name of its folder."""
    place = place_of(step)
    run, _, name = str(place).rpartition("/")
    return place.beside(run), name


class RemoteRun:
    """A prefix with steps in it; its methods are those of `ckptkit.runs.local_run.LocalRun`."""

    def __init__(self, run: PathLike) -> None:
        place = place_of(run)
        self._objects = RemoteFolder(place, partial(_as_error, options=place.options))
        self.location = str(place)
        self._is_read_only = is_read_only(place)
        self._begun: set[str] = set()
        self._renewing = threading.Lock()

    def files(self) -> Sequence[StoredFile]:
        """Returns the objects of all steps, sorted by path."""
        objects = self._objects.entries()
        return [
            StoredFile(path, info.size_bytes, info.modified, info.identity)
            for path, info in sorted(objects.items())
            if parse_step(path.split("/", 1)[0]) is not None
        ]

    def is_live(self) -> bool | None:
        """Returns None: a store does not show whether a job writes to it."""
        return None

    def is_there(self, path: str) -> bool:
        return self._objects.look_up(path) is not None

    @contextmanager
    def hold(self, step: str, markers: Collection[str]) -> Iterator[None]:  # noqa: ARG002
        """Keeps a mark while a block of code runs; without permission there is no mark."""
        path = f"{_IN_USE}/{step}/{os.urandom(_NONCE_BYTES).hex()}.json"
        if self._is_read_only or not self._marked(path, step):
            yield
            return
        ended = repeat(_RENEWAL_SECONDS, lambda: self._renew(path, ended), "ckptkit-mark")
        try:
            yield
        finally:
            ended.set()
            with self._renewing:
                self._drop(path)

    def in_use(self, step: str, markers: Collection[str]) -> bool:  # noqa: ARG002
        marks = self._objects.entries(f"{_IN_USE}/{step}").values()
        return any(_is_younger(mark, _LIFE_SECONDS) for mark in marks)

    def claim(
        self, step: str, markers: Collection[str], files: Sequence[StoredFile]
    ) -> AbstractContextManager[object] | None:
        """Marks a step as being removed; None if it is being read."""
        self._check_writable()
        path = _claim_path(step)
        listed = {file.path: [file.identity, file.modified] for file in files}
        self._objects.put(path, json.dumps(listed).encode())
        if self.in_use(step, markers):
            self._drop(path)
            return None
        return self._claimed(step)

    def drop(self, step: str, files: Sequence[StoredFile]) -> None:  # noqa: ARG002
        """Removes some files of a claimed step."""
        self._objects.remove(*(file.path for file in files))

    def put(self, path: str, data: bytes) -> None:
        """Creates or replaces a small object of a step, which becomes visible as a whole."""
        self._check_writable()
        self._objects.put(path, data)

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise RefusedError("this storage is read-only", where=self.location)

    def remove(self, step: str, files: Sequence[StoredFile]) -> None:
        """Removes a claimed step: first the files that make it complete, then the rest."""
        now = self._list_step(step)
        listed = {file.path: [file.identity, file.modified] for file in files}
        if not all(_is_listed(path, info, listed) for path, info in now.items()):
            raise OutputError(
                "is being replaced, and was not removed", where=f"{self.location}/{step}"
            )
        self._begun.add(step)
        self._remove_in_order(list(now))
        self._objects.remove(*self._objects.folder_markers(step))
        self._objects.remove(_claim_path(step))

    def clear_up(self, *, remove: bool) -> Sequence[str]:
        """Finishes removals that a kill has interrupted, and removes marks of dead readers."""
        if remove:
            for path, mark in self._objects.entries(_IN_USE).items():
                if not _is_younger(mark, _LIFE_SECONDS):
                    self._drop(path)
        steps = []
        for path, claim in sorted(self._objects.entries(_REMOVING).items()):
            step = path.removeprefix(f"{_REMOVING}/").removesuffix(".json")
            listed = self._read_claim(path, claim)
            now = self._list_step(step)
            left = [name for name, info in now.items() if _is_listed(name, info, listed)]
            is_new = len(left) < len(now)  # the step is being replaced
            has_begun = isinstance(listed, dict) and len(left) < len(listed)
            if is_new or not has_begun:
                if remove and (is_new or not _is_younger(claim, _CLAIM_SECONDS)):
                    self._objects.remove(path)
                continue
            steps += [step] if left else []
            if remove:
                self._remove_in_order(left)
                self._objects.remove(*self._objects.folder_markers(step))
                self._objects.remove(path)
        return steps

    def _list_step(self, step: str) -> dict[str, ObjectInfo]:
        """Returns the objects of a step, a folder or files right in the run, by their paths."""
        below = self._objects.entries(step)
        if below or parse_step_file(step) is None:
            return below
        objects = self._objects.entries().items()
        return {path: info for path, info in objects if name_step(path) == step}

    def _read_claim(self, path: str, info: ObjectInfo) -> object:
        """Returns the JSON value of a claim; None if it is missing, too large or not JSON."""
        data = self._objects.get(path) if info.size_bytes <= _MOST_BYTES else None
        with suppress(ValueError, RecursionError):
            return None if data is None else json.loads(data)
        return None

    def _remove_in_order(self, paths: Sequence[str]) -> None:
        left = list(paths)
        for ending in _FIRST:
            first = [path for path in left if path.endswith(ending)]
            self._objects.remove(*first)
            left = [path for path in left if path not in first]
        self._objects.remove(*left)

    @contextmanager
    def _claimed(self, step: str) -> Iterator[None]:
        try:
            yield
        finally:
            if step not in self._begun:
                self._drop(_claim_path(step))

    def _marked(self, path: str, step: str) -> bool:
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_TRY_SECONDS)
            try:
                self._objects.put(path, b"{}")
            except CkptkitError as error:
                logger.debug("%s cannot be marked as being read: %s", step, error)
                return False
            claim = self._objects.look_up(_claim_path(step))
            if claim is None or not _is_younger(claim, _CLAIM_SECONDS):
                return True
            self._drop(path)
        raise MissingFileError(
            "is being removed",
            where=f"{self.location}/{step}",
            hint="run again; a newer step will be taken",
        )

    def _renew(self, path: str, ended: threading.Event) -> None:
        try:
            with self._renewing:
                if not ended.is_set():
                    self._objects.put(path, b"{}")
        except CkptkitError as error:
            logger.warning("the mark %s cannot be renewed: %s", path, error)

    def _drop(self, path: str) -> None:
        try:
            self._objects.remove(path)
        except CkptkitError as error:
            logger.warning("the mark %s cannot be removed: %s", path, error)


def _as_error(
    error: Exception, where: str, verb: str, *, options: Mapping[str, Any]
) -> CkptkitError:
    if verb == "read":
        return as_input_error(error, where=where, options=options)
    text = f"cannot be {verb}: {describe_error(error, options)}"
    return OutputError(text, where=where, hint="check that the credentials allow it")


def _claim_path(step: str) -> str:
    return f"{_REMOVING}/{step}.json"


def _is_listed(path: str, info: ObjectInfo, listed: object) -> bool:
    """Returns whether an object is the one that was listed before, and was not written since."""
    return isinstance(listed, dict) and listed.get(path) == [info.identity, info.modified]


def _is_younger(info: ObjectInfo, seconds: float) -> bool:
    return not info.modified or info.modified + seconds > time.time()
