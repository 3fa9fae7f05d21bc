"""Which steps stay, where it is no matter of arithmetic: of that see `tests/property`."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.runs.retention import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import TIME_FORMAT, RunStep, step_of_source

BEST = {"keep_best": "loss"}
RATED = {10: 2.0, 20: 1.0, 30: 3.0, 40: 2.5}


@pytest.mark.parametrize(
    ("losses", "rules", "removed"),
    [
        (RATED, {}, ()),
        (RATED, {"keep_every": 20}, (10, 30)),
        (RATED, BEST, (10, 30)),
        (RATED, {**BEST, "best_mode": "max"}, (10, 20)),
        ({10: 1.0, 20: 1.0, 30: math.nan, 40: 5.0}, BEST, (10, 30)),  # of equal ones the newer
        ({10: None, 20: None}, BEST, (10,)),
    ],
)
def test_the_rules_say_which_steps_go(
    losses: dict[int, float | None], rules: dict[str, Any], removed: tuple[int, ...]
) -> None:
    found = [RunStep(step, metrics={"loss": loss}) for step, loss in losses.items()]
    assert steps_to_remove(found, Retention(**rules)) == removed


def test_steps_of_a_time_stay_and_those_whose_time_is_unknown() -> None:
    now, hour = time.time(), 3600.0
    ages = {10: 50 * hour, 20: 30 * hour, 30: 23 * hour, 40: -hour}
    found = [RunStep(step, modified=now - age) for step, age in ages.items()]
    found += [RunStep(5), RunStep(50, modified=now - 99 * hour)]  # the newest
    assert steps_to_remove(found, Retention(keep_for="24h")) == (10, 20)
    assert steps_to_remove(found, Retention(keep_for="1d", keep_every=20)) == (10,)
    assert steps_to_remove(found, Retention(keep_for="1.5 D")) == (10,)
    saved = {"saved_at": time.strftime(TIME_FORMAT, time.gmtime(now - 2 * hour))}
    assert abs(step_of_source(1, "", saved).modified - (now - 2 * hour)) < 2
    for wrong in ("never", "2026-13-01T00:00:00Z", 7, None, "9" * 999):
        assert step_of_source(1, "", {"saved_at": wrong}).modified == 0


@pytest.mark.parametrize(
    ("saved", "rules", "removed"),
    [
        ((200, 300, 210), {"keep_last": 2}, (300,)),
        ((200, 300, 210, 220), {"keep_last": 2}, (200, 300)),
        ((200, 300, 210), {"keep_last": 2, "keep_every": 300}, ()),
        ((200, 210, 300), {"keep_last": 2}, (200,)),  # reached again
    ],
)
def test_after_a_rollback_the_steps_saved_last_are_the_newest(
    saved: tuple[int, ...], rules: dict[str, Any], removed: tuple[int, ...]
) -> None:
    found = [RunStep(step, save_number=order) for order, step in enumerate(saved, 1)]
    assert steps_to_remove(found, Retention(**rules)) == removed


def test_a_metric_that_no_step_has_is_told_with_those_that_there_are() -> None:
    found = [RunStep(10, metrics={"loss": 1.0, "acc": None}), RunStep(20)]
    assert "found are acc, loss" in missing_metric(found, Retention(keep_best="acc"))
    assert "no step has any" in missing_metric([RunStep(10)], Retention(keep_best="acc"))
    assert missing_metric(found, Retention(keep_best="loss")) == ""
    assert missing_metric(found, Retention(keep_last=1)) == ""
    assert missing_metric([], Retention(keep_best="loss")) == ""


@pytest.mark.parametrize(
    "options",
    [
        *({"keep_last": number} for number in (0, -1, 1.5, True)),
        *({"keep_every": 0}, {"keep_best": "x", "best_mode": "least"}),
        *({"keep_best": 3}, {"keep_best": ""}),
        *(
            {"keep_for": time_text}
            for time_text in (7, "7", "d", "-1d", "0h", "7 days", "1e3d", "")
        ),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**options)
