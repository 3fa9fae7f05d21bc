"""Ranks that are at different saves find out at once, and meet again at the next."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import PeerError
from ckptkit.training import Checkpointer
from ckptkit.training.agree import barrier, peers
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.save.saver import Save, SaveCommitter

SECONDS = 20.0


class Rank:
    """One rank of several, each a thread."""

    def __init__(self, rank: int, world_size: int, board: LocalKeyValueStore) -> None:
        self.barrier = SaveBarrier(Peers(rank, world_size, board, "nonce"))
        self.count = 0
        self.thread = ThreadPoolExecutor(1)

    def save(self, step: int) -> Future[Any]:
        self.count += 1
        name = f"nonce-{step}-1"
        save = Save(self.count, name, step, Path(), Path(), {}, SaveHandle(step))
        return self.thread.submit(
            lambda: self.barrier.agree_on(
                save, {"step": step}, lambda values: {"all": values}, timeout_seconds=SECONDS
            )
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    monkeypatch.setattr(barrier, "_LOOK_SECONDS", 0.05)
    board = LocalKeyValueStore()
    return [Rank(rank, 3, board) for rank in range(3)]


def meet(ranks: list[Rank], step: int) -> None:
    futures = [rank.save(step) for rank in ranks]
    for future in futures:
        assert future.result(SECONDS) == {"all": 3 * [{"step": step}]}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_left_a_save_out_fails_that_one_and_no_other(
    ranks: list[Rank], absent: int
) -> None:
    began = time.monotonic()
    meet(ranks, 1)
    for step in (2, 5):  # the second time the counts differ by one already
        gone = [r for r in ranks if r is not ranks[absent]]
        futures = [rank.save(step) for rank in gone]
        late = ranks[absent].save(step + 1)
        for future in futures:
            with pytest.raises(
                PeerError, match=rf"(?m)is at the save of step {step + 1},.* of step {step}$"
            ):
                future.result(SECONDS)
        for rank in gone:
            future = rank.save(step + 1)
        assert future.result(SECONDS) == late.result(SECONDS)
        meet(ranks, step + 2)
    assert time.monotonic() - began < SECONDS / 2


def test_ranks_that_count_steps_differently_are_told_both_numbers(ranks: list[Rank]) -> None:
    began = time.monotonic()
    other = ranks[1].save(11)
    futures = [ranks[0].save(10), ranks[2].save(10)]
    for future in futures:
        with pytest.raises(PeerError, match=r"(?m)step 11,.* step 10$") as caught:
            future.result(SECONDS)
        assert "same steps" in caught.value.hint
    first = ranks[0].save(20)  # where the other one has no chance any more
    with pytest.raises(PeerError, match=r"(?m)step 20,.* step 11$"):
        other.result(SECONDS)
    others = [rank.save(20) for rank in ranks[1:]]
    assert all(future.result(SECONDS) == first.result(SECONDS) for future in others)
    assert time.monotonic() - began < SECONDS / 2


@pytest.mark.parametrize("attempt", ["", "another-1"])
def test_a_rank_looks_for_the_step_before_it_says_that_a_save_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attempt: str,
) -> None:
    """Rank 0 may leave once it has renamed the step, before the others have its answer."""
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.save(7, {"extra": {"n": 1}}).result(60)
    name = json.loads((step / "ckptkit.json").read_text())["source"]["attempt"]
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 0.1)
    reports: list[SaveReport] = []
    committer = SaveCommitter(
        SaveBarrier(Peers(1, 2, LocalKeyValueStore(), "nonce")),
        None,
        retire=lambda *_: (),
        timeout_seconds=0.1,
        listener=reports.append,
    )
    handle = SaveHandle(7)
    with caplog.at_level(logging.INFO, logger="ckptkit"):
        committer.end(Save(1, attempt or name, 7, tmp_path / "work", step, {}, handle))
    if attempt:
        assert isinstance(handle.error, PeerError)
        assert "step 7 was not saved: rank 0 did not decide" in caplog.text
        return
    assert handle.result(1) == step
    assert "not saved" not in caplog.text
    assert "step 7 was committed, after which rank 0 did not decide" in caplog.text
    assert [report.path for report in reports] == [step]
    files = [path for path in step.rglob("*") if path.is_file() and path.name != "ckptkit.json"]
    assert reports[0].total_bytes == sum(path.stat().st_size for path in files)
