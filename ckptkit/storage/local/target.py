"""Writing a directory on a local or mounted file system, invisible until it is complete.

Files are staged in a work folder and written at their final offsets, by many threads of one process
(`LocalTarget`) or by several processes (`SharedTarget`).
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.core.arrays import address_of
from ckptkit.core.crc import crc32
from ckptkit.core.errors import ChecksumError, NoSpaceError, OutputError, OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import ObjectPart, SharedRange
from ckptkit.storage.base import (
    Row,
    SentRows,
    Sink,
    Source,
    Target,
    encode_plan_note,
    parse_plan,
    parse_seen,
)
from ckptkit.storage.local.disk import (
    BLOCK_BYTES,
    LOCAL_DISK,
    PAGE_BYTES,
    DescriptorPool,
    Disk,
    is_out_of_space,
    is_refused,
)
from ckptkit.storage.local.durable import sync_folders
from ckptkit.storage.local.ownership import refuse_planted
from ckptkit.storage.local.workdir import (
    NONCE_BYTES,
    WorkFolder,
    can_be_replaced,
    claim_work_folder,
    is_empty,
    is_free,
    join_work_folder,
    publish,
    reclaim_work_folder,
    sweep_work_folders,
)
from ckptkit.storage.locations import check_relative, hidden_name, unstaged_path
from ckptkit.storage.manifests import (
    manifest_digest,
    refuse_newer,
    refuse_unnamed_in,
)
from ckptkit.storage.place_identity import find_filesystem_type

OPEN_FILES = 64
SYNC_THREADS = 4
MIN_DIRECT_BYTES = 128 * 1024
"""Shorter writes go through the page cache: waiting for the device would cost more."""


class StagedFiles(Sink):
    """The files of an output in the hidden folder in which it grows.

    Data whose address is congruent to its place in the file modulo 4,096 bypasses the page cache.
    """

    def __init__(self, work: WorkFolder, named: Path, disk: Disk) -> None:
        self.location = str(named)
        self.folder = work.path
        self._work = work
        self._named = named
        self._disk = disk
        self._make = disk.create_file
        self._sizes: dict[str, int] = {}
        # Of each file, what it shares with others, as starts and stops in their order.
        self._shared: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self._pool = DescriptorPool(self._open, OPEN_FILES, retire=StagedFile.retire)

    def create(self, path: str, size_bytes: int) -> None:
        file = self.staged(path)
        with translate_errors(self._named, size_bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._make(file, size_bytes)
        self._sizes[path] = size_bytes

    def why_no_sharing(self, source: Source, path: str) -> str:
        probe = self._work.path / f".probe-{os.urandom(8).hex()}"
        given = source.local_file(path) if self._disk.sharing else None
        if given is None:
            return "only files on a disk of this machine, which runs Linux, have blocks to share"
        with translate_errors(self._named), given as file:
            try:
                with self._disk.new_file(probe) as made:
                    made.share_blocks(file, 0, BLOCK_BYTES, 0)
            except OSError as error:
                if is_out_of_space(error):
                    raise
                if error.errno == errno.EXDEV:
                    return "the source is on another file system, or mount, than the output"
                named = f"the file system ({find_filesystem_type(self._work.path) or 'unknown'})"
                if error.errno == errno.EINVAL:  # by ioctl_ficlonerange(2)
                    return f"{named} shares no blocks of {path!r}, as of one without checksums"
                return f"{named} does not share blocks between files"
            probe.unlink()
        return ""

    def create_shared(
        self, path: str, size_bytes: int, shared: Sequence[tuple[Source, SharedRange]]
    ) -> None:
        file, done = self.staged(path), list[SharedRange]()
        with translate_errors(self._named, size_bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            with self._disk.new_file(file) as made:
                made.truncate(size_bytes)
                for source, part in shared:
                    given = source.local_file(part.stored.path)
                    assert given is not None  # noqa: S101  by `why_no_sharing`
                    with given as stored:
                        try:
                            size, at = part.stored.size_bytes, part.start
                            made.share_blocks(stored, part.stored.start, size, at)
                        except OSError as error:
                            if is_out_of_space(error):
                                raise
                            continue  # a compressed file, or one without checksums: it is written
                    done.append(part)
                self._shared[path] = [part.start for part in done], [part.stop for part in done]
                lacking = list(self.unshared(path, 0, size_bytes))
                self._disk.reserve(made, size_bytes, lacking, file)
        self._sizes[path] = size_bytes
        self.shared_bytes += sum(part.stored.size_bytes for part in done)

    def staged(self, path: str) -> Path:
        """Returns where a file of the output is until the commit."""
        check_relative(path, self.location)
        return self._work.files / path

    def write(self, path: str, start: int, data: memoryview) -> None:
        size_bytes = self._sizes.get(path, -1)
        if start < 0 or start + data.nbytes > size_bytes:
            raise ValueError(f"bytes [{start}, {start + data.nbytes}) are not in file {path!r}")
        if not data.nbytes:
            return
        with translate_errors(self._named, data.nbytes), self._pool.use(path) as file:
            for low, high in self.unshared(path, start, start + data.nbytes):
                file.write_at(low, data.cast("B")[low - start : high - start])

    def unshared(self, path: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        starts, stops = self._shared.get(path, ((), ()))
        for at in range(bisect_right(stops, start), len(starts)):
            if starts[at] >= stop:
                break
            if starts[at] > start:
                yield start, starts[at]
            start = stops[at]
        if start < stop:
            yield start, stop

    def write_runs(self, path: str, starts: Sequence[int], data: memoryview) -> None:
        """Writes data of as many equal runs as there are starts, each at its own byte of a file."""
        length = data.nbytes // len(starts)
        if min(starts) < 0 or max(starts) + length > self._sizes.get(path, -1):
            raise ValueError(f"runs from byte {min(starts)} on are not all in file {path!r}")
        with translate_errors(self._named, data.nbytes), self._pool.use(path) as file:
            for number, start in enumerate(starts):
                file.write_at(start, data[number * length : (number + 1) * length])

    def sync(self) -> None:
        """Makes what was written durable, and forgets the files."""

        def sync_file(path: str) -> None:
            with self._pool.use(path) as file:
                file.sync()

        with translate_errors(self._named):
            with ThreadPoolExecutor(SYNC_THREADS) as threads:
                for _ in threads.map(sync_file, self._sizes):
                    pass
            self._pool.close()
            sync_folders(self._work.files, self._disk)
        self._sizes, self._shared = {}, {}
        self._pool = DescriptorPool(self._open, OPEN_FILES, retire=StagedFile.retire)

    def _open(self, path: str) -> StagedFile:
        return StagedFile(self._work.files / path, self._sizes[path], self._disk)


class StagedFile:
    """A file under construction: whole pages bypass the page cache, ragged edges go through it."""

    __slots__ = ("_buffered", "_direct", "_direct_works")

    def __init__(self, path: Path, size_bytes: int, disk: Disk) -> None:
        self._buffered = disk.open_for_writing(path)
        self._direct = None
        try:
            if size_bytes >= MIN_DIRECT_BYTES:
                self._direct = disk.open_direct(path)
        except OSError:
            self._buffered.close()
            raise
        self._direct_works = self._direct is not None

    def write_at(self, start: int, data: memoryview) -> None:
        # `data[head:tail]` fills whole pages of the file.
        head = -start % PAGE_BYTES
        tail = len(data) - (start + len(data)) % PAGE_BYTES
        if (
            self._direct is None
            or not self._direct_works
            or tail - head < MIN_DIRECT_BYTES
            or (address_of(data) + head) % BLOCK_BYTES
        ):
            self._buffered.write_at(start, data)
            return
        if head:
            self._buffered.write_at(start, data[:head])
        try:
            self._direct.write_at(start + head, data[head:tail])
        except OSError as error:
            if not is_refused(error):
                raise
            self._direct_works = False  # other threads may still be in a direct write: not closed
            self._buffered.write_at(start + head, data[head:tail])
        if tail < len(data):
            self._buffered.write_at(start + tail, data[tail:])

    def sync(self) -> None:
        self._buffered.sync()

    def close(self) -> None:
        self._buffered.close()
        if self._direct is not None:
            self._direct.close()

    def retire(self) -> None:
        """Closes the descriptors, but not before an error of writing back has been seen."""
        try:
            self.sync()
        finally:
            self.close()


@contextmanager
def translate_errors(named: Path, size_bytes: int = 0) -> Iterator[None]:
    """Turns errors of the system into ours, for an output named so by the user."""
    try:
        yield
    except OSError as error:
        if is_out_of_space(error):
            raise _no_space(named, size_bytes) from error
        reason = (error.strerror or str(error)).lower()
        name = f" (at {unstaged_path(str(error.filename))!r})" if error.filename else ""
        raise OutputError(f"cannot be written: {reason}{name}", where=str(named)) from error


def _no_space(named: Path, size_bytes: int) -> NoSpaceError:
    free = free_bytes(named.absolute())
    place = str(named.parent)
    if not size_bytes:
        text = f"the disk or a quota is full: {free:,} bytes are free at {place!r}"
    elif free > size_bytes:
        text = f"the disk or a quota is full, although {free:,} bytes are free at {place!r}"
    else:
        text = f"needs {size_bytes:,} bytes more, but {free:,} are free at {place!r}"
    return NoSpaceError(text, where=str(named), hint="free some space, or name a place with more")


def write_small(path: Path, data: bytes, disk: Disk) -> None:
    """Makes a small file, durable with its entry in the folder, unless another process has."""
    disk.join_file(path, len(data))
    file = disk.open_for_writing(path)
    try:
        file.write_at(0, memoryview(data))
        file.sync()
    finally:
        file.close()
    disk.sync_directory(path.parent)


def free_bytes(path: Path) -> int:
    """Returns the room on the disk that holds `path`, or will."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def taken_bytes(path: Path) -> int:
    if not path.is_file():
        return 0
    status = path.stat()
    return getattr(status, "st_blocks", 0) * 512 or status.st_size


_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def output_exists_error(out: Path) -> OutputExistsError:
    return OutputExistsError(
        "the directory holds files where an empty or absent one was expected",
        where=str(out),
        hint="name another directory, or have this one replaced: --overwrite, overwrite=True",
    )


def not_replaceable_error(out: Path) -> OutputError:
    return OutputError(
        "the directory holds files and cannot be renamed, so it cannot be replaced at once",
        where=str(out),
        hint="empty it, or name a directory below it",
    )


class LocalTarget(StagedFiles, Target):
    """A directory that comes into being, complete and durable, when it is committed.

    Until then its files grow in a hidden folder beside it, on the same file system.

    Attributes:
        shares_blocks: As it does unless the file system refuses.
        parts: Notes of finished parts.
        has_finished: Whether there are finished files that another run can take over.
    """

    shares_blocks = True

    def __init__(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        disk: Disk = LOCAL_DISK,
    ) -> None:
        """Prepares the place, makes missing parents and sweeps away what a kill left behind.

        With `resume`, what a killed run left is taken over where it has notes of parts.
        """
        self._disk = disk
        self._overwrite = overwrite
        self._is_left = self.has_finished = False
        self._made_folders: list[Path] = []
        with translate_errors(out):
            self._out = out.resolve()
            refuse_file(self._out, out)
            try:
                self._made_folders = make_missing(self._out.parent)
                work = self._prepare(out, resume=resume)
            except BaseException:
                remove_empty(self._made_folders)
                raise
        super().__init__(work, out, disk)
        self._seen = manifest_digest(self._out)
        self.parts = work.parts

    def commit(self, last: str) -> None:
        if last not in self._sizes:
            raise ValueError(f"file {last!r} was not created")
        self.sync()
        with translate_errors(self._named):
            if last == MANIFEST_NAME and self._overwrite and self._out.is_dir():
                refuse_newer(manifest_digest(self._out), self._seen, self.location)
                refuse_unnamed_in(self._out, self.location)
            overwrite = self._overwrite
            if not publish(self._work, self._out, self._disk, last=last, overwrite=overwrite):
                raise output_exists_error(self._named)
            new, self._made_folders = self._made_folders, []
            for folder in {self._out.parent, *(path.parent for path in new)}:
                self._disk.sync_directory(folder)
        self._work.remove()
        self._sweep()  # what killed runs left to be resumed is of no use any more

    @property
    def is_filled(self) -> bool:
        """Whether another process has filled the destination, so that nothing can be committed."""
        return not self._overwrite and self._out.is_dir() and not is_empty(self._out)

    def _sweep(self) -> None:
        for parent in (self._out.parent, self._out):
            sweep_work_folders(parent, self._out, self._disk)

    def abandon(self) -> None:
        if self._is_left:
            return
        self._pool.close()
        self._work.remove()
        remove_empty(self._made_folders)

    def leave(self) -> None:
        """Ends without a commit, and keeps what was written for a later run."""
        self._is_left = True
        self._pool.close()
        self._work.release()

    def keep(self, paths: Collection[str]) -> None:
        """Takes over proven files of an earlier run, and removes what else it left."""
        kept = {self.staged(path): path for path in paths}
        with translate_errors(self._named):
            for file in list(self._work.files.rglob("*")):
                if file not in kept and not file.is_dir():
                    file.unlink()
            self._sizes |= {path: file.stat().st_size for file, path in kept.items()}
        self.has_finished = bool(paths)

    def free_bytes(self) -> int:
        with translate_errors(self._named):
            taken = sum(taken_bytes(path) for path in self._work.files.rglob("*"))
            return free_bytes(self._work.path) + taken

    def _prepare(self, named: Path, *, resume: bool) -> WorkFolder:
        out, work = self._out, None
        if resume:
            work = reclaim_work_folder(out.parent, out, self._disk)
            work = work or reclaim_work_folder(out, out, self._disk)
        self._sweep()
        if self.is_filled:
            if work is not None:
                work.remove()
            raise output_exists_error(named)
        self.has_finished = work is not None
        if work is not None:
            return work
        exists = out.is_dir()
        try:
            work = claim_work_folder(out.parent, out.name, self._disk)
        except OSError as error:
            if not exists or error.errno not in _NOT_WRITABLE:
                raise
        else:
            if not exists or can_be_replaced(out, work):
                return work
            work.remove()
        if not is_empty(out):
            raise not_replaceable_error(named)
        return claim_work_folder(out, out.name, self._disk)


def refuse_file(out: Path, named: Path) -> None:
    """Refuses to write a directory where a file is, or one that another user made for us."""
    refuse_planted(named.absolute())
    if out.exists() and not out.is_dir():
        raise OutputError(
            "a file was found where an empty or absent directory was expected", where=str(named)
        )


def make_missing(folder: Path) -> list[Path]:
    """Makes a folder and its missing parents, and returns those it made, outermost first."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    missing.reverse()
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Removes folders, given outermost first, as far as they are empty."""
    with suppress(OSError):  # another process uses it by now
        for folder in reversed(folders):
            folder.rmdir()


_PLAN = "plan"
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES})
_CONTENT = "content"


class WorkNotes:
    """Notes, each a folder with one file in it: renaming a folder never replaces a filled one."""

    def __init__(self, folder: Path, named: Path, disk: Disk) -> None:
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
        with translate_errors(self._named):
            try:
                return (self._folder / name / _CONTENT).read_bytes()
            except FileNotFoundError:
                return None

    @contextmanager
    def alone(self, name: str, _owner: str = "") -> Iterator[bool]:
        is_alone, lock = False, None
        with suppress(FileNotFoundError):  # another process has removed the folder
            is_alone, lock = self._disk.try_lock(self._folder / f"{name}.lock")
        try:
            yield is_alone
        finally:
            if lock is not None:
                lock.close()


class PartFile:
    """A file written from its start to its end, and what is to become of its bytes.

    Attributes:
        rows: What was written, in its order.
    """

    def __init__(self, path: Path, named: Path, disk: Disk) -> None:
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


class SharedTarget(StagedFiles):
    """One process's view of an output that all of them write, each its own ranges.

    The first process makes the hidden folder and its files, the others enter it. Where the system
    has locks, every process holds a shared one, so that no run sweeps the folder away before the
    last of them has ended.

    Attributes:
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

        `nonce`, 16 hexadecimal digits, names this attempt in all processes. `seen` is what
        `manifest_digest` returned when they began, None for now.
        """
        named = named or out
        self._overwrite = overwrite
        self._made_folders: list[Path] = []
        with translate_errors(named):
            self._out = out.resolve()
            self._seen = manifest_digest(self._out) if seen is None else seen
            refuse_file(self._out, named)
            is_fixed = _is_fixed(self._out)
            if not is_free(self._out, disk):
                if not overwrite:
                    raise output_exists_error(named)
                if is_fixed:
                    raise not_replaceable_error(named)
            parent = self._out if is_fixed else self._out.parent
            self._made_folders = make_missing(parent)
            try:
                work = join_work_folder(parent, self._out.name, nonce, disk)
            except BaseException:
                remove_empty(self._made_folders)
                raise
        super().__init__(work, named, disk)
        self._make = disk.join_file
        self.removal = f"rm -r '{self.folder}'"
        self.notes = WorkNotes(self.folder, named, disk)

    def plan(self) -> bytes | None:
        note = self.notes.get(_PLAN)
        return None if note is None else parse_plan(note)

    def agree(self, plan: bytes) -> bytes:
        """Proposes a plan unless another process has; returns the plan that was agreed on."""
        seen = self._seen if self._overwrite else None
        return parse_plan(self.notes.put(_PLAN, encode_plan_note(plan, seen)))

    def sweep(self) -> None:
        """Removes what killed attempts left behind; for one of the processes."""
        sweep_work_folders(self.folder.parent, self._out, self._disk)

    def why_no_ranges(self) -> str:
        return why_no_ranges(self.folder, self._named, self._disk)

    def part_file(self, name: str) -> PartFile:
        """Makes a file whose bytes the process that commits puts in their place with `unite`."""
        return PartFile(self.folder / name, self._named, self._disk)

    def unite(self, sizes: Mapping[str, int], parts: Mapping[str, Sequence[Row]]) -> None:
        """Puts the rows of part files, by name, in their place in files of these sizes."""
        for path, size_bytes in sizes.items():
            self.create(path, size_bytes)
        with translate_errors(self._named):
            for name, rows in parts.items():
                for path, starts, data in read_parts(self.folder / name, rows, self._disk):
                    self.write_runs(path, starts, data)
        super().sync()

    def free_bytes(self) -> int:
        with translate_errors(self._named):
            return free_bytes(self.folder)

    def room_bytes(self, paths: Iterable[str]) -> int:
        """Returns how much room there is for these files, with what they take already.

        Any process that writes to the output may have made them, of their full size.
        """
        with translate_errors(self._named):
            free = free_bytes(self.folder)  # before the rest, which only grows meanwhile
            return free + sum(taken_bytes(self._work.files / path) for path in paths)

    def sync(self) -> None:
        super().sync()
        with translate_errors(self._named):
            for folder in self._made_folders:
                self._disk.sync_directory(folder.parent)

    def begin(self) -> None:
        self.sync()

    def sent(self) -> SentRows:
        return {}

    def adopt(self, _sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        return {}

    def finish(self, mark: str) -> None:
        """Makes what this process wrote durable, and leaves a mark of that."""
        self.sync()
        with translate_errors(self._named):
            (self.folder / mark).touch()

    def absent(self, marks: Iterable[str]) -> list[str]:
        """Returns the marks that are not there: of processes that are not done, or elsewhere."""
        with suppress(FileNotFoundError):
            there = {path.name for path in self.folder.iterdir()}
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
        self._pool.close()
        self._work.release()

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it."""
        self._pool.close()
        away = self.folder.with_name(hidden_name(self._out.name, os.urandom(NONCE_BYTES).hex()))
        with suppress(OSError):  # another process was faster, or it was committed
            # In one step, marks and all: a commit of half of it has to be impossible meanwhile.
            self.folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        self._work.release()
        remove_empty(self._made_folders)


def _is_fixed(out: Path) -> bool:
    """Says whether a directory cannot be renamed; all processes must get the same answer."""
    return out.is_dir() and (os.path.ismount(out) or not os.access(out.parent, os.W_OK))
