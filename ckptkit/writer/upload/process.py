"""The program of the process that uploads: like the writer's, but it may speak to a store.

How a trainer starts the process that uploads.

Bringing the files that some ranks wrote on their node's own disk into a run's step.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.storage.local.disk import Disk
from ckptkit.storage.local.names import check_relative
from ckptkit.writer.drain import Mark, open_written, read_small, recorded_files, shared_mark
from ckptkit.writer.failures import Tally, as_failure, naming
from ckptkit.writer.messages import (
    Answer,
    Buffer,
    Channel,
    Failed,
    Finish,
    Message,
    Remote,
    Upload,
    Written,
)
from ckptkit.writer.process import run
from ckptkit.writer.record import WrittenFile
from ckptkit.writer.upload.steps import Ledger, claim_step, finish
from ckptkit.writer.upload.store import Entry, Sender, Store
from ckptkit.writer.upload.store import as_failure as as_failure_of_store


class Uploader:
    """Uploads the files of one step after another."""

    def __init__(self, disk: Disk) -> None:
        """Takes what the platform offers."""
        self._disk = disk
        # Of files with several names, as frozen weights have: what was last uploaded, by path.
        self._shared: dict[str, tuple[Mark, Entry]] = {}

    def upload(self, request: Upload, store: Store, tally: Tally) -> Written:
        """Uploads files, then the records that prove them.

        Args:
            request: What to upload.
            store: The run.
            tally: Is told of every part.

        Returns:
            What was uploaded.
        """
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        listed += [_as_written(folder, path) for path in request.further]
        claim_step(store, request.step, request.attempt)
        step = _Step(self._disk, request, store, tally, self._shared)
        for file in listed:
            step.bring(file)
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
    """One step that is being uploaded."""

    def __init__(
        self,
        disk: Disk,
        request: Upload,
        store: Store,
        tally: Tally,
        shared: dict[str, tuple[Mark, Entry]],
    ) -> None:
        self.sent_bytes = self.copied_bytes = 0
        self.notes: list[str] = []
        self._disk = disk
        self._request = request
        self._store = store
        self._tally = tally
        self._shared = shared
        self._sender = Sender(store, tally)
        self._ledger = Ledger.of(Path(request.folder), request.records[0])

    def bring(self, file: WrittenFile) -> None:
        """Uploads a file; or has it copied where the step before has it; or finds it there."""
        source, target = Path(self._request.folder, file.path), f"{self._request.step}/{file.path}"
        url = self._store.where(target)
        known = self._ledger.entries.get(url)
        if known is not None and self._store.look(target) == known:
            self._tally.done_bytes += file.size_bytes
            return
        mark = shared_mark(source, names=2)
        before = self._shared.pop(file.path, None)
        entry = None
        if mark is not None and before is not None and before[0] == mark:
            entry = self._copied(f"{self._request.earlier}/{file.path}", target, before[1])
        if entry is None:
            entry = self._sent(source, target, file.size_bytes)
        if mark is not None:
            self._shared[file.path] = mark, entry
        self._ledger.add(url, entry)

    def _copied(self, earlier: str, target: str, expected: Entry) -> Entry | None:
        """Has the store copy a file from the step before; None where it is to be uploaded."""
        if not self._request.earlier:
            return None
        try:
            if self._store.look(earlier) != expected:
                return None
            if earlier != target:
                self._store.copy(earlier, target)
            found = self._store.look(target)
        except CkptkitError as error:
            self.notes.append(f"frozen weights were uploaded again: {error.message}")
            return None
        if found is None or found.size_bytes != expected.size_bytes:
            return None
        self.copied_bytes += found.size_bytes
        self._tally.done_bytes += found.size_bytes
        return found

    def _sent(self, source: Path, target: str, size_bytes: int) -> Entry:
        with naming(source):
            file = open_written(source, size_bytes, self._disk)
        try:
            self._sender.send(file, size_bytes, target)
        finally:
            file.close()
        self.sent_bytes += size_bytes
        found = self._store.look(target)
        if found is None or found.size_bytes != size_bytes:
            raise SaveError(
                f"{found.size_bytes if found else 0:,} bytes were found where {size_bytes:,} were"
                " uploaded",
                where=self._store.where(target),
                hint="see whether something else writes to the run, or removes from it",
            )
        return found


def _as_written(folder: Path, path: str) -> WrittenFile:
    check_relative(path, str(folder))
    with naming(folder / path):
        return WrittenFile(path, (folder / path).stat().st_size, None)


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(UploadDesk(Disk()))
    os._exit(0)  # threads of the store's client would be waited for


@dataclass(slots=True)
class UploadDesk:
    """Does requests, and answers every failure.

    Attributes:
        disk: The file operations of the platform.
    """

    disk: Disk
    _uploader: Uploader | None = None
    _known: Remote | None = None
    _store: Store | None = field(default=None, repr=False)

    def attach(self, message: Buffer, channel: Channel) -> None:  # noqa: ARG002
        """Refuses a buffer, of which this process has no use."""
        os.close(channel.take_descriptor())

    def do(self, message: Message, tally: Tally) -> Answer:
        """Does a request.

        Returns:
            Its answer, `Failed` where it could not be done.
        """
        attempt = str(getattr(message, "attempt", ""))
        try:
            return self._done(message, tally)
        except OSError as error:  # of the local disk: the store's are errors of ours
            where = str(getattr(message, "folder", ""))
            return Failed(attempt, as_failure(error, where).to_json())
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer has to know
            remote = getattr(message, "remote", None) or Remote("")
            return Failed(attempt, as_failure_of_store(error, remote.url, remote.options).to_json())

    def _done(self, message: Message, tally: Tally) -> Answer:
        if isinstance(message, Upload):
            if self._uploader is None:
                self._uploader = Uploader(self.disk)
            return self._uploader.upload(message, self._store_of(message.remote), tally)
        if isinstance(message, Finish):
            return finish(message, self._store_of(message.remote), tally)
        raise SaveError(
            f"a {type(message).__name__} was received where an upload was expected",
            hint="trainer and uploader are of different versions; start the job again",
        )

    def _store_of(self, remote: Remote) -> Store:
        if self._store is None or (remote.url, remote.options) != (
            self._known and self._known.url,
            self._known and self._known.options,
        ):
            self._known, self._store = remote, Store(remote)
        return self._store


NICENESS = 19  # it may take its time: the step is safe already
_PROGRAM = (
    "import sys; sys.path.extend({!r}); from ckptkit.writer.upload.process import main; main()"
)


def upload_command(descriptor: int, niceness: int = NICENESS) -> list[str]:
    """Returns the command of a process that serves requests to upload.

    Unlike the writer it needs packages: those of the trainer, found where the trainer finds them.
    Nothing of what it is to upload, and with which credentials, shows in the command.

    Args:
        descriptor: Number of the socket that it inherits.
        niceness: By how much its priority is lowered.
    """
    folders = [folder for folder in sys.path if folder]
    return [
        *(sys.executable, "-I", "-c", _PROGRAM.format(folders)),
        *(str(descriptor), str(niceness)),
    ]
