"""What holds of retention whatever the steps and the rules are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.planning.retention import Retention, StepFacts, steps_to_remove

METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=True))
STEPS = st.lists(
    st.builds(
        StepFacts,
        step=st.integers(0, 60),
        complete=st.booleans(),
        metrics=METRICS,
        protected=st.booleans(),
    ),
    unique_by=lambda facts: facts.step,
)
COUNTS = st.none() | st.integers(1, 8)
RULES = st.builds(
    Retention,
    keep_last=COUNTS,
    keep_every=COUNTS,
    keep_best=st.none() | st.sampled_from(["loss", "accuracy"]),
    best_mode=st.sampled_from(["min", "max"]),
    best_count=st.integers(1, 3),
)


@given(steps=STEPS, rules=RULES)
def test_what_must_stay_stays(steps: list[StepFacts], rules: Retention) -> None:
    removed = set(steps_to_remove(steps, rules))
    complete = sorted(facts.step for facts in steps if facts.complete)
    assert removed <= set(complete[:-1])
    assert not removed & {facts.step for facts in steps if facts.protected}
    if rules.keep_last is not None:
        assert not removed & set(complete[-rules.keep_last :])
    if rules.keep_every is not None:
        assert not any(step % rules.keep_every == 0 for step in removed)


@given(steps=STEPS, rules=RULES)
def test_no_removed_step_is_better_than_all_that_stay(
    steps: list[StepFacts], rules: Retention
) -> None:
    removed = set(steps_to_remove(steps, rules))
    name = rules.keep_best or ""
    values = {
        facts.step: facts.metrics[name] * (1 if rules.best_mode == "min" else -1)
        for facts in steps
        if facts.complete and name in facts.metrics and facts.metrics[name] == facts.metrics[name]
    }
    kept = [value for step, value in values.items() if step not in removed]
    assert all(min(kept) <= value for step, value in values.items() if step in removed)


@given(steps=STEPS, rules=RULES)
def test_removing_twice_removes_nothing_more(steps: list[StepFacts], rules: Retention) -> None:
    removed = steps_to_remove(steps, rules)
    left = [facts for facts in steps if facts.step not in removed]
    assert steps_to_remove(left, rules) == ()


@given(steps=STEPS, last=st.integers(1, 8))
def test_with_keep_last_alone_all_others_go(steps: list[StepFacts], last: int) -> None:
    removed = steps_to_remove(steps, Retention(keep_last=last))
    complete = sorted((f for f in steps if f.complete), key=lambda facts: facts.step)
    assert removed == tuple(f.step for f in complete[:-last] if not f.protected)
