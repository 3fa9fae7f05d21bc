"""`ckptkit.hub.pull`: downloads a repository, and compares every byte with the Hub's hashes.

Files are collected in a hidden folder, which survives a kill; the next pull continues there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptkit.conversion.verify import run_verification
from ckptkit.core.arguments import check_arguments
from ckptkit.core.checksums import DIGEST_SCHEME, digest_of
from ckptkit.core.display import plain_fields
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
from ckptkit.engine.progress import report_to
from ckptkit.formats.discovery import ITSELF
from ckptkit.hub.client import MAIN, Hub, commit_of, list_files, quiet_client
from ckptkit.hub.large_files import LargeFile, git_hash, large_file, read_checked
from ckptkit.runs.step_manifests import file_problems
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import sync_file, sync_folders
from ckptkit.storage.local.ownership import make_private, refuse_planted
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.local.target import free_bytes, make_missing, translate_errors
from ckptkit.storage.local.workdir import WorkFolder, is_empty, publish, recover
from ckptkit.storage.locations import check_relative, hidden_name
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import PathLike, is_url, local_path

_CLIENT = ".cache"  # the folder with the state of the client's downloads


class PullFolder:
    """The hidden folder that collects the files of a pull."""

    def __init__(self, out: Path, work: WorkFolder) -> None:
        self._named = out
        self._out = out.resolve()
        self._work = work
        self.files = work.files

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Removes files that an earlier pull of another revision left.

        Raises:
            NoSpaceError: If the files do not fit on the disk.
        """
        present = 0
        for path in list(self._files()):
            if path.relative_to(self.files).as_posix() in sizes:
                present += path.stat().st_size
            else:
                path.unlink()
        wanted, free = sum(sizes.values()) - present, free_bytes(self.files)
        if wanted > free:
            raise NoSpaceError(
                f"{size_text(wanted)} are needed, {size_text(free)} are free",
                where=str(self._named),
                hint="free some space, or pass a directory on another disk",
            )

    def commit(self) -> None:
        """Makes everything durable, and the folder visible.

        Raises:
            OutputExistsError: If the destination got files meanwhile.
            OutputError: If something cannot be made durable or visible.
        """  # noqa: DOC501  `_exists` and `translate_errors` make them
        with translate_errors(self._named):
            shutil.rmtree(self.files / _CLIENT, ignore_errors=True)
            files = list(self._files())
            for path in files:
                sync_file(path)
            sync_folders(self.files, LOCAL_DISK)
            if files:
                # After a kill in between, the last one is downloaded again.
                last = min(files, key=lambda p: (p.name != MANIFEST_NAME, p.stat().st_size))
                name = last.relative_to(self.files).as_posix()
                if not publish(self._work, self._out, LOCAL_DISK, last=name):
                    raise _exists(self._named)
            self._out.mkdir(exist_ok=True)  # a repository may have no files
            LOCAL_DISK.sync_directory(self._out.parent)
        self._work.remove()

    def leave(self) -> None:
        """Releases the folder; downloaded files stay for the next pull."""
        if any(self._files()) or (self.files / _CLIENT).exists():
            self._work.release()
        else:
            self._work.remove()

    def _files(self) -> Iterator[Path]:
        for path in self.files.rglob("*"):
            if path.is_file() and _CLIENT not in path.relative_to(self.files).parts[:1]:
                yield path


@contextmanager
def open_pull_folder(out: Path) -> Iterator[PullFolder]:
    """Makes the hidden folder next to `out`, or opens the one that an earlier pull left.

    Yields:
        The folder to fill and commit.

    Raises:
        OutputExistsError: If `out` is not empty.
        OutputError: If `out` is a file, or nothing can be written there, or another user made it.
        RefusedError: If another pull is writing there.
    """
    if out.exists() and not out.is_dir():
        raise OutputError("a file was found where a directory was expected", where=str(out))
    resolved = out.resolve()
    path = resolved.with_name(hidden_name(resolved.name, "pull"))
    if not WorkFolder(path, None).last.exists():  # otherwise half of a commit is undone below
        _refuse_full(out)
    refuse_planted(out.absolute())
    lock = None
    with translate_errors(out):
        make_missing(resolved.parent)
        make_private(path, exist_ok=True)
        is_alone, lock = LOCAL_DISK.try_lock(path / ".lock")
        if not is_alone:
            raise RefusedError(
                "another pull is writing there",
                where=str(out),
                hint="wait for it, or pass another directory",
            )
        work = WorkFolder(path, lock)
        work.make_files(resolved)
        if lock is not None:
            recover(work, resolved)
    partial = PullFolder(out, work)
    try:
        _refuse_full(out)
        yield partial
    finally:
        partial.leave()


def _refuse_full(out: Path) -> None:
    if out.is_dir() and not is_empty(out):
        raise _exists(out)


def _exists(out: Path) -> OutputExistsError:
    return OutputExistsError(
        "the directory is not empty",
        where=str(out),
        hint="pass another directory",
    )


_CHECKS_AT_ONCE = 2
_WEIGHTS = (".safetensors", ".bin")
_TORCH = "torch"  # outputs whose tensors lie inside archives


class Pulled(Struct, frozen=True):
    """The result of a pull.

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
        return plain_fields(self)


@check_arguments
def pull(
    repo_id: str,
    folder: PathLike,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    listener: Listener | None = None,
    progress: bool = False,
) -> Pulled:
    """Downloads a repository to a folder, all of it or nothing.

    Every file is compared with the Hub's hash, and what ckptkit pushed with the digests of its
    manifest too. An interrupted pull continues where it stopped when it is run again.

    Args:
        repo_id: `owner/name`.
        folder: A directory that does not exist, or is empty.
        revision: A branch, tag or commit; `main` if left out.
        token: Left out, that of HF_TOKEN or of the last login is taken.
        endpoint: Left out, HF_ENDPOINT is taken, as it was when `huggingface_hub` was imported.
        listener: Receives progress events, from several threads.
        progress: Whether progress is shown, see `ckptkit.api.Options`.

    Returns:
        The files, and what was checked.

    Raises:
        UsageError: If the repository's id is invalid.
        OutputExistsError: If the folder is not empty.
        OutputError: If it cannot be written.
        RefusedError: If the folder is a URL, or another pull writes there.
        VerificationError: If a file does not match the Hub's hash or the manifest.
        HubError: If the Hub refuses, or is not reached.
    """
    if is_url(folder):
        raise RefusedError(
            "a pull writes to a directory of this machine",
            where=os.fspath(folder),
            hint="pull to a local directory, then `ckptkit convert` it to the URL",
        )
    hub = Hub(repo_id, token=token, endpoint=endpoint)
    with (
        quiet_client(),
        open_pull_folder(local_path(folder)) as partial,
        report_to("pull", {"listener": listener, "progress": progress}) as listen,
    ):
        hub.resolve_owner()
        commit = commit_of(hub, revision or MAIN)
        remote = {file.path: file for file in list_files(hub, commit)}
        for path in remote:
            check_relative(path, hub.repo_id)
        sizes = {path: int(file.size) for path, file in remote.items()}
        partial.prepare(sizes)
        listen(Started(sum(sizes.values()), tuple(sizes.items())))
        manifest = _fetch_all(hub, commit, remote, partial.files, listen)
        place = f"{hub.repo_id}@{commit[:10]}"
        notes = [] if manifest is None else _check_whole(partial.files, manifest, place)
        partial.commit()
        listen(OutputCommitted(os.fspath(folder)))
    return Pulled(
        repo_id=hub.repo_id,
        commit=commit,
        path=os.fspath(folder),
        files=tuple(remote),
        size_bytes=sum(sizes.values()),
        tensors=len(manifest.tensors) if manifest is not None else 0,
        notes=tuple(notes),
    )


def _fetch_all(
    hub: Hub, commit: str, remote: Mapping[str, Any], folder: Path, listener: Listener
) -> Manifest | None:
    """Fetches files into a folder, and compares them with the Hub's hashes and the manifest."""

    def fetch(path: str, *, again: bool = False) -> None:
        hub.call(
            hub.api.hf_hub_download,
            hub.repo_id,
            path,
            revision=commit,
            local_dir=str(folder),
            force_download=again,
        )

    def check(path: str, manifest: Manifest | None) -> None:
        lfs, blob_id = remote[path].lfs, remote[path].blob_id
        with LocalSource(folder) as source:
            in_order = manifest is None or manifest.kind != _TORCH
            is_weights = path.endswith(".safetensors") and in_order
            size = source.stat(path).size_bytes
            file = large_file(source, path, manifest) if is_weights else LargeFile(path, size, ())
            whole = hashlib.sha256() if lfs else git_hash(size)
            read_checked(source, file, ignore, whole.update)
        listener(BytesWritten(size, path))
        if whole.hexdigest() != (lfs.sha256 if lfs else blob_id):
            raise VerificationError(
                f"{path} has another hash here than on the Hub",
                where=f"{hub.repo_id}@{commit[:10]}",
                hint="run it again; if it happens again, check the network and the disk",
            )

    def fetch_and_check(paths: Sequence[str], manifest: Manifest | None) -> None:
        # `snapshot_download` would call the client from threads that no signal stops.
        with ThreadPoolExecutor(_CHECKS_AT_ONCE, thread_name_prefix="pull") as pool:
            checks = {}
            for path in paths:
                fetch(path)
                checks[path] = pool.submit(check, path, manifest)
            for path, checked in checks.items():
                try:
                    checked.result()
                except CkptkitError:  # an earlier pull, or the disk, damaged the file
                    fetch(path, again=True)
                    check(path, manifest)

    manifest = None
    if MANIFEST_NAME in remote:  # first, since it has the digests of the others
        fetch_and_check([MANIFEST_NAME], None)
        with LocalSource(folder) as source:
            manifest = read_manifest(source)
    fetch_and_check([path for path in remote if path != MANIFEST_NAME], manifest)
    return manifest


def _check_whole(folder: Path, manifest: Manifest, place: str) -> list[str]:
    """Checks all files together; returns notes on side files that were edited on the Hub."""
    with LocalSource(folder) as source:
        missing = [p for p in file_problems(source, "", manifest) if p.where.endswith(_WEIGHTS)]
    if manifest.kind == _TORCH:
        report = run_verification(folder, select=ITSELF)
        missing += [problem for problem in report.problems if "tensor" in problem.where]
    for problem in missing:
        raise VerificationError(
            problem.message,
            where=f"{place}: {problem.where}",
            hint="the repository was changed after it was pushed; push the model again",
        )
    notes = []
    for path, record in sorted(manifest.files.items()):
        file = folder / path
        if record.digest.startswith(DIGEST_SCHEME) and not (
            file.is_file() and digest_of(memoryview(file.read_bytes())) == record.digest
        ):
            notes.append(f"{path} was changed on the Hub after it was pushed")
    return notes
