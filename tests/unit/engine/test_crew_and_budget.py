"""Threads that stop together, and as many of them as memory allows."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ckptkit.core.errors import NoSpaceError
from ckptkit.core.threads import Throttle, repeat, run_crew
from ckptkit.engine.executor import WORKER_BYTES, settle_workers


def test_a_repeated_call_is_made_until_its_event_is_set() -> None:
    calls = threading.Semaphore(0)
    ended = repeat(0.001, calls.release, "repeated")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "repeated")
    assert all(calls.acquire(timeout=30) for _ in range(3))
    ended.set()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_the_first_error_of_a_crew_stops_the_others() -> None:
    done: list[int] = []
    failed = threading.Event()

    def work(items: Any) -> None:
        for item in items:
            if item == 3:
                failed.set()
                raise ValueError("three")
            failed.wait(10)
            done.append(item)

    with pytest.raises(ValueError, match="three"):
        run_crew(4, iter(range(10_000)), work)
    assert len(done) < 10_000
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptkit-")]


@pytest.mark.usefixtures("alarm")
def test_nobody_waits_for_bandwidth_any_longer_once_another_has_failed() -> None:
    throttle = Throttle(1)
    waits = threading.Event()

    def work(items: Any) -> None:
        for item in items:
            if item:
                waits.wait()
                raise ValueError("failed")
            waits.set()
            throttle.take(1_000_000)

    with pytest.raises(ValueError, match="failed"):
        run_crew(2, iter(range(2)), work, throttle.stopped)


def test_an_iterator_that_fails_is_reported() -> None:
    def items() -> Any:
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run_crew(2, items(), list[int]().extend)


class Hung(Exception):  # noqa: N818
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    """Breaks off what waits for ever."""

    def ring(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("kind", [threading.Event, threading.Semaphore])
@pytest.mark.parametrize("number", range(6))
def test_a_signal_right_after_any_wait_stops_the_crew(
    kind: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "wait" if kind is threading.Event else "acquire"
    wait, waits, ours = getattr(kind, name), itertools.count(), threading.current_thread()

    def interrupted(self: Any, *arguments: Any) -> Any:
        result = wait(self, *arguments)
        if threading.current_thread() is ours and next(waits) == number:
            raise KeyboardInterrupt
        return result

    seen: list[int] = []

    def work(items: Any) -> None:
        for item in items:
            time.sleep(0.005)
            seen.append(item)

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, interrupted)
        with suppress(KeyboardInterrupt):
            run_crew(3, iter(range(30)), work)
    count = len(seen)
    time.sleep(0.02)
    assert len(seen) == count  # nobody works on


def test_a_thread_that_cannot_be_started_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, itertools.count()

    def refused(self: threading.Thread) -> None:
        if next(started) == 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="start new thread"):
        run_crew(3, iter(itertools.repeat(1)), lambda items: deque(items, maxlen=0).clear())
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptkit-")]


# Memory


def settled(wanted: int | None = None, **options: int | None) -> int:
    values: dict[str, Any] = {
        "cores": 2, "budget_bytes": 10**9, "limit_bytes": None, "used_bytes": 50_000_000,
    }  # fmt: skip
    return settle_workers(wanted, **(values | options))


@pytest.mark.parametrize(
    ("wanted", "options", "workers"),
    [
        (None, {}, 3),
        (None, {"cores": 64}, 8),
        (5, {}, 5),
        (5, {"budget_bytes": 2 * WORKER_BYTES + 1}, 2),
        (None, {"limit_bytes": 50_000_000 + WORKER_BYTES}, 1),
        (9, {"limit_bytes": 10**12}, 9),
    ],
)
def test_workers_fit_into_cores_and_memory(
    wanted: int | None, options: dict[str, int], workers: int
) -> None:
    assert settled(wanted, **options) == workers


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"budget_bytes": WORKER_BYTES - 1}, "--memory-budget"),
        ({"limit_bytes": 50_000_000 + WORKER_BYTES - 1}, "--memory-limit"),
        ({"limit_bytes": 1}, "--memory-limit"),
        ({"limit_bytes": 2 * 10**9, "budget_bytes": 10**6}, "--memory-budget"),
        ({"limit_bytes": 51 * 10**6, "budget_bytes": 2 * 10**6}, "--memory-limit"),
    ],
)
def test_room_for_less_than_one_worker_is_refused_with_what_is_needed(
    options: dict[str, int], where: str
) -> None:
    with pytest.raises(NoSpaceError) as caught:
        settled(**options)
    assert caught.value.where == where
    assert f"{WORKER_BYTES:,}" in str(caught.value) + caught.value.hint


def test_the_hint_for_the_option_that_binds_is_enough() -> None:
    with pytest.raises(NoSpaceError) as caught:
        settled(limit_bytes=2 * 10**9, budget_bytes=10**6)
    assert settled(limit_bytes=2 * 10**9, budget_bytes=WORKER_BYTES) == 1
    assert f"--memory-budget {WORKER_BYTES}B" in caught.value.hint
    assert "50,000,000" not in caught.value.message  # what is in use does not matter here
