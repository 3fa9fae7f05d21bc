"""Which steps stay."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.runs.retention import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import RunStep


def steps(*numbers: int) -> list[RunStep]:
    return [RunStep(number) for number in numbers]


def rated(losses: dict[int, float]) -> list[RunStep]:
    return [RunStep(step, metrics={"loss": loss}) for step, loss in losses.items()]


def test_without_a_rule_all_stay() -> None:
    assert steps_to_remove(steps(1, 2, 3), Retention()) == ()


def test_the_newest_stay_in_whatever_order_they_are_named() -> None:
    assert steps_to_remove(steps(30, 10, 40, 20), Retention(keep_last=2)) == (10, 20)


def test_an_incomplete_step_is_neither_counted_nor_removed() -> None:
    found = [*steps(10, 20, 30), RunStep(5, complete=False), RunStep(40, complete=False)]
    assert steps_to_remove(found, Retention(keep_last=1)) == (10, 20)


def test_every_thousandth_stays_and_so_does_the_newest() -> None:
    found = steps(500, 1000, 1500, 2000, 2500)
    assert steps_to_remove(found, Retention(keep_every=1000)) == (500, 1500)


@pytest.mark.parametrize(("mode", "removed"), [("min", (10, 30)), ("max", (10, 20))])
def test_the_best_and_the_newest_stay(mode: Any, removed: tuple[int, ...]) -> None:
    found = rated({10: 2.0, 20: 1.0, 30: 3.0, 40: 2.5})
    assert steps_to_remove(found, Retention(keep_best="loss", best_mode=mode)) == removed


def test_of_equal_values_the_newer_is_better_and_nan_never_is() -> None:
    found = rated({10: 1.0, 20: 1.0, 30: math.nan, 40: 5.0})
    assert steps_to_remove(found, Retention(keep_best="loss")) == (10, 30)


def test_without_the_metric_anywhere_only_the_newest_stays() -> None:
    assert steps_to_remove(steps(10, 20), Retention(keep_best="loss")) == (10,)


def test_a_protected_step_stays() -> None:
    found = [RunStep(10, protected=True), *steps(20, 30)]
    assert steps_to_remove(found, Retention(keep_last=1)) == (20,)


def saved(*numbers: int) -> list[RunStep]:
    return [RunStep(step, save_number=order) for order, step in enumerate(numbers, 1)]


def test_after_a_rollback_the_steps_saved_last_are_the_newest() -> None:
    assert steps_to_remove(saved(200, 300, 210), Retention(keep_last=2)) == (300,)
    assert steps_to_remove(saved(200, 300, 210, 220), Retention(keep_last=2)) == (200, 300)
    assert steps_to_remove(saved(200, 300, 210), Retention(keep_last=2, keep_every=300)) == ()


def test_a_step_that_was_reached_again_counts_again() -> None:
    assert steps_to_remove(saved(200, 210, 300), Retention(keep_last=2)) == (200,)


def test_a_metric_that_no_step_has_is_told_with_those_that_there_are() -> None:
    found = [RunStep(10, metrics={"loss": 1.0, "acc": None}), RunStep(20)]
    assert "found are acc, loss" in missing_metric(found, Retention(keep_best="acc"))
    assert "no step has any" in missing_metric(steps(10), Retention(keep_best="acc"))
    assert missing_metric(found, Retention(keep_best="loss")) == ""
    assert missing_metric(found, Retention(keep_last=1)) == ""
    assert missing_metric([], Retention(keep_best="loss")) == ""


def test_any_rule_is_enough_to_stay() -> None:
    found = rated({10: 1.0, 20: 5.0, 30: 5.0, 40: 5.0, 50: 5.0})
    kept = Retention(keep_last=1, keep_every=20, keep_best="loss")
    assert steps_to_remove(found, kept) == (30,)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_every": 0},
        {"keep_last": 1.5},
        {"keep_last": True},
        {"keep_best": "x", "best_mode": "least"},
        {"keep_best": 3},
        {"keep_best": ""},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**options)
