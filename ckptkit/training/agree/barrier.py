"""Agreement of all ranks on each save, and on questions that they ask in any order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import PeerError, UsageError
from ckptkit.training.agree.key_values import KeyValueStore
from ckptkit.training.agree.peers import Peers

if TYPE_CHECKING:
    from ckptkit.training.save.saver import Save

_LOOK_SECONDS = 0.5
_HINT = "call save on all ranks at the same steps"


class SaveBarrier(Peers):
    """A barrier for each save, at which rank 0 decides on what all ranks report.

    Saves are matched by step and attempt, so a rank that has left one out still meets the others at
    the next one. Each rank publishes the save that it is at: a rank that waits for another one that
    has passed its save fails at once instead of at the timeout. Saves are numbered by rank 0, whose
    count the others take over at each barrier.
    """

    def __init__(self, peers: Peers, about: str = "save") -> None:
        """Publishes that this rank is at no save yet; `about` is unlike that of other barriers."""
        super().__init__(peers.rank, peers.world_size, peers.store, peers.nonce)
        self._about = about
        self._lead = 0  # how many more saves rank 0 has counted
        self._at: tuple[int, int, str] = (0, 0, "")
        self._looked = time.monotonic()
        self._watched = [r for r in range(peers.world_size) if r] if not peers.rank else [0]
        self._publish_position()

    def agree_on(
        self,
        save: Save,
        value: Mapping[str, Any],
        decide: Callable[[list[Any]], Mapping[str, Any]],
        *,
        timeout_seconds: float,
    ) -> Mapping[str, Any]:
        """Lets rank 0 decide on the values of all ranks, as `agree` does."""
        self._at = save.number + self._lead, save.step, save.name
        number = self._at[0]
        self._publish_position()
        self._looked = time.monotonic()

        def decide_all(reports: list[Any]) -> dict[str, Any]:
            for rank, report in enumerate(reports):
                if report["name"] != reports[0]["name"]:
                    raise UsageError(
                        f"is {report['name']!r} on rank {rank} and {reports[0]['name']!r} on rank"
                        " 0, where the same was expected on all ranks",
                        where="name",
                        hint="save under the same name on every rank",
                    )
            return {"number": number, "outcome": decide([report["value"] for report in reports])}

        answer: Mapping[str, Any] = self.agree(
            f"the {self._about} of step {save.step}, attempt {save.name}",
            {"name": save.step_name, "value": value},
            decide_all,
            timeout_seconds=timeout_seconds,
        )
        self._lead = answer["number"] - save.number
        outcome: Mapping[str, Any] = answer["outcome"]
        return outcome

    def _publish_position(self) -> None:
        if self._watched:
            self.store.set(f"at/{self._about}/{self.rank}", json.dumps(self._at).encode())

    def _fetch(self, keys: Sequence[str]) -> list[bytes] | None:
        """Looks now and then whether another rank has passed this rank's save."""
        reason = None
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            reason = self._find_passed()
        # Read after the check: a rank answers before it starts another save.
        values = super()._fetch(keys)
        if values is None and reason is not None:
            raise reason
        return values

    def _find_passed(self) -> PeerError | None:
        positions = self.store.get_all([f"at/{self._about}/{rank}" for rank in self._watched])
        for rank, text in zip(self._watched, positions or (), strict=False):
            number, step, name = json.loads(text)
            if name != self._at[2] and (number, step) > self._at[:2]:
                return PeerError(
                    f"rank {rank} is at the save of step {step}, where rank {self.rank} waits for"
                    f" it at the save of step {self._at[1]}",
                    hint=_HINT,
                )
        return None


_REMEMBERED = 256  # answers that stay in the store


class SharedAnswers:
    """Answers that are the same on all ranks: that of the rank that asks first."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._asked: deque[str] = deque()

    def answer(self, question: str, find: Callable[[], str]) -> str:
        """Returns the answer of the rank that asked first; `find` is not called if there is one."""
        answer = self._store.get(f"votes/{question}")
        return self.first(question, find() if answer is None else "")

    def first(self, question: str, own: str) -> str:
        """Returns the answer of the rank that asked first, without waiting for any other rank.

        A rank asks each question once.
        """
        key = f"votes/{question}"
        self._asked.append(key)
        if len(self._asked) > _REMEMBERED:  # every rank has asked long ago
            self._store.delete(self._asked.popleft())
        # "=", since an empty value means a missing key
        return self._store.compare_set(key, b"", f"={own}".encode()).decode().removeprefix("=")
