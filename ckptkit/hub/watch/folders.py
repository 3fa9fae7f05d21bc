"""The steps of a watched run as folders in one directory, each named as its step.

A folder is there once it is complete. It stays when its step is pruned. Its manifest has the run
and the step that it was made from, so that it is made again where the step was saved again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.conversion.write import find_written_output, read_output_manifest
from ckptkit.core.errors import FormatError, OutputExistsError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Listener
from ckptkit.formats.discovery import parse_step
from ckptkit.hub.watch.build import BuildSettings, write_model
from ckptkit.hub.watch.versions import sweep
from ckptkit.hub.watch.watched_steps import (
    PUBLISHED,
    StepCommit,
    WatchedRun,
    describe_published,
)
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.steps import RunStep
from ckptkit.storage.places import PathLike


class StepFolders:
    """Makes the folder of each step, as it is or beside its push."""

    takes_folders = False  # a folder is built where it stays

    def __init__(
        self, folder: Path, run: WatchedRun, identity: str, build: BuildSettings, listener: Listener
    ) -> None:
        self._folder = folder
        self._run = run
        self._identity = identity
        self._build = build
        self._listener = listener

    def sweep(self) -> None:
        """Removes what a killed watch has left."""
        if self._folder.is_dir():
            sweep(self._folder, parse_step)

    def check(self) -> None:
        """Does nothing: a directory that cannot be written fails with the first step."""

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns the folder of a step, None if it has none."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if parse_step(path.name) == push.step and path.is_dir():
                made = self._read_published(path)
                if (made.get("run"), made.get("digest")) == (self._identity, push.digest):
                    return StepCommit(path.name, os.fspath(path), is_new=False)
        return None

    def tag(self, _push: StepPush, commit: StepCommit) -> str:
        """Returns the name of the folder."""
        return commit.commit

    def publish(self, step: RunStep, _push: StepPush, _folder: Path) -> StepCommit:
        """Makes the folder of a step."""
        return self.make(step)

    def make(self, step: RunStep) -> StepCommit:
        """Makes the folder of a step, unless it is there; it is visible when it is complete."""
        path, source = self._folder / step.name, self._run.place_of(step)
        if self._is_written(path, source):
            return StepCommit(step.name, os.fspath(path), is_new=False)
        is_own = self._read_published(path).get("run") == self._identity
        job = self._build.make_any_job(source, path, overwrite=is_own)
        try:
            facts = describe_published(self._identity, step)
            manifest, notes = write_model(job, self._build, self._listener, facts)
        except OutputExistsError as error:
            hint = "it is not of this run: move it away, or pass another --to-dir"
            raise error.hinted(hint) from error
        return StepCommit(step.name, os.fspath(path), manifest.size_bytes, notes=notes)

    def _is_written(self, path: Path, source: PathLike) -> bool:
        """Returns whether a folder is the one that would be made of a step."""
        if _read(path) is None:
            return False
        with self._build.make_any_job(source, path).plan_output() as planned:
            return find_written_output(planned, path) is not None

    def _read_published(self, path: Path) -> Mapping[str, Any]:
        manifest = _read(path)
        made = {} if manifest is None else manifest.source.get(PUBLISHED)
        return made if isinstance(made, Mapping) else {}


def _read(path: Path) -> Manifest | None:
    try:
        return read_output_manifest(path)
    except FormatError:
        return None
