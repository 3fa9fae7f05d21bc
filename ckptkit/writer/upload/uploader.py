"""The process that uploads: takes requests as the writer process does, and uses a store's client.

It uploads files that some ranks wrote to their node's own disk, and finishes steps.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.durable import naming
from ckptkit.storage.locations import check_relative
from ckptkit.storage.remote.errors import as_upload_error
from ckptkit.storage.remote.store import ObjectInfo
from ckptkit.writer.drain import Mark, open_written, read_small, recorded_files, shared_mark
from ckptkit.writer.messages import (
    Answer,
    Buffer,
    ByteCounter,
    Channel,
    Failed,
    FinishUpload,
    Message,
    Remote,
    UploadFiles,
    Written,
)
from ckptkit.writer.process import as_failure, run
from ckptkit.writer.record import WrittenFile
from ckptkit.writer.upload.run_store import (
    RunStore,
    UploadedFiles,
    claim_step,
    finish,
    send_file,
)


class Uploader:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        # The last upload of files with several links, such as frozen weights, by path.
        self._shared: dict[str, tuple[Mark, ObjectInfo]] = {}

    def upload(self, request: UploadFiles, store: RunStore, counter: ByteCounter) -> Written:
        """Uploads files, then the records that prove them."""
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        for path in request.further:
            check_relative(path, str(folder))
            with naming(folder / path):
                listed.append(WrittenFile(path, (folder / path).stat().st_size, None))
        claim_step(store, request.step, request.attempt)
        step = _Step(self._disk, request, store, counter, self._shared)
        for file in listed:
            step.upload(file)
        for path, data in records.items():
            store.put(f"{request.step}/{path}", data)
        return Written(
            attempt=request.attempt,
            size_bytes=step.sent_bytes + sum(map(len, records.values())),
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - processor,
            notes=tuple(step.notes),
            linked_bytes=step.copied_bytes,
        )


class _Step:
    def __init__(
        self,
        disk: Disk,
        request: UploadFiles,
        store: RunStore,
        counter: ByteCounter,
        shared: dict[str, tuple[Mark, ObjectInfo]],
    ) -> None:
        self.sent_bytes = self.copied_bytes = 0
        self.notes: list[str] = []
        self._disk = disk
        self._request = request
        self._store = store
        self._counter = counter
        self._shared = shared
        self._uploaded = UploadedFiles.of(Path(request.folder), request.records[0])

    def upload(self, file: WrittenFile) -> None:
        """Uploads a file, unless it was uploaded before or the store can copy an earlier one."""
        source, target = Path(self._request.folder, file.path), f"{self._request.step}/{file.path}"
        url = self._store.where(target)
        known = self._uploaded.identities.get(url)
        there = None if known is None else self._store.look_up(target)
        if there is not None and there.identity == known:
            self._counter.done_bytes += file.size_bytes
            return
        mark = shared_mark(source, names=2)
        before = self._shared.pop(file.path, None)
        entry = None
        if mark is not None and before is not None and before[0] == mark:
            entry = self._copy_earlier(f"{self._request.earlier}/{file.path}", target, before[1])
        if entry is None:
            entry = self._send(source, target, file.size_bytes)
        if mark is not None:
            self._shared[file.path] = mark, entry
        self._uploaded.add(url, entry)

    def _copy_earlier(self, earlier: str, target: str, expected: ObjectInfo) -> ObjectInfo | None:
        """Has the store copy a file of the previous step; None if it has to be uploaded."""
        if not self._request.earlier:
            return None
        try:
            before = self._store.look_up(earlier)
            if before is None or before.identity != expected.identity:
                return None
            if earlier != target:
                self._store.copy(earlier, target)
            entry = self._store.look_up(target)
        except CkptkitError as error:
            self.notes.append(f"frozen weights were uploaded again: {error.message}")
            return None
        if entry is None or entry.size_bytes != expected.size_bytes:
            return None
        self.copied_bytes += entry.size_bytes
        self._counter.done_bytes += entry.size_bytes
        return entry

    def _send(self, source: Path, target: str, size_bytes: int) -> ObjectInfo:
        with naming(source):
            file = open_written(source, size_bytes, self._disk)
        try:
            send_file(self._store, self._counter, file.read_bytes, size_bytes, target)
        finally:
            file.close()
        self.sent_bytes += size_bytes
        entry = self._store.look_up(target)
        if entry is None or entry.size_bytes != size_bytes:
            raise SaveError(
                f"uploaded {size_bytes:,} bytes, found {entry.size_bytes if entry else 0:,}",
                where=self._store.where(target),
                hint="check whether another program writes to the run or removes objects from it",
            )
        return entry


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(UploadRequestHandler(Disk()))
    os._exit(0)  # a normal exit would join threads of the store's client


@dataclass(slots=True)
class UploadRequestHandler:
    disk: Disk
    _uploader: Uploader | None = None
    _known: Remote | None = None
    _store: RunStore | None = field(default=None, repr=False)

    def attach(self, message: Buffer, channel: Channel) -> None:  # noqa: ARG002
        """Closes the descriptor of a buffer, which this process does not use."""
        os.close(channel.take_descriptor())

    def do(self, message: Message, counter: ByteCounter) -> Answer:
        attempt = str(getattr(message, "attempt", ""))
        try:
            return self._dispatch(message, counter)
        except OSError as error:  # of the local disk: the store raises errors of ours
            where = str(getattr(message, "folder", ""))
            return Failed(attempt, as_failure(error, where).to_json())
        except Exception as error:  # noqa: BLE001  the trainer reports any error
            remote = getattr(message, "remote", None) or Remote("")
            failure = as_upload_error(error, where=remote.url, options=remote.options)
            return Failed(attempt, failure.to_json())

    def _dispatch(self, message: Message, counter: ByteCounter) -> Answer:
        if isinstance(message, UploadFiles):
            if self._uploader is None:
                self._uploader = Uploader(self.disk)
            return self._uploader.upload(message, self._store_of(message.remote), counter)
        if isinstance(message, FinishUpload):
            return finish(message, self._store_of(message.remote), counter)
        raise SaveError(
            f"expected an upload, received a {type(message).__name__}",
            hint="trainer and uploader have different versions; restart the job",
        )

    def _store_of(self, remote: Remote) -> RunStore:
        if self._store is None or (remote.url, remote.options) != (
            self._known and self._known.url,
            self._known and self._known.options,
        ):
            self._known, self._store = remote, RunStore(remote)
        return self._store


NICENESS = 19  # the step is durable already
_PROGRAM = (
    "import sys; sys.path.extend({!r}); from ckptkit.writer.upload.uploader import main; main()"
)


def upload_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests to upload.

    Unlike the writer it needs packages, which it finds where the trainer finds them. The command
    has no credentials and no paths of the upload.
    """
    folders = [folder for folder in sys.path if folder]
    return [
        *(sys.executable, "-I", "-c", _PROGRAM.format(folders)),
        *(str(descriptor), str(niceness)),
    ]
