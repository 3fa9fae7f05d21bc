"""Where the ranks agree on one save after another, and on questions that they ask in any order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.core.errors import PeerError, UsageError
from ckptkit.training.agree.key_values import KeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.save.attempts import SaveAttempt

_LOOK_SECONDS = 0.5
_HINT = "call save on all ranks at the same steps"
Decide = Callable[[list[Any]], Mapping[str, Any]]


class SaveBarrier:
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
        self._store = peers.store
        watched = _WatchedBoard(peers.store, self._find_passed)
        self._peers = Peers(peers.rank, peers.world_size, watched, peers.nonce)
        self._lead = 0  # how many saves rank 0 has counted more
        self._here: tuple[int, int, str] = (0, 0, "")
        self._others = [r for r in range(peers.world_size) if r] if not peers.rank else [0]
        self._tell()

    def agree(
        self,
        attempt: SaveAttempt,
        value: Mapping[str, Any],
        decide: Decide,
        *,
        timeout_seconds: float,
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
            self._store.set(f"at/{self._about}/{self.rank}", json.dumps(self._here).encode())

    def _find_passed(self) -> PeerError | None:
        """Looks for a rank that will not come to this rank's save any more."""
        found = self._store.get_all([f"at/{self._about}/{rank}" for rank in self._others])
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

    def __init__(self, store: KeyValueStore, find_reason: Callable[[], PeerError | None]) -> None:
        self._store = store
        self._find_reason = find_reason
        self._looked = time.monotonic()

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
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
        found = self._store.get_all(keys)
        if found is None and reason is not None:
            raise reason
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete(self, key: str) -> None:
        self._store.delete(key)


_REMEMBERED = 256  # answers that stay on the board


class SharedAnswers:
    """Questions that all ranks ask, in any order and at any time."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
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
            self._store.delete(self._asked.popleft())
        found = self._store.get(key)
        if found is None:
            own = f"={find()}"  # as an empty value stands for none
            found = self._store.compare_set(key, b"", own.encode())
        return found.decode().removeprefix("=")
