"""Opening a run on all ranks, also after some came alone; and ranks that have only an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError, PeerError, UsageError
from ckptkit.training.agree import peers as peers_module
from ckptkit.training.agree.key_values import MAX_VALUE_BYTES, LocalKeyValueStore
from ckptkit.training.agree.peers import Peers, meet

WORLD = 3


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_GRACE_SECONDS", 0.1)


def opened(board: LocalKeyValueStore, ranks: list[int], seconds: float) -> list[str | Exception]:
    def come(rank: int) -> str | Exception:
        try:
            return meet(board, rank, WORLD, timeout_seconds=seconds)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(come, ranks))


def test_all_ranks_get_one_name_for_each_session() -> None:
    board = LocalKeyValueStore()
    found = [opened(board, [0, 1, 2], 10) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in found)
    assert len({names[0] for names in found}) == 3


@pytest.mark.parametrize("alone", [[0], [1], [0, 2], [1, 2]])
@pytest.mark.parametrize("before", [0, 1])
def test_after_some_ranks_came_alone_all_can_still_open_the_run(
    alone: list[int], before: int
) -> None:
    board = LocalKeyValueStore()
    for _ in range(before):
        opened(board, [0, 1, 2], 10)
    for _ in range(2):
        assert all(isinstance(found, PeerError) for found in opened(board, alone, 0.1))
    names = opened(board, [0, 1, 2], 10)
    assert len({*map(str, names)}) == 1
    assert isinstance(names[0], str)


def test_rank_0_names_those_that_did_not_come() -> None:
    found = opened(LocalKeyValueStore(), [0, 2], 0.1)
    assert all("rank 1 did not open the run within 0.1 s" in str(error) for error in found)


def on_ranks(work: Callable[[Peers], Any]) -> list[Any]:
    board = LocalKeyValueStore()
    ranks = [Peers(rank, WORLD, board, "nonce") for rank in range(WORLD)]

    def run(one: Peers) -> Any:
        try:
            return work(one)
        except CkptkitError as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, ranks))


@pytest.mark.parametrize("refusing", [{0}, {1}, {1, 2}, {0, 2}])
def test_a_rank_that_refuses_ends_the_round_on_all_ranks_at_once(refusing: set[int]) -> None:
    def work(peers: Peers) -> Any:
        if peers.rank in refusing:
            peers.refuse("topic", UsageError("bad", where="key"), timeout_seconds=30)
        else:
            with pytest.raises(UsageError, match="key: bad"):
                peers.agree("topic", 1, sum, timeout_seconds=30)
        return peers.agree("topic", 1, sum, timeout_seconds=30)

    began = time.monotonic()
    assert on_ranks(work) == [WORLD] * WORLD
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("value", ["x" * MAX_VALUE_BYTES, {1, 2}], ids=["too large", "no JSON"])
def test_a_value_that_cannot_be_sent_is_an_error_on_all_ranks(value: object) -> None:
    def work(peers: Peers) -> Any:
        return peers.agree("topic", value if peers.rank == 1 else 0, len, timeout_seconds=30)

    began = time.monotonic()
    for error in on_ranks(work):
        assert "rank 1 has no answer" in str(error)
    assert time.monotonic() - began < 5
