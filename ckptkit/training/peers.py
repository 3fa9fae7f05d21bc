"""What the ranks tell each other, over the store that torch.distributed was started with.

Whoever waits for others asks again and again, with growing pauses, until a deadline.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ckptkit.core.errors import CkptkitError, PeerError, UsageError, error_from_json
from ckptkit.training.boards import MAX_VALUE_BYTES, Board, LocalBoard, StoreBoard, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.2
_PAUSE_GROWTH = 1.1  # so that an answer is heard at most a tenth later than it came
_GRACE_SECONDS = 5.0  # by which the others outwait rank 0, so that it is rank 0 who says why
_NAMED_RANKS = 8

T = TypeVar("T")


def poll_until(fetch: Callable[[], T | None], timeout_seconds: float) -> T | None:
    """Calls `fetch` with growing pauses until it returns something, or the time is up.

    Returns:
        What `fetch` returned, None when the time is up.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while (found := fetch()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(_PAUSE_GROWTH * pause, _LONGEST_PAUSE_SECONDS)
    return found


class Peers:
    """The ranks of one training, as one of them sees them.

    All methods may be called from several threads, as long as no two use the same topic.

    Attributes:
        rank: This process's number, from 0.
        world_size: How many ranks there are.
        board: What they share; keys with a first part other than `agree` are the callers'.
        nonce: Names this session; the same on all ranks, and unlike that of any other session.
    """

    def __init__(self, rank: int, world_size: int, board: Board, nonce: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.board = board
        self.nonce = nonce
        self._lock = threading.Lock()
        self._rounds: dict[str, int] = {}
        self._stale: list[tuple[float, str]] = []

    def agree(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout_seconds: float,
    ) -> Any:
        """Lets rank 0 decide on the values of all ranks, and returns its decision on each.

        Every rank has to call this equally often for a topic. A round that fails on one rank
        fails on all of them that wait for it, with the same error.

        Args:
            topic: What it is about.
            value: This rank's part, of what JSON can hold, at most 4 MiB.
            decide: Called on rank 0 alone, with the values in the order of the ranks; its result
                must be of what JSON can hold.
            timeout_seconds: How long rank 0 waits for the others, and about how long they do.

        Returns:
            What `decide` returned.

        Raises:
            PeerError: If a rank did not answer in time, or the store failed.
            ValueError: If this rank's part, or the decision of rank 0, is too large.
            CkptkitError: The same that `decide` raised on rank 0.
        """
        self._sweep()
        key = self._next_round(topic)
        if self.rank:
            return self._ask(topic, key, value, timeout_seconds)
        try:
            values = self._collect(topic, key, value, timeout_seconds)
            answer = _encoded({"value": decide(values)})
        except Exception as error:
            self._publish(key, _encoded({"error": _error_json(topic, error)}), timeout_seconds)
            raise
        self._publish(key, answer, timeout_seconds)
        return json.loads(answer)["value"]

    def close(self) -> None:
        """Ends the connection; nothing else may be called after it."""
        if isinstance(self.board, StoreBoard):
            self.board.close()

    def _next_round(self, topic: str) -> str:
        with self._lock:
            number = self._rounds[topic] = self._rounds.get(topic, 0) + 1
        return f"agree/{topic}/{number}"

    def _collect(self, topic: str, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Returns all ranks' values; for rank 0."""
        keys = [f"{key}/{rank}" for rank in range(1, self.world_size)]
        found = poll_until(lambda: self.board.get_all(keys), timeout_seconds) if keys else []
        if found is None:
            missing = [rank for rank, name in enumerate(keys, 1) if self.board.get(name) is None]
            raise PeerError(
                f"{name_ranks(missing)} did not answer within {timeout_seconds:g} s about {topic!r}"
            )
        return [json.loads(text) for text in [_encoded(value), *found]]

    def _publish(self, key: str, answer: bytes, timeout_seconds: float) -> None:
        if self.world_size > 1:
            self.board.set(f"{key}/answer", answer)
            self._forget(f"{key}/answer", timeout_seconds + 2 * _GRACE_SECONDS)

    def _ask(self, topic: str, key: str, value: Any, timeout_seconds: float) -> Any:
        """Tells rank 0 this rank's value and returns the decision; for the other ranks."""
        self.board.set(f"{key}/{self.rank}", _encoded(value))
        found = poll_until(
            lambda: self.board.get(f"{key}/answer"), timeout_seconds + _GRACE_SECONDS
        )
        if found is None:
            # Rank 0 may be about to read our value: who removes it now would make it wait.
            self._forget(f"{key}/{self.rank}", timeout_seconds + 2 * _GRACE_SECONDS)
            raise PeerError(f"rank 0 did not decide within {timeout_seconds:g} s about {topic!r}")
        self._forget(f"{key}/{self.rank}", 0.0)
        answer = json.loads(found)
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer["value"]

    def _forget(self, key: str, after_seconds: float) -> None:
        """Has a key removed by a later call, when nobody can be waiting for it any more."""
        with self._lock:
            self._stale.append((time.monotonic() + after_seconds, key))

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [key for when, key in self._stale if when <= now]
            self._stale = [entry for entry in self._stale if entry[0] > now]
        for key in due:
            self.board.delete(key)


def open_peers(run: str, *, timeout_seconds: float) -> Peers:
    """Finds the other ranks of this training and agrees with them on a new session.

    All ranks of the default process group have to call this, equally often for a run. Where
    torch.distributed is not initialised there is one rank.

    Args:
        run: Names what the ranks work on; the same text on all of them.
        timeout_seconds: How long to wait for all ranks to come here.

    Returns:
        The ranks.

    Raises:
        PeerError: If a rank did not come in time, or the store failed.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return Peers(0, 1, LocalBoard(), _new_nonce())
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    digest = hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()[:16]
    board = StoreBoard(_default_store(), f"ckptkit/{digest}")
    try:
        opening = Peers(rank, world_size, board.under(str(_count_opening(board, rank))), "")
        nonce = opening.agree(
            "opening the run",
            _new_nonce(),
            lambda nonces: nonces[0],
            timeout_seconds=timeout_seconds,
        )
    except BaseException:
        board.close()
        raise
    return Peers(rank, world_size, board.under(nonce), nonce)


def _count_opening(board: Board, rank: int) -> int:
    """Returns how often this rank has opened this run on this store, this time included."""
    key = f"openings/{rank}"
    while True:
        found = board.get(key) or b""
        number = int(found or 0) + 1
        desired = str(number).encode()
        if board.compare_set(key, found, desired) == desired:
            return number


def _default_store() -> Store:
    # There is no public way to the store that init_process_group was given or made.
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # MPI has none
        raise UsageError(
            "the process group has no store",
            hint="start torch.distributed with the backend gloo or nccl",
        )
    return store


def _new_nonce() -> str:
    return secrets.token_hex(4)


def _encoded(value: Any) -> bytes:
    text = json.dumps(value).encode()
    if len(text) > MAX_VALUE_BYTES:
        raise ValueError(f"{len(text):,} bytes were found against at most {MAX_VALUE_BYTES:,}")
    return text


def _error_json(topic: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, CkptkitError):
        return error.to_json()
    text = f"rank 0 failed to decide about {topic!r}: {type(error).__name__}: {first_line(error)}"
    return PeerError(text, hint="see the log of rank 0").to_json()


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns, for example, `ranks 3, 7`; of many only the first ones are named."""
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    further = f" and {len(ranks) - _NAMED_RANKS:,} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {named}{further}"
