"""Reading a directory on a local or mounted file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath

from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    MissingFileError,
    UnsafePathError,
)
from ckptkit.core.index import FileRef
from ckptkit.storage.base import Source, truncated_error
from ckptkit.storage.local.disk import LOCAL_DISK, DescriptorPool, Disk, OpenFile
from ckptkit.storage.locations import check_relative, is_work_folder

OPEN_FILES = 128

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class LocalSource(Source):
    """A directory that is read and never changed, nor mapped into memory.

    Files are read through a bounded number of descriptors. Links are followed as long as they
    stay inside the directory, or lead from a snapshot in the Hub's cache to its blobs.
    """

    def __init__(
        self, root: Path, *, disk: Disk = LOCAL_DISK, open_files: int = OPEN_FILES
    ) -> None:
        self.location = str(root)
        self._root = root
        self._disk = disk
        with self._translate_errors(""):
            self._resolved = root.resolve(strict=True)
            if not self._resolved.is_dir():
                raise MissingFileError(
                    "a file was found where a directory was expected", where=self.location
                )
        # Of a snapshot of the Hub, the folder of its blobs; see
        # https://huggingface.co/docs/huggingface_hub/guides/manage-cache
        blobs = [
            folder.parent / "blobs"
            for folder in self._resolved.parents
            if folder.name == "snapshots" and folder.parent.name.startswith("models--")
        ]
        self._allowed = (self._resolved, *blobs[:1])
        self.closed_folders: set[str] = set()
        self._pool = DescriptorPool(self._open, open_files)

    def walk(self, depth: int, folder: str = "") -> Iterator[str]:
        # Folders that are links are not entered, since they may lead round in circles; nor are
        # folders in which an output is being staged, or that may not be looked into.
        if folder and not os.access(self._resolved / folder, os.R_OK | os.X_OK):
            self.closed_folders.add(folder.rstrip("/"))
            return  # whether that matters is known where checkpoints are chosen
        try:
            with self._translate_errors(folder), os.scandir(self._resolved / folder) as entries:
                children = sorted(
                    (f"{folder}{entry.name}{'/' if _is_folder(entry) else ''}", entry.is_symlink())
                    for entry in entries
                    if not is_work_folder(entry.name)
                )
        except MissingFileError:
            if not folder:
                raise
            return  # removed since its parent was listed, such as an old step of a run
        for path, is_link in children:  # with the slash, the order is that of all paths below
            if not path.endswith("/"):
                yield path
            elif depth > 0 and not is_link:
                yield from self.walk(depth - 1, path)

    def stat(self, path: str) -> FileRef:
        """Returns size and identity of a file, the latter from inode, mtime and size."""
        with self._translate_errors(path):
            status = self._resolve(path).stat()
            self._check_regular(path, status)
        identity = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
        return FileRef(path, status.st_size, identity, status.st_mtime)

    def read(self, path: str, start: int, stop: int) -> bytes:
        with self._translate_errors(path), self._pool.use(path) as file:
            size_bytes = file.status().st_size
            if stop > size_bytes:
                raise truncated_error(self._where(path), start, stop, size_bytes)
            data = file.read_bytes(start, stop - start)
        if len(data) < stop - start:
            raise truncated_error(self._where(path), start, stop, start + len(data))
        return data

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        view = target.cast("B")
        with self._translate_errors(path), self._pool.use(path) as file:
            done = file.read_at(start, view)
        if done < len(view):
            raise truncated_error(self._where(path), start, start + len(view), start + done)

    @contextmanager
    def local_file(self, path: str) -> Iterator[OpenFile]:
        with ExitStack() as stack:
            with self._translate_errors(path):
                file = stack.enter_context(self._pool.use(path))
            yield file

    def close(self) -> None:
        self._pool.close()

    def linked_folders(self) -> list[str]:
        with self._translate_errors(""), os.scandir(self._resolved) as entries:
            return sorted(e.name for e in entries if e.is_symlink() and _is_folder(e))

    def _open(self, path: str) -> OpenFile:
        resolved = self._resolve(path)
        self._check_regular(path, resolved.stat())
        file = self._disk.open_for_reading(resolved)
        try:
            self._check_regular(path, file.status())  # it may have been swapped in between
            place = file.find_place()  # and a folder above it for a link
            if place is not None and not self._is_inside(place):
                raise self._unsafe_error(path)
            file.advise_sequential()
        except (CkptkitError, OSError):
            file.close()
            raise
        return file

    def _resolve(self, path: str) -> Path:
        check_relative(path, self.location)
        place = str(self._resolved).rstrip("/")
        for name in PurePath(path).parts:  # what is above them was resolved before
            place = f"{place}/{name}"
            if stat.S_ISLNK(os.lstat(place).st_mode):
                break
        else:
            return Path(place)
        resolved = (self._resolved / path).resolve(strict=True)
        if self._is_inside(resolved):
            return resolved
        raise self._unsafe_error(path)

    def _is_inside(self, place: Path) -> bool:
        return any(place.is_relative_to(folder) for folder in self._allowed)

    def _unsafe_error(self, path: str) -> UnsafePathError:
        return UnsafePathError(
            "a link that leads out of the checkpoint was found where a file was expected",
            where=self._where(path),
            hint=f"copy the checkpoint with its links followed: cp -rL {self.location} COPY",
        )

    def _check_regular(self, path: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "no file")
            raise InputError(
                f"{kind} was found where a regular file was expected", where=self._where(path)
            )

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            where = self._where(path)
            raise MissingFileError("nothing was found there", where=where) from error
        except RuntimeError as error:  # how pathlib reports links in a circle before 3.13
            where = self._where(path)
            raise InputError("cannot be read: links lead round in a circle", where=where) from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"cannot be read: {reason}", where=self._where(path)) from error

    def _where(self, path: str) -> str:
        return str(self._root / path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle; reading it will say so
        return False
