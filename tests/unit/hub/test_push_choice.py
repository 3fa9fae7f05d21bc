"""Which steps are pushed, in which order; and the journal of what was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.hub.watch.build import PushChoice, choose_steps
from ckptkit.runs.push_journal import (
    StepPush,
    journal_path,
    open_journal,
    read_journals,
    take_watch_lock,
    watch_identity,
)
from ckptkit.runs.steps import RunStep
from ckptkit.storage.local.disk import Disk


def saved(step: int, number: int = 0, loss: float | None = None, whole: bool = True) -> RunStep:
    metrics = {} if loss is None else {"loss": loss}
    return RunStep(step, complete=whole, metrics=metrics, save_number=number)


def waiting(
    steps: list[RunStep],
    earlier: dict[int, StepPush] | None = None,
    choice: PushChoice | None = None,
) -> tuple[int, ...]:
    digests = {facts.step: f"digest {facts.step}-{facts.save_number}" for facts in steps}
    return choose_steps(steps, digests, earlier or {}, choice or PushChoice())


def pushed(step: int, number: int = 0, loss: float | None = None) -> dict[int, StepPush]:
    metrics = {} if loss is None else {"loss": loss}
    digest = f"digest {step}-{number}"
    return {step: StepPush(step, digest, "pushed", "org/name", save_number=number, metrics=metrics)}


def test_steps_wait_in_the_order_in_which_they_were_saved() -> None:
    steps = [saved(300, 2), saved(250, 3), saved(200, 1), saved(400, 4, whole=False)]
    assert waiting(steps) == (200, 250)  # training went back from 300
    assert waiting(steps, pushed(200, 1)) == (250,)
    assert waiting(steps, pushed(250, 3)) == ()  # 200 was saved before what is there


def test_a_step_that_was_saved_again_waits_again() -> None:
    assert waiting([saved(200, 5)], pushed(200, 1)) == (200,)
    assert waiting([saved(200, 1)], pushed(200, 1)) == ()


def test_rules_leave_steps_out() -> None:
    steps = [saved(100, 1, 3.0), saved(150, 2, 1.0), saved(200, 3, 2.0)]
    assert waiting(steps, choice=PushChoice(every=100)) == (100, 200)
    assert waiting(steps, choice=PushChoice(last_only=True)) == (200,)
    assert waiting(steps, choice=PushChoice(best="loss")) == (150,)
    assert waiting(steps, choice=PushChoice(best="loss", best_mode="max")) == (100,)
    assert waiting(steps, choice=PushChoice(best="accuracy")) == ()


def test_the_best_is_better_than_what_was_pushed_and_is_gone_since() -> None:
    best = PushChoice(best="loss")
    assert waiting([saved(200, 2, 2.0)], pushed(100, 1, 1.0), best) == ()
    assert waiting([saved(200, 2, 1.0)], pushed(100, 1, 1.0), best) == ()
    assert waiting([saved(200, 2, 0.5)], pushed(100, 1, 1.0), best) == (200,)
    assert waiting([saved(200, 2, float("nan"))], pushed(100, 1, 1.0), best) == ()


def test_rules_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        PushChoice(every=0)
    with pytest.raises(UsageError, match="min, max"):
        PushChoice(best="loss", best_mode="low")  # type: ignore[arg-type]


PUSH = StepPush(5, "d", "pushed", "org/name", commit="c", tag="step-5", metrics={"loss": 1.0})


def test_a_journal_is_read_back_and_is_that_of_its_run_and_repository(tmp_path: Path) -> None:
    journal, note = open_journal(tmp_path, "org/name", "run")
    assert not note
    journal.note(PUSH)
    journal.note(StepPush(6, "e", "pushing", "org/name"))
    assert open_journal(tmp_path, "org/name", "run")[0].pushes == journal.pushes
    assert [push.step for push in read_journals(tmp_path)] == [5, 6]
    journal.forget(6)
    assert read_journals(tmp_path) == (PUSH,)
    assert not open_journal(tmp_path, "org/other", "run")[0].pushes
    known, note = open_journal(tmp_path, "org/name", "its name now", ["run"])
    assert (known.pushes, note) == ({5: PUSH}, "")
    other, note = open_journal(tmp_path, "org/name", "another run")
    assert not other.pushes
    assert "is of another run" in note


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ckptkit_pushes": 9}', '{"ckptkit_pushes": 1}'])
def test_a_damaged_journal_is_put_aside(text: str, tmp_path: Path) -> None:
    path = journal_path(tmp_path, "org/name")
    path.write_text(text)
    journal, note = open_journal(tmp_path, "org/name", "run")
    assert not journal.pushes
    assert "is no journal" in note
    assert read_journals(tmp_path) == ()
    journal.note(PUSH)
    assert json.loads(path.read_text())["steps"]["5"]["commit"] == "c"


def test_one_process_at_a_time_has_the_lock_of_a_run_wherever_its_state_is(tmp_path: Path) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    lock = take_watch_lock(run, run)
    with pytest.raises(RefusedError, match=r"another watch is running: process \d+"):
        take_watch_lock(state, run)
    lock.close()
    identity = watch_identity(run)
    assert identity
    assert watch_identity(run) == identity
    take_watch_lock(state, run).close()
    take_watch_lock(state, None, Disk.portable()).close()
