"""Learning rate schedulers, saved midway and resumed in a fresh job, take the same next steps."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from ckptkit.training import Checkpointer
from tests.sampled import sampled

Make = Callable[[Any], Any]
DONE, NEXT = 5, 20
BASE = {"LRScheduler", "_LRScheduler"}


class Power:
    """A callable object, whose attributes torch saves."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: float) -> float:
        return float(self.base**step)


def power(base: float, step: float) -> float:
    return float(base**step)


OF_TORCH: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of a partial": lambda o: schedulers.LambdaLR(o, partial(power, 0.9)),
    "LambdaLR of an object": lambda o: schedulers.LambdaLR(o, Power(0.8)),
    "LambdaLR of both": lambda o: schedulers.LambdaLR(o, [partial(power, 0.9), Power(0.7)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, partial(power, 0.99)),
    "MultiplicativeLR of an object": lambda o: schedulers.MultiplicativeLR(o, Power(0.99)),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 7, 12, 12]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 8),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1, 9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 15),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1, 4), schedulers.MultiStepLR(o, [3, 9], 0.3)], [4]
    ),
    "SequentialLR of LambdaLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LambdaLR(o, partial(power, 0.9)), schedulers.LambdaLR(o, Power(0.5))], [8]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.MultiStepLR(o, [6, 9])]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
    "CyclicLR of an object": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.1, 4, cycle_momentum=False, scale_fn=partial(power, 0.9)
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], total_steps=40),
    "SWALR": lambda o: SWALR(o, 0.01, 8),
}
OPTIONS = {
    "num_warmup_steps": 3,
    "num_training_steps": 30,
    "num_decay_steps": 8,
    "num_stable_steps": 6,
    "min_lr": 0.001,
}
STARTS_BELOW = {"get_adafactor_schedule"}  # is for Adafactor alone


def of_transformers() -> dict[str, Make]:
    module = importlib.import_module("transformers.optimization")
    found: dict[str, Make] = {}
    for name in dir(module):
        if not (name.startswith("get_") and "schedule" in name) or name == "get_scheduler":
            continue
        make = getattr(module, name)
        known = set(inspect.signature(make).parameters)
        given = {key: value for key, value in OPTIONS.items() if key in known}
        if "num_stable_steps" in given:
            del given["num_training_steps"]
        if name not in STARTS_BELOW:
            found[name] = partial(make, **given)
    return found


def test_every_public_scheduler_of_torch_is_in_the_list() -> None:
    classes = (getattr(schedulers, name) for name in dir(schedulers))
    public = {c.__name__ for c in classes if isinstance(c, type) and hasattr(c, "get_last_lr")}
    assert public - BASE <= {name.partition(" ")[0] for name in OF_TORCH}


def build(make: Make) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}


def rates(state: dict[str, Any], first: int, count: int) -> list[list[float]]:
    optimizer, scheduler = state["optimizer"], state["scheduler"]
    needs_loss = "metrics" in inspect.signature(scheduler.step).parameters
    found = []
    for step in range(first, first + count):
        optimizer.step()
        scheduler.step(*[1.0 + step % 3] if needs_loss else [])
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


@pytest.fixture(scope="module", params=sampled(["accelerate", "dcp", "trainer"], ["accelerate"]))
def checkpointer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpointer]:
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run, layout=request.param, keep_last=1) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_schedulers_resumed_in_another_job_take_the_same_next_steps(
    checkpointer: Checkpointer,
) -> None:
    for number, (name, make) in enumerate({**OF_TORCH, **of_transformers()}.items(), 1):
        state, fresh = build(make), build(make)
        rates(state, 0, DONE)
        assert not checkpointer.save(number, state).report(60).lost
        expected = rates(state, DONE, NEXT)
        assert checkpointer.resume(fresh) == number
        assert rates(fresh, DONE, NEXT) == expected, name
        if number % 5 == 0:  # into one that was used already
            assert checkpointer.resume(state) == number
            assert rates(state, DONE, NEXT) == expected, name


class Hooked(Power):
    """Keeps what no file can hold."""

    def __init__(self) -> None:
        super().__init__(0.9)
        self.hook = lambda: None


def test_a_callable_that_cannot_be_kept_is_refused_by_its_path(checkpointer: Checkpointer) -> None:
    state = build(lambda o: schedulers.LambdaLR(o, Hooked()))
    with pytest.raises(Exception, match="a function cannot be pickled") as caught:
        checkpointer.save(1_000, state)
    where = "state['scheduler']['lr_lambdas'][0]['hook']"
    assert str(getattr(caught.value, "where", "")) == where
