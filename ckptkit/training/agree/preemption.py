"""When to save: one answer on all ranks, from the interval, signals, the scheduler and people."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.training.agree.peers import Peers
from ckptkit.training.agree.save_steps import Rounds, Wish
from ckptkit.training.environment import slurm_end_time
from ckptkit.training.runs import Run
from ckptkit.training.settings import Interval, Settings
from ckptkit.training.signals import SignalWatch

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 60.0
_IDLE_SECONDS = 0.2
_BUSY_SECONDS = 0.01
_FAILED_SECONDS = 2.0  # doubled with each further failure, since torch prints each of them
_MOST_FAILED_SECONDS = 60.0
_FILE_SECONDS = 1.0  # between two looks at a file system that may be far away
_QUESTIONS_PER_SECOND = 5_000  # of all ranks together: a tenth of what one store answers
_FAILED_FILE_SECONDS = 60.0
_AGAIN_SECONDS = 60.0  # until the job's end is announced again, if ranks did not answer
_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _Clock:
    """What rank 0 asks for by itself, when the time for it comes."""

    interval_seconds: float | None
    saved_at: float
    job_ends: float | None
    asked_at: float = float("-inf")

    def wish(self) -> Wish | None:
        """Returns what is due now."""
        now = time.monotonic()
        if self.job_ends is not None and now >= max(self.job_ends, self.asked_at + _AGAIN_SECONDS):
            self.asked_at = now
            return Wish("the job is about to end", stop=True)
        if self.interval_seconds is not None and now >= self.saved_at + self.interval_seconds:
            self.saved_at = now  # the save itself will set it again
            return Wish(f"{self.interval_seconds:g} s have passed since the last save")
        return None


class SaveRequests:
    """Gathers requests to save on each rank and agrees on the step, in a thread of its own.

    `should_save` is for the training thread and asks nobody: only while a request is under
    discussion does it wait, at most `LONGEST_WAIT_SECONDS` and a fifth. How the ranks agree, and
    what happens when one of them is gone, is told in `ckptkit.training.agree.save_steps`.
    """

    def __init__(
        self,
        peers: Peers,
        run: Run[Any],
        *,
        interval: Interval = Interval(),  # noqa: B008  a frozen value
        signals: Sequence[str] = (),
        slurm_margin_seconds: float = 300.0,
        timeout_seconds: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        """Installs the handlers of signals, and starts the thread.

        Args:
            peers: The ranks.
            run: Where `ckptkit save-now` leaves its requests.
            interval: When to save without a request; times are measured on rank 0.
            signals: After which all ranks save and stop; see `SignalWatch`.
            slurm_margin_seconds: How long before Slurm ends the job all ranks save and stop, at
                most half of the time that is left now; 0 to ignore Slurm.
            timeout_seconds: How long `should_save` may wait for other ranks, if less than
                `LONGEST_WAIT_SECONDS`.
        """
        self._peers = peers
        self._run = run
        self._interval = interval
        self._stop_requested = False
        self._rounds = Rounds(peers, limit_seconds=min(timeout_seconds, LONGEST_WAIT_SECONDS))
        self._clock = _Clock(interval.seconds, time.monotonic(), _job_ends(slurm_margin_seconds))
        self._asked: deque[Wish] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._looked_at = float("-inf")
        self._failures = 0
        self._signals = SignalWatch(signals)
        self._thread = threading.Thread(target=self._watch, name="ckptkit-requests", daemon=True)
        self._thread.start()
        # A thread that comes back from C++ while the interpreter is torn down aborts the process.
        atexit.register(self.close)

    def should_save(self, step: int) -> bool:
        """Tells whether to save at this step; the answer is the same on all ranks.

        Call it on every rank at every step, with rising steps. It is True once for a request,
        and for a step always the same. It also sets `stop_requested`.
        """
        due, stop = self._rounds.due(step)
        if stop:
            self._stop_requested = True
            self._clock.job_ends = None
        if due or self._interval.due_at_step(step):
            self._clock.saved_at = time.monotonic()
            return True
        return False

    def request_save(self, *, stop: bool = False) -> None:
        """Asks all ranks to save; from any thread, but not from the handler of a signal.

        Args:
            stop: Whether `stop_requested` is to become true at that save.
        """
        self._asked.append(Wish(f"request_save on rank {self._peers.rank}", stop))
        self._wake.set()

    @property
    def stop_requested(self) -> bool:
        """Whether training should end; it turns true at the same step on all ranks."""
        return self._stop_requested

    def close(self) -> None:
        """Ends the thread and puts earlier handlers back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        self._signals.close()

    def _watch(self) -> None:
        while not self._closed:
            pause = self._advance()
            self._wake.wait(pause)
            self._wake.clear()

    def _advance(self) -> float:
        """Does what can be done now; returns after how many seconds to come again."""
        try:
            for wish in self._gathered():
                self._rounds.ask(wish)
            self._rounds.advance()
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
        return max(_BUSY_SECONDS if self._rounds.is_open else _IDLE_SECONDS, shared)

    def _gathered(self) -> Iterator[Wish]:
        """Yields what was asked for on this rank since the last time."""
        while self._asked:
            yield self._asked.popleft()
        while (name := self._signals.take()) is not None:
            yield Wish(f"{name} on rank {self._peers.rank}", stop=True)
        if self._peers.rank == 0:
            for source in (self._clock.wish, self._take_file):
                wish = source()
                if wish is not None:
                    yield wish

    def _take_file(self) -> Wish | None:
        now = time.monotonic()
        if now < self._looked_at + _FILE_SECONDS:
            return None
        self._looked_at = now
        try:
            owner = self._run.take_request()
        except OSError as error:
            self._looked_at = now + _FAILED_FILE_SECONDS
            logger.warning("a request of `ckptkit save-now` cannot be taken up: %s", error)
            return None
        return None if owner is None else Wish(f"ckptkit save-now ({owner})")


def _job_ends(margin_seconds: float) -> float | None:
    """Returns when to stop before Slurm does, as `time.monotonic` tells it."""
    end = slurm_end_time() if margin_seconds > 0 else None
    if end is None:
        return None
    left = max(end - time.time(), 0.0)
    return time.monotonic() + left - min(margin_seconds, left / 2)


def open_requests(peers: Peers, run: Run[Any], settings: Settings) -> SaveRequests:
    """Begins to gather requests to save; see `SaveRequests`."""
    return SaveRequests(
        peers,
        run,
        interval=settings.interval,
        signals=settings.signals,
        slurm_margin_seconds=settings.slurm_margin_seconds,
        timeout_seconds=settings.timeout_seconds,
    )
