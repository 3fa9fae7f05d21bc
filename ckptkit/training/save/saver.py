"""A save whose files are written: agreed on by all ranks, committed and reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptkit.core.errors import CkptkitError, PeerError, SaveError, error_from_json
from ckptkit.core.manifest import Manifest
from ckptkit.runs.step_manifests import read_findings
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import Place, open_source
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.save.attempts import SaveAttempt, StepCommitter
from ckptkit.writer.messages import Written

logger = logging.getLogger(__name__)
OURS = "this is a bug of ckptkit; please report it with the log's traceback"


class Save(Struct):
    """A save under way on this rank.

    Attributes:
        attempt: The attempt.
        handle: The caller's handle.
        began: `time.perf_counter` at the call of `save`.
        after: The previous save, which ends first, so that the later of two saves of a step stays.
        staged_bytes: Tensor bytes that this rank copies.
        copy_limit: Bytes per second of a plain warm copy; 0 if unknown.
        durable: `time.perf_counter` when this rank's files were durable.
        local_seconds: From the call until the step was durable on the nodes' own disks.
        answers: Of the writer, one for each wave.
        error: What failed on this rank.
        rewrite: Writes this rank's files again, into the attempt's folder; None if the buffer does
            not have all of them any more.
    """

    attempt: SaveAttempt
    handle: SaveHandle
    began: float
    after: SaveHandle | None = None
    staged_bytes: int = 0
    copy_limit: float = 0.0
    durable: float = 0.0
    local_seconds: float = 0.0
    answers: list[Written] = field(default_factory=list)
    error: CkptkitError | None = None
    rewrite: Callable[[], None] | None = None


class SaveBackend:
    """Where saves go, and how they end once this rank's part is written.

    A backend that drains and queues nothing has to define `end` only.
    """

    def placed(self, attempt: SaveAttempt) -> SaveAttempt:
        """Returns an attempt with the folder that this rank writes into."""
        return attempt

    def recover(self) -> None:
        """Drains steps that are durable on the nodes' disks only."""

    def end(self, save: Save) -> None:
        """Ends a save, or queues it; called in the thread that writes."""
        raise NotImplementedError

    def kill(self) -> None:
        """Makes queued saves fail soon."""

    def close(self) -> None:
        """Waits for queued saves."""


Listener = Callable[[SaveReport], None]


class CommitCoordinator(SaveBackend):
    """The backend for saves to shared storage: ranks agree, rank 0 commits, each rank reports.

    Every save ends within a bounded time: other ranks are waited for up to `timeout_seconds`. The
    listener is called in the thread that ends the save.
    """

    def __init__(
        self,
        barrier: SaveBarrier,
        committer: StepCommitter | None,
        *,
        timeout_seconds: float,
        listener: Listener | None,
    ) -> None:
        """Starts nothing; only rank 0 has a committer."""
        self._barrier = barrier
        self._committer = committer
        self._timeout_seconds = timeout_seconds
        self._listener = listener

    @property
    def rank(self) -> int:
        return self._barrier.rank

    def end(self, save: Save) -> None:
        """Ends a save that this rank has written, after the previous one."""
        if save.after is not None:
            save.after.wait()
        self.settle(save)

    def settle(self, save: Save) -> bool:
        """Agrees on a save, commits and reports it; returns whether it was committed."""
        try:
            report = self._report(save, self._agree(save))
        except CkptkitError as error:
            self._clear()
            self.fail(save, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("ending the save of %s", save.attempt)
            self.fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self._barrier.rank == 0:
                logger.info("%s", report)
                for name, reason in sorted(report.lost.items()):
                    logger.error(
                        "%s was saved without the state of %s, and no older step is removed"
                        " for it: %s",
                        save.attempt,
                        name,
                        reason,
                    )
            for note in report.notes:
                logger.warning("%s, rank %d: %s", save.attempt, self._barrier.rank, note)
            save.handle.succeed(report)
            try:
                if self._listener is not None:
                    self._listener(report)
            except BaseException:  # the user's code, in our thread, may even exit
                logger.exception("the listener of saves failed")
            self._clear()
            return True
        return False

    @staticmethod
    def fail(save: Save, error: CkptkitError) -> None:
        """Ends a save that is not committed."""
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("%s was not saved: %s%s", save.attempt, error, hint)
        save.handle.fail(error)

    def _clear(self) -> None:
        if self._committer is None:
            return
        try:
            self._committer.clear()
        except Exception:  # a bug of ours must not leave the caller waiting
            logger.exception("removing the folders of failed saves")

    def _agree(self, save: Save) -> Mapping[str, Any]:
        """Exchanges the outcomes of all ranks, and returns what was committed."""
        attempt, committer = save.attempt, self._committer

        def commit(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            assert committer is not None  # noqa: S101  rank 0 decides
            return committer.commit(attempt, values)

        def find() -> Mapping[str, Any] | None:
            manifest = find_committed(attempt.final, attempt.name)
            if manifest is None:
                return None
            lost = read_findings(manifest).lost
            return {"committed": {"size_bytes": manifest.size_bytes, "lost": lost}}

        # Rank 0 commits after it has waited for all, so the others have to wait for both.
        timeout_seconds = self._timeout_seconds * (1 if committer is not None else 2)
        agree = partial(
            self._barrier.agree, attempt, outcome_here(save), timeout_seconds=timeout_seconds
        )
        try:
            agreed = agree_on_commit(agree, commit, find, str(attempt))
        except CkptkitError:
            if committer is not None:  # no rank will commit it any more
                committer.give_up(attempt)
            raise
        if "error" in agreed:
            raise error_from_json(agreed["error"])
        answer: Mapping[str, Any] = agreed["committed"]
        return answer

    @staticmethod
    def _report(save: Save, committed: Mapping[str, Any]) -> SaveReport:
        blocked = save.handle.blocked_seconds
        waited = save.handle.waited_seconds
        rate = save.staged_bytes / (blocked - waited) if blocked > waited else 0.0
        return SaveReport(
            step=save.attempt.step,
            path=save.attempt.final,
            size_bytes=sum(answer.size_bytes for answer in save.answers),
            total_bytes=committed["size_bytes"],
            blocked_seconds=blocked,
            bytes_per_second=rate,
            copy_limit_share=rate / save.copy_limit if save.copy_limit else 0.0,
            durable_seconds=save.durable - save.began,
            committed_seconds=time.perf_counter() - save.began,
            writer_cpu_seconds=sum(answer.cpu_seconds for answer in save.answers),
            notes=tuple(dict.fromkeys(note for a in save.answers for note in a.notes)),
            waited_seconds=waited,
            local_seconds=save.local_seconds,
            linked_bytes=sum(answer.linked_bytes for answer in save.answers),
            lost=committed.get("lost", {}),
        )


Outcome = Mapping[str, Any]


def agree_on_commit(
    agree: Callable[[Callable[[list[Any]], Outcome]], Outcome],
    commit: Callable[[Sequence[Outcome]], Outcome],
    find: Callable[[], Outcome | None],
    what: str,
) -> Outcome:
    """Returns on all ranks the outcome of a commit by rank 0, which may end before it tells them.

    Args:
        agree: Lets rank 0 decide on the values of all ranks.
        commit: Decides, by a commit.
        find: Returns the outcome of a commit that rank 0 did not tell, None where there was none.
        what: Is committed, for messages.
    """
    decided: list[Outcome] = []

    def decide(values: list[Any]) -> Outcome:
        decided.append(commit(values))
        return decided[0]

    try:
        return agree(decide)
    except CkptkitError as error:
        if decided:
            logger.warning("the outcome of %s could not be sent to all ranks: %s", what, error)
            return decided[0]
        found = find() if isinstance(error, PeerError) else None
        if found is None:
            raise
        logger.info("%s was committed, after which %s", what, error)
        return found


def find_committed(final: Path | Place, attempt: str) -> Manifest | None:
    """Returns the manifest of a save or export, None where another attempt, or nothing, is."""
    try:
        with closing(open_source(final)) as source:
            manifest = read_manifest(source)
    except (CkptkitError, OSError):
        return None
    return manifest if manifest.source.get("attempt") == attempt else None


def outcome_here(save: Save) -> dict[str, Any]:
    """Returns this rank's outcome: `{"proof": …}` or `{"error": …}`."""
    if save.error is not None:
        return {"error": save.error.to_json()}
    proof = next((a.proof for a in reversed(save.answers) if a.proof is not None), None)
    if proof is None:
        error = SaveError("the writer gave no proof of what it wrote", where="writer")
        return {"error": error.to_json()}
    return {
        "proof": {
            "rank": proof.rank,
            "path": proof.path,
            "size_bytes": proof.size_bytes,
            "crc32": proof.crc32,
        }
    }
