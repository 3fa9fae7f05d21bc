"""A Checkpointer in modes of torch, with objects that fail, and the forms that a step has."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkit
from ckptkit.core.errors import CkptkitError, ResumeError, SaveError, UnsupportedError, UsageError
from ckptkit.core.manifest import parse_manifest
from ckptkit.training import Checkpointer
from tests.sampled import sampled
from tests.unit.training.builders import assert_equal, by_fsdp1, content

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")  # as FSDP1 is with one rank

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


def by_fsdp2() -> nn.Module:
    model = network()
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": network,
    "fsdp2": by_fsdp2,
    "fsdp1": lambda: by_fsdp1(network()),
    "fsdp1, flat": lambda: by_fsdp1(network(), use_orig_params=False),
}


def state_of(build: Callable[[], nn.Module]) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    return {"model": model, "optimizer": optimizer, "extra": {"rate": 0.1}}


def train(state: dict[str, Any]) -> None:
    state["model"](INPUTS).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


WORST = ("inference_mode", "default device meta", "a dispatch mode")
QUICK = (*WORST, "bfloat16 by default")
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


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.parametrize(
    "mode",
    sampled(
        ["inference_mode", "default device meta", "float64 by default"], ["default device meta"]
    ),
)
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


@pytest.mark.parametrize(
    "call", sampled(["save", "prepare", "export", "resume"], ["save", "resume"])
)
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


@pytest.mark.parametrize("call", sampled(["save", "should_save", "request_save"], ["save"]))
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


def trained(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def with_adapter(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["0"], r=2, modules_to_save=["1"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(1 + len(name))
    return model


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: S311


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.iterdir()}


def test_a_step_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    state, other = trained(), trained(1)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, state, name="epoch_0").result()
        checkpointer.save(1, state).result()
        checkpointer.save(2, state).result()
        assert files_of(tmp_path) == {"epoch_0", "checkpoint-2", ".ckptkit"}
        assert checkpointer.resume(other, folder=tmp_path / "epoch_0") == 1
    assert torch.equal(other["model"][0].weight, state["model"][0].weight)


def test_steps_stay_for_a_time(tmp_path: Path) -> None:
    state = trained()
    with Checkpointer(tmp_path, keep_for="1h") as checkpointer:
        checkpointer.save(1, state).result()
        checkpointer.save(2, state).result()
        path = tmp_path / "checkpoint-1" / "ckptkit.json"
        manifest = parse_manifest(path.read_bytes(), where="")
        older = {**manifest.source, "saved_at": "2020-01-01T00:00:00Z"}
        path.write_bytes(replace(manifest, source=older).to_json())
        checkpointer.save(3, state).result()
        assert files_of(tmp_path) == {"checkpoint-2", "checkpoint-3", ".ckptkit"}


@pytest.mark.parametrize("name", ["", "..", "a/b", "checkpoint-7", "checkpoint_7", ".hidden"])
def test_a_name_is_that_of_a_folder_in_the_run(tmp_path: Path, name: str) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="name"):
        checkpointer.save(1, trained(), name=name)


def test_a_save_does_not_replace_the_directory_that_the_program_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    with Checkpointer(tmp_path) as checkpointer:
        for name, below in ((None, "."), ("mine", "."), ("mine", "logs")):
            step = checkpointer.save(1, state, name=name).result()
            (step / below).mkdir(exist_ok=True)
            monkeypatch.chdir(step / below)
            with pytest.raises(UsageError, match="that this program runs in"):
                checkpointer.save(1, state, name=name)
            assert Path.cwd() == step / below
            monkeypatch.chdir(tmp_path)
        assert checkpointer.save(1, state).result() == tmp_path / "checkpoint-1"


def test_steps_may_be_called_as_accelerate_calls_them(tmp_path: Path) -> None:
    state, other = trained(), trained(1)
    with Checkpointer(tmp_path, prefix="checkpoint_", keep_last=2) as checkpointer:
        for step in (0, 1, 2):
            checkpointer.save(step, state).result()
        assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_2", ".ckptkit"}
        assert checkpointer.resume(other) == 2


def test_further_files_lie_in_the_step_and_are_in_its_manifest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.save(3, trained(), files={"notes/a.json": b"{}"}).result()
    assert (step / "notes" / "a.json").read_bytes() == b"{}"
    assert json.loads((step / "ckptkit.json").read_bytes())["files"]["notes/a.json"]["digest"]


@pytest.mark.parametrize("layout", sampled(["accelerate", "dcp", "trainer"], ["trainer"]))
def test_further_files_do_not_take_the_names_of_others(tmp_path: Path, layout: Any) -> None:
    names = [
        *("", ".", "..", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a.", "a ", "a./b", "a\\b"),
        *("a\0b", "a\nb", "a\ud800"),
        *("ckptkit.json", "CkptKit.JSON", "a/ckptkit.json", "ckptkit", "ckptkit/config.json"),
        *(".ckptkit", ".ckptkit-x/a", ".metadata", "a/.METADATA", ".ranks/0.json"),
        *("__0_0.distcp", "a/b.DISTCP", "optimizer_0", "optimizer_0/a", "Optimizer_12/a"),
        *(
            "pytorch_model_fsdp_0/a",
            "base_model_1/a",
            "random_states_0.pkl",
            "RANDOM_states_17.pkl",
        ),
        *("scheduler.bin", "scheduler_1.bin", "scheduler.pt", "scaler.pt", "scaler_2.pt"),
        *("custom_checkpoint_0.pkl", "rng_state.pth", "rng_state_3.pth"),
    ]
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        for name in names:
            with pytest.raises(UsageError, match="files"):
                checkpointer.save(3, trained(), files={name: b""})
        with pytest.raises(UsageError, match=r"files.*mapping|files.*by file name"):
            checkpointer.save(3, trained(), files=cast("Any", [("a", b"")]))
        for pair in (("a", "A"), ("a", "a/b"), ("A/c", "a")):
            with pytest.raises(UsageError, match="cannot be in one directory"):
                checkpointer.save(3, trained(), files=dict.fromkeys(pair, b""))
        fine = dict.fromkeys((".env/a", "optimizer.txt", "random_states.pkl", "a/b", "a/c"), b"x")
        step = checkpointer.save(4, trained(), files=fine).result()
        assert checkpointer.resume(trained(1)) == 4
    assert ckptkit.verify(step).ok


def test_a_file_in_the_place_of_an_object_is_refused(tmp_path: Path) -> None:
    state = trained() | {"ema": {"weights": [1]}}
    with Checkpointer(tmp_path) as checkpointer:
        for name in ("ema_0", "EMA_0/a"):
            with pytest.raises(UsageError, match="taken"):
                checkpointer.save(3, state, files={name: b""})


def test_a_step_that_would_not_be_found_again_is_refused(tmp_path: Path) -> None:
    state = trained()
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10**18, 10**25):
            with pytest.raises(UsageError, match="at most 18 digits"):
                checkpointer.save(step, state)
        checkpointer.save(10**18 - 1, state).result()
        assert checkpointer.resume(trained(1)) == 10**18 - 1
        with pytest.raises(UsageError, match="name of a step"):
            checkpointer.save(1, state, name="Checkpoint-7")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ResumeError, match="no directory"):
        checkpointer.resume(trained(), folder=tmp_path / "absent")


def test_the_trainers_layout_has_the_trainers_names(tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, trained(), files={"trainer_state.json": b"{}"}).result()
        expected = drawn()
        assert checkpointer.resume(trained(1)) == 5
    assert drawn() == expected
    assert files_of(step) == {
        *("pytorch_model_fsdp_0", "optimizer_0", "scheduler.pt", "rng_state.pth"),
        *("trainer_state.json", "ckptkit.json", "ckptkit"),
    }
    states = torch.load(step / "rng_state.pth", weights_only=True)  # noqa: TID251
    assert set(states) == {"python", "numpy", "cpu"}


def test_a_model_alone_comes_without_random_numbers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": trained()["model"]}).result()
    assert files_of(step) == {"pytorch_model_fsdp_0", "ckptkit.json", "ckptkit"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_adapter_lies_apart_under_the_names_of_its_files(tmp_path: Path) -> None:
    model, other = with_adapter(), with_adapter(1)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": model}).result()
        assert checkpointer.resume({"model": other}) == 5
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    expected = {
        f"model.{name}": value.clone()
        for name, value in peft.get_peft_model_state_dict(
            model, save_embedding_layers=False
        ).items()
    }
    found = {name: torch.full_like(value, 7) for name, value in expected.items()}
    reader = dcp.FileSystemReader(step / "pytorch_model_fsdp_0")
    assert set(reader.read_metadata().state_dict_metadata) == set(expected)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    base = dcp.FileSystemReader(step / "base_model_0").read_metadata().state_dict_metadata
    assert "model.base_model.model.0.base_layer.weight" in base


def test_a_step_with_the_adapter_alone_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    model, other = with_adapter(), with_adapter(1)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": model}).result()
        foreign = tmp_path / "checkpoint-9"
        shutil.copytree(step / "pytorch_model_fsdp_0", foreign / "pytorch_model_fsdp_0")
        (foreign / "trainer_state.json").write_text("{}")
        before = other.state_dict()["base_model.model.0.base_layer.weight"].clone()
        assert checkpointer.resume({"model": other}, folder=foreign) == 9
    after, saved = other.state_dict(), model.state_dict()
    assert torch.equal(after["base_model.model.0.base_layer.weight"], before)
    lora = "base_model.model.0.lora_A.default.weight"
    assert torch.equal(after[lora], saved[lora])


def save_and_end(run: Path) -> None:
    torch.set_num_threads(1)
    Checkpointer(run).save(1, {"model": nn.Linear(2_000, 2_000)})


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_was_forked_ends_once_its_save_is_written(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_and_end, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert ckptkit.verify(tmp_path / "checkpoint-1").ok
