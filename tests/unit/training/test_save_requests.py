"""One answer on all ranks: threads that play ranks, and what asks for a save."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.core.errors import PeerError
from ckptkit.runs.marks import ask_for_save
from ckptkit.training.agree import save_requests
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.agree.save_requests import SaveRequest, SaveRequestWatcher, SaveStepAgreement
from ckptkit.training.run_folders import RunFolder
from ckptkit.training.settings import Interval

LIMIT_SECONDS = 60.0
STEPS = 6_000
DRIFT = 3


class Drill:
    """Ranks that train in threads, at most three steps apart, while requests come in at random."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size = world_size
        self.polled = [0] * world_size
        self.saved: list[list[int]] = [[] for _ in range(world_size)]
        self.stopped: list[list[int]] = [[] for _ in range(world_size)]
        self.wishes: list[tuple[int, bool]] = []
        self._seed = seed
        self._ended = threading.Event()
        board = LocalKeyValueStore()
        self._rounds = [
            SaveStepAgreement(Peers(rank, world_size, board, "drill"), limit_seconds=LIMIT_SECONDS)
            for rank in range(world_size)
        ]

    def run(self) -> None:
        threads = [
            threading.Thread(target=work, args=(rank,))
            for rank in range(self.world_size)
            for work in (self._train, self._watch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads[::2]:
            thread.join()
        self._ended.set()
        for thread in threads[1::2]:
            thread.join()

    def _train(self, rank: int) -> None:
        dice = random.Random(f"{self._seed} trains {rank}")  # noqa: S311  no secret
        for step in range(1, STEPS + 1):
            while step > min(self.polled) + DRIFT:
                time.sleep(0.0001)
            if dice.random() < 0.2:
                time.sleep(0.002 * dice.random())
            due, stop = self._rounds[rank].due(step)
            self.polled[rank] = step
            if due:
                self.saved[rank].append(step)
            if stop:
                self.stopped[rank].append(step)

    def _watch(self, rank: int) -> None:
        dice = random.Random(f"{self._seed} watches {rank}")  # noqa: S311  no secret
        while not self._ended.is_set():
            if dice.random() < 0.05 and self.polled[rank] < STEPS - 50:
                stop = dice.random() < 0.2
                self.wishes.append((self.polled[rank], stop))
                self._rounds[rank].ask(SaveRequest(f"drill {rank}", stop))
            self._rounds[rank].advance()
            time.sleep(0.003 * dice.random())


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seed"), [(4, 1), (8, 2)])
def test_ranks_that_drift_apart_save_the_same_steps_over_hundreds_of_rounds(
    world_size: int, seed: int
) -> None:
    drill = Drill(world_size, seed)
    drill.run()
    saved, stopped = drill.saved[0], drill.stopped[0]
    assert all(steps == saved for steps in drill.saved)
    assert all(steps == stopped for steps in drill.stopped)
    assert len(saved) > 200
    assert len(stopped) > 10
    for polled, stop in drill.wishes:
        assert any(step > polled for step in (stopped if stop else saved))


@contextmanager
def ranks(
    folder: Path, world_size: int = 1, *, interval: Interval | None = None, limit: float = 30.0
) -> Iterator[list[SaveRequestWatcher]]:
    board = LocalKeyValueStore()
    made = [
        SaveRequestWatcher(
            Peers(rank, world_size, board, "nonce"),
            RunFolder(folder),
            interval=interval or Interval(),
            signals=(),
            timeout_seconds=limit,
        )
        for rank in range(world_size)
    ]
    try:
        yield made
    finally:
        for requests in made:
            requests.close()


def next_save(requests: SaveRequestWatcher, *, first: int = 1, seconds: float = 10.0) -> int:
    """Polls one step after another until it is time to save."""
    deadline = time.monotonic() + seconds
    step = first
    while not requests.should_save(step):
        assert time.monotonic() < deadline
        step += 1
        time.sleep(0.002)
    return step


def test_a_request_is_answered_once_and_the_same_for_a_step_asked_twice(tmp_path: Path) -> None:
    with ranks(tmp_path) as [requests]:
        requests.request_save()
        step = next_save(requests)
        assert requests.should_save(step)
        assert not any(requests.should_save(step + more) for more in range(1, 50))
        assert not requests.stop_requested


def test_two_ranks_save_the_same_step_and_stop_at_it(tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as [zero, one]:
        one.request_save(stop=True)
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(next_save(zero)))
        other.start()
        assert not one.stop_requested
        found.append(next_save(one))
        other.join()
        assert found[0] == found[1]
        assert zero.stop_requested
        assert one.stop_requested


def test_steps_of_the_interval_are_saved_without_any_talk(tmp_path: Path) -> None:
    with ranks(tmp_path, interval=Interval(steps=3)) as [requests]:
        assert [step for step in range(10) if requests.should_save(step)] == [3, 6, 9]


def test_time_since_the_last_save_asks_for_one(tmp_path: Path) -> None:
    with ranks(tmp_path, interval=Interval(seconds=0.3)) as [requests]:
        first = next_save(requests)
        assert next_save(requests, first=first + 1) > first


def test_a_request_left_by_the_command_is_taken_up_and_removed(tmp_path: Path) -> None:
    with ranks(tmp_path) as [requests]:
        ask_for_save(tmp_path)
        next_save(requests)
        assert not list((tmp_path / ".ckptkit").iterdir())
        assert not requests.stop_requested


def test_a_signal_asks_to_save_and_stop(tmp_path: Path) -> None:
    peers = Peers(0, 1, LocalKeyValueStore(), "nonce")
    requests = SaveRequestWatcher(peers, RunFolder(tmp_path), signals=("SIGUSR2",))
    try:
        signal.raise_signal(signal.SIGUSR2)
        next_save(requests)
        assert requests.stop_requested
    finally:
        requests.close()


@pytest.mark.parametrize(("left", "margin"), [(100.5, 100.0), (0.2, 300.0)])
def test_the_end_of_the_job_asks_to_save_and_stop(
    left: float, margin: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_requests, "slurm_end_time", lambda: time.time() + left)
    if margin < left:  # it would take a minute until half of the time has passed
        monkeypatch.setattr(save_requests, "min", lambda *values: values[0], raising=False)
    peers = Peers(0, 1, LocalKeyValueStore(), "nonce")
    requests = SaveRequestWatcher(
        peers, RunFolder(tmp_path), signals=(), slurm_margin_seconds=margin
    )
    try:
        assert not requests.should_save(1)
        next_save(requests, first=2)
        assert requests.stop_requested
    finally:
        requests.close()


def test_a_margin_of_0_ignores_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_requests, "slurm_end_time", time.time)
    assert save_requests._job_ends(0.0) is None


def test_a_rank_that_is_gone_holds_the_others_up_for_a_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), ranks(tmp_path, 3, limit=1.0) as [zero, one, gone]:
        gone.close()
        one.request_save()
        began = time.monotonic()
        threads = [
            threading.Thread(target=poll_for, args=(requests, 2.0)) for requests in (zero, one)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 4.0
    assert "rank 2 did not answer" in caplog.text


def poll_for(requests: SaveRequestWatcher, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    step = 0
    while time.monotonic() < deadline:
        step += 1
        assert not requests.should_save(step)
        time.sleep(0.002)


def test_training_goes_on_when_the_store_dies_in_the_middle_of_a_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = FailingBoard()
    rounds = SaveStepAgreement(Peers(1, 2, board, "nonce"), limit_seconds=0.3)
    rounds.ask(SaveRequest("test"))
    rounds.advance()
    board.broken = True
    with pytest.raises(PeerError):
        rounds.advance()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert rounds.due(5) == (False, False)
    assert 0.2 < time.monotonic() - began < 5.0
    assert rounds.due(6) == (False, False)
    assert "got no answer" in caplog.text


def test_a_rank_that_gave_up_voids_the_round_for_all(caplog: pytest.LogCaptureFixture) -> None:
    board = LocalKeyValueStore()
    zero, one = (
        SaveStepAgreement(Peers(r, 2, board, "nonce"), limit_seconds=s)
        for r, s in ((0, 60), (1, 0))
    )
    one.ask(SaveRequest("test"))
    one.advance()
    time.sleep(0.4)
    with caplog.at_level(logging.WARNING):
        one.advance()
        zero.advance()
    assert not zero.is_open
    assert not one.is_open
    assert zero.due(1) == one.due(1) == (False, False)
    assert "the request to save was dropped: rank 0 did not decide" in caplog.text


def test_a_rank_that_learns_too_late_of_a_save_does_not_save_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = LocalKeyValueStore()
    zero, one = (
        SaveStepAgreement(Peers(r, 2, board, "nonce"), limit_seconds=s)
        for r, s in ((0, 60), (1, 0))
    )
    one.ask(SaveRequest("test"))
    one.advance()
    zero.advance()  # decides on step 0
    assert zero.due(3) == (True, False)
    with caplog.at_level(logging.WARNING):
        assert one.due(3) == (False, False)  # the time is up, and its watcher was not heard
        one.advance()
    assert one.due(4) == (False, False)
    assert "which it has passed" in caplog.text


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Waits until a thread has logged a text."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while text not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_watcher_survives_a_store_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(save_requests, "_FAILED_SECONDS", 0.05)
    board = FailingBoard()
    requests = SaveRequestWatcher(Peers(0, 1, board, "nonce"), RunFolder(tmp_path), signals=())
    try:
        with caplog.at_level(logging.WARNING):
            board.broken = True
            requests.request_save()
            wait_for("do not reach the other ranks", caplog)
            time.sleep(0.2)  # in which it fails again
            assert not requests.should_save(1)
            board.broken = False
            next_save(requests, first=2)
            wait_for("reach the other ranks again", caplog)
        assert caplog.text.count("do not reach the other ranks") == 1
    finally:
        requests.close()


def test_keys_of_finished_rounds_are_removed() -> None:
    board = LocalKeyValueStore()
    pair = [
        SaveStepAgreement(Peers(rank, 2, board, "nonce"), limit_seconds=60) for rank in range(2)
    ]
    for step in range(1, 200, 2):
        pair[1].ask(SaveRequest("test"))
        for _ in range(3):
            for rounds in pair:
                rounds.advance()
        assert all(rounds.due(step + 1) == (True, False) for rounds in pair)
    assert len(board._values) < 10


def test_no_question_costs_more_than_20_microseconds(tmp_path: Path) -> None:
    with ranks(tmp_path, interval=Interval(steps=10**9)) as [requests]:
        best = min(timed(lambda: requests.should_save(7)) for _ in range(5))
    assert best < 20e-6


def timed(call: Callable[[], object], times: int = 2_000) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


class FailingBoard(LocalKeyValueStore):
    """A board whose host can be away."""

    broken = False

    def get(self, key: str) -> bytes | None:
        if self.broken:
            raise PeerError("the store failed: gone")
        return super().get(key)

    def set(self, key: str, value: bytes) -> None:
        if self.broken:
            raise PeerError("the store failed: gone")
        super().set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self.broken:
            raise PeerError("the store failed: gone")
        return super().compare_set(key, expected, desired)
