"""How a save ends: all ranks hear how it went, rank 0 commits it, and the caller is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.core.errors import CkptkitError, SaveError, error_from_json
from ckptkit.training.agree.peers import Meeting
from ckptkit.training.handle import SaveReport
from ckptkit.training.save.commit import Attempt, Committer
from ckptkit.training.save.saver import OURS, Save

logger = logging.getLogger(__name__)
Listener = Callable[[SaveReport], None]


class Settler:
    """Ends saves whose files lie where all ranks write, one after another.

    Every save ends within a bounded time: other ranks are waited for as long as
    `timeout_seconds`. The listener is called in the thread that ends the save.
    """

    def __init__(
        self,
        meeting: Meeting,
        committer: Committer | None,
        *,
        timeout_seconds: float,
        listener: Listener | None,
    ) -> None:
        """Takes where the ranks meet, and on rank 0 what commits."""
        self._meeting = meeting
        self._committer = committer
        self._timeout_seconds = timeout_seconds
        self._listener = listener

    @staticmethod
    def placed(attempt: Attempt) -> Attempt:
        return attempt

    def recover(self) -> None:
        """Has nothing of its own to drain."""

    def kill(self) -> None:
        """Has nothing of its own to end."""

    def close(self) -> None:
        """Has nothing of its own to end."""

    def end(self, save: Save) -> None:
        """Ends a save of which this rank's part is written, after the one before it."""
        if save.after is not None:
            save.after.wait()
        self.settle(save)

    def settle(self, save: Save) -> bool:
        """Has the save agreed on, committed and reported; returns whether it was committed."""
        try:
            report = self._report(save, self._agree(save))
        except CkptkitError as error:
            self._clear()
            self.fail(save, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("ending the save of step %d", save.attempt.step)
            self.fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self._meeting.rank == 0:
                logger.info("%s", report)
                _tell_lost(report)
            for note in report.notes:
                logger.warning("step %d, rank %d: %s", report.step, self._meeting.rank, note)
            save.handle.succeed(report)
            self._tell(report)
            self._clear()
            return True
        return False

    @staticmethod
    def fail(save: Save, error: CkptkitError) -> None:
        """Ends a save that nobody will commit."""
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
        """Tells all ranks how it went here, and returns what was committed."""
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
                save.attempt, outcome_here(save), decide, timeout_seconds=patience
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

    def _tell(self, report: SaveReport) -> None:
        if self._listener is None:
            return
        try:
            self._listener(report)
        except BaseException:  # the user's code, in our thread, may even exit
            logger.exception("the listener of saves failed")


def _tell_lost(report: SaveReport) -> None:
    for name, reason in sorted(report.lost.items()):
        logger.error(
            "step %d was saved without the state of %s, and no older step is removed for it: %s",
            report.step,
            name,
            reason,
        )


def outcome_here(save: Save) -> dict[str, Any]:
    """Returns what this rank has to tell of its part: `{"proof": …}` or `{"error": …}`."""
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
