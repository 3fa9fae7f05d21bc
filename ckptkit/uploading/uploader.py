"""Bringing the files that some ranks wrote on their node's own disk into a run's step."""

from __future__ import annotations

import time
from pathlib import Path

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.storage.names import check_relative
from ckptkit.storage.syscalls import Capabilities
from ckptkit.uploading.ledger import Ledger
from ckptkit.uploading.sending import Sender
from ckptkit.uploading.steps import claim_step
from ckptkit.uploading.store import Entry, Store
from ckptkit.writer.failures import naming
from ckptkit.writer.messages import Written
from ckptkit.writer.own_disk import Mark, open_written, read_small, recorded_files, shared_mark
from ckptkit.writer.record import WrittenFile
from ckptkit.writer.upload_messages import Upload
from ckptkit.writer.watching import Tally


class Uploader:
    """Uploads the files of one step after another."""

    def __init__(self, capabilities: Capabilities) -> None:
        """Takes what the platform offers."""
        self._capabilities = capabilities
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

        Raises:
            InputError: If a file is not there, or not as long as it was.
            OutputExistsError: If something else lies where the step was to go.
            CkptkitError: If the store refuses.
            OSError: If something cannot be read.
        """
        began, processor = time.monotonic(), time.process_time()
        folder = Path(request.folder)
        records = {path: read_small(folder, path) for path in request.records}
        listed = recorded_files(folder, records)
        listed += [_as_written(folder, path) for path in request.further]
        claim_step(store, request.step, request.attempt)
        step = _Step(self._capabilities, request, store, tally, self._shared)
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
        capabilities: Capabilities,
        request: Upload,
        store: Store,
        tally: Tally,
        shared: dict[str, tuple[Mark, Entry]],
    ) -> None:
        self.sent_bytes = self.copied_bytes = 0
        self.notes: list[str] = []
        self._capabilities = capabilities
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
            file = open_written(source, size_bytes, self._capabilities)
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
