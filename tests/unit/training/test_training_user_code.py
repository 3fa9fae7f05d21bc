"""What the user's own objects raise, and calls from where a Checkpointer cannot work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.training import Checkpointer


class Odd:
    """An object whose methods raise after an attribute is set to False."""

    saves = loads = True

    def state_dict(self) -> dict[str, int]:
        if not self.saves:
            raise RuntimeError("no state")
        return {"n": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        if not self.loads:
            raise KeyError("no place")


class Own(nn.Linear):
    """Overrides `state_dict` without its arguments."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


def test_what_an_object_raises_is_an_error_with_its_path(tmp_path: Path) -> None:
    odd = Odd()
    state = {"model": nn.Linear(2, 2), "odd": odd}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        odd.saves = False
        with pytest.raises(CkptkitError, match="no state") as caught:
            checkpointer.save(2, state).result()
        assert "state['odd']: its state_dict() raised RuntimeError" in str(caught.value)
        assert "bug of ckptkit" not in str(caught.value.hint)
        odd.saves, odd.loads = True, False
        with pytest.raises(CkptkitError, match="no place") as caught:
            checkpointer.resume(state)
        assert "state['odd']: its load_state_dict() raised KeyError" in str(caught.value)
        odd.loads = True
        assert checkpointer.resume(state) == 1


def test_a_model_whose_state_dict_takes_other_arguments_is_named(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(SaveError, match=r"state\['model'\]: its state_dict\(keep_vars=True\)"),
    ):
        checkpointer.save(1, {"model": Own(2, 2)}).result()


@pytest.mark.parametrize("call", ["save", "resume"])
def test_a_lazy_module_is_refused_by_the_name_of_its_parameter(tmp_path: Path, call: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": nn.Sequential(nn.Linear(2, 2))}).result()
        state = {"model": nn.Sequential(nn.LazyLinear(2))}
        with pytest.raises(UsageError, match=r"0\.weight: has no shape yet") as caught:
            checkpointer.save(2, state) if call == "save" else checkpointer.resume(state)
        assert caught.value.hint == "call the model once before"
        state["model"](torch.ones(1, 2))
        checkpointer.save(3, state).result()


def test_a_number_that_no_float_holds_is_no_metric(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UsageError, match="metrics: expected a number for each name"),
    ):
        checkpointer.save(1, {"model": nn.Linear(1, 1)}, metrics={"loss": 10**400})


@pytest.mark.parametrize("call", ["save", "should_save", "request_save"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path, call: str) -> None:
    state = {"model": nn.Linear(2, 2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                arguments: dict[str, Any] = {
                    "save": {"step": 2, "state": state},
                    "should_save": {"step": 2},
                    "request_save": {},
                }
                getattr(checkpointer, call)(**arguments[call])
            except UsageError as error:
                status = 0 if "this is a forked child" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.save(3, state).result()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-3",
    ]
