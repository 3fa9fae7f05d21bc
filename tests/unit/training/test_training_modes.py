"""What modes of torch a training loop may be in when it calls a Checkpointer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.training import Checkpointer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*NO_SHARD"),  # as FSDP1 is with one rank
    pytest.mark.usefixtures("alone"),
]

INPUTS = torch.arange(20.0).reshape(5, 4)


class Scaling(TorchFunctionMode):
    """Changes the results of what is called in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") in {"detach", "narrow"} else result


class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing be called in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} was called")


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(mode=False)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(True),
    "default device cpu": lambda: default_device("cpu"),
    "default device meta": lambda: default_device("meta"),
    "torch.device as a context": lambda: torch.device("meta"),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": deterministic,
    "a function mode": Scaling,
    "a dispatch mode": Refusing,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def by_fsdp1(*, use_orig_params: bool) -> nn.Module:
    device = torch.device("cpu")
    return FullyShardedDataParallel(network(), device_id=device, use_orig_params=use_orig_params)


def by_fsdp2() -> nn.Module:
    model = network()
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": network,
    "fsdp2": by_fsdp2,
    "fsdp1": lambda: by_fsdp1(use_orig_params=True),
    "fsdp1, flat": lambda: by_fsdp1(use_orig_params=False),
}


def state_of(build: Callable[[], nn.Module]) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    return {"model": model, "optimizer": optimizer, "extra": {"rate": 0.1}}


def train(state: dict[str, Any]) -> None:
    state["model"](INPUTS).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def content(step: Path) -> dict[str, torch.Tensor]:
    """The tensors of a step, read by other means than a resume."""
    with ckptkit.open(step) as checkpoint:
        return {name: checkpoint[name].clone() for name in checkpoint.keys()}  # noqa: SIM118


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


WORST = ("inference_mode", "default device meta", "a dispatch mode")
QUICK = (*WORST, "bfloat16 by default", "autocast", "a function mode")
CASES = [
    pytest.param(
        *(mode, model), marks=() if mode in QUICK and model == "fsdp2" else pytest.mark.slow
    )
    for mode in MODES
    for model in MODELS
    if model == "fsdp2" or mode in WORST
]


@pytest.fixture(scope="module")
def saved_in_no_mode(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, torch.Tensor]]:
    """Returns what a step of a model holds that is saved in no mode; of each model it is one."""

    @functools.cache
    def save(model: str) -> dict[str, torch.Tensor]:
        state = state_of(MODELS[model])
        train(state)
        with Checkpointer(tmp_path_factory.mktemp("plain"), layout="dcp") as checkpointer:
            return content(checkpointer.save(1, state).result(60))

    return save


@pytest.mark.parametrize(("mode", "model"), CASES)
def test_a_step_and_a_resume_are_the_same_in_every_mode(
    tmp_path: Path,
    mode: str,
    model: str,
    saved_in_no_mode: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    expected = saved_in_no_mode(model)
    state = state_of(MODELS[model])
    train(state)
    with MODES[mode]():
        checkpointer = Checkpointer(tmp_path / "run", layout="dcp")
    with checkpointer:
        with MODES[mode]():
            first = checkpointer.save(1, state)  # which needs a plan
        assert_equal(content(first.result(60)), expected)
        assert_equal(content(checkpointer.save(2, state).result(60)), expected)
        with MODES[mode]():
            later = checkpointer.save(3, state)
        assert_equal(content(later.result(60)), expected)
        fresh = state_of(MODELS[model])
        with MODES[mode]():
            assert checkpointer.resume(fresh) == 3
            checkpointer.prepare(fresh)
        assert fresh["extra"] == {"rate": 0.1}
        assert_equal(content(checkpointer.save(4, fresh).result(60)), expected)
        with MODES[mode]():
            handle = checkpointer.export(tmp_path / "out", state={"model": state["model"]})
        exported = content(handle.result(60))
        assert_equal(exported, {name: expected[name] for name in exported})
        train(state)
        train(fresh)  # neither inference tensors nor tensors on the meta device were left behind
        went_on = content(checkpointer.save(5, fresh).result(60))
        assert_equal(went_on, content(checkpointer.save(6, state).result(60)))


@pytest.mark.parametrize("mode", ["inference_mode", "default device meta", "float64 by default"])
def test_a_model_on_the_meta_device_is_resumed_in_every_mode(tmp_path: Path, mode: str) -> None:
    state = state_of(network)
    train(state)
    with torch.device("meta"):
        model = network()
    rate = torch.tensor(0.3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    fresh: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result(60)
        with MODES[mode]():
            checkpointer.resume(fresh | {"extra": {}})
        train(state)
        train(fresh)
    assert_equal(fresh["model"].state_dict(), state["model"].state_dict())


def test_a_rate_that_was_a_number_keeps_its_digits(tmp_path: Path) -> None:
    model = network()
    with Checkpointer(tmp_path) as checkpointer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
        rate = torch.tensor(0.3, dtype=torch.float64)
        fresh = torch.optim.SGD(model.parameters(), lr=rate)
        with default_dtype(torch.bfloat16):
            checkpointer.resume({"model": model, "optimizer": fresh})
        assert fresh.param_groups[0]["lr"].item() == 0.1


def test_a_model_that_was_built_under_inference_mode_is_saved_and_resumed(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = network()
        shadow = {"weights": [parameter.clone() for parameter in model.parameters()]}
    for parameter in model.parameters():
        parameter.requires_grad = False  # such are watched, to be linked
    expected = model[0].weight.clone()  # type: ignore[index]
    state = {"model": model, "shadow": shadow}
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        for step in (1, 2):
            assert torch.equal(
                content(checkpointer.save(step, state).result(60))["0.weight"], expected
            )
        with torch.inference_mode():
            model[0].weight.zero_()  # type: ignore[index]
        assert checkpointer.resume(state) == 2
        assert torch.equal(model[0].weight, expected)  # type: ignore[index]
        assert torch.equal(shadow["weights"][0], expected)


@pytest.mark.parametrize("call", ["save", "prepare", "export", "resume"])
@pytest.mark.parametrize("kind", ["FakeTensorMode", "torch.func"])
def test_a_mode_in_which_tensors_are_others_is_refused_by_name(
    tmp_path: Path, kind: str, call: str
) -> None:
    state = {"model": network()}
    with Checkpointer(tmp_path / "run") as checkpointer:
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: checkpointer.save(1, state),
            "prepare": lambda: checkpointer.prepare(state),
            "export": lambda: checkpointer.export(tmp_path / "out", state=state),
            "resume": lambda: checkpointer.resume(state),
        }

        def refused(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(UsageError, match=rf"Checkpointer.{call}: .*{kind}.* is active"):
                calls[call]()
            return x.sum()

        if kind == "FakeTensorMode":
            with FakeTensorMode():
                refused(torch.ones(3))
        else:
            torch.func.grad(refused)(torch.ones(3))
        step = checkpointer.save(2, state).result(60)
        assert_equal(content(step), dict(state["model"].state_dict()))


def test_tensors_of_a_fake_mode_are_refused_by_name(tmp_path: Path) -> None:
    with FakeTensorMode():
        state = {"model": network()}
    checkpointer = Checkpointer(tmp_path / "run")
    calls: list[Callable[[], object]] = [
        lambda: checkpointer.save(1, state).result(60),
        lambda: checkpointer.prepare(state),
        lambda: checkpointer.export(tmp_path / "out", state=state).result(60),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"0\.weight.*without data"):
            call()
    checkpointer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo, about what it does not compile
def test_a_save_inside_a_compiled_function_is_not_compiled(tmp_path: Path) -> None:
    model = network()
    with Checkpointer(tmp_path) as checkpointer:

        @torch.compile(backend="aot_eager")
        def step(inputs: torch.Tensor, number: int) -> Any:
            model(inputs)
            return checkpointer.save(number, {"model": model})

        for number in (1, 2):
            found = content(step(INPUTS, number).result(60))
            assert_equal(found, dict(model.state_dict()))


class Broken:
    """Cannot be saved for a while."""

    broken = True

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise OSError("the disk is away")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def fail(checkpointer: Checkpointer, steps: range, *, heard: bool) -> None:
    for step in steps:
        handle = checkpointer.save(step, {"model": nn.Linear(2, 2), "other": Broken()})
        assert handle.wait(60)
        if heard:
            assert isinstance(handle.exception(), CkptkitError)


@pytest.mark.parametrize("heard", [True, False])
def test_training_is_warned_when_all_saves_fail(tmp_path: Path, *, heard: bool) -> None:
    checkpointer = Checkpointer(tmp_path, every=1)
    fail(checkpointer, range(1, 4), heard=heard)  # no warning, which would be an error here
    with pytest.warns(RuntimeWarning, match="the last 3 saves failed.*the disk is away") as caught:
        assert checkpointer.should_save(4)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="the last [34] saves failed") as caught:
        fail(checkpointer, range(4, 5), heard=heard)
    assert caught[0].filename == __file__
    with pytest.raises(CkptkitError, match="the disk is away"):
        checkpointer.close()


def test_a_save_that_went_well_ends_the_warnings(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=1) as checkpointer:
        fail(checkpointer, range(1, 4), heard=True)
        with pytest.warns(RuntimeWarning):
            checkpointer.save(4, {"model": nn.Linear(2, 2)}).result(60)
        assert checkpointer.should_save(5)
        fail(checkpointer, range(5, 7), heard=True)
        assert checkpointer.should_save(7)


def test_the_end_of_a_with_block_raises_when_all_saves_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(CkptkitError, match="the last 3 saves failed"),
        Checkpointer(tmp_path) as checkpointer,
    ):
        fail(checkpointer, range(1, 4), heard=True)


def test_the_end_of_a_with_block_does_not_mask_what_ended_it(tmp_path: Path) -> None:
    def end_by_an_error() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            fail(checkpointer, range(1, 4), heard=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        end_by_an_error()
    assert "the last 3 saves failed" in caught.value.__notes__[0]
