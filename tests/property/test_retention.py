"""What holds of retention whatever the steps and the rules are."""

from __future__ import annotations

import math
import time

from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.runs.retention import Retention, steps_to_remove
from ckptkit.runs.steps import RunStep, abandoned

NOW = time.time()
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.none() | st.floats())
STEPS = st.lists(
    st.builds(
        lambda **facts: RunStep(**facts),  # noqa: PLW0108  hides annotations of type checkers
        step=st.integers(0, 60),
        complete=st.booleans(),
        metrics=METRICS,
        protected=st.booleans(),
        save_number=st.integers(0, 5),
        modified=st.sampled_from([0.0, NOW - 7200, NOW]),
    ),
    unique_by=lambda facts: facts.step,
)
VALUES = {
    "int | None": st.none() | st.integers(1, 8),
    "str | None": st.none() | st.sampled_from(["loss", "accuracy"]),
    "BestMode": st.sampled_from(["min", "max"]),
}
RULES = st.builds(
    Retention,
    **{name: VALUES[kind] for name, kind in Retention.__annotations__.items()}
    | {"keep_for": st.none() | st.sampled_from(["1h", "1d"])},
)


def line(steps: list[RunStep]) -> list[int]:
    """Returns the complete steps of which training has not gone back, lowest first."""
    complete = [facts for facts in steps if facts.complete]
    return sorted(
        one.step
        for one in complete
        if not any(
            other.step < one.step and other.save_number > one.save_number > 0 for other in complete
        )
    )


@given(steps=STEPS)
def test_a_step_is_abandoned_if_a_lower_one_was_saved_later(steps: list[RunStep]) -> None:
    complete = {facts.step for facts in steps if facts.complete}
    assert complete - abandoned(steps) == set(line(steps))


@given(steps=STEPS, rules=RULES)
def test_what_must_stay_stays(steps: list[RunStep], rules: Retention) -> None:
    removed = set(steps_to_remove(steps, rules))
    complete = sorted((facts for facts in steps if facts.complete), key=lambda facts: facts.step)
    assert removed <= {facts.step for facts in complete}
    saved_last, latest = -1, -1
    for facts in complete:  # where no number is known, it was saved after the steps below it
        if facts.save_number >= latest or not facts.save_number:
            saved_last, latest = facts.step, max(latest, facts.save_number)
    assert saved_last not in removed
    assert not removed & {facts.step for facts in steps if facts.protected}
    if rules.keep_last is not None:
        assert not removed & set(line(steps)[-rules.keep_last :])
    if rules.keep_every is not None:
        assert not any(step % rules.keep_every == 0 for step in removed)
    if rules.keep_for is not None:
        hours = 1 if rules.keep_for == "1h" else 24
        old = {one.step for one in steps if 0 < one.modified < NOW - hours * 3600}
        assert removed <= old


@given(steps=STEPS, rules=RULES)
def test_no_removed_step_is_better_than_all_that_stay(
    steps: list[RunStep], rules: Retention
) -> None:
    removed = set(steps_to_remove(steps, rules))
    name = rules.keep_best or ""
    sign = 1 if rules.best_mode == "min" else -1
    values = {
        facts.step: sign * value
        for facts in steps
        if facts.complete and (value := facts.metrics.get(name)) is not None
        if math.isfinite(value)
    }
    kept = [value for step, value in values.items() if step not in removed]
    assert all(min(kept) <= value for step, value in values.items() if step in removed)


BACK = [
    RunStep(step=step, complete=True, save_number=number, metrics={"loss": loss})
    for step, number, loss in ((0, 0, 0.0), (3, 1, 0.0), (1, 2, 9.0), (4, 3, 9.0))
]


@example(steps=BACK, rules=Retention(keep_best="loss"))
@given(steps=STEPS, rules=RULES)
def test_removing_twice_removes_nothing_more(steps: list[RunStep], rules: Retention) -> None:
    removed = steps_to_remove(steps, rules)
    left = [facts for facts in steps if facts.step not in removed]
    assert steps_to_remove(left, rules) == ()


@given(steps=STEPS, last=st.integers(1, 8))
def test_with_keep_last_alone_all_others_go(steps: list[RunStep], last: int) -> None:
    removed = steps_to_remove(steps, Retention(keep_last=last))
    kept = {*line(steps)[-last:], *(facts.step for facts in steps if facts.protected)}
    complete = sorted(facts.step for facts in steps if facts.complete)
    assert removed == tuple(step for step in complete if step not in kept)
