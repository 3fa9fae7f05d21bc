"""When to save: one answer on all ranks, from the interval, signals, the scheduler and requests.

The ranks agree on a step in rounds. The rank with a request opens a round. The watcher of each rank
answers with the last step that its training thread has asked about, and from then on that thread
waits before any later step. When all have answered, rank 0 publishes the largest answer plus one:
no rank has passed that step, so none can miss it, however far apart they are.

The outcome is written once, by a compare-and-set of one key: either rank 0 writes the step, or a
rank whose time is up voids the round, and then it is void for all. So the ranks can only disagree
if one of them cannot reach the store: it continues when its time is up, and logs a warning if it
learns later that it has passed the step.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import CkptkitError
from ckptkit.core.threads import call_at_exit
from ckptkit.training.agree.peers import Peers, name_ranks
from ckptkit.training.environment import slurm_end_time
from ckptkit.training.run_folders import TrainingRun
from ckptkit.training.settings import Interval
from ckptkit.training.signals import SignalWatch

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 60.0
_IDLE_SECONDS = 0.2
_BUSY_SECONDS = 0.01
_FAILED_SECONDS = 2.0  # doubled with each further failure, since torch prints each one
_MOST_FAILED_SECONDS = 60.0
_FILE_SECONDS = 1.0  # between two looks at a file system that may be remote
_QUESTIONS_PER_SECOND = 5_000  # of all ranks together: a tenth of what one store can answer
_FAILED_FILE_SECONDS = 60.0
_AGAIN_SECONDS = 60.0  # until the job's end is announced again, if ranks did not answer
_CLOSE_SECONDS = 5.0


class SaveRequestWatcher:
    """Gathers requests to save on each rank and agrees on the step, in a thread of its own.

    `should_save` is for the training thread and sends nothing: it waits only while a round is open,
    at most 1.2 times `LONGEST_WAIT_SECONDS`.
    """

    def __init__(
        self,
        peers: Peers,
        run: TrainingRun[Any],
        *,
        interval: Interval = Interval(),  # noqa: B008  a frozen value
        signals: Sequence[str] = (),
        slurm_margin_seconds: float = 300.0,
        timeout_seconds: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        """Installs the signal handlers and starts the thread.

        Times are measured on rank 0. All ranks save and stop `slurm_margin_seconds` before Slurm
        ends the job, at most half of the time that is left now; 0 ignores Slurm.
        """
        self._peers = peers
        self._run = run
        self._interval = interval
        self._stop_requested = False
        self._agreement = SaveStepAgreement(
            peers, limit_seconds=min(timeout_seconds, LONGEST_WAIT_SECONDS)
        )
        self._saved_at = time.monotonic()
        self._job_ends = _job_ends(slurm_margin_seconds)
        self._announced_at = float("-inf")  # the end of the job
        self._asked: deque[SaveRequest] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._looked_at = float("-inf")
        self._failures = 0
        self._signals = SignalWatch(signals)
        self._thread = threading.Thread(target=self._watch, name="ckptkit-requests", daemon=True)
        self._thread.start()
        # A thread that returns from C++ while the interpreter shuts down aborts the process.
        self._leave_exit = call_at_exit(self.close)

    def should_save(self, step: int) -> bool:
        """Returns whether to save at this step; the same on all ranks.

        Call it on every rank at every step, with rising steps. It is True once for a request, and
        always the same for a step. It also sets `stop_requested`.
        """
        due, stop = self._agreement.due(step)
        if stop:
            self._stop_requested = True
            self._job_ends = None
        if due or self._interval.due_at_step(step):
            self._saved_at = time.monotonic()
            return True
        return False

    def request_save(self, *, stop: bool = False) -> None:
        """Asks all ranks to save; from any thread, but not from a signal handler."""
        self._asked.append(SaveRequest(f"request_save on rank {self._peers.rank}", stop))
        self._wake.set()

    @property
    def stop_requested(self) -> bool:
        """Whether training should end; it becomes true at the same step on all ranks."""
        return self._stop_requested

    def close(self) -> None:
        """Ends the thread and restores earlier signal handlers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._leave_exit()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        self._signals.close()

    def _watch(self) -> None:
        while not self._closed:
            pause = self._advance()
            self._wake.wait(pause)
            self._wake.clear()

    def _advance(self) -> float:
        """Does what can be done now; returns the seconds until the next call."""
        try:
            for request in self._gathered():
                self._agreement.ask(request)
            self._agreement.advance()
        except (CkptkitError, OSError) as error:
            if not self._failures:
                logger.warning("requests to save do not reach the other ranks: %s", error)
            pause = min(_FAILED_SECONDS * 2.0 ** min(self._failures, 10), _MOST_FAILED_SECONDS)
            self._failures += 1
            return pause
        if self._failures:
            logger.warning("requests to save reach the other ranks again")
        self._failures = 0
        shared = self._peers.world_size / _QUESTIONS_PER_SECOND
        return max(_BUSY_SECONDS if self._agreement.is_open else _IDLE_SECONDS, shared)

    def _gathered(self) -> Iterator[SaveRequest]:
        """Yields the new requests of this rank."""
        while self._asked:
            yield self._asked.popleft()
        while (name := self._signals.take()) is not None:
            yield SaveRequest(f"{name} on rank {self._peers.rank}", stop=True)
        if self._peers.rank:
            return
        now, seconds, ends = time.monotonic(), self._interval.seconds, self._job_ends
        if ends is not None and now >= max(ends, self._announced_at + _AGAIN_SECONDS):
            self._announced_at = now
            yield SaveRequest("the job is about to end", stop=True)
        elif seconds is not None and now >= self._saved_at + seconds:
            self._saved_at = now  # the save itself will set it again
            yield SaveRequest(f"{seconds:g} s have passed since the last save")
        if now >= self._looked_at + _FILE_SECONDS:
            self._looked_at = now
            try:
                owner = self._run.take_request()
            except OSError as error:
                self._looked_at = now + _FAILED_FILE_SECONDS
                logger.warning("a request of `ckptkit save-now` cannot be read: %s", error)
            else:
                if owner is not None:
                    yield SaveRequest(f"ckptkit save-now ({owner})")


def _job_ends(margin_seconds: float) -> float | None:
    """Returns when to stop before Slurm does, on the clock of `time.monotonic`."""
    end = slurm_end_time() if margin_seconds > 0 else None
    if end is None:
        return None
    left = max(end - time.time(), 0.0)
    return time.monotonic() + left - min(margin_seconds, left / 2)


_NEVER_POLLED = -1
_MARGIN_SECONDS = 0.3  # between those who give up one after another, who look now and then


class SaveRequest(Struct, frozen=True):
    """A request for a save."""

    reason: str  # what asked for it, for the log
    stop: bool = False  # whether training is to end after it

    def joined(self, other: SaveRequest | None) -> SaveRequest:
        """Returns one request for both, which stops if one of them does."""
        if other is None:
            return self
        has_reason = self.reason in other.reason
        reason = other.reason if has_reason else f"{other.reason}, {self.reason}"
        return SaveRequest(reason, self.stop or other.stop)


class _Round(Struct):
    """An open round; `limit` is when this rank voids it."""

    number: int
    answered: int
    own: SaveRequest | None
    limit: float
    is_answered: bool = False
    abandoned: bool = False

    def holds_up(self, step: int) -> bool:
        """Whether the training thread has to wait before a step."""
        return step > self.answered and not self.abandoned


class SaveStepAgreement:
    """One rank's part in all rounds; the watcher calls `advance`, the training thread `due`.

    Args:
        peers: The ranks.
        limit_seconds: After this time rank 0 voids a round that not all ranks have answered. The
            others do so after a tenth more, in case rank 0 is gone, and the training thread waits
            another tenth, in case the store is gone as well.
    """

    def __init__(self, peers: Peers, *, limit_seconds: float) -> None:
        self._peers = peers
        self._limit_seconds = limit_seconds
        self._margin_seconds = 0.1 * limit_seconds + _MARGIN_SECONDS
        self._settled = threading.Condition(threading.Lock())
        self._polled = _NEVER_POLLED
        self._open: _Round | None = None
        self._targets: dict[int, bool] = {}  # step -> whether to stop there
        self._taken: int | None = None
        # From here on used by the watcher only.
        self._number = 1
        self._request: SaveRequest | None = None
        self._litter: list[int] = []

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def ask(self, request: SaveRequest) -> None:
        """Adds a request for the next `advance`; for the watcher only.

        It is dropped if a save that fulfils it is agreed on and still ahead.
        """
        with self._settled:
            ahead = list(self._targets.values())
        if not (any(ahead) if request.stop else ahead):
            self._request = request.joined(self._request)

    def advance(self) -> None:
        """Advances the open round, or opens one, as far as possible without waiting."""
        current = self._open or self._join()
        if current is None:
            return
        if not current.is_answered:
            answer: dict[str, Any] = {"step": current.answered}
            if current.own is not None:
                answer |= {"reason": current.own.reason, "stop": current.own.stop}
            self._peers.store.set(f"{self._key}/{self._peers.rank}", json.dumps(answer).encode())
            current.is_answered = True
        outcome = self._peers.store.get(f"{self._key}/outcome") or self._decide(current)
        if outcome is not None:
            self._settle(current, json.loads(outcome))

    def due(self, step: int) -> tuple[bool, bool]:
        """Returns whether to save at a step, and whether to stop then; for the training thread.

        It waits only while a round is open that this rank has answered with an earlier step.
        """
        with self._settled:
            while self._open is not None and self._open.holds_up(step):
                left = self._open.limit + self._margin_seconds - time.monotonic()
                if left > 0:
                    self._settled.wait(left)
                    continue
                self._open.abandoned = True
                logger.warning(
                    "rank %d got no answer about the requested save; training continues",
                    self._peers.rank,
                )
            self._polled = step
            if self._targets:
                stops = [self._targets.pop(t) for t in list(self._targets) if t <= step]
                if stops:
                    self._taken = step
                    return True, any(stops)
            return step == self._taken, False

    @property
    def _key(self) -> str:
        return f"round/{self._number}"

    def _join(self) -> _Round | None:
        """Opens a round if there is a request, or joins one that another rank has opened."""
        store, rank = self._peers.store, self._peers.rank
        if self._request is not None:
            store.compare_set(self._key, b"", str(rank).encode())
        elif store.get(self._key) is None:
            return None
        timeout_seconds = self._limit_seconds + (self._margin_seconds if rank else 0.0)
        own, self._request = self._request, None
        with self._settled:
            self._open = _Round(self._number, self._polled, own, time.monotonic() + timeout_seconds)
            return self._open

    def _decide(self, current: _Round) -> bytes | None:
        """Returns the outcome, if it is this rank's turn to decide on it."""
        outcome: dict[str, Any] | None = None
        keys = [f"{self._key}/{rank}" for rank in range(self._peers.world_size)]
        if self._peers.rank == 0 and (answers := self._peers.store.get_all(keys)) is not None:
            outcome = _target([json.loads(answer) for answer in answers])
        elif time.monotonic() > current.limit:
            reason = "rank 0 did not decide"
            if self._peers.rank == 0:
                store = self._peers.store
                silent = [rank for rank, key in enumerate(keys) if store.get(key) is None]
                reason = f"{name_ranks(silent)} did not answer"
            outcome = {"void": reason}
        if outcome is None:
            return None
        return self._peers.store.compare_set(
            f"{self._key}/outcome", b"", json.dumps(outcome).encode()
        )

    def _settle(self, current: _Round, outcome: dict[str, Any]) -> None:
        step, stop = outcome.get("step"), outcome.get("stop", False)
        with self._settled:
            missed = current.abandoned and step is not None and step <= self._polled
            if step is not None and (stop or not missed):
                self._targets[step] = stop
            self._open = None
            self._settled.notify_all()
        if "void" in outcome:
            logger.warning(
                "the request to save was dropped: %s within %.0f s; training continues",
                outcome["void"],
                self._limit_seconds,
            )
        elif missed:
            logger.warning(
                "rank %d was notified too late that all ranks save at step %d, which it has passed",
                self._peers.rank,
                step,
            )
        elif self._peers.rank == 0:
            ending = ", then training ends" if stop else ""
            logger.info("saving at step %d: %s%s", step, outcome["reason"], ending)
        if self._peers.rank == 0:
            # A rank that answered this round has left all earlier ones, but may not have read the
            # outcome of this one yet.
            for number in self._litter if step is not None else ():
                for name in ("", "/outcome", *(f"/{r}" for r in range(self._peers.world_size))):
                    self._peers.store.delete(f"round/{number}{name}")
            self._litter = [*([] if step is not None else self._litter), self._number]
        self._number += 1
        if step is not None and self._request is not None and (stop or not self._request.stop):
            self._request = None  # added while the round was open, and fulfilled by it


def _target(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the outcome of the answers of all ranks."""
    reasons = dict.fromkeys(answer["reason"] for answer in answers if "reason" in answer)
    return {
        "step": max(answer["step"] for answer in answers) + 1,
        "stop": any(answer.get("stop", False) for answer in answers),
        "reason": ", ".join(list(reasons)[:4]),
    }
