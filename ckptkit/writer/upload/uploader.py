"""The process that uploads: takes requests as the writer process does, and uses a store's client.

It uploads files that some ranks wrote to their node's own disk, and finishes steps.
"""

from __future__ import annotations

import os
import sys
import time
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
from ckptkit.writer.upload.run_store import RunStore, UploadedFiles, claim_step, finish, send_file


class Uploader:
    """Serves requests to upload files and to finish steps."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        # The last upload of files with several links, such as frozen weights, by path.
        self._shared: dict[str, tuple[Mark, ObjectInfo]] = {}
        self._remote = Remote("")
        self._store: RunStore | None = None  # of that run

    def attach(self, message: Buffer, channel: Channel) -> None:  # noqa: ARG002
        """Closes the descriptor of a buffer, which this process does not use."""
        os.close(channel.take_descriptor())

    def do(self, message: Message, counter: ByteCounter) -> Answer:
        attempt = str(getattr(message, "attempt", ""))
        remote = getattr(message, "remote", None) or Remote("")
        try:
            if isinstance(message, UploadFiles | FinishUpload):
                known = self._remote.url, self._remote.options
                if self._store is None or (remote.url, remote.options) != known:
                    self._remote, self._store = remote, RunStore(remote)
                if isinstance(message, FinishUpload):
                    return finish(message, self._store, counter)
                return self.upload(message, self._store, counter)
            raise SaveError(  # noqa: TRY301  it is the answer
                f"expected an upload, received a {type(message).__name__}",
                hint="trainer and uploader have different versions; restart the job",
            )
        except OSError as error:  # of the local disk: the store raises errors of ours
            where = str(getattr(message, "folder", ""))
            return Failed(attempt, as_failure(error, where).to_json())
        except Exception as error:  # noqa: BLE001  the trainer reports any error
            failure = as_upload_error(error, where=remote.url, options=remote.options)
            return Failed(attempt, failure.to_json())

    def upload(self, request: UploadFiles, store: RunStore, counter: ByteCounter) -> Written:
        """Uploads files, then the records that prove them.

        Not those that were uploaded before, nor those of which the store can copy an earlier one.
        """
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        for path in request.further:
            check_relative(path, str(folder))
            with naming(folder / path):
                listed.append(WrittenFile(path, (folder / path).stat().st_size, None))
        claim_step(store, request.step, request.attempt, request.job)
        uploaded = UploadedFiles.of(folder, request.records[0])
        sent_bytes = copied_bytes = 0
        notes: list[str] = []
        for file in listed:
            source, target = folder / file.path, f"{request.step}/{file.path}"
            url = store.where(target)
            known = uploaded.identities.get(url)
            there = None if known is None else store.look_up(target)
            if there is not None and there.identity == known:
                counter.done_bytes += file.size_bytes
                continue
            mark = shared_mark(source, names=2)
            before = self._shared.pop(file.path, None)
            entry = None
            if request.earlier and mark is not None and before is not None and before[0] == mark:
                earlier = f"{request.earlier}/{file.path}"
                try:
                    entry = _copy_earlier(store, earlier, target, before[1])
                except CkptkitError as error:
                    notes.append(f"frozen weights were uploaded again: {error.message}")
            if entry is not None:
                copied_bytes += entry.size_bytes
                counter.done_bytes += entry.size_bytes
            else:
                entry = self._send(store, counter, source, target, file.size_bytes)
                sent_bytes += file.size_bytes
            if mark is not None:
                self._shared[file.path] = mark, entry
            uploaded.add(url, entry)
        for path, data in records.items():
            store.put(f"{request.step}/{path}", data)
        return Written(
            attempt=request.attempt,
            size_bytes=sent_bytes + sum(map(len, records.values())),
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - processor,
            notes=tuple(notes),
            linked_bytes=copied_bytes,
        )

    def _send(
        self, store: RunStore, counter: ByteCounter, source: Path, target: str, size_bytes: int
    ) -> ObjectInfo:
        with naming(source):
            file = open_written(source, size_bytes, self._disk)
        try:
            if store.store.is_bucket:
                store.put_file(source, target, counter)
            else:
                send_file(store, counter, file.read_bytes, size_bytes, target)
        finally:
            file.close()
        entry = store.look_up(target)
        if entry is None or entry.size_bytes != size_bytes:
            raise SaveError(
                f"uploaded {size_bytes:,} bytes, found {entry.size_bytes if entry else 0:,}",
                where=store.where(target),
                hint="check whether another program writes to the run or removes objects from it",
            )
        return entry


def _copy_earlier(
    store: RunStore, earlier: str, target: str, expected: ObjectInfo
) -> ObjectInfo | None:
    """Has the store copy a file of the previous step; None if it has to be uploaded."""
    before = store.look_up(earlier)
    if before is None or before.identity != expected.identity:
        return None
    if earlier != target:
        store.copy(earlier, target)
    entry = store.look_up(target)
    return entry if entry is not None and entry.size_bytes == expected.size_bytes else None


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(Uploader(Disk()))
    os._exit(0)  # a normal exit would join threads of the store's client


NICENESS = 19  # the step is durable already
# The order of folders: first the standard library, so that no module of it is replaced; then those
# of the trainer; then site-packages, which may hold another version of a package.
_PROGRAM = (
    "import sys; sys.path.extend({!r}); import site; site.main();"
    " from ckptkit.writer.upload.uploader import main; main()"
)


def upload_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests to upload.

    Unlike the writer it needs packages, which it finds where the trainer finds them. The command
    has no credentials and no paths of the upload.
    """
    folders = [folder for folder in sys.path if folder]
    return [
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format(folders)),
        *(str(descriptor), str(niceness)),
    ]
