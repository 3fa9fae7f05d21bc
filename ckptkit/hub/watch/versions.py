"""The steps of a watched run as versions in one folder, which engines pull: models and deltas.

Version N is in the folder `weight_v{N:06d}`; numbers begin with 1 and have no gaps. A version is a
whole model or a delta to the version before, see `ckptkit.deltas.form`. Its manifest has the step
that it was made from. So a watch that was killed continues the chain, wherever it was killed.

Source: slime, docs/en/advanced/delta-weight-sync.md; python/sglang/srt/weight_sync/
local_checkpoint.py of SGLang (`pull`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from msgspec import Struct

from ckptkit.adapters.merge import MergeJob
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    OutputError,
    RefusedError,
)
from ckptkit.core.manifest import Manifest
from ckptkit.deltas.create import DeltaRequest, PublishedBase, create_delta
from ckptkit.deltas.form import DELTA, name_version, version_of_folder
from ckptkit.engine.outcome import Listener
from ckptkit.hub.watch.build import BuildSettings, write_model
from ckptkit.hub.watch.watched_steps import (
    OF_NO_STEP,
    PUBLISHED,
    StepCommit,
    WatchedRun,
    describe_published,
)
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.steps import RunStep
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.workdir import sweep_work_folders
from ckptkit.storage.locations import WORK_INFIX, is_work_folder
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path, open_source, place_of


class PublishedVersion(Struct, frozen=True):
    """A version in the folder."""

    version: int
    is_delta: bool  # to the version before
    step: int  # that it was made from
    digest: str  # of that step

    @property
    def name(self) -> str:
        return name_version(self.version)


class PublishedVersions:
    """Publishes steps as versions; the newest one's step is protected from pruning."""

    takes_folders = False  # a version is built where it is published

    def __init__(
        self,
        folder: PathLike,
        every: int,
        run: WatchedRun,
        identity: str,
        build: BuildSettings,
        listener: Listener,
    ) -> None:
        self._place = place_of(folder)
        self._every = every  # one of so many versions is a whole model, the first of them
        self._run = run
        self._identity = identity
        self._build = build
        self._listener = listener
        self._versions: list[PublishedVersion] | None = None
        self._mark: AbstractContextManager[object] | None = None

    def check(self) -> None:
        """Reads which versions are there, and refuses those of another run or program."""
        self._list()

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns the version of a step, None if it has none."""
        for version in reversed(self._list()):
            if (version.step, version.digest) == (push.step, push.digest):
                return StepCommit(version.name, self._location(version.version), is_new=False)
        return None

    def tag(self, _push: StepPush, commit: StepCommit) -> str:
        """Returns the name of the version."""
        return commit.commit

    def publish(self, step: RunStep, _push: StepPush, _folder: Path) -> StepCommit:
        """Writes the next version; it is visible when it is complete."""
        versions = self._list()
        number = versions[-1].version + 1 if versions else 1
        self._versions = None  # unknown until this has succeeded
        manifest, notes = self._write(step, number, versions)
        self._versions = [*versions, _describe(number, manifest)]
        self._hold(step)
        size, where = manifest.size_bytes, self._location(number)
        return StepCommit(name_version(number), where, size, notes=notes)

    def close(self) -> None:
        """Releases the newest version's step."""
        mark, self._mark = self._mark, None
        if mark is not None:
            with suppress(CkptkitError):  # a mark in a store that cannot be reached expires
                mark.__exit__(None, None, None)

    def _write(
        self, step: RunStep, number: int, versions: list[PublishedVersion]
    ) -> tuple[Manifest, tuple[str, ...]]:
        overwrite = self._is_unfinished(number)
        job = self._job(step, number, overwrite=overwrite)
        facts = describe_published(self._identity, step)
        base = self._find_base(versions)
        notes: tuple[str, ...] = ()
        if base is not None:
            request = DeltaRequest(version=number)
            try:
                return create_delta(
                    self._job(base, number, overwrite=overwrite),
                    job,
                    request,
                    self._listener,
                    facts,
                    published=self._read_newest(number - 1),
                ), ()
            except OF_NO_STEP:
                raise
            except (InputError, RefusedError) as error:
                # Of the step before, too: it may be damaged, or gone by now.
                text = f"published as a whole model, since no delta is possible: {error}"
                notes = (text,)
        facts[DELTA] = {"version": number}
        manifest, _ = write_model(job, self._build, self._listener, facts)
        return manifest, notes

    def _is_unfinished(self, number: int) -> bool:
        """Returns whether a watch was killed while a store made the files of a version visible."""
        if not is_url(self._place):
            return False
        with open_source(self._place.beside(self._location(number))) as source:
            try:
                next(source.walk(0), None)
            except NotACheckpointError:
                return True
        return False

    def _read_newest(self, number: int) -> PublishedBase:
        with open_source(self._place) as source:
            return PublishedBase(number, read_manifest(source, name_version(number)))

    def _find_base(self, versions: list[PublishedVersion]) -> RunStep | None:
        """Returns the step of the newest version; None if the next version is a whole model."""
        deltas = 0
        for version in reversed(versions):
            if not version.is_delta:
                break
            deltas += 1
        else:  # no version, or none that an engine can begin with
            return None
        if deltas + 1 >= self._every:
            return None
        newest = versions[-1]
        for step in self._run.list_steps():
            if (step.step, step.digest) == (newest.step, newest.digest):
                return step
        return None

    def _job(self, step: RunStep, number: int, *, overwrite: bool) -> ConversionJob | MergeJob:
        place = self._place.beside(self._location(number))
        return self._build.make_job(self._run.place_of(step), place, overwrite=overwrite)

    def _hold(self, step: RunStep) -> None:
        """Protects the step that the next delta is made from."""
        before, self._mark = self._mark, None
        with suppress(InputError):  # it is gone: the next version will be a whole model
            self._mark = self._run.hold(step)
            self._mark.__enter__()
        if before is not None:
            with suppress(CkptkitError):
                before.__exit__(None, None, None)

    def _list(self) -> list[PublishedVersion]:
        if self._versions is None:
            found = sorted(self._read(), key=lambda version: version.version)
            for one, following in itertools.pairwise(found):
                if following.version != one.version + 1:
                    # What comes before a gap was removed, and is of no use for what comes after.
                    found = found[found.index(following) :]
            self._versions = found
            newest = self._find_base(found)
            if newest is not None and self._mark is None:
                self._hold(newest)
        return self._versions

    def _read(self) -> list[PublishedVersion]:
        if not is_url(self._place):
            if not local_path(self._place).is_dir():
                return []
            sweep(local_path(self._place), version_of_folder)
        versions = []
        with open_source(self._place) as source:
            folders = {path.split("/")[0] for path in source.walk(1) if "/" in path}
            for folder in sorted(folders):
                number = version_of_folder(folder)
                if number is None:
                    continue
                try:
                    manifest = read_manifest(source, folder)
                    version = _describe(number, manifest)
                except (MissingFileError, KeyError, TypeError, ValueError) as error:
                    raise OutputError(
                        "was not published by a watch, whose versions have to follow each other",
                        where=f"{self._place.location}/{folder}",
                        hint="publish into a folder that no other program writes to",
                    ) from error
                if manifest.source[PUBLISHED].get("run") != self._identity:
                    raise OutputError(
                        "was published from another run",
                        where=f"{self._place.location}/{folder}",
                        hint="publish each run into a folder of its own",
                    )
                versions.append(version)
        return versions

    def _location(self, number: int) -> str:
        return f"{self._place.location.rstrip('/')}/{name_version(number)}"


def sweep(folder: Path, number_of: Callable[[str], int | None]) -> None:
    """Removes what a killed watch has left of folders whose names have a number."""
    for path in list(folder.iterdir()):
        name = path.name[1:].partition(WORK_INFIX)[0]
        if is_work_folder(path.name) and number_of(name) is not None:
            sweep_work_folders(folder, folder / name, LOCAL_DISK)


def _describe(number: int, manifest: Manifest) -> PublishedVersion:
    published = manifest.source[PUBLISHED]
    return PublishedVersion(
        number,
        manifest.kind == DELTA,
        int(published["step"]),
        str(published["digest"]),
    )
