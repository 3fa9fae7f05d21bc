"""How the ranks agree on the step to save at, when somebody asks for a save.

A round is opened by whoever asks first. The watcher of each rank answers with the last step that
its training thread has asked about, and from then on that thread waits before any later step.
When all have answered, rank 0 publishes the largest answer plus one: no rank has passed that
step, so none can miss it, however far apart they are.

The outcome is written once, by comparing and setting one key: either rank 0 writes the step, or
a rank whose patience is at its end voids the round, and then it is void for all. So the ranks
can only disagree where one of them cannot reach the store: it goes on when its time is up, and
says so if it learns later that it has passed the step.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from ckptkit.training.agree.peers import Peers, name_ranks

logger = logging.getLogger(__name__)

_NEVER_POLLED = -1
_MARGIN_SECONDS = 0.3  # between those who give up one after another, who look now and then


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for a save.

    Attributes:
        reason: What asked for it, for the log.
        stop: Whether training is to end after it.
    """

    reason: str
    stop: bool = False

    def joined(self, other: Wish | None) -> Wish:
        """Returns one request that stands for both; to stop wins."""
        if other is None:
            return self
        told = self.reason in other.reason
        reason = other.reason if told else f"{other.reason}, {self.reason}"
        return Wish(reason, self.stop or other.stop)


@dataclass(slots=True)
class _Round:
    """A round that this rank knows to be open; `limit` is when it voids the round."""

    number: int
    answered: int
    own: Wish | None
    limit: float
    told: bool = False
    abandoned: bool = False


class Rounds:
    """One rank's part in all rounds; the watcher calls `advance`, the training thread `due`.

    Args:
        peers: The ranks.
        limit_seconds: After how long rank 0 voids a round that not all ranks have answered. The
            others do so after a tenth more, in case it is rank 0 that is gone, and the training
            thread waits a tenth longer still, in case the store is gone as well.
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
        # From here on only the watcher's.
        self._number = 1
        self._wish: Wish | None = None
        self._litter: list[int] = []

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def ask(self, wish: Wish) -> None:
        """Asks for a save, with the next `advance`; for the watcher alone.

        A request is dropped where a save that fulfils it is agreed on and still ahead.
        """
        with self._settled:
            ahead = list(self._targets.values())
        if not (any(ahead) if wish.stop else ahead):
            self._wish = wish.joined(self._wish)

    def advance(self) -> None:
        """Takes the round that is open, or to be opened, as far as it gets without waiting."""
        current = self._open or self._join()
        if current is None:
            return
        if not current.told:
            answer = {"step": current.answered} | _wish_json(current.own)
            self._peers.board.set(f"{self._key}/{self._peers.rank}", json.dumps(answer).encode())
            current.told = True
        outcome = self._peers.board.get(f"{self._key}/outcome") or self._decide(current)
        if outcome is not None:
            self._settle(current, json.loads(outcome))

    def due(self, step: int) -> tuple[bool, bool]:
        """Tells whether to save at a step, and whether to stop then; for the training thread.

        It waits only while a round is open in which this rank has answered an earlier step.
        """
        with self._settled:
            while self._open is not None and self._holds(self._open, step):
                self._wait(self._open)
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
        """Opens a round if there is a wish, or finds that another rank has opened it."""
        board, rank = self._peers.board, self._peers.rank
        if self._wish is not None:
            board.compare_set(self._key, b"", str(rank).encode())
        elif board.get(self._key) is None:
            return None
        patience = self._limit_seconds + (self._margin_seconds if rank else 0.0)
        own, self._wish = self._wish, None
        with self._settled:
            self._open = _Round(self._number, self._polled, own, time.monotonic() + patience)
            return self._open

    def _decide(self, current: _Round) -> bytes | None:
        """Returns the outcome, if it is this rank's turn to decide on it."""
        outcome: dict[str, Any] | None = None
        keys = [f"{self._key}/{rank}" for rank in range(self._peers.world_size)]
        if self._peers.rank == 0 and (found := self._peers.board.get_all(keys)) is not None:
            outcome = _target([json.loads(answer) for answer in found])
        elif time.monotonic() > current.limit:
            outcome = {"void": self._complaint(keys)}
        if outcome is None:
            return None
        return self._peers.board.compare_set(
            f"{self._key}/outcome", b"", json.dumps(outcome).encode()
        )

    def _complaint(self, keys: list[str]) -> str:
        if self._peers.rank:
            return "rank 0 did not decide"
        silent = [rank for rank, key in enumerate(keys) if self._peers.board.get(key) is None]
        return f"{name_ranks(silent)} did not answer"

    def _settle(self, current: _Round, outcome: dict[str, Any]) -> None:
        step, stop = outcome.get("step"), outcome.get("stop", False)
        with self._settled:
            missed = current.abandoned and step is not None and step <= self._polled
            if step is not None and (stop or not missed):
                self._targets[step] = stop
            self._open = None
            self._settled.notify_all()
        self._report(outcome, missed=missed)
        self._clean(whole=step is not None)
        self._number += 1
        if step is not None and self._wish is not None and (stop or not self._wish.stop):
            self._wish = None  # made while the round was open, and fulfilled by it

    def _report(self, outcome: dict[str, Any], *, missed: bool) -> None:
        if "void" in outcome:
            logger.warning(
                "the request to save was dropped: %s within %.0f s; training goes on",
                outcome["void"],
                self._limit_seconds,
            )
        elif missed:
            logger.warning(
                "rank %d learnt too late that all ranks save at step %d, which it has passed",
                self._peers.rank,
                outcome["step"],
            )
        elif self._peers.rank == 0:
            ending = ", then training is told to end" if outcome["stop"] else ""
            logger.info("saving at step %d: %s%s", outcome["step"], outcome["reason"], ending)

    def _clean(self, *, whole: bool) -> None:
        """Removes the keys of rounds that all ranks have left; for rank 0.

        Whoever answered this round has left all earlier ones, and a rank may still be on its way
        to the outcome of this one.
        """
        if self._peers.rank:
            return
        if whole:
            for number in self._litter:
                for name in ("", "/outcome", *(f"/{r}" for r in range(self._peers.world_size))):
                    self._peers.board.delete(f"round/{number}{name}")
            self._litter.clear()
        self._litter.append(self._number)

    @staticmethod
    def _holds(current: _Round, step: int) -> bool:
        return step > current.answered and not current.abandoned

    def _wait(self, current: _Round) -> None:
        """Waits for a change, with the condition held; gives up on the round when time is up."""
        left = current.limit + self._margin_seconds - time.monotonic()
        if left > 0:
            self._settled.wait(left)
            return
        current.abandoned = True
        logger.warning(
            "rank %d heard nothing of the save that was asked for; training goes on",
            self._peers.rank,
        )


def _wish_json(wish: Wish | None) -> dict[str, Any]:
    return {} if wish is None else {"reason": wish.reason, "stop": wish.stop}


def _target(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the outcome that follows from all ranks' answers."""
    reasons = dict.fromkeys(answer["reason"] for answer in answers if "reason" in answer)
    return {
        "step": max(answer["step"] for answer in answers) + 1,
        "stop": any(answer.get("stop", False) for answer in answers),
        "reason": ", ".join(list(reasons)[:4]),
    }
