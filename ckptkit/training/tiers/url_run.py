"""A run whose steps are at a URL; what is being written is on the node's own disk.

A resume reads the files of a step that the node still has from its disk: `NearPlace`,
`with_near_files`. `UploadProcess` is the trainer's end of the process that uploads, which takes the
requests of a writer process.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, FormatError, InputError, UsageError
from ckptkit.core.index import FileRange, FileRef
from ckptkit.core.manifest import MANIFEST_NAME, Manifest, check_manifest_size, parse_manifest
from ckptkit.engine.progress import Stage
from ckptkit.runs.marks import STEP_PREFIXES, is_step_folder
from ckptkit.runs.steps import KnownSteps, RunStep, list_saved_steps
from ckptkit.storage.base import Source
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.locations import WORK_INFIX, is_read_only
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.storage.places import Place
from ckptkit.storage.remote.store import ObjectInfo
from ckptkit.training.run_folders import TrainingRun
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.writer.messages import (
    Commit,
    Discard,
    Drain,
    FinishUpload,
    Remote,
    Request,
    StepCommitted,
    UploadFiles,
    Written,
)
from ckptkit.writer.upload.run_store import (
    RunStore,
    newest_step,
    remove_unfinished,
    run_identity,
    take_run,
    unfinished_steps,
)
from ckptkit.writer.upload.uploader import NICENESS, upload_command

logger = logging.getLogger(__name__)


class NearPlace(Place):
    """A URL that may have a local part on this node.

    Attributes:
        near: The directory of that part.
    """

    __slots__ = ("near",)

    near: Path

    @classmethod
    def of(cls, place: Place, near: Path) -> NearPlace:
        """Returns a place with the directory that may have some of its files."""
        new = cls(place, place.options)
        new.near = near
        return new

    def step(self, name: str) -> NearPlace:
        return NearPlace.of(self.beside(posixpath.join(self, name)), self.near / name)


def with_near_files(far: Source, near: Path, manifest: Manifest) -> Source:
    """Returns a step's source that reads from the node's own disk what it has of that save."""
    try:
        copy = read_local_manifest(near)
    except (CkptkitError, OSError):
        return far
    attempt = manifest.source.get("attempt")
    if not attempt or copy.source.get("attempt") != attempt:
        return far
    names: list[str] = []
    for name, record in copy.files.items():
        if manifest.files.get(name) == record:
            with suppress(OSError):
                if (near / name).stat().st_size == record.size_bytes:
                    names.append(name)
    return _LocalFirst(far, LocalSource(near), names)


class _LocalFirst(Source):
    """A remote folder. Files that this node has are read locally, until a local read fails."""

    def __init__(self, remote: Source, local: LocalSource, names: Collection[str]) -> None:
        self.location = remote.location
        self.is_remote = remote.is_remote
        self.closed_folders = remote.closed_folders
        self._remote = remote
        self._local = local
        self._names = frozenset(names)

    def walk(self, depth: int) -> Iterator[str]:
        return self._remote.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._remote.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        if path in self._names:
            try:
                return self._local.read(path, start, stop)
            except (InputError, OSError):
                self._names -= {path}
        return self._remote.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if path in self._names:
            try:
                self._local.read_into(path, start, target)
            except (InputError, OSError):
                self._names -= {path}
            else:
                return
        self._remote.read_into(path, start, target)

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        self._remote.prefetch([wanted for wanted in ranges if wanted.path not in self._names])

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        return self._remote.changed(refs)

    def linked_folders(self) -> list[str]:
        return self._remote.linked_folders()

    def close(self) -> None:
        self._local.close()
        self._remote.close()


class UploadProcess(WriterProcess):
    """Translates requests to drain and commit into uploads to a URL."""

    def __init__(
        self, timeouts: WriterTimeouts, name: str, remote: Remote, session: tuple[str, str]
    ) -> None:
        """Starts nothing yet."""
        super().__init__(timeouts, name=name)
        self._remote = remote
        self._job, self._scratch = session
        self._failed: dict[str, str] = {}  # steps by attempt; empty for one that was cleaned up

    def turn_to(self, remote: Remote) -> None:
        """Sends what follows to another URL."""
        if remote.url != self._remote.url:
            self._failed.clear()
        self._remote = remote

    def request(self, request: Request, stage: Stage | None = None) -> Written | StepCommitted:
        """Sends a request and returns the answer; starts a process if none runs.

        What a failed attempt left at the URL stays until another step is committed or the run is
        opened again, since other ranks may be uploading that very step again.
        """
        if isinstance(request, Discard):
            name = _name(request.folder).removeprefix(".").partition(WORK_INFIX)[0]
            self._failed.setdefault(request.attempt, name)
            return Written(request.attempt, 0, 0.0, 0.0)
        answer = super().request(self._translated(request), stage)
        if isinstance(request, Commit):
            self._failed = dict.fromkeys(self._failed, "")
        return answer

    def _translated(self, request: Request) -> Request:
        if isinstance(request, Drain):
            return UploadFiles(
                attempt=request.attempt,
                remote=self._remote,
                step=_name(request.folder),
                job=self._job,
                folder=request.folder,
                records=request.records,
                further=request.further,
                earlier=_name(request.earlier),
            )
        if isinstance(request, Commit):
            return FinishUpload(
                attempt=request.attempt,
                remote=self._remote,
                step=_name(request.final),
                job=self._job,
                proofs=request.proofs,
                manifest=request.manifest,
                beside=request.beside,
                remove=tuple(map(_name, request.remove)),
                given_up=tuple({*self._failed.values()} - {"", _name(request.final)}),
                scratch=self._scratch,
                visible_seconds=request.visible_seconds,
            )
        return request


def _name(place: str) -> str:
    return PurePosixPath(place).name


_WITHIN_A_PROCESS = frozenset({"memory"})


class UrlRun(TrainingRun[Place]):
    """A run in an object store, and a directory of this node for steps that are not uploaded."""

    takes_saves = False

    def __init__(
        self, place: Place, local: Path, nonce: str, prefix: str = STEP_PREFIXES[0]
    ) -> None:
        """Sends no request yet."""
        self.path = local.absolute()
        self.place = NearPlace.of(place, self.path)
        self.prefix = prefix
        self._nonce = nonce
        self._process: UploadProcess | None = None
        self._known: KnownSteps = {}

    @cached_property
    def store(self) -> RunStore:
        return RunStore(self._remote)

    def open(self) -> None:
        """Takes the run for this job: called once, by rank 0, before anything is saved."""
        take_run(self.store, self._nonce)
        run_identity(self.store)
        count = self.store.abort_unfinished()
        if count:
            logger.info("%s: %d unfinished uploads of earlier jobs were removed", self.place, count)

    def check(self) -> None:
        run_identity(self.store)

    def sweep(self) -> None:
        """Removes leftovers of unfinished saves; called while nothing is saved."""
        try:
            for step in unfinished_steps(self.store.entries().keys()):
                remove_unfinished(self.store, step)
                logger.info("%s was removed, since its upload was not finished", self.below(step))
        except CkptkitError as error:
            logger.warning("leftovers of earlier jobs could not be removed: %s", error)

    def identity(self) -> str:
        return run_identity(self.store)

    def steps(self) -> tuple[RunStep, ...]:
        """Returns the steps of the run; reads no manifest twice."""
        return _steps_at(self.store, self.prefix, self._known)

    def process(
        self, timeouts: WriterTimeouts, name: str, *, niceness: int | None = None
    ) -> WriterProcess:
        """Returns the process that uploads to the run, not started yet; see `TrainingRun`.

        One process does all uploads of this rank, one after another.
        """
        if self._process is None:
            command = partial(upload_command, niceness=niceness or NICENESS)
            patient, session = replace(timeouts, command=command), (self._nonce, str(self.path))
            self._process = UploadProcess(patient, name, self._remote, session)
        return self._process

    @property
    def _remote(self) -> Remote:
        return Remote(str(self.place), self.place.options)

    def below(self, name: str) -> Place:
        return self.place.beside(posixpath.join(self.place, name))

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return _manifest_of(self.store, name)
        except FormatError:
            return None


def check_place(place: Place) -> None:
    """Refuses URLs that cannot be uploaded to."""
    if is_read_only(place) or place.protocol in _WITHIN_A_PROCESS:
        what, why = f"a {place.protocol}:// URL, which", "is within one process"
        if place.protocol == "hf":
            what, why = "a repository of the Hub, which", "keeps every file of every step for ever"
        elif is_read_only(place):
            why = "is read-only"
        raise UsageError(
            f"cannot save to {what} {why}",
            where=str(place),
            hint="save to a directory or a bucket, of the Hub hf://buckets/ORG/NAME/RUN;"
            " `ckptkit push` uploads models to repositories",
        )


def steps_of_place(place: Place, prefix: str) -> tuple[RunStep, ...]:
    return _steps_at(RunStore(Remote(str(place), place.options)), prefix, {})


def _steps_at(store: RunStore, prefix: str, known: KnownSteps) -> tuple[RunStep, ...]:
    files = _StoredStepFiles(store)
    numbers = {
        name: int(name.removeprefix(prefix))
        for name in sorted(files.folders)
        if is_step_folder(name) and name.startswith(prefix)
    }
    return list_saved_steps(numbers, files, known)


class _StoredStepFiles:
    """The files of steps in a store; see `StepFiles`. What its listing lacks is asked for."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._entries = store.entries()
        folders = {path.partition("/")[0] for path in self._entries if "/" in path}
        self.folders = folders | {newest_step(store)}

    @property
    def location(self) -> str:
        return self._store.where("")

    def identity(self, name: str) -> ObjectInfo | None:
        return self._entry(f"{name}/{MANIFEST_NAME}")

    def manifest(self, name: str) -> Manifest | None:
        entry = self._entries.get(f"{name}/{MANIFEST_NAME}")
        if entry is not None:
            where = self._store.where(f"{name}/{MANIFEST_NAME}")
            check_manifest_size(entry.size_bytes, where=where)
        return _manifest_of(self._store, name)

    def size_bytes(self, name: str, file: str) -> int | None:
        entry = self._entry(f"{name}/{file}")
        return None if entry is None else entry.size_bytes

    def _entry(self, path: str) -> ObjectInfo | None:
        entry = self._entries.get(path) or self._store.look_up(path)
        if entry is not None:
            self._entries[path] = entry
        return entry


def _manifest_of(store: RunStore, name: str) -> Manifest | None:
    path = f"{name}/{MANIFEST_NAME}"
    data = store.get(path)
    return None if data is None else parse_manifest(data, where=store.where(path))
