"""The files that `consolidate` would write, as a file system of fsspec that can only be read.

`fsspec.open("ckptkit://model.safetensors", src="runs/llama")` reads a file that was never written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile

from ckptkit.api import ServeOptions
from ckptkit.core.arguments import check_arguments
from ckptkit.core.text import event_of_note
from ckptkit.core.threads import Throttle
from ckptkit.engine.outcome import Event, Planned
from ckptkit.serving.planned_folder import (
    PART_BYTES,
    IdleReaders,
    PlannedFile,
    PlannedFolder,
    divide_memory,
)
from ckptkit.serving.plans import ServePlan
from ckptkit.storage.locations import resolve_places
from ckptkit.storage.places import PathLike

_Found = tuple[PlannedFolder, PlannedFile]
logger = logging.getLogger(__name__)
_AGAIN = "call `invalidate_cache()` of the file system once the source is complete"


class CheckpointFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The planned folder of a checkpoint, whose bytes are made and proven when they are read.

    The first use plans the output, which opens the source; `invalidate_cache` closes it, and the
    next use plans again. A read raises `ChecksumError` or `SourceChangedError` where a byte cannot
    be proven. All threads that read share `memory_budget`, 96 MB by default.
    """

    protocol = "ckptkit"
    root_marker = ""

    def __init__(
        self,
        src: PathLike,
        *,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Checks the options; nothing is read yet.

        Args:
            src: Any path in or above a checkpoint, or an adapter.
            asynchronous: Whether its coroutines are awaited, as fsspec has it.
            loop: The event loop, as fsspec has it.
            batch_size: How many files are copied at a time, as fsspec has it.
            **options: See `ckptkit.ServeOptions`.

        Raises:
            ArgumentError: If an option does not exist, or has a value of another type.
        """
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size)
        self._plan = filesystem(src, **options)
        self._lock = threading.Lock()
        self._opened: PlannedFolder | None = None

    def invalidate_cache(self, path: str | None = None) -> None:
        """Closes the source, so that the next use plans again, with what the source is then."""
        super().invalidate_cache(path)
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            self._close()

    def created(self, path: str) -> datetime:
        """Returns when the file was planned."""
        return self._find_file(path)[1].modified

    modified = created

    def ukey(self, path: str) -> str:
        """Returns the version of a file: equal as long as source, options and ckptkit are."""
        return self._find_file(path)[1].etag

    def _folder(self) -> PlannedFolder:
        with self._lock:
            if self._opened is None:
                folder = PlannedFolder(self._plan, _log_notes, _AGAIN, IdleReaders())
                _log(folder.notes)
                resources = self._plan.job.resources
                threads, _ = divide_memory(resources, is_remote=folder.is_remote)
                self._turns = threading.Semaphore(threads)
                self._throttle = Throttle(resources.bytes_per_second)
                self._close = weakref.finalize(self, folder.close)
                self._opened = folder
            return self._opened

    def _find_file(self, path: str) -> _Found:
        folder = self._folder()
        planned = folder.files.get(self._strip_protocol(path))
        if planned is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder, planned

    def _read(self, found: _Found, start: int | None, end: int | None) -> Iterator[memoryview]:
        """Yields the proven bytes of a slice of a file, part by part, all of one plan."""
        folder, planned = found
        low, high, _ = slice(start, end).indices(planned.size_bytes)
        for first, stop in planned.cut(low, high):
            view = memoryview(bytearray(stop - first))
            with folder.used() as is_open, self._turns:
                if not is_open:
                    raise ValueError(
                        f"{planned.file.path!r} was opened before `invalidate_cache()`"
                    )
                self._throttle.take(len(view))
                folder.read_into(planned, first, view)
            yield view

    def _describe(self, path: str) -> dict[str, Any]:
        name, files = self._strip_protocol(path), self._folder().files
        if name in files:
            return _describe_file(name, files[name])
        if not name or any(one.startswith(f"{name}/") for one in files):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _list(self, path: str) -> list[dict[str, Any]]:
        described = self._describe(path)
        if described["type"] == "file":
            return [described]
        above = f"{described['name']}/".lstrip("/")
        below = [name for name in self._folder().files if name.startswith(above)]
        names = {above + name[len(above) :].partition("/")[0] for name in below}
        return [self._describe(name) for name in sorted(names)]

    def _copy_file(self, path: str, to: str, callback: Any) -> None:
        if self._describe(path)["type"] == "directory":
            Path(to).mkdir(parents=True, exist_ok=True)
            return
        found = self._find_file(path)
        callback.set_size(found[1].size_bytes)
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        try:
            with Path(to).open("wb") as copy:
                for view in self._read(found, None, None):
                    copy.write(view)
                    callback.relative_update(len(view))
        except BaseException:  # a part of a file would be taken for the file
            Path(to).unlink(missing_ok=True)
            raise

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(path).strip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Returns the URL of a path; with a slash in front, as `fsspec.generic.rsync` needs it."""
        path = self._strip_protocol(name)
        return f"ckptkit:///{path}" if path else "ckptkit://"

    async def _info(self, path: str, **_options: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._describe, path)

    async def _ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:  # noqa: FBT001, FBT002  of fsspec
        listed = await asyncio.to_thread(self._list, path)
        return listed if detail else [one["name"] for one in listed]

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        return await asyncio.to_thread(
            lambda: b"".join(self._read(self._find_file(path), start, end))
        )

    async def _get_file(
        self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_options: Any
    ) -> None:
        await asyncio.to_thread(self._copy_file, rpath, lpath, callback)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any
    ) -> _OpenFile:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        found = self._find_file(path)
        size, block_bytes = found[1].size_bytes, block_size or PART_BYTES
        return _OpenFile(self, path, mode, block_bytes, size=size, found=found, **options)


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An open file, with what it read ahead; by default one part."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        read = self.fs._read(self.kwargs["found"], start, end)  # noqa: SLF001  of the same module
        return b"".join(read)


@check_arguments
def filesystem(src: PathLike, **options: Unpack[ServeOptions]) -> ServePlan:
    """Checks the options of a file system, under the name by which users make one."""
    return ServePlan.from_options(resolve_places(src, None, options))


def _describe_file(name: str, planned: PlannedFile) -> dict[str, Any]:
    described = {"name": name, "size": planned.size_bytes, "type": "file"}
    return described | {"ETag": planned.etag, "mtime": planned.modified}


def _log_notes(event: Event) -> None:
    _log(event.notes if isinstance(event, Planned) else ())


def _log(notes: Iterable[str]) -> None:
    for note in notes:
        logger.log(logging.INFO if event_of_note(note) == "note" else logging.WARNING, "%s", note)
