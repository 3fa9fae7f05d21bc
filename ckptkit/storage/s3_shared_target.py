"""An output on S3 that several processes fill at once: parts of common uploads, completed by one.

Below the output lies, until it is committed,

    .ckptkit-0123456789abcdef/
        plan                  what all processes do; who removes it gives the others up
        ATTEMPT/uploads/PATH  the upload of a file, of which every process sends its own parts
        ATTEMPT/…             what else the processes tell each other

No reader sees the uploads, and the next run finds them by these notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptkit.core.errors import OutputError, OutputExistsError
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.core.object_parts import ObjectPart
from ckptkit.storage.names import WORK_INFIX, check_relative
from ckptkit.storage.s3_commit import S3Commit
from ckptkit.storage.s3_notes import S3Notes
from ckptkit.storage.s3_shared_object import S3SharedObject
from ckptkit.storage.s3_sweep import UPLOADS, mark_of, sweep_uploads, uploads_in
from ckptkit.storage.s3_uploads import S3Uploads
from ckptkit.storage.shared_output import Attempt, Cut, SentRows, plan_note, plan_of, seen_in
from ckptkit.storage.store_errors import Writing, quietly

_PLAN = "plan"
_PLANNED = ".planned"
_REQUESTS_AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a bucket to which an output goes.

    Attributes:
        store: The bucket.
        key: Of the keys, with the slash at its end; empty for the bucket itself.
        location: What messages call it.
        writing: A context that makes errors of ours of what the store raises.
    """

    store: S3Uploads
    key: str
    location: str
    writing: Writing


class S3SharedTarget:
    """One process's view of such an output."""

    takes_parts = True

    def __init__(self, place: Prefix, attempt: Attempt, cut: Cut) -> None:
        """Looks at what is there.

        Args:
            place: Where it goes.
            attempt: What all processes have in common.
            cut: Returns the parts of a file, as all processes cut it.

        Raises:
            OutputExistsError: If something lies there and is not to be replaced.
        """
        self._place, self._attempt, self._cut = place, attempt, cut
        self._store = S3Uploads(place.store.store, place.store.root, writer=attempt.nonce)
        self._writing = place.writing
        self._folder = f"{place.key}{WORK_INFIX}{attempt.nonce}/"
        self._common = S3Notes(self._store, self._folder, self._writing)
        self._notes = S3Notes(self._store, f"{self._folder}{attempt.name}/", self._writing)
        self._objects: dict[str, S3SharedObject] = {}
        self._commit = S3Commit(
            self._store, place.location, place.writing, overwrite=attempt.overwrite
        )
        if attempt.seen is not None:
            self._commit.seen = attempt.seen

    @property
    def location(self) -> str:
        """The URL, as it was named."""
        return self._place.location

    @property
    def removal(self) -> str:
        """The command by which a user gives up what other processes have begun."""
        return f"aws s3 rm '{self._store.url(self._folder + _PLAN)}'"

    @property
    def notes(self) -> S3Notes:
        """What the processes of this attempt tell each other."""
        return self._notes

    def plan(self) -> bytes | None:
        """Returns what the processes have agreed on, None where nobody has begun."""
        note = self._common.get(_PLAN)
        return None if note is None else plan_of(note)

    def agree(self, plan: bytes) -> bytes:
        """Says what is to be done, unless another process has; returns what was agreed on."""
        seen = self._commit.seen if self._attempt.overwrite else None
        return plan_of(self._common.put(_PLAN, plan_note(plan, seen)))

    def free_bytes(self) -> int | None:
        """Returns None: a bucket has no limit that anybody could ask for."""
        return None

    def why_no_ranges(self) -> str:
        """Returns why processes cannot agree on uploads there, empty if they can."""
        return self._common.why_no_conditions() if self._attempt.is_agreed else ""

    def sweep(self) -> None:
        """Removes what killed and given up attempts left behind; for one of the processes."""
        self._commit.sweep(kept=f"{self._folder}{self._attempt.name}/")

    def create(self, path: str, size_bytes: int) -> None:
        """Takes note of a file of that size; parts of it that were not sent are forgotten.

        Raises:
            UnsafePathError: If it would lie outside the output.
        """
        check_relative(path, self.location)
        key = self._place.key + path
        parts = self._cut(path) if size_bytes else ()
        self._objects[path] = S3SharedObject(self._store, key, parts, lambda: self._upload(path))

    def begin(self) -> None:
        """Begins the uploads of all files that were created, and says so to the others.

        Raises:
            OutputError: If the store refuses.
        """
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as threads:
            for _ in threads.map(self._begin_one, self._objects):
                pass

    def write(self, path: str, start: int, data: memoryview) -> None:
        """Takes bytes of a created file, and sends every part that they complete.

        Raises:
            OutputError: If the store does not take them.
            ValueError: If the range is not inside a file that was created.
        """
        item = self._objects.get(path)
        if item is None:
            raise ValueError(f"file {path!r} was not created")
        with self._writing():
            item.write(start, data)

    def sync(self) -> None:
        """Does nothing: what was sent is durable."""

    def sent(self) -> SentRows:
        """Returns number, ETag and CRC-32 of the parts that were sent."""
        return {path: item.rows() for path, item in self._objects.items() if item.rows()}

    def adopt(self, sent: SentRows) -> Mapping[str, Sequence[ObjectPart]]:
        """Takes over what the processes have sent; returns which parts are missing, by file."""
        for path, rows in sent.items():
            self._objects[path].adopt(rows)
        missing = {path: item.missing() for path, item in self._objects.items()}
        return {path: parts for path, parts in missing.items() if parts}

    def commit(self, last: str, data: bytes) -> None:
        """Makes the whole visible, the file `last` after all others; for one process.

        Args:
            last: The file that says that all is there.
            data: Its content.

        Raises:
            ChecksumError: If the store has other bytes than it was given.
            OutputExistsError: If another run has filled the place meanwhile, or replaced what
                was there; in the second case nothing of this output is kept.
            OutputError: If the store refuses.
            ValueError: If `last` is not the manifest.
        """
        if last != MANIFEST_NAME:
            raise ValueError(f"{last!r} is no manifest")
        agreed = seen_in(self._common.get(_PLAN))
        if agreed is not None:
            self._commit.seen = agreed
        try:
            self._commit.run(list(self._objects.values()), data, self._has_uploads)
            quietly(self._writing, self._remove)
        except OutputExistsError:
            if self._attempt.overwrite:  # else each further try would be refused
                self.abandon()
            raise
        finally:
            self._commit.release()

    def leave(self) -> None:
        """Ends this process's part, whatever becomes of the whole."""

    def abandon(self) -> None:
        """Removes what all processes wrote, so that none of them can commit it any more."""
        quietly(self._writing, self._remove)

    def _remove(self) -> None:
        """Removes the notes, the one first without which the others are nothing, and uploads."""
        self._store.delete([self._folder + _PLAN])
        sweep_uploads(self._store, self._place.key, only=self._folder)

    def _has_uploads(self) -> bool:
        """Tells whether no other run has removed the notes of the uploads, and so these."""
        with_parts = [path for path, item in self._objects.items() if item.rows()]
        return not with_parts or self._notes.get(_note_of(with_parts[0])) is not None

    def _plan_one(self, path: str) -> None:
        """Writes down an upload that is about to begin, for the next run after a kill."""
        key = self._place.key + path
        self._notes.leave(f"{_note_of(path)}{_PLANNED}", mark_of([], [key]))

    def _begin_one(self, path: str) -> None:
        with self._writing():
            key = self._place.key + path
            self._plan_one(path)
            upload = self._store.begin(key)
            self._notes.leave(_note_of(path), mark_of([(key, upload)]))

    def _upload(self, path: str) -> str:
        """Returns the upload of a file, which the first process that needs it begins."""
        found = self._notes.get(_note_of(path))
        if found is None and self._attempt.is_agreed:
            key = self._place.key + path
            self._plan_one(path)
            mine = self._store.begin(key)
            found = self._notes.put(_note_of(path), mark_of([(key, mine)]))
            if found != mark_of([(key, mine)]):
                self._store.abort(key, mine)
        for _, upload in uploads_in(found or b""):
            return upload
        raise OutputError(
            f"the upload of {path!r} was removed by somebody else",
            where=self.location,
            hint="run one command at a time for an output, and this one again",
        )


def _note_of(path: str) -> str:
    return f"{UPLOADS}/{path}"
