"""Intervals as users write them, and what the launcher tells."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.training.environment import slurm_end_time
from ckptkit.training.settings import Interval


@pytest.mark.parametrize(
    ("every", "interval"),
    [
        (None, Interval()),
        (500, Interval(steps=500)),
        ("500", Interval(steps=500)),
        ("30min", Interval(seconds=1800)),
        (" 30 Min ", Interval(seconds=1800)),
        ("90s", Interval(seconds=90)),
        ("1.5h", Interval(seconds=5400)),
        ("1d", Interval(seconds=86400)),
        (timedelta(minutes=5), Interval(seconds=300)),
    ],
)
def test_an_interval_is_read(every: int | str | timedelta | None, interval: Interval) -> None:
    assert Interval.parse(every) == interval


@pytest.mark.parametrize(
    "every",
    [0, -5, "0", "0min", "1.5", "min", "", "5 weeks", "1e3", True, 2.5, timedelta(0), "1h30min"],
)
def test_what_is_no_interval_is_refused_with_an_example(every: object) -> None:
    with pytest.raises(UsageError, match="every: ") as caught:
        Interval.parse(every)  # type: ignore[arg-type]
    assert '"30min"' in caught.value.hint


def test_only_multiples_of_the_steps_are_due_and_never_step_0() -> None:
    assert [step for step in range(12) if Interval(steps=4).due_at_step(step)] == [4, 8]
    assert not any(Interval(seconds=1).due_at_step(step) for step in range(5))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("1790000000", 1790000000.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("0", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_slurm_tells_when_the_job_ends(
    text: str | None, end: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    else:
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    assert slurm_end_time() == end
