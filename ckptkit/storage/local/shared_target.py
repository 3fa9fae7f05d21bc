"""A directory that several processes fill at once, invisible until all of them are done."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.base import Row, SentRows, Sink, encode_plan_note, parse_plan, parse_seen
from ckptkit.storage.local.disk import LOCAL_DISK, PAGE_BYTES, Disk, is_out_of_space, is_refused
from ckptkit.storage.local.target import (
    StagedFiles,
    free_bytes,
    make_missing,
    not_replaceable_error,
    output_exists_error,
    refuse_file,
    remove_empty,
    taken_bytes,
    translate_errors,
    write_small,
)
from ckptkit.storage.local.workdir import (
    NONCE_BYTES,
    WorkFolder,
    is_free,
    join_work_folder,
    publish,
    sweep_work_folders,
)
from ckptkit.storage.locations import hidden_name, unstaged_path
from ckptkit.storage.manifests import manifest_digest, refuse_newer, refuse_unnamed_in

_PLAN = "plan"
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES})
_CONTENT = "content"


class WorkNotes:
    """Notes, each a folder with one file in it: renaming a folder never replaces a filled one."""

    def __init__(self, folder: Path, named: Path, disk: Disk) -> None:
        """Takes a hidden folder that exists; `named` is the output, for messages."""
        self._folder = folder
        self._named = named
        self._disk = disk

    def put(self, name: str, data: bytes) -> bytes:
        """Writes a durable note unless there is one of that name; returns the note's content."""
        new = self._folder / f"{name}.{os.urandom(8).hex()}"
        with translate_errors(self._named, len(data)):
            try:
                new.mkdir()
                write_small(new / _CONTENT, data, self._disk)
                new.rename(self._folder / name)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                content = self.get(name) if error.errno in _OCCUPIED else None
                if content is None:
                    raise
                return content
            self._disk.sync_directory(self._folder)
        return data

    def get(self, name: str) -> bytes | None:
        """Returns the content of a note, None where there is none."""
        with translate_errors(self._named):
            try:
                return (self._folder / name / _CONTENT).read_bytes()
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, _owner: str = "") -> Iterator[bool]:
        """Yields whether this process is the only one here; always, where there are no locks."""
        if not self._disk.locks:
            yield True
            return
        try:
            lock = self._disk.open_locked(self._folder / f"{name}.lock")
        except FileNotFoundError:  # another process has removed the folder
            yield False
            return
        except OSError as error:
            if not is_refused(error):
                raise
            yield True
            return
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()


class PartFile:
    """A file written from its start to its end, and what is to become of its bytes.

    Attributes:
        rows: What was written, in its order.
    """

    def __init__(self, path: Path, named: Path, disk: Disk) -> None:
        """Makes the file; `named` is the output, for messages."""
        self.rows: list[Row] = []
        self._path = path
        self._named = named
        self._at = 0
        self._lock = threading.Lock()
        with translate_errors(named):
            disk.join_file(path, 0)
            self._file = disk.open_for_writing(path)

    def create(self, _path: str, _size_bytes: int) -> None:
        """Does nothing: the process that unites the parts makes the files."""

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        """Takes data that is cut into as many equal runs, each for its own byte of a file."""
        with self._lock, translate_errors(self._named, data.nbytes):
            self._file.write_at(self._at, data)
            self._at += data.nbytes
            self.rows.append((path, starts, data.nbytes, crc32(data)))

    def free_bytes(self) -> int:
        with translate_errors(self._named):
            return free_bytes(self._path)

    def finish(self) -> None:
        """Makes the file durable and closes it, after which other machines see all of it."""
        with translate_errors(self._named):
            try:
                self._file.sync()
            finally:
                self._file.close()

    def close(self) -> None:
        """Closes the file, whatever it holds."""
        self._file.close()


def read_parts(
    path: Path, rows: Sequence[Row], disk: Disk
) -> Iterator[tuple[str, Sequence[int], memoryview]]:
    """Yields what a file was written for: the file of the output, the runs' starts, the bytes."""
    file, at = disk.open_for_reading(path), 0
    try:
        for name, starts, size, expected in rows:
            data = file.read_bytes(at, size)
            if len(data) != size or crc32(data) != expected:
                raise ChecksumError(
                    f"other bytes than were written were found from byte {at:,} on",
                    where=unstaged_path(str(path)),
                    hint="the storage does not show what another machine wrote; export to another",
                )
            yield name, starts, memoryview(data)
            at += size
    finally:
        file.close()


def why_no_ranges(folder: Path, named: Path, disk: Disk) -> str:
    """Tries to write at an offset in a folder; returns why that fails, empty if it works."""
    # Not by the process, whose number another machine may have given as well.
    path = folder / f".probe-{os.urandom(8).hex()}"
    with translate_errors(named):
        try:
            disk.join_file(path, 2 * PAGE_BYTES)
            file = disk.open_for_writing(path)
            try:
                file.write_at(PAGE_BYTES, memoryview(b"1"))
                file.write_at(1, memoryview(b"1"))
            finally:
                file.close()
        except OSError as error:
            if is_out_of_space(error):
                raise
            return f"it does not take ranges of a file: {(error.strerror or str(error)).lower()}"
        finally:
            path.unlink(missing_ok=True)
    return ""


class SharedTarget(Sink):
    """One process's view of an output that all of them write, each its own ranges.

    The first process makes the hidden folder and its files, the others enter it. Where the system
    has locks, every process holds a shared one, so that no run sweeps the folder away before the
    last of them has ended.

    Attributes:
        location: The directory as the user named it, for messages.
        folder: The hidden folder.
        removal: The shell command with which a user discards what other processes have begun.
        notes: Of what the processes have done.
    """

    takes_parts = False

    def __init__(
        self,
        out: Path,
        nonce: str,
        *,
        overwrite: bool = False,
        seen: str | None = None,
        disk: Disk = LOCAL_DISK,
        named: Path | None = None,
    ) -> None:
        """Enters the hidden folder, and makes it and missing parents where they are not there.

        Args:
            out: The directory to be; its name is kept for messages as it is given.
            nonce: 16 hexadecimal digits that name this attempt, the same in all processes.
            overwrite: Whether a directory that holds something is replaced by the commit.
            seen: What `manifest_digest` returned when the processes began; None for now.
            disk: The file operations of the platform.
            named: What messages call the directory; None for `out`.
        """
        named = named or out
        self.location = str(named)
        self._named = named
        self._overwrite = overwrite
        self._disk = disk
        self._made_folders: list[Path] = []
        with translate_errors(named):
            self._out = out.resolve()
            self._seen = manifest_digest(self._out) if seen is None else seen
            refuse_file(self._out, named)
            is_fixed = _is_fixed(self._out)
            if not is_free(self._out, self._disk):
                if not overwrite:
                    raise output_exists_error(named)
                if is_fixed:
                    raise not_replaceable_error(named)
            parent = self._out if is_fixed else self._out.parent
            self._made_folders = make_missing(parent)
            try:
                self._work: WorkFolder = join_work_folder(parent, self._out.name, nonce, self._disk)
            except BaseException:
                remove_empty(self._made_folders)
                raise
        self._files = StagedFiles(self._work.files, named, self._disk)
        self.folder = self._work.path
        self.removal = f"rm -r '{self.folder}'"
        self.notes = WorkNotes(self.folder, named, self._disk)

    def plan(self) -> bytes | None:
        note = self.notes.get(_PLAN)
        return None if note is None else parse_plan(note)

    def agree(self, plan: bytes) -> bytes:
        """Proposes a plan unless another process has; returns the plan that was agreed on."""
        seen = self._seen if self._overwrite else None
        return parse_plan(self.notes.put(_PLAN, encode_plan_note(plan, seen)))

    def sweep(self) -> None:
        """Removes what killed attempts left behind; for one of the processes."""
        sweep_work_folders(self._work.path.parent, self._out, self._disk)

    def why_no_ranges(self) -> str:
        """Tries to write at an offset; returns why that cannot be done, empty if it can."""
        return why_no_ranges(self._work.path, self._named, self._disk)

    def create(self, path: str, size_bytes: int) -> None:
        """Makes a file of that size, unless another process has done so."""
        self._files.create(path, size_bytes, self._disk.join_file)

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start` of a created file; thread-safe for disjoint ranges."""
        self._files.write(path, start, data)

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        self._files.write_runs(path, starts, data)

    def part_file(self, name: str) -> PartFile:
        """Makes a file whose bytes the process that commits puts in their place with `unite`."""
        return PartFile(self._work.path / name, self._named, self._disk)

    def unite(self, sizes: Mapping[str, int], parts: Mapping[str, Sequence[Row]]) -> None:
        """Puts what other processes wrote to part files in its place; for one process.

        Args:
            sizes: Of the files of the output, by path.
            parts: The rows of each part file, by name.
        """
        files = StagedFiles(self._work.files, self._named, self._disk)
        try:
            for path, size_bytes in sizes.items():
                files.create(path, size_bytes, self._disk.join_file)
            with translate_errors(self._named):
                for name, rows in parts.items():
                    part = self._work.path / name
                    for path, starts, data in read_parts(part, rows, self._disk):
                        files.write_runs(path, starts, data)
                files.sync()
        finally:
            files.close()

    def free_bytes(self) -> int:
        with translate_errors(self._named):
            return free_bytes(self._work.path)

    def room_bytes(self, paths: Iterable[str]) -> int:
        """Returns how much room there is for these files, with what they take already.

        Any process that writes to the output may have made them, of their full size.
        """
        with translate_errors(self._named):
            free = free_bytes(self._work.path)  # before the rest, which only grows meanwhile
            return free + sum(taken_bytes(self._work.files / path) for path in paths)

    def sync(self) -> None:
        """Makes what this process wrote durable; what it writes next it has to create again."""
        with translate_errors(self._named):
            self._files.sync()
            self._files = StagedFiles(self._work.files, self._named, self._disk)
            for folder in self._made_folders:
                self._disk.sync_directory(folder.parent)

    def begin(self) -> None:
        """Makes the created files durable, so that other processes find them."""
        self.sync()

    def sent(self) -> SentRows:
        """Returns nothing: what was written is in its place."""
        return {}

    def adopt(self, _sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Does nothing: what other processes wrote is in its place."""
        return {}

    def finish(self, mark: str) -> None:
        """Makes what this process wrote durable, and leaves a mark of that."""
        self.sync()
        with translate_errors(self._named):
            (self._work.path / mark).touch()

    def absent(self, marks: Iterable[str]) -> list[str]:
        """Returns the marks that are not there: of processes that are not done, or elsewhere."""
        with suppress(FileNotFoundError):
            there = {path.name for path in self._work.path.iterdir()}
            return [mark for mark in marks if mark not in there]
        return list(marks)

    def commit(self, last: str, data: bytes) -> None:
        """Makes the output visible at once, the file `last` after all others; for one process."""
        with translate_errors(self._named):
            if last == MANIFEST_NAME and self._overwrite and self._out.is_dir():
                agreed = parse_seen(self.notes.get(_PLAN))
                seen = self._seen if agreed is None else agreed
                try:
                    refuse_newer(manifest_digest(self._out), seen, self.location)
                except OutputExistsError:
                    self.abandon()  # else each further try would be refused
                    raise
                refuse_unnamed_in(self._out, self.location)
            write_small(self._work.files / last, data, self._disk)
            overwrite = self._overwrite
            if not publish(self._work, self._out, self._disk, last=last, overwrite=overwrite):
                raise output_exists_error(self._named)
            self._disk.sync_directory(self._out.parent)
        self._work.remove()

    def leave(self) -> None:
        """Ends this process's part; the output stays as it is."""
        self._files.close()
        self._work.release()

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it."""
        self._files.close()
        away = self._work.path.with_name(hidden_name(self._out.name, os.urandom(NONCE_BYTES).hex()))
        with suppress(OSError):  # another process was faster, or it was committed
            # In one step, marks and all: a commit of half of it has to be impossible meanwhile.
            self._work.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        self._work.release()
        remove_empty(self._made_folders)


def _is_fixed(out: Path) -> bool:
    """Says whether a directory cannot be renamed; all processes must get the same answer."""
    return out.is_dir() and (os.path.ismount(out) or not os.access(out.parent, os.W_OK))
