"""A save after the training thread is done with it: written, agreed on, committed, reported."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, SaveError, error_from_json
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.peers import Peers
from ckptkit.training.staging import Staged
from ckptkit.training.writer_process import WriterProcess
from ckptkit.writer.messages import (
    Commit,
    Committed,
    Discard,
    Image,
    Inline,
    Persist,
    Proof,
    Written,
)

logger = logging.getLogger(__name__)
OURS = "this is a fault of ckptkit; please report it with the log's traceback"
_MOST_FAILED = 8  # attempts whose folders are looked after
_VISIBLE_SECONDS = 60.0
Listener = Callable[[SaveReport], None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save one step, the same on every rank.

    Attributes:
        name: Unique in the run: the session's nonce and the number of the save.
        step: The training step.
        folder: The working folder.
        final: The step's directory.
        manifest: What the manifest will say, but for the files.
        beside: A folder whose files lie beside the shards of every step.
    """

    name: str
    step: int
    folder: Path
    final: Path
    manifest: Mapping[str, Any]
    beside: str


@dataclass(frozen=True, slots=True)
class Wave:
    """What one message to the writer asks for.

    Attributes:
        images: Files to write from the buffer.
        staged: The copies into the buffer, which may still be running on a device.
        inline: Small files, with the last wave.
        record: The rank's record, with the last wave.
    """

    images: tuple[Image, ...]
    staged: Staged
    inline: tuple[Inline, ...] = ()
    record: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Save:
    """A save under way on this rank.

    Attributes:
        attempt: What is being tried.
        handle: What the caller holds.
        began: `time.perf_counter` at the call of `save`.
        after: The save before, which ends first: of two saves of a step the later one stays.
        staged_bytes: Tensor bytes that this rank copies.
        copy_limit: Bytes per second of a plain warm copy; 0 where unknown.
    """

    attempt: Attempt
    handle: SaveHandle
    began: float
    after: SaveHandle | None = None
    staged_bytes: int = 0
    copy_limit: float = 0.0
    answers: list[Written] = field(default_factory=list)
    error: CkptkitError | None = None

    def staged(self) -> None:
        """Notes that the training thread is done with the save."""
        self.handle.blocked_seconds = time.perf_counter() - self.began


class Committer:
    """What only rank 0 does: turn the files of all ranks into a step."""

    def __init__(
        self,
        process: WriterProcess,
        retire: Callable[[int, Mapping[str, float]], Sequence[Path]],
        *,
        timeout_seconds: float,
    ) -> None:
        """Takes the process that commits, and what names the steps that a new one retires.

        Args:
            process: What commits.
            retire: From a step and its metrics to the directories that go.
            timeout_seconds: How long the other ranks wait for a commit.
        """
        self._process = process
        self._retire = retire
        self._visible_seconds = min(_VISIBLE_SECONDS, timeout_seconds / 2)
        self._failed: list[Attempt] = []

    def commit(self, attempt: Attempt, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Commits an attempt that every rank has answered, or clears it away.

        Args:
            attempt: What was tried.
            values: By rank, `{"proof": …}` or `{"error": …}`.

        Returns:
            `{"committed": …}` or `{"error": …}`, for every rank.
        """  # noqa: DOC501  raised to be told to all ranks
        errors = [(rank, v["error"]) for rank, v in enumerate(values) if "error" in v]
        outcome: dict[str, Any]
        try:
            if errors:
                raise _of_ranks(errors)
            proofs = [Proof(**value["proof"]) for value in values]
            outcome = {"committed": self._commit(attempt, proofs)}
        except CkptkitError as error:
            outcome = {"error": error.to_json()}
            self._failed.append(attempt)
        self._clear()
        return outcome

    def give_up(self, attempt: Attempt) -> None:
        """Clears away an attempt that not all ranks have answered."""
        self._failed.append(attempt)
        self._clear()

    def _clear(self) -> None:
        """Removes what failed attempts left, again and again: late ranks may write there still."""
        self._failed = self._failed[-_MOST_FAILED:]
        for attempt in self._failed:
            self._discard(attempt)

    def _commit(self, attempt: Attempt, proofs: Sequence[Proof]) -> dict[str, Any]:
        metrics = attempt.manifest["source"].get("metrics", {})
        answer = self._process.request(
            Commit(
                attempt=attempt.name,
                folder=str(attempt.folder),
                final=str(attempt.final),
                proofs=tuple(proofs),
                manifest=attempt.manifest,
                beside=attempt.beside,
                remove=tuple(map(str, self._retire(attempt.step, metrics))),
                visible_seconds=self._visible_seconds,
            )
        )
        assert isinstance(answer, Committed)  # noqa: S101  the answer to `Commit`
        for note in answer.notes:
            logger.warning("step %d: %s", attempt.step, note)
        return {"size_bytes": answer.size_bytes, "removed": list(answer.removed)}

    def _discard(self, attempt: Attempt) -> None:
        try:
            self._process.request(Discard(attempt.name, str(attempt.folder)))
        except CkptkitError as error:
            logger.warning("the working folder %s was left behind: %s", attempt.folder, error)


def _of_ranks(errors: Sequence[tuple[int, Mapping[str, Any]]]) -> CkptkitError:
    """Returns the first error, saying on which rank, and on how many more, it happened."""
    rank, document = errors[0]
    more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
    return error_from_json(document).located(f"rank {rank}{more}")


class Saver:
    """A thread that brings the saves of one buffer to their end, one after another.

    Every save ends within a bounded time: the writer is killed when it hangs, and other ranks
    are waited for as long as `timeout_seconds`.
    """

    def __init__(
        self,
        writer: WriterProcess,
        peers: Peers,
        committer: Committer | None,
        *,
        timeout_seconds: float,
        listener: Listener | None,
    ) -> None:
        """Starts the thread; the writer is started with the first save, or by `prepare`."""
        self._writer = writer
        self._peers = peers
        self._committer = committer
        self._timeout_seconds = timeout_seconds
        self._listener = listener
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ckptkit-saver", daemon=True)
        self._thread.start()

    def write(self, save: Save, wave: Wave) -> Future[None]:
        """Has a wave written; the future ends when the buffer may be used again.

        What goes wrong is kept for the end of the save.
        """
        written: Future[None] = Future()

        def work() -> None:
            try:
                self._write(save, wave)
            finally:
                written.set_result(None)

        self._work.put(work)
        return written

    def finish(self, save: Save) -> None:
        """Has the save agreed on, committed and reported, after all its waves."""
        self._work.put(lambda: self._finish(save))

    def close(self) -> None:
        """Ends the thread after what it was given, and the writer."""
        self._work.put(None)
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _write(self, save: Save, wave: Wave) -> None:
        try:
            wave.staged.wait()
            if save.error is not None:
                return
            answer = self._writer.request(
                Persist(
                    attempt=save.attempt.name,
                    folder=str(save.attempt.folder),
                    images=wave.images,
                    inline=wave.inline,
                    record=wave.record,
                    record_path=f".ranks/{self._peers.rank}.json",
                )
            )
            assert isinstance(answer, Written)  # noqa: S101  the answer to `Persist`
            save.answers.append(answer)
        except CkptkitError as error:
            save.error = error
        except Exception as error:
            logger.exception("saving step %d", save.attempt.step)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)

    def _finish(self, save: Save) -> None:
        durable = time.perf_counter()
        if save.after is not None:
            save.after.wait()
        try:
            report = self._report(save, durable, self._agree(save))
        except CkptkitError as error:
            self._fail(save, error)
            return
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("ending the save of step %d", save.attempt.step)
            self._fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
            return
        if self._peers.rank == 0:
            logger.info("%s", report)
        for note in report.notes:
            logger.warning("step %d, rank %d: %s", report.step, self._peers.rank, note)
        self._tell(report)
        save.handle.succeed(report)

    def _fail(self, save: Save, error: CkptkitError) -> None:
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("step %d was not saved: %s%s", save.attempt.step, error, hint)
        save.handle.fail(error)

    def _agree(self, save: Save) -> Mapping[str, Any]:
        """Tells all ranks how it went here, and returns what was committed.

        Raises:
            CkptkitError: What went wrong on any rank.
        """  # noqa: DOC501
        value = _value(save)
        committer = self._committer

        def decide(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            assert committer is not None  # noqa: S101  rank 0 decides
            return committer.commit(save.attempt, values)

        # Rank 0 commits after it has waited for all, so the others have to wait for both.
        patience = self._timeout_seconds * (1 if self._peers.rank == 0 else 2)
        topic = f"the save of step {save.attempt.step}, attempt {save.attempt.name}"
        try:
            agreed: Mapping[str, Any] = self._peers.agree(
                topic, value, decide, timeout_seconds=patience
            )
        except CkptkitError:
            if committer is not None:  # nobody will commit it any more
                committer.give_up(save.attempt)
            raise
        if "error" in agreed:
            raise error_from_json(agreed["error"])
        committed: Mapping[str, Any] = agreed["committed"]
        return committed

    def _report(self, save: Save, durable: float, committed: Mapping[str, Any]) -> SaveReport:
        blocked = save.handle.blocked_seconds
        rate = save.staged_bytes / blocked if blocked else 0.0
        return SaveReport(
            step=save.attempt.step,
            path=save.attempt.final,
            size_bytes=sum(answer.size_bytes for answer in save.answers),
            total_bytes=committed["size_bytes"],
            blocked_seconds=blocked,
            bytes_per_second=rate,
            copy_limit_share=rate / save.copy_limit if save.copy_limit else 0.0,
            durable_seconds=durable - save.began,
            committed_seconds=time.perf_counter() - save.began,
            writer_cpu_seconds=sum(answer.cpu_seconds for answer in save.answers),
            notes=tuple(dict.fromkeys(note for a in save.answers for note in a.notes)),
        )

    def _tell(self, report: SaveReport) -> None:
        if self._listener is None:
            return
        try:
            self._listener(report)
        except Exception:  # the user's code, in our thread
            logger.exception("the listener of saves failed")


def _value(save: Save) -> dict[str, Any]:
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
