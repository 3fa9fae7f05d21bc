"""Options of a Checkpointer: what is taken, and how what is wrong is told."""

from __future__ import annotations

import math
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ckptkit.core.errors import UsageError
from ckptkit.training.environment import slurm_end_time
from ckptkit.training.settings import Interval, Settings, check_options, check_shared
from tests.made_up_runs import RULES


def checked(**options: Any) -> Settings:
    return check_options(options)  # type: ignore[arg-type]


def test_without_options_everything_has_its_default() -> None:
    assert checked() == Settings()
    assert checked(sidecar=None, signals=None, every=None, staging_limit=None) == Settings()


def test_what_has_the_right_form_is_taken() -> None:
    settings = checked(
        layout="dcp",
        every="30min",
        keep_last=2,
        keep_best="loss",
        local="/disk/run",
        in_flight="skip",
        max_in_flight=2,
        signals="SIGTERM",
        slurm_margin_seconds=0,
        staging_limit="1MiB",
        timeout_seconds=10,
        stall_seconds=0.5,
        sidecar={"notes.txt": b""},
        listener=print,
    )
    assert settings.interval.seconds == 1800
    assert settings.local == Path("/disk/run")
    assert (settings.retention.keep_last, settings.retention.keep_best) == (2, "loss")
    assert settings.signals == ("SIGTERM",)
    assert settings.staging_limit_bytes == 1 << 20
    assert checked(signals=(signal.SIGTERM, int(signal.SIGUSR2))).signals == ("SIGTERM", "SIGUSR2")
    assert checked(staging_limit=2 << 20).staging_limit_bytes == 2 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("layout", value) for value in ("hf", ["dcp"])),
        *(("local", value) for value in ("", 3)),
        *(("every", value) for value in (0, 1.5)),
        *(("keep_last", value) for value in ("2", 0)),
        *(("keep_every", True), ("keep_best", 3), ("in_flight", None)),
        *(("best_mode", value) for value in (1, ["min"])),
        *(("unfit_optimizer", "ignore"), ("missing_groups", "lose"), ("listener", 5)),
        *(("max_in_flight", value) for value in ("2", 1.5, True, 0)),
        *(("timeout_seconds", value) for value in (None, "10", math.nan, math.inf, 0, True)),
        *(("stall_seconds", value) for value in ("x", -1)),
        *(("slurm_margin_seconds", value) for value in (None, -0.5)),
        *(("signals", value) for value in (1.5, "TERM", (None,))),
        *(("sidecar", value) for value in (["x"], {"x": 5}, {"x": nn.Linear(1, 1)})),
        *(("staging_limit", value) for value in ("1KB", True, 1e9, "much")),
    ],
)
def test_what_has_another_form_is_refused_with_the_options_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        checked(**{name: value})
    assert name in caught.value.where
    assert "expected" in caught.value.message or "not " in caught.value.message or caught.value.hint


def test_a_count_that_is_none_is_told_against_what_was_expected() -> None:
    with pytest.raises(
        UsageError, match=r"^max_in_flight: expected a whole number above 0, got '2'"
    ):
        checked(max_in_flight="2")
    with pytest.raises(
        UsageError, match=r"^timeout_seconds: expected a number of seconds .* got nan"
    ):
        checked(timeout_seconds=float("nan"))
    with pytest.raises(
        UsageError, match=r"^staging_limit: expected at least 1,048,576 bytes, got 1,000"
    ):
        checked(staging_limit="1KB")
    with pytest.raises(UsageError, match=r"^listener: expected a function that takes a SaveReport"):
        checked(listener=5)


def test_an_unknown_option_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        UsageError, match="unknown option 'keep_lats'; did you mean 'keep_last'"
    ) as found:
        checked(keep_lats=2)
    assert not found.value.hint
    with pytest.raises(UsageError, match=r"unknown option 'quite_something_else'") as found:
        checked(quite_something_else=1)
    assert found.value.hint.startswith("known are best_mode, every, ")


def test_options_that_differ_between_ranks_are_refused_with_the_ranks() -> None:
    same = checked(every=5, signals=("SIGTERM", "SIGUSR2"), listener=print).shared()
    other = checked(every=5, signals=(signal.SIGUSR2, signal.SIGTERM), staging_limit="1GB").shared()
    check_shared([same, other, same])
    later = checked(every="5s", signals=(signal.SIGUSR2, signal.SIGTERM)).shared()
    with pytest.raises(UsageError, match=r"^every: is '5s' on ranks 1, 3 and 5 on rank 0"):
        check_shared([same, later, same, later])


@pytest.mark.parametrize(
    "option",
    [
        {"layout": "dcp"},
        {"every": "1h"},
        *({name: value} for name, value in RULES.items()),
        {"in_flight": "skip"},
        {"max_in_flight": 2},
        {"signals": "SIGTERM"},
        {"slurm_margin_seconds": 60},
    ],
)
def test_what_ranks_share_tells_every_option_that_matters(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(option))}: is .* on rank 1 and"):
        check_shared([checked().shared(), checked(**option).shared()])


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
