"""How ranks agree: a key-value store, rounds of agreement, and what happens without an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C import _distributed_c10d as distributed_c10d

from ckptkit.core.errors import CkptkitError, NoSpaceError, PeerError, UsageError
from ckptkit.training.agree import key_values
from ckptkit.training.agree.key_values import (
    MAX_VALUE_BYTES,
    KeyValueStore,
    LocalKeyValueStore,
    TorchKeyValueStore,
)
from ckptkit.training.agree.peers import Peers, meet, name_ranks, open_peers, poll_until
from tests.sampled import sampled

SHORT = 0.3
WORLD = 3


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.training.agree.peers._GRACE_SECONDS", 0.1)


def tcp_store() -> Any:
    return distributed_c10d.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))


@pytest.fixture(params=["local", "tcp", "hash"])
def board(request: pytest.FixtureRequest) -> Iterator[KeyValueStore]:
    if request.param == "local":
        yield LocalKeyValueStore()
        return
    store = tcp_store() if request.param == "tcp" else distributed_c10d.HashStore()
    made = TorchKeyValueStore(store, "test")
    yield made
    made.close()


def test_a_board_tells_what_was_set_and_never_waits(board: KeyValueStore) -> None:
    began = time.monotonic()
    assert board.get("key") is None
    assert board.get_all(["key", "other"]) is None
    board.set("key", b"\x00\xff value")
    assert board.get("key") == b"\x00\xff value"
    assert board.get_all(["key", "other"]) is None
    board.set("other", b"2")
    assert board.get_all(["other", "key"]) == [b"2", b"\x00\xff value"]
    board.delete("key")
    board.delete("never there")
    assert board.get("key") is None
    assert time.monotonic() - began < 2


def test_a_value_that_another_rank_deletes_meanwhile_is_read_or_missing_at_once() -> None:
    store = tcp_store()
    reader, writer = (TorchKeyValueStore(store, "test") for _ in range(2))
    keys = [f"key {number}" for number in range(500)]
    for key in keys:
        writer.set(key, b"value")

    def delete_all() -> None:
        for key in keys:
            writer.delete(key)

    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(delete_all)
        while not deleting.done():
            assert {reader.get(key) for key in keys} <= {b"value", None}
    assert time.monotonic() - began < 10
    for board in (reader, writer):
        board.close()


def test_the_first_to_compare_and_set_wins(board: KeyValueStore) -> None:
    assert board.compare_set("key", b"", b"first") == b"first"
    assert board.compare_set("key", b"", b"second") == b"first"
    assert board.compare_set("key", b"first", b"third") == b"third"
    assert board.compare_set("missing", b"something", b"else") == b"something"
    assert board.get("missing") is None
    assert board.get("key") == b"third"


def test_a_value_of_a_megabyte_travels_and_one_that_would_cut_the_line_is_refused() -> None:
    board = TorchKeyValueStore(tcp_store(), "test")
    value = bytes(range(256)) * 4096
    board.set("big", value)
    assert board.get("big") == value
    with pytest.raises(ValueError, match="at most 4,194,304"):
        board.set("bigger", bytes(MAX_VALUE_BYTES + 1))
    board.close()


def test_a_board_keeps_to_its_prefix_and_shares_the_connection_below_it() -> None:
    store = distributed_c10d.HashStore()
    board = TorchKeyValueStore(store, "a")
    below = board.under("b")
    below.set("key", b"1")
    assert board.get("b/key") == b"1"
    assert store.get("a/b/key") == b"1"
    board.close()
    with pytest.raises(PeerError, match="closed"):
        below.get("key")


def test_a_store_that_is_gone_is_an_error_with_a_hint() -> None:
    store = tcp_store()
    board = TorchKeyValueStore(store.clone(), "test")
    board.set("key", b"1")
    del store
    with pytest.raises(PeerError, match="the store failed") as caught:
        poll_until(lambda: board.get("another"), 5)
    assert "store" in caught.value.hint
    board.close()


def test_a_store_that_hangs_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_values, "_OPERATION_SECONDS", 0.1)
    board = TorchKeyValueStore(distributed_c10d.HashStore(), "test")
    release = threading.Event()
    with pytest.raises(PeerError, match="did not answer"):
        board._sender.run(release.wait)
    with pytest.raises(PeerError, match="did not answer"):
        board.get("key")
    release.set()
    monkeypatch.setattr(key_values, "_OPERATION_SECONDS", 5.0)
    assert board.get("key") is None
    board.close()


class Slow:
    """A store that gives no second connection for a long time, as a host without descriptors."""

    def __init__(self) -> None:
        self.inner = distributed_c10d.HashStore()
        self.release = threading.Event()

    def clone(self) -> Any:
        self.release.wait(30)
        raise RuntimeError("late")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_without_a_connection_of_its_own_a_board_uses_the_one_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_values, "_CONNECT_SECONDS", 0.2)
    store: Any = Slow()
    began = time.monotonic()
    board = TorchKeyValueStore(store, "test")
    board.set("key", b"1")
    assert time.monotonic() - began < 5
    assert store.inner.get("test/key") == b"1"
    assert "the connection of the training is used" in caplog.text
    store.release.set()
    board.close()


def on_ranks(world_size: int, work: Callable[[Peers], Any]) -> list[Any]:
    """Runs `work` for all ranks in threads; returns what each returned or raised."""
    board = LocalKeyValueStore()
    peers = [Peers(rank, world_size, board, "nonce") for rank in range(world_size)]

    def run(one: Peers) -> Any:
        try:
            return work(one)
        except CkptkitError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, peers))


def test_all_ranks_get_what_rank_0_decided_on_the_values_of_all() -> None:
    def work(peers: Peers) -> Any:
        return [
            peers.agree("topic", [peers.rank, number], list, timeout_seconds=10)
            for number in range(5)
        ]

    expected = [[[rank, number] for rank in range(4)] for number in range(5)]
    assert on_ranks(4, work) == [expected] * 4


def test_one_rank_agrees_with_itself_in_the_same_form() -> None:
    peers = open_peers("run", timeout_seconds=1)
    assert (peers.rank, peers.world_size) == (0, 1)
    assert peers.agree("topic", (1, 2), lambda values: {"all": values}, timeout_seconds=1) == {
        "all": [[1, 2]]
    }
    assert open_peers("run", timeout_seconds=1).nonce != peers.nonce


def test_ranks_that_do_not_answer_are_named_to_all_others() -> None:
    def work(peers: Peers) -> Any:
        if peers.rank in {1, 3}:
            return None
        return peers.agree("topic", 1, sum, timeout_seconds=SHORT)

    zero, _, two, _ = on_ranks(4, work)
    assert str(zero) == "ranks 1, 3 did not answer within 0.3 s about 'topic'"
    assert str(two) == str(zero)
    assert isinstance(zero, PeerError)


@pytest.mark.usefixtures("no_grace")
def test_without_rank_0_the_others_end_in_time() -> None:
    began = time.monotonic()
    results = on_ranks(
        2, lambda peers: peers.rank and peers.agree("topic", 1, sum, timeout_seconds=SHORT)
    )
    assert "rank 0 did not decide" in str(results[1])
    assert time.monotonic() - began < 2


def test_an_error_of_the_decision_reaches_all_ranks() -> None:
    def full(_values: list[Any]) -> Any:
        raise NoSpaceError("the disk is full", where="/data", hint="make room")

    def work(peers: Peers) -> Any:
        return peers.agree("topic", 1, full, timeout_seconds=5)

    for error in on_ranks(3, work):
        assert isinstance(error, NoSpaceError)
        assert (str(error), error.hint) == ("/data: the disk is full", "make room")


def test_a_bug_in_the_decision_is_told_to_the_others() -> None:
    def work(peers: Peers) -> Any:
        if peers.rank:
            return peers.agree("topic", 1, sum, timeout_seconds=5)
        with pytest.raises(ZeroDivisionError):
            peers.agree("topic", 1, lambda values: values[0] / 0, timeout_seconds=5)
        return None

    assert "ZeroDivisionError" in str(on_ranks(2, work)[1])


def test_a_decision_that_is_too_large_to_send_is_told_to_the_others() -> None:
    def work(peers: Peers) -> Any:
        if peers.rank:
            return peers.agree("topic", 1, sum, timeout_seconds=5)
        with pytest.raises(ValueError, match="at most"):
            peers.agree("topic", 1, lambda _: "x" * MAX_VALUE_BYTES, timeout_seconds=5)
        return None

    assert "at most 4,194,304" in str(on_ranks(2, work)[1])


def test_a_store_that_torch_cannot_copy_is_used_itself() -> None:
    class Old:
        def check(self, keys: list[str]) -> bool:
            return keys == ["test/key"]

        def get(self, key: str) -> bytes:
            return key.encode()

        def has_extended_api(self) -> bool:
            return False

    board = TorchKeyValueStore(Old(), "test")  # type: ignore[arg-type]
    assert board.get_all(["key"]) == [b"test/key"]
    assert board.get_all(["other"]) is None
    board.close()


def test_two_threads_of_a_rank_agree_on_different_topics_at_once() -> None:
    def work(peers: Peers) -> Any:
        def talk(topic: str) -> list[int]:
            return [peers.agree(topic, number, max, timeout_seconds=10) for number in range(20)]

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(talk, ["a", "b"]))

    assert on_ranks(3, work) == [[list(range(20))] * 2] * 3


def test_keys_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.training.agree.peers._GRACE_SECONDS", 0.0)

    def work(peers: Peers) -> Any:
        for number in range(40):
            peers.agree(f"topic {number}", 1, sum, timeout_seconds=0.5)
        time.sleep(0.6)
        peers.agree("last", 1, sum, timeout_seconds=0.5)
        peers._sweep()
        assert isinstance(peers.store, LocalKeyValueStore)
        return len(peers.store._values)

    assert max(on_ranks(3, work)) <= 6


def test_polling_ends_with_the_first_answer_or_the_time() -> None:
    answers = iter([None, None, 5])
    assert poll_until(lambda: next(answers), 5) == 5
    began = time.monotonic()
    assert poll_until(lambda: None, 0.1) is None
    assert 0.09 < time.monotonic() - began < 5


def test_of_many_ranks_only_some_are_named() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(2_000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1,992 more"


def test_4096_ranks_are_collected_in_one_answer_and_within_seconds() -> None:
    board = TorchKeyValueStore(tcp_store(), "test")
    peers = Peers(0, 4096, board, "nonce")
    for rank in range(1, 4096):
        board.set(f"agree/topic/1/{rank}", b"1")
    began = time.perf_counter()
    assert peers.agree("topic", 1, sum, timeout_seconds=30) == 4096
    assert time.perf_counter() - began < 3
    board.close()


def test_the_host_of_the_store_does_not_leave_before_its_answer_was_heard() -> None:
    store = tcp_store()  # as where no launcher hosts it: it ends with the process of rank 0
    heard = threading.Event()
    boards_of = [TorchKeyValueStore(store, "test") for _ in range(2)]
    host, other = (Peers(rank, 2, board, "nonce") for rank, board in enumerate(boards_of))
    fetch = boards_of[1].get_all

    def late(keys: Sequence[str]) -> list[bytes] | None:
        found = fetch(keys)
        if found and keys[0].endswith("answer"):
            time.sleep(SHORT)
            heard.set()
        return found

    boards_of[1].get_all = late  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: other.agree("topic", 1, sum, timeout_seconds=10))
        assert host.agree("topic", 1, sum, timeout_seconds=10) == 2
        host.close()
        assert heard.is_set()
        assert answer.result() == 2
    other.close()


def test_the_host_of_the_store_does_not_leave_before_its_error_was_heard() -> None:
    store = tcp_store()
    boards_of = [TorchKeyValueStore(store, "test") for _ in range(3)]
    host, other, refuser = (Peers(rank, 3, board, "nonce") for rank, board in enumerate(boards_of))
    is_closed = threading.Event()
    fetch = boards_of[1].get_all

    def late(keys: Sequence[str]) -> list[bytes] | None:
        is_closed.wait(SHORT)
        assert not is_closed.is_set()
        return fetch(keys)

    boards_of[1].get_all = late  # type: ignore[method-assign]
    problem = NoSpaceError("the disk is full", where="/data")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: other.agree("topic", 1, sum, timeout_seconds=10))
        refuser.refuse("topic", problem, timeout_seconds=10)
        with pytest.raises(NoSpaceError):
            host.agree("topic", 1, sum, timeout_seconds=10)
        began = time.monotonic()
        host.close()
        is_closed.set()
        assert time.monotonic() - began < 4  # whoever refused awaits nothing
        with pytest.raises(NoSpaceError):
            answer.result()
    for peers in (other, refuser):
        peers.close()


def test_the_host_of_the_store_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.training.agree.peers._GRACE_SECONDS", SHORT)
    board = TorchKeyValueStore(tcp_store(), "test")
    board.set("agree/topic/1/1", b"1")  # of a rank that was killed after it said this
    peers = Peers(0, 2, board, "nonce")
    assert peers.agree("topic", 1, sum, timeout_seconds=10) == 2
    began = time.monotonic()
    peers.close()
    assert SHORT / 2 < time.monotonic() - began < 5


def opened(board: LocalKeyValueStore, ranks: list[int], seconds: float) -> list[str | Exception]:
    def come(rank: int) -> str | Exception:
        try:
            return meet(board, rank, WORLD, timeout_seconds=seconds)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(come, ranks))


@pytest.mark.usefixtures("no_grace")
def test_all_ranks_get_one_name_for_each_session() -> None:
    board = LocalKeyValueStore()
    found = [opened(board, [0, 1, 2], 10) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in found)
    assert len({names[0] for names in found}) == 3


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("alone", [[0], [1], [0, 2], [1, 2]])
@pytest.mark.parametrize("before", sampled([0, 1], [1]))
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


@pytest.mark.usefixtures("no_grace")
def test_rank_0_names_those_that_did_not_come() -> None:
    found = opened(LocalKeyValueStore(), [0, 2], 0.1)
    assert all("rank 1 did not open the run within 0.1 s" in str(error) for error in found)


@pytest.mark.usefixtures("no_grace")
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
    assert on_ranks(WORLD, work) == [WORLD] * WORLD
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("value", ["x" * MAX_VALUE_BYTES, {1, 2}], ids=["too large", "no JSON"])
def test_a_value_that_cannot_be_sent_is_an_error_on_all_ranks(value: object) -> None:
    def work(peers: Peers) -> Any:
        return peers.agree("topic", value if peers.rank == 1 else 0, len, timeout_seconds=30)

    began = time.monotonic()
    for error in on_ranks(WORLD, work):
        assert "rank 1 has no answer" in str(error)
    assert time.monotonic() - began < 5
