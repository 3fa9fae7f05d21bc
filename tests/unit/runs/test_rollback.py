"""Every command means the same steps after training went back, whoever saved them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from ckptkit.conversion.source.open import open_checkpoint
from ckptkit.hub.watch.build import PushChoice, choose_steps
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.runs.push_journal import StepPush
from ckptkit.runs.retention import Retention, steps_to_remove
from ckptkit.runs.steps import RunStep
from tests.made_up_runs import save_step, save_stock_step

Save = Callable[..., Path]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


def dated(step: Path, seconds: float) -> Path:
    for path in [*step.rglob("*"), step]:
        os.utime(path, (seconds, seconds))
    return step


def by_trainer(run: Path) -> Save:
    """Saves as the stock Trainer does: each state holds the log of what its branch has seen."""
    count = iter(range(1, 100))
    log: list[dict[str, object]] = []

    def save(step: int, *, best: str = "", loss: float = 1.0) -> Path:
        number = next(count)
        log[:] = [entry for entry in log if entry["step"] < step]  # type: ignore[operator]
        log.append({"step": step, "eval_loss": loss, "loss": 1 / number})
        folder = save_stock_step(run, step, best=best)
        path = folder / "trainer_state.json"
        state = json.loads(path.read_text()) | {"log_history": list(log)}
        path.write_text(json.dumps(state))
        return dated(folder, 1.7e9 + 3600 * number)

    return save


def by_hooks(run: Path) -> Save:
    """Saves as ckptkit does in the Trainer: the manifest counts the saves."""
    count = iter(range(1, 100))

    def save(step: int, *, best: str = "", loss: float = 1.0) -> Path:
        folder = save_step(run, step, metrics={"eval_loss": loss}, save_number=next(count))
        state = {"best_model_checkpoint": f"/home/alice/run/{best}"} if best else {}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        return folder

    return save


@pytest.fixture(params=[by_trainer, by_hooks])
def went_back(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Steps 100 to 400, then from 200 again: 210 and 220. The best were 400, and then 210."""
    save = request.param(tmp_path)
    save(100, best="checkpoint-100", loss=0.9)
    save(200, best="checkpoint-100", loss=0.95)
    save(300, best="checkpoint-300", loss=0.5)
    save(400, best="checkpoint-400", loss=0.1)
    save(210, best="checkpoint-210", loss=0.7)
    save(220, best="checkpoint-210", loss=0.8)
    return tmp_path


def test_the_best_of_the_live_branch_stays_and_that_of_the_abandoned_goes(went_back: Path) -> None:
    listing = ckptkit.list_run(went_back)
    assert listing.best == {"checkpoint-210"}
    planned = ckptkit.prune(went_back, keep_last=1, dry_run=True)
    done = ckptkit.prune(went_back, keep_last=1)
    assert [one.name for one in planned.removed] == [one.name for one in done.removed]
    reasons = {one.step.step: one.why for one in done.steps}
    assert names(went_back) == ["checkpoint-210", "checkpoint-220"]
    assert reasons[210] == "the Trainer calls it the best"
    assert reasons[220] == "the newest complete step"
    assert reasons[400] == "training went back from it"


def test_the_best_by_a_metric_stays_on_both_branches(went_back: Path) -> None:
    ckptkit.prune(went_back, keep_best="eval_loss")
    assert names(went_back) == ["checkpoint-210", "checkpoint-220", "checkpoint-400"]
    facts = [
        RunStep(s, metrics={"x": x}, save_number=n)
        for n, (s, x) in enumerate([(1, 2.0), (9, 0.0), (2, 1.0), (3, 3.0)], 1)
    ]
    assert steps_to_remove(facts, Retention(keep_best="x")) == (1,)


def test_consolidate_and_inspect_take_the_newest_of_the_live_branch(went_back: Path) -> None:
    with open_checkpoint(went_back) as found:
        assert found.folder == "checkpoint-220"
        back = "checkpoint-300, checkpoint-400 left alone: training went back from it"
        assert found.notes[:2] == (back, "checkpoint-220 is used; 3 older steps left alone")
    assert ckptkit.inspect(went_back).to_json()["step"] == 220


def test_an_incomplete_step_of_the_live_branch_proves_nothing(went_back: Path) -> None:
    for step in (210, 220):
        for path in (went_back / f"checkpoint-{step}").rglob("*.distcp"):
            path.unlink()
    with open_checkpoint(went_back) as found:
        assert found.folder == "checkpoint-400"


def test_a_watch_pushes_the_live_branch_and_its_best(went_back: Path, tmp_path: Path) -> None:
    seen = WatchedRun(went_back, tmp_path / "state")
    seen.list_steps()
    steps = seen.list_steps()
    digests = {step.step: step.digest for step in steps}
    assert choose_steps(steps, digests, {}, PushChoice()) == (100, 200, 210, 220)
    best = PushChoice(best="eval_loss")
    assert choose_steps(steps, digests, {}, best) == (210,)
    number = next(s.save_number for s in steps if s.step == 400)
    before = {400: StepPush(400, digests[400], "pushed", "org/name", save_number=number)}
    assert choose_steps(steps, digests, before, PushChoice()) == (210, 220)


def test_a_copy_with_other_times_is_no_rollback(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    save = by_trainer(run)
    for step in (50, 100, 200):
        save(step)
    save(1000, best="checkpoint-100")
    for number, folder in enumerate(sorted(run.iterdir())):  # 100, 1000, 200, 50
        dated(Path(shutil.copytree(folder, copy / folder.name)), 1.8e9 + number)
    with open_checkpoint(copy) as found:
        assert found.folder == "checkpoint-1000"
    pruned = ckptkit.prune(copy, keep_last=1)
    assert names(copy) == ["checkpoint-100", "checkpoint-1000", "checkpoint-50"]
    assert {one.step.step: one.why for one in pruned.steps}[50] == "its files are the newest"
    steps = [RunStep(step) for step in (50, 100, 200, 1000, 1100)]
    digests = {facts.step: str(facts.step) for facts in steps}
    number = 1_700_000_000_000
    earlier = {1000: StepPush(1000, "1000", "pushed", "org/name", save_number=number)}
    assert choose_steps(steps, digests, earlier, PushChoice()) == (1100,)


def test_steps_at_one_time_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    save = by_trainer(tmp_path)
    for step in (100, 200, 300):
        dated(save(step), 1.7e9)
    with open_checkpoint(tmp_path) as found:
        assert found.folder == "checkpoint-300"
    ckptkit.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["checkpoint-300"]
