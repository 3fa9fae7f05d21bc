"""Threads that stop together, and as many of them as memory allows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckptkit.core.errors import NoSpaceError
from ckptkit.execution.budget import WORKER_BYTES, settle_workers
from ckptkit.execution.crew import run_crew


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


def test_every_item_is_worked_on_once() -> None:
    seen: list[int] = []
    run_crew(4, iter(range(500)), seen.extend)
    assert sorted(seen) == list(range(500))


def test_an_iterator_that_fails_is_reported() -> None:
    def items() -> Any:
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run_crew(2, items(), list[int]().extend)


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
    ],
)
def test_room_for_less_than_one_worker_is_refused_with_what_is_needed(
    options: dict[str, int], where: str
) -> None:
    with pytest.raises(NoSpaceError) as caught:
        settled(**options)
    assert caught.value.where == where
    assert f"{WORKER_BYTES:,}" in str(caught.value) + caught.value.hint
