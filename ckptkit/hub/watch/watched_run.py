"""The run that is watched: its committed steps, and a digest that identifies each of them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import IncompleteCheckpointError, InputError, NotACheckpointError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.formats.discovery import parse_step
from ckptkit.runs.listing import RunListing, list_run
from ckptkit.runs.run_paths import open_run
from ckptkit.runs.steps import RunStep
from ckptkit.storage.places import PathLike, Place, is_url, open_source

_QUIET_SECONDS = 60.0  # after which a step without manifest counts as finished
_DIGEST_LENGTH = 16  # hexadecimal digits
_LISTED = 5


class WatchedRun:
    """Lists a run repeatedly, and reads no manifest twice."""

    def __init__(self, run: PathLike, state: Path) -> None:
        self._run = run
        self._state = state
        self._digests: dict[str, tuple[str, str]] = {}  # by folder: identity, and digest
        self._unsettled: dict[
            str, str
        ] = {}  # steps without a manifest, with digests of the last listing
        self._taken: set[str] = set()  # those of them that the last listing returned
        self._absence: InputError | None = None  # why the last listing had no complete step

    def look(self) -> tuple[RunStep, ...]:
        """Returns the complete steps, the lowest number first; none if the run does not exist yet.

        A step without a manifest is included once it has not changed for a while.
        """
        try:
            listing = list_run(self._run, state=self._state)
        except NotACheckpointError as error:
            self._unsettled, self._taken, self._absence = {}, set(), error
            return ()
        self._absence = _absence(listing)
        steps = [
            step for step in listing.steps if step.complete and parse_step(step.name) is not None
        ]
        before, self._unsettled = self._unsettled, {}
        self._taken = set()
        seen: dict[int, RunStep] = {}
        for step in steps:
            digest = self._digest(step, before)
            if digest:
                seen[step.step] = replace(step, digest=digest)
        return tuple(seen.values())

    @property
    def absence(self) -> InputError | None:
        """Why the last listing had no complete step; None if it had one."""
        return self._absence

    @property
    def unsettled(self) -> Mapping[str, str]:
        """Steps without a manifest that may still be written to, with their digests."""
        return {n: digest for n, digest in self._unsettled.items() if n not in self._taken}

    def hold(self, step: RunStep) -> AbstractContextManager[object]:
        """Returns a context manager that protects a step from pruning."""
        return open_run(self._run).hold(step.name, step.markers)

    def is_there(self, step: RunStep) -> bool:
        """Returns whether a step is still in the run, and was not replaced."""
        try:
            return any(now.digest == step.digest for now in self.look() if now.step == step.step)
        except InputError:
            return True  # the run cannot be listed now

    def place_of(self, step: RunStep) -> PathLike:
        """Returns the path or URL of a step, with the options of its storage."""
        location = f"{os.fspath(self._run).rstrip('/')}/{step.name}"
        if isinstance(self._run, Place):
            return self._run.beside(location)
        return location if is_url(location) else str(Path(self._run) / step.name)

    def _digest(self, step: RunStep, before: Mapping[str, str]) -> str:
        """Returns the digest of a step; empty if it may not be finished yet."""
        path = f"{step.name}/{MANIFEST_NAME}"
        manifest = next((file for file in step.files if file.path == path), None)
        if manifest is not None:
            identity, digest = self._digests.get(step.name, ("", ""))
            if identity != manifest.identity:
                digest = self._digest_of(path, manifest.size_bytes)
                self._digests[step.name] = manifest.identity, digest
            return digest
        listed = "".join(f"{f.path}\0{f.size_bytes}\0{f.modified}\n" for f in step.files)
        digest = _short_digest(listed.encode())
        self._unsettled[step.name] = digest
        is_quiet = step.modified > 0 and time.time() - step.modified > _QUIET_SECONDS
        if is_quiet or before.get(step.name) == digest:
            self._taken.add(step.name)
            return digest
        return ""

    def _digest_of(self, path: str, size_bytes: int) -> str:
        with open_source(self._run) as source:
            return _short_digest(source.read(path, 0, size_bytes))


def _absence(listing: RunListing) -> InputError | None:
    """Returns an error that lists the incomplete steps of a run without a complete one."""
    steps = [step for step in listing.steps if parse_step(step.name) is not None]
    if not steps or any(step.complete for step in steps):
        return None
    problems = "; ".join(f"{step.name}: {step.problem}" for step in steps[-_LISTED:])
    return IncompleteCheckpointError(
        f"no step is complete; {problems}",
        where=listing.location,
        hint="run it again once a step has been saved; `ckptkit ls` shows all of them",
    )


def _short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]
