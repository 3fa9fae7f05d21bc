"""`ckptkit.hub.pull`: from a repository to a folder, every byte compared with the Hub's hashes.

The hidden folder in which a pull grows: it outlives a kill, and the next pull goes on there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptkit.conversion.verify import run_verification
from ckptkit.core.arguments import check_arguments
from ckptkit.core.checksums import DIGEST_SCHEME
from ckptkit.core.errors import (
    CkptkitError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    RefusedError,
    VerificationError,
)
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.core.text import size_text
from ckptkit.engine.outcome import BytesWritten, Listener, OutputCommitted, Started, ignore
from ckptkit.hub.client import Hub, quiet_client
from ckptkit.hub.publish.commit import commit_of
from ckptkit.hub.publish.source import LargeFile, OneReading, large_file
from ckptkit.runs.steps import file_problems
from ckptkit.storage.local.disk import LOCAL_DISK, Disk, is_refused
from ckptkit.storage.local.names import WORK_INFIX, check_relative
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import free_bytes, make_missing, translate_errors
from ckptkit.storage.local.workdir import WorkFolder, is_empty, publish
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url

_CLIENT = ".cache"  # what the client remembers of its downloads lies here, beside the files


class Partial:
    """The files of a pull on their way to the folder that they are to be."""

    def __init__(self, out: Path, work: WorkFolder, disk: Disk) -> None:
        self._named = out
        self._out = out.resolve()
        self._work = work
        self._disk = disk

    @property
    def files(self) -> Path:
        """Where the files are put."""
        return self._work.files

    def keep_only(self, paths: set[str]) -> None:
        """Removes what an earlier pull of another revision left."""
        for path in list(self._files()):
            if path.relative_to(self.files).as_posix() not in paths:
                path.unlink()

    def check_room(self, sizes: dict[str, int]) -> None:
        """Refuses a pull that the disk has no room for.

        Raises:
            NoSpaceError: If there is too little.
        """
        there = sum(
            (self.files / path).stat().st_size for path in sizes if (self.files / path).is_file()
        )
        wanted, free = sum(sizes.values()) - there, free_bytes(self.files)
        if wanted > free:
            raise NoSpaceError(
                f"{size_text(wanted)} are to be written, and {size_text(free)} are free",
                where=str(self._named),
                hint="make room, or name a directory on another disk",
            )

    def commit(self) -> None:
        """Makes everything durable, and the folder visible.

        Raises:
            OutputExistsError: If somebody filled the destination meanwhile.
            OutputError: If something cannot be made durable or visible.
        """  # noqa: DOC501  `_exists` and `translate_errors` make them
        with translate_errors(self._named):
            shutil.rmtree(self.files / _CLIENT, ignore_errors=True)
            folders = {self.files}
            for path in self._files():
                _sync(path)
                folders.add(path.parent)
            for folder in folders:
                self._disk.sync_directory(folder)
            if not publish(self._work, self._out, overwrite=False, disk=self._disk):
                raise _exists(self._named)
            self._disk.sync_directory(self._out.parent)
        self._work.remove()

    def leave(self) -> None:
        """Lets go of the folder; what came so far stays for the next pull."""
        if any(self._files()) or (self.files / _CLIENT).exists():
            self._work.release()
        else:
            self._work.remove()

    def _files(self) -> Iterator[Path]:
        for path in self.files.rglob("*"):
            if path.is_file() and _CLIENT not in path.relative_to(self.files).parts[:1]:
                yield path


@contextmanager
def partial_folder(out: Path) -> Iterator[Partial]:
    """Makes the hidden folder beside `out`, or enters the one that a pull left behind.

    Yields:
        What is to be filled, and committed.

    Raises:
        OutputExistsError: If `out` holds something.
        OutputError: If `out` is a file, or nothing can be written there.
        RefusedError: If another pull is at work there.
    """  # noqa: DOC501  `_exists` makes the first
    disk = LOCAL_DISK
    if out.exists() and not out.is_dir():
        raise OutputError("a file was found where a directory was expected", where=str(out))
    if out.is_dir() and not is_empty(out):
        raise _exists(out)
    with translate_errors(out):
        resolved = out.resolve()
        make_missing(resolved.parent)
        work = _enter(resolved, disk)
    if work is None:
        raise RefusedError(
            "another pull is writing there",
            where=str(out),
            hint="wait for it, or name another directory",
        )
    partial = Partial(out, work, disk)
    try:
        yield partial
    finally:
        partial.leave()


def _exists(out: Path) -> OutputExistsError:
    return OutputExistsError(
        "the directory holds files where an empty or absent one was expected",
        where=str(out),
        hint="name another directory",
    )


def _enter(out: Path, disk: Disk) -> WorkFolder | None:
    path = out.parent / f".{out.name}{WORK_INFIX}pull"
    path.mkdir(exist_ok=True)
    lock = None
    if disk.locks:
        try:
            lock = disk.open_locked(path / ".lock")
        except OSError as error:
            if not is_refused(error):
                raise
        else:
            if lock is None:
                return None
    work = WorkFolder(path, lock)
    work.files.mkdir(exist_ok=True)
    return work


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHECKS_AT_ONCE = 2
_TORCH = "torch"  # outputs whose tensors lie inside archives


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought.

    Attributes:
        repo_id: `owner/name`.
        commit: The commit that the files are of.
        path: The folder.
        files: All files.
        size_bytes: Their sizes together.
        tensors: How many tensors were compared with the digests of the manifest.
        notes: What the user should know.
    """

    repo_id: str
    commit: str
    path: str
    files: tuple[str, ...]
    size_bytes: int
    tensors: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Remote:
    path: str
    size_bytes: int
    sha256: str
    """Of a large file; empty of others."""
    blob_id: str


@check_arguments
def pull(
    repo_id: str,
    folder: PathLike,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    listener: Listener | None = None,
) -> Pulled:
    """Brings a repository to a folder, whole or not at all.

    Every file is compared with the Hub's hash, and what ckptkit pushed with the digests of its
    manifest too. A pull that was interrupted goes on where it stopped when it is run again.

    Args:
        repo_id: `owner/name`.
        folder: A directory that does not exist, or is empty.
        revision: A branch, tag or commit; `main` if left out.
        token: Left out, that of HF_TOKEN or of the last login is taken.
        endpoint: Left out, HF_ENDPOINT is taken, as it was when `huggingface_hub` was imported.
        listener: Receives progress events, from several threads.

    Returns:
        What was brought.

    Raises:
        UsageError: If the repository's id is none.
        OutputExistsError: If the folder holds something.
        OutputError: If it cannot be written.
        RefusedError: If it is a URL, or another pull writes there.
        VerificationError: If a file is not what the Hub or the manifest says.
        HubError: If the Hub refuses, or is not reached.
    """
    if is_url(folder):
        raise RefusedError(
            "a pull writes to a directory of this machine",
            where=os.fspath(folder),
            hint="pull to a local directory, then `ckptkit convert` it to the URL",
        )
    hub = Hub(repo_id, token=token, endpoint=endpoint)
    with quiet_client(), partial_folder(Path(folder)) as partial:
        hub.named_by_owner()
        commit = commit_of(hub, revision or "main")
        remote = _remote_files(hub, commit)
        one = _Pull(hub, commit, remote, partial, listener or ignore)
        return one.run(os.fspath(folder))


def _remote_files(hub: Hub, commit: str) -> dict[str, _Remote]:
    tree = hub.call(
        lambda: list(hub.api.list_repo_tree(hub.repo_id, recursive=True, revision=commit))
    )
    found = {}
    for entry in tree:
        blob_id = getattr(entry, "blob_id", None)
        if blob_id is not None:
            check_relative(entry.path, hub.repo_id)
            lfs: Any = getattr(entry, "lfs", None)
            size = int(getattr(entry, "size", 0))
            found[entry.path] = _Remote(entry.path, size, lfs.sha256 if lfs else "", blob_id)
    return found


class _Pull:
    def __init__(
        self,
        hub: Hub,
        commit: str,
        remote: Mapping[str, _Remote],
        partial: Partial,
        listener: Listener,
    ) -> None:
        self._hub = hub
        self._commit = commit
        self._remote = remote
        self._partial = partial
        self._listener = listener

    def run(self, folder: str) -> Pulled:
        """Brings, checks and publishes the files."""
        sizes = {path: file.size_bytes for path, file in self._remote.items()}
        self._partial.keep_only(set(sizes))
        self._partial.check_room(sizes)
        self._listener(Started(sum(sizes.values())))
        first = [path for path in (MANIFEST_NAME,) if path in self._remote]
        self._all(first, None)
        with LocalSource(self._partial.files) as source:
            manifest = read_manifest(source) if first else None
        rest = [path for path in self._remote if path not in first]
        self._all(rest, manifest)
        notes = self._check_whole(manifest)
        self._partial.commit()
        self._listener(OutputCommitted(folder))
        return Pulled(
            repo_id=self._hub.repo_id,
            commit=self._commit,
            path=folder,
            files=tuple(self._remote),
            size_bytes=sum(sizes.values()),
            tensors=len(manifest.tensors) if manifest is not None else 0,
            notes=tuple(notes),
        )

    def _all(self, paths: Sequence[str], manifest: Manifest | None) -> None:
        """Brings files one by one, each fetched in parts at once, and checks those before it.

        The client is called from this thread, in which a signal stops it.
        """
        with ThreadPoolExecutor(_CHECKS_AT_ONCE, thread_name_prefix="pull") as pool:
            checks = []
            for path in paths:
                self._download(path, again=False)
                checks.append((path, pool.submit(self._check, path, manifest)))
            for path, check in checks:
                self._settle(path, check, manifest)

    def _settle(self, path: str, check: Future[None], manifest: Manifest | None) -> None:
        """Brings a file once more where an earlier pull, or the disk, damaged it."""
        try:
            check.result()
        except CkptkitError:
            self._download(path, again=True)
            self._check(path, manifest)

    def _download(self, path: str, *, again: bool) -> None:
        self._hub.call(
            self._hub.api.hf_hub_download,
            self._hub.repo_id,
            path,
            revision=self._commit,
            local_dir=str(self._partial.files),
            force_download=again,
        )

    def _check(self, path: str, manifest: Manifest | None) -> None:
        remote = self._remote[path]
        with LocalSource(self._partial.files) as source:
            in_order = manifest is None or manifest.kind != _TORCH
            is_weights = path.endswith(".safetensors") and in_order
            size = source.stat(path).size_bytes
            file = large_file(source, path, manifest) if is_weights else LargeFile(path, size, ())
            found = hashlib.sha256()
            blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            whole = found if remote.sha256 else blob
            OneReading(source, file, ignore).to(whole.update)
        self._listener(BytesWritten(size))
        if whole.hexdigest() != (remote.sha256 or remote.blob_id):
            raise VerificationError(
                f"{path} has another hash here than at the Hub",
                where=f"{self._hub.repo_id}@{self._commit[:10]}",
                hint="run it again; if it stays so, something between here and the Hub is broken",
            )

    def _check_whole(self, manifest: Manifest | None) -> list[str]:
        """Checks what concerns several files; side files that somebody edited there are noted."""
        if manifest is None:
            return []
        with LocalSource(self._partial.files) as source:
            missing = [p for p in file_problems(source, "", manifest) if _is_weights(p.where)]
        if manifest.kind == _TORCH:
            report = run_verification(self._partial.files)
            missing += [problem for problem in report.problems if "tensor" in problem.where]
        for problem in missing:
            raise VerificationError(
                problem.message,
                where=f"{self._hub.repo_id}@{self._commit[:10]}: {problem.where}",
                hint="the repository was changed after it was pushed; push the model again",
            )
        return [
            f"{path} was changed at the Hub after it was pushed"
            for path in _edited(self._partial.files, manifest)
        ]


def _is_weights(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def _edited(folder: Path, manifest: Manifest) -> list[str]:
    from ckptkit.core.checksums import digest_of

    return [
        path
        for path, record in sorted(manifest.files.items())
        if record.digest.startswith(DIGEST_SCHEME)
        and not (
            (folder / path).is_file()
            and digest_of(memoryview((folder / path).read_bytes())) == record.digest
        )
    ]
