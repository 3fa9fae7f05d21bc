"""A save after the training thread is done with it: written, agreed on, committed, reported."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import CkptkitError, SaveError, error_from_json
from ckptkit.training.committing import Attempt, Committer
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.meeting import Meeting
from ckptkit.training.staging import Staged
from ckptkit.training.writer_process import WriterProcess
from ckptkit.writer.messages import Image, Inline, Persist, Written

logger = logging.getLogger(__name__)
OURS = "this is a fault of ckptkit; please report it with the log's traceback"
Listener = Callable[[SaveReport], None]


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


class Saver:
    """A thread that brings the saves of one buffer to their end, one after another.

    The listener is called in it: the next save of the buffer is not written before that returns.

    Every save ends within a bounded time: the writer is killed when it hangs, and other ranks
    are waited for as long as `timeout_seconds`.
    """

    def __init__(
        self,
        writer: WriterProcess,
        meeting: Meeting,
        committer: Committer | None,
        *,
        timeout_seconds: float,
        listener: Listener | None,
    ) -> None:
        """Starts the thread; the writer is started with the first save, or by `prepare`."""
        self._writer = writer
        self._meeting = meeting
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

    def kill(self) -> None:
        """Has the save under way fail soon."""
        self._writer.kill()

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
                    record_path=f".ranks/{self._meeting.rank}.json",
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
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("ending the save of step %d", save.attempt.step)
            self._fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self._meeting.rank == 0:
                logger.info("%s", report)
            for note in report.notes:
                logger.warning("step %d, rank %d: %s", report.step, self._meeting.rank, note)
            save.handle.succeed(report)
            self._tell(report)
            self._clear()

    def _fail(self, save: Save, error: CkptkitError) -> None:
        self._clear()
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("step %d was not saved: %s%s", save.attempt.step, error, hint)
        save.handle.fail(error)

    def _clear(self) -> None:
        if self._committer is None:
            return
        try:
            self._committer.clear()
        except Exception:  # a bug of ours must not leave the caller waiting
            logger.exception("removing what failed saves left")

    def _agree(self, save: Save) -> Mapping[str, Any]:
        """Tells all ranks how it went here, and returns what was committed.

        Raises:
            CkptkitError: What went wrong on any rank.
        """  # noqa: DOC501
        committer = self._committer
        decided: list[Mapping[str, Any]] = []

        def decide(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            assert committer is not None  # noqa: S101  rank 0 decides
            decided.append(committer.commit(save.attempt, values))
            return decided[0]

        # Rank 0 commits after it has waited for all, so the others have to wait for both.
        patience = self._timeout_seconds * (1 if committer is not None else 2)
        try:
            agreed = self._meeting.agree(
                save.attempt, _value(save), decide, timeout_seconds=patience
            )
        except CkptkitError as error:
            if not decided:
                if committer is not None:  # nobody will commit it any more
                    committer.give_up(save.attempt)
                raise
            logger.warning(
                "what became of step %d could not be told to all ranks: %s",
                save.attempt.step,
                error,
            )
            agreed = decided[0]
        if "error" in agreed:
            raise error_from_json(agreed["error"])
        committed: Mapping[str, Any] = agreed["committed"]
        return committed

    def _report(self, save: Save, durable: float, committed: Mapping[str, Any]) -> SaveReport:
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
            durable_seconds=durable - save.began,
            committed_seconds=time.perf_counter() - save.began,
            writer_cpu_seconds=sum(answer.cpu_seconds for answer in save.answers),
            notes=tuple(dict.fromkeys(note for a in save.answers for note in a.notes)),
            waited_seconds=waited,
        )

    def _tell(self, report: SaveReport) -> None:
        if self._listener is None:
            return
        try:
            self._listener(report)
        except BaseException:  # the user's code, in our thread, may even exit
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
