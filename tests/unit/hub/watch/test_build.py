"""Which steps are pushed, in which order."""

from __future__ import annotations

from ckptkit.hub.watch.build import PushChoice, choose_steps
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.steps import RunStep


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
