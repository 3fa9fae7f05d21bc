"""What the ranks tell each other, over the store that torch.distributed was started with.

Whoever waits for others asks again and again, with growing pauses, until a deadline.

Agreement on a save between ranks that need not all be at the same one.

Answers that are the same on all ranks, without waiting for any: who asks first decides.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ckptkit.core.errors import CkptkitError, PeerError, UsageError, error_from_json
from ckptkit.training.agree.same_place import check_same_place, place_facts
from ckptkit.training.agree.store import MAX_VALUE_BYTES, Board, LocalBoard, StoreBoard, first_line
from ckptkit.training.save.commit import Attempt

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.2
_PAUSE_GROWTH = 1.1  # so that an answer is heard at most a tenth later than it came
_GRACE_SECONDS = 5.0  # by which the others outwait rank 0, so that it is rank 0 who says why
_NAMED_RANKS = 8
_REFUSED = b"!"  # before the error of a rank that has no value; no JSON begins like this
_LONGEST_ERROR = 2_000
_MOST_OPENINGS = 10_000
_OPENING = threading.Lock()  # openings are numbered, and so must come one after another

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
        self._answered: list[tuple[float, str]] = []  # rounds whose answer some may still await

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
        """
        self._sweep()
        key = self._next_round(topic)
        if self.rank:
            return self._ask(topic, key, value, timeout_seconds)
        try:
            values = self._collect(topic, key, value, timeout_seconds)
            answer = _encoded({"value": decide(values)})
        except Exception as error:
            document = _error_json(f"rank 0 failed to decide about {topic!r}", error)
            self._publish(key, _encoded({"error": document}), timeout_seconds)
            raise
        self._publish(key, answer, timeout_seconds)
        return json.loads(answer)["value"]

    def refuse(self, topic: str, error: Exception, *, timeout_seconds: float) -> None:
        """Takes part in a round in which this rank has nothing but an error, and waits for nobody.

        All ranks that call `agree` in this round raise the error at once.

        Args:
            topic: What the round is about.
            error: What went wrong here.
            timeout_seconds: As for `agree`.
        """
        key = self._next_round(topic)
        document = _error_json(f"rank {self.rank} failed before {topic!r}", error)
        if self.rank:
            self.board.set(f"{key}/{self.rank}", _REFUSED + _encoded(document))
            self._forget(f"{key}/{self.rank}", timeout_seconds + 2 * _GRACE_SECONDS)
        else:
            self._publish(key, _encoded({"error": document}), timeout_seconds)

    def close(self) -> None:
        """Ends the connection; nothing else may be called after it.

        Rank 0 often hosts the store, and the program may end next: it waits some seconds for those
        that have not heard its last answers.
        """
        if not isinstance(self.board, StoreBoard):
            return
        with suppress(PeerError):
            poll_until(self._all_heard, _GRACE_SECONDS)
        self.board.close()

    def _all_heard(self) -> bool | None:
        """Tells whether every rank has taken its values back, as it does after an answer.

        A rank that did not come has none, and one that had to refuse awaits nothing.
        """
        now = time.monotonic()
        with self._lock:
            self._answered = [entry for entry in self._answered if entry[0] > now]
            keys = [f"{key}/{rank}" for _, key in self._answered for rank in self._others]
        values = map(self.board.get, keys)
        return all(value is None or value.startswith(_REFUSED) for value in values) or None

    @property
    def _others(self) -> range:
        return range(1, self.world_size)

    def _next_round(self, topic: str) -> str:
        with self._lock:
            number = self._rounds[topic] = self._rounds.get(topic, 0) + 1
        return f"agree/{topic}/{number}"

    def _collect(self, topic: str, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Returns all ranks' values; for rank 0."""
        keys = [f"{key}/{rank}" for rank in self._others]
        found = poll_until(lambda: self.board.get_all(keys), timeout_seconds) if keys else []
        if found is None:
            missing = [rank for rank, name in enumerate(keys, 1) if self.board.get(name) is None]
            raise PeerError(
                f"{name_ranks(missing)} did not answer within {timeout_seconds:g} s about {topic!r}"
            )
        refused = next((text for text in found if text.startswith(_REFUSED)), None)
        if refused is not None:
            raise error_from_json(json.loads(refused.removeprefix(_REFUSED)))
        return [json.loads(text) for text in [_encoded(value), *found]]

    def _publish(self, key: str, answer: bytes, timeout_seconds: float) -> None:
        if self.world_size > 1:
            self.board.set(f"{key}/answer", answer)
            self._forget(f"{key}/answer", timeout_seconds + 2 * _GRACE_SECONDS)
            with self._lock:
                self._answered.append((time.monotonic() + _GRACE_SECONDS, key))

    def _ask(self, topic: str, key: str, value: Any, timeout_seconds: float) -> Any:
        """Tells rank 0 this rank's value and returns the decision; for the other ranks."""
        try:
            part = _encoded(value)
        except (TypeError, ValueError) as error:
            part = _REFUSED + _encoded(_error_json(f"rank {self.rank} has no answer", error))
        self.board.set(f"{key}/{self.rank}", part)
        found = poll_until(
            lambda: self.board.get(f"{key}/answer"), timeout_seconds + _GRACE_SECONDS
        )
        if found is None:
            # Rank 0 may be about to read our value: who removes it now would make it wait.
            self._forget(f"{key}/{self.rank}", timeout_seconds + 2 * _GRACE_SECONDS)
            raise PeerError(f"rank 0 did not decide within {timeout_seconds:g} s about {topic!r}")
        self.board.delete(f"{key}/{self.rank}")  # which tells rank 0 that it was heard
        answer = json.loads(found)
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer["value"]

    def _forget(self, key: str, after_seconds: float) -> None:
        with self._lock:
            self._stale.append((time.monotonic() + after_seconds, key))

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [key for when, key in self._stale if when <= now]
            self._answered = [entry for entry in self._answered if entry[0] > now]
            self._stale = [entry for entry in self._stale if entry[0] > now]
        for key in due:
            self.board.delete(key)


def open_peers(run: str | PathLike[str], *, timeout_seconds: float, is_place: bool = True) -> Peers:
    """Finds the other ranks of this training and agrees with them on a new session.

    All ranks of the default process group have to call this, in the same order. Where
    torch.distributed is not initialised there is one rank.

    Args:
        run: What the ranks work on; the same on all of them.
        timeout_seconds: How long to wait for all ranks to come here.
        is_place: Whether `run` is a directory or a URL, which ranks may spell in different ways.

    Returns:
        The ranks.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return Peers(0, 1, LocalBoard(), _new_nonce())
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    topic = {"named": str(run), "machine": "", "path": str(run), "inode": []}
    facts = place_facts(run) if is_place else topic
    # One meeting for all that ranks open: those that open different things meet, and are told.
    with _OPENING:
        board = StoreBoard(_default_store(), "ckptkit/runs")
        try:
            nonce = meet(board, rank, world_size, timeout_seconds=timeout_seconds)
            peers = Peers(rank, world_size, board.under(nonce), nonce)
            peers.agree(
                "what the ranks open",
                facts,
                lambda of_ranks: check_same_place(of_ranks, "the directory of the run"),
                timeout_seconds=timeout_seconds,
            )
        except BaseException:
            board.close()
            raise
    return peers


def meet(board: Board, rank: int, world_size: int, *, timeout_seconds: float) -> str:
    """Agrees with all ranks on the nonce of a session.

    Openings are numbered by the answers of rank 0, each of which names the nonces of the ranks
    that it is for. A rank that is not among them came too late, or was not there at all when
    rank 0 gave up on it, and goes on to the next one.

    """
    own = _new_nonce()
    number = int(board.get(f"openings/{rank}") or 0) + 1
    if rank == 0:
        return _host(board, number, own, world_size, timeout_seconds)
    deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
    for opening in range(number, number + _MOST_OPENINGS):
        answer = _join(board, opening, rank, own, deadline)
        if answer is None:
            break
        board.set(f"openings/{rank}", str(opening).encode())
        if own in answer["nonces"]:
            if "error" in answer:
                raise error_from_json(answer["error"])
            return str(answer["nonces"][0])
    raise PeerError(f"rank 0 did not open the run within {timeout_seconds:g} s")


def _host(board: Board, number: int, own: str, world_size: int, timeout_seconds: float) -> str:
    """Waits for the others, and tells those that came how it ended; for rank 0."""
    keys = [f"{number}/{rank}" for rank in range(1, world_size)]
    found = poll_until(lambda: board.get_all(keys), timeout_seconds) if keys else []
    error: PeerError | None = None
    here: list[bytes | None] = list(found or ())
    if found is None:
        here = [board.get(key) for key in keys]
        missing = [rank for rank, nonce in enumerate(here, 1) if nonce is None]
        error = PeerError(
            f"{name_ranks(missing)} did not open the run within {timeout_seconds:g} s"
        )
    nonces = [own, *(nonce.decode() for nonce in here if nonce is not None)]
    answer = {"nonces": nonces} | ({} if error is None else {"error": error.to_json()})
    board.set("openings/0", str(number).encode())
    board.set(f"{number}/answer", _encoded(answer))
    if error is not None:
        raise error
    return own


def _join(board: Board, number: int, rank: int, own: str, deadline: float) -> Any:
    """Takes part in an opening and returns what rank 0 answered, None if nothing in time."""
    key = f"{number}/{rank}"
    board.set(key, own.encode())
    try:
        left = max(deadline - time.monotonic(), 0.0)
        found = poll_until(lambda: board.get(f"{number}/answer"), left)
    finally:
        board.delete(key)  # or rank 0 would take this rank for one that still waits
    return None if found is None else json.loads(found)


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


def _error_json(what: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, CkptkitError):
        return error.to_json()
    text = f"{what}: {type(error).__name__}: {first_line(error)}"
    return PeerError(text[:_LONGEST_ERROR], hint="see the log of that rank").to_json()


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns, for example, `ranks 3, 7`; of many only the first ones are named."""
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    further = f" and {len(ranks) - _NAMED_RANKS:,} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {named}{further}"


_LOOK_SECONDS = 0.5
_HINT = "call save on all ranks at the same steps"
Decide = Callable[[list[Any]], Mapping[str, Any]]


class Meeting:
    """Where the ranks meet for each save, one save after the other.

    Saves are matched by step and try, so that a rank that has left one out still meets the others
    at the next. Each rank tells at which save it is: who waits for a rank that is past its own
    save need not wait until the time is up. Numbers of saves are those of rank 0, whose count the
    others take over each time they meet.
    """

    def __init__(self, peers: Peers, about: str = "save") -> None:
        """Tells the others that this rank is at no save yet.

        Args:
            peers: The other ranks.
            about: What they meet for, unlike that of any other meeting.
        """
        self.rank = peers.rank
        self._about = about
        self._board = peers.board
        watched = _WatchedBoard(peers.board, self._find_passed)
        self._peers = Peers(peers.rank, peers.world_size, watched, peers.nonce)
        self._lead = 0  # how many saves rank 0 has counted more
        self._here: tuple[int, int, str] = (0, 0, "")
        self._others = [r for r in range(peers.world_size) if r] if not peers.rank else [0]
        self._tell()

    def agree(
        self, attempt: Attempt, value: Mapping[str, Any], decide: Decide, *, timeout_seconds: float
    ) -> Mapping[str, Any]:
        """Lets rank 0 decide on what all ranks say of an attempt, as `Peers.agree` does."""
        self._here = attempt.number + self._lead, attempt.step, attempt.name
        number = self._here[0]
        self._tell()
        answer: Mapping[str, Any] = self._peers.agree(
            f"the {self._about} of step {attempt.step}, attempt {attempt.name}",
            {"name": attempt.step_name, "value": value},
            lambda told: {"number": number, "outcome": decide(_values_of(told))},
            timeout_seconds=timeout_seconds,
        )
        self._lead = answer["number"] - attempt.number
        outcome: Mapping[str, Any] = answer["outcome"]
        return outcome

    def _tell(self) -> None:
        if self._others:
            self._board.set(f"at/{self._about}/{self.rank}", json.dumps(self._here).encode())

    def _find_passed(self) -> PeerError | None:
        """Looks for a rank that will not come to this rank's save any more."""
        found = self._board.get_all([f"at/{self._about}/{rank}" for rank in self._others])
        for rank, text in zip(self._others, found or (), strict=False):
            number, step, name = json.loads(text)
            if name != self._here[2] and (number, step) > self._here[:2]:
                return PeerError(
                    f"rank {rank} is at the save of step {step}, where rank {self.rank} waits for"
                    f" it at the save of step {self._here[1]}",
                    hint=_HINT,
                )
        return None


def _values_of(told: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns what all ranks say of an attempt, where they mean the same directory."""
    for rank, one in enumerate(told):
        if one["name"] != told[0]["name"]:
            raise UsageError(
                f"is {one['name']!r} on rank {rank} and {told[0]['name']!r} on rank 0, where the"
                " same was expected on all ranks",
                where="name",
                hint="save under the same name on every rank",
            )
    return [one["value"] for one in told]


class _WatchedBoard:
    """A board that, asked in vain again and again, looks for a reason to give up."""

    def __init__(self, board: Board, find_reason: Callable[[], PeerError | None]) -> None:
        self._board = board
        self._find_reason = find_reason
        self._looked = time.monotonic()

    def set(self, key: str, value: bytes) -> None:
        self._board.set(key, value)
        self._looked = time.monotonic()

    def get(self, key: str) -> bytes | None:
        found = self.get_all([key])
        return found[0] if found else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        reason = None
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            reason = self._find_reason()
        # Asked afterwards: a rank answers before it goes on to another save.
        found = self._board.get_all(keys)
        if found is None and reason is not None:
            raise reason
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._board.compare_set(key, expected, desired)

    def delete(self, key: str) -> None:
        self._board.delete(key)


_REMEMBERED = 256  # answers that stay on the board


class Votes:
    """Questions that all ranks ask, in any order and at any time."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._asked: deque[str] = deque()

    def answer(self, question: str, find: Callable[[], str]) -> str:
        """Returns the answer of the rank that asked first.

        Args:
            question: Names the question; each is asked once by a rank.
            find: Returns this rank's answer, which is not looked for where one stands already.
        """
        key = f"votes/{question}"
        self._asked.append(key)
        if len(self._asked) > _REMEMBERED:  # every rank has long since asked
            self._board.delete(self._asked.popleft())
        found = self._board.get(key)
        if found is None:
            own = f"={find()}"  # as an empty value stands for none
            found = self._board.compare_set(key, b"", own.encode())
        return found.decode().removeprefix("=")
