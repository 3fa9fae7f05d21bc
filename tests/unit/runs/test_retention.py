"""Which steps stay, where it is no matter of arithmetic: of that see `tests/property`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.runs.retention import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import RunStep

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
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**options)
