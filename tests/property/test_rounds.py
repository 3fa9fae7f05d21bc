"""How ranks agree on a step, in every order of events that Hypothesis can think of."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.agree.save_requests import SaveRequest, SaveStepAgreement
from tests.property.examples import examples

NEVER_VOID_SECONDS = 3600.0
MAX_DRIFT = 3
RANKS = st.integers(0, 3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), RANKS),
        st.tuples(st.just("watch"), RANKS),
        st.tuples(st.sampled_from(["ask", "ask to stop"]), RANKS),
    ),
    max_size=120,
)


@dataclass
class Rank:
    """A rank whose training and watcher take turns as the test says."""

    rounds: SaveStepAgreement
    polled: int = 0
    saved: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    wishes: list[tuple[int, bool]] = field(default_factory=list)

    def would_wait(self) -> bool:
        current = self.rounds._open
        return current is not None and current.holds_up(self.polled + 1)

    def step(self) -> None:
        self.polled += 1
        due, stop = self.rounds.due(self.polled)
        if due:
            self.saved.append(self.polled)
        if stop:
            self.stopped.append(self.polled)


def make_ranks(count: int) -> list[Rank]:
    board = LocalKeyValueStore()
    return [
        Rank(
            SaveStepAgreement(Peers(rank, count, board, "nonce"), limit_seconds=NEVER_VOID_SECONDS)
        )
        for rank in range(count)
    ]


def finish(ranks: list[Rank]) -> None:
    """Lets all watchers settle what is open, and every rank come to the same step."""
    for _ in range(20):
        for rank in ranks:
            rank.rounds.advance()
    last = max(rank.polled for rank in ranks) + 2
    while any(rank.polled < last for rank in ranks):
        for rank in ranks:
            rank.rounds.advance()
            if rank.polled < last and not rank.would_wait():
                rank.step()


@given(count=st.integers(1, 4), events=EVENTS)
@settings(max_examples=examples(400))
def test_all_ranks_save_and_stop_at_the_same_steps(
    count: int, events: list[tuple[str, int]]
) -> None:
    ranks = make_ranks(count)
    wishes: list[tuple[int, bool]] = []
    for event, number in events:
        rank = ranks[number % count]
        if event == "watch":
            rank.rounds.advance()
        elif event == "step":
            behind = min(other.polled for other in ranks)
            if rank.polled < behind + MAX_DRIFT and not rank.would_wait():
                rank.step()
        else:
            rank.rounds.ask(SaveRequest(f"test {number}", stop=event == "ask to stop"))
            wishes.append((rank.polled, event == "ask to stop"))
    finish(ranks)
    assert all(rank.saved == ranks[0].saved for rank in ranks)
    assert all(rank.stopped == ranks[0].stopped for rank in ranks)
    assert len(set(ranks[0].saved)) == len(ranks[0].saved)
    for polled, stop in wishes:
        fulfilled = ranks[0].stopped if stop else ranks[0].saved
        assert any(step > polled for step in fulfilled)
    assert len(ranks[0].saved) <= len(wishes)
