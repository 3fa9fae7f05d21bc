"""Optimizers whose state is quantised, flattened by other tools, or cannot be saved at all."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import SGD, AdamW, Optimizer

import ckptkit
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ResumeError, UnsupportedError, UsageError
from ckptkit.core.index import Box, Chunk, ChunkTable, Key, RecordTable, TensorEntry, TensorIndex
from ckptkit.training import Checkpointer
from ckptkit.training.resume.optimizers import allocate_state
from ckptkit.training.state.collect import Layout
from ckptkit.training.state.dtensors import Copies, inner_tensors
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Replicas, whole_layout
from ckptkit.training.step_names import TensorPlaces

NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
LAYOUTS: tuple[Layout, ...] = ("accelerate", "dcp")
STEPS = itertools.count(1)


@pytest.fixture(scope="module")
def low_bit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, about deprecated parts of torch
        return importlib.import_module("torchao.optim")


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpointer]]:
    """One for each layout: starting the processes that write costs more than most tests do."""
    with ExitStack() as stack:
        yield {
            layout: stack.enter_context(Checkpointer(tmp_path_factory.mktemp("run"), layout=layout))
            for layout in LAYOUTS
        }


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3))


def state_of(make: Any) -> dict[str, Any]:
    model = network()
    return {"model": model, "optimizer": make(model.parameters(), lr=0.01)}


def train(state: dict[str, Any], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        state["model"](torch.randn(4, 64, generator=generator)).pow(2).mean().backward()
        # What torch.compile would make of the step takes longer than all of this.
        with torch.compiler.set_stance("force_eager"):
            state["optimizer"].step()
        state["optimizer"].zero_grad()


def save(run: Path, state: dict[str, Any]) -> Any:
    with Checkpointer(run) as checkpointer:
        return save_next(checkpointer, state)


def save_next(checkpointer: Checkpointer, state: dict[str, Any]) -> Any:
    checkpointer.prepare(state)
    return checkpointer.save(next(STEPS), state).report(60)


def resume(step: Path, state: dict[str, Any], **options: Any) -> int | None:
    """Resumes in a run of its own: the one of the step is locked while it is open."""
    run = step.parent.with_name(f"{step.parent.name}-resumed")
    with Checkpointer(run, **options) as checkpointer:
        return checkpointer.resume(state, folder=step)


def plain_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    values = [value for of in state["optimizer"].state.values() for value in of.values()]
    tensors = [*state["model"].parameters(), *values]
    return [inner for tensor in tensors for _, inner in inner_tensors(tensor.detach())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_quantised_state_goes_on_bit_for_bit(
    low_bit: Any, savers: dict[str, Checkpointer], name: str, layout: str
) -> None:
    state, fresh = (state_of(getattr(low_bit, name)) for _ in range(2))
    train(state, 2)
    report = save_next(savers[layout], state)
    assert not report.lost
    assert resume(report.path, fresh, layout=layout) == report.step
    train(state, 2)
    train(fresh, 2)
    expected, found = plain_tensors(state), plain_tensors(fresh)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["AdamW4bit", "torch"])
def test_quantised_state_is_no_other_optimizers(
    low_bit: Any, savers: dict[str, Checkpointer], name: str
) -> None:
    state = state_of(low_bit.AdamW8bit)
    train(state, 1)
    report = save_next(savers["accelerate"], state)
    other = state_of(torch.optim.AdamW if name == "torch" else getattr(low_bit, name))
    before = [tensor.clone() for tensor in plain_tensors(other)]
    with pytest.raises(ResumeError, match="OptimState8bit was saved") as caught:
        resume(report.path, other)
    assert "unfit_optimizer='reset'" in str(caught.value.hint)
    assert all(map(torch.equal, before, plain_tensors(other)[: len(before)]))
    assert resume(report.path, other, unfit_optimizer="reset") == report.step
    assert not other["optimizer"].state
    pairs = zip(state["model"].parameters(), other["model"].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flattened_state_of_stock_tools_is_resumed_from(tmp_path: Path) -> None:
    state, fresh = (state_of(torch.optim.AdamW) for _ in range(2))
    train(state, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    assert "param_groups.0.weight.lr" in optimizer
    folder = tmp_path / "step-7"
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    fresh["optimizer"].param_groups[0]["lr"] = 9.0
    with Checkpointer(tmp_path / "run", layout="dcp") as checkpointer:
        checkpointer.resume(fresh, folder=folder)
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.01
    assert all(map(torch.equal, plain_tensors(state), plain_tensors(fresh)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flattened_groups_that_differ_are_no_group(tmp_path: Path) -> None:
    model = network()
    groups = [{"params": [p], "weight_decay": 0.1 * n} for n, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found = get_state_dict(model, optimizer, options=options)
    folder = tmp_path / "step"
    dcp.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=folder, no_dist=True)
    checkpointer = Checkpointer(tmp_path / "run", layout="dcp")
    with checkpointer, pytest.raises(ResumeError, match="saved with different hyperparameters"):
        checkpointer.resume(state_of(torch.optim.AdamW), folder=folder)


class Counting(torch.optim.SGD):
    """Keeps state beside that of parameters, and hyperparameters that grow."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own: Any = self.state
        if "count" not in own:
            own["count"], own["sum"] = 0, torch.zeros(2)
            own["more"] = {"factor": 1.0, "history": [torch.ones(3)]}
        own["count"] += 1
        own["sum"] += own["count"]
        own["more"]["factor"] *= 0.9
        own["more"]["history"][0] *= own["more"]["factor"]
        for group in self.param_groups:
            group.setdefault("run", torch.zeros(3)).add_(1.0)
            factor = own["more"]["history"][0][0] * own["sum"][0] * group["run"].sum()
            for parameter in group["params"]:
                parameter.grad *= factor * own["more"]["factor"]
        return super().step(closure)


@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_of_its_own_beside_that_of_parameters_goes_on(
    savers: dict[str, Checkpointer], layout: str, stepped: int
) -> None:
    state, fresh = state_of(Counting), state_of(Counting)
    train(state, 3)
    train(fresh, stepped)
    report = save_next(savers[layout], state)
    assert resume(report.path, fresh, layout=layout) == report.step
    own: Any = fresh["optimizer"].state
    assert own["count"] == 3
    train(state, 2)
    train(fresh, 2)
    assert own["more"]["factor"] == state["optimizer"].state["more"]["factor"]
    assert all(map(torch.equal, state["model"].parameters(), fresh["model"].parameters()))


class Wrapper(torch.optim.Optimizer):
    """Keeps nothing itself, as those do that some libraries put around others."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=lr)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        raise RuntimeError("nobody asks for it")


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [torch.optim.Muon(matrices, lr=0.1), Wrapper(others, lr=0.1)]


def test_two_optimizers_of_one_model_one_of_them_a_wrapper_go_on(
    savers: dict[str, Checkpointer],
) -> None:
    models = [network(), network()]
    states = [{"model": model, "optimizer": muon_and_adamw(model)} for model in models]

    def step(state: dict[str, Any]) -> None:
        for parameter in state["model"].parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.25
        for optimizer in state["optimizer"]:
            optimizer.step()

    step(states[0])
    report = save_next(savers["accelerate"], states[0])
    assert not report.lost
    assert resume(report.path, states[1]) == report.step
    for state in states:
        step(state)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


class Failing(torch.optim.SGD):
    """Fails when its groups are looked at, once it is told to."""

    fails = False

    def __getattribute__(self, name: str) -> Any:
        if name == "state" and object.__getattribute__(self, "fails"):
            raise RuntimeError("the state lies on the moon")
        return super().__getattribute__(name)


class Lambdas(torch.optim.SGD):
    """Keeps what no file can hold among the hyperparameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([{"params": list(parameters), "hook": lambda x: x}], lr=lr)


class Thin(torch.optim.SGD):
    """Keeps a sparse tensor among the hyperparameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        thin = torch.eye(3).to_sparse()
        super().__init__([{"params": list(parameters), "thin": thin}], lr=lr)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Failing, "the state lies on the moon"),
        (Lambdas, "a function cannot be pickled"),
        (Thin, "expected a dense tensor, found a torch.sparse_coo tensor"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_that_cannot_be_saved_does_not_cost_the_model(
    savers: dict[str, Checkpointer],
    caplog: pytest.LogCaptureFixture,
    make: Any,
    reason: str,
    layout: str,
) -> None:
    state = state_of(make)
    state["optimizer"].fails = True
    with caplog.at_level(logging.WARNING):
        report = save_next(savers[layout], state)
    assert reason in report.lost["optimizer"]
    assert "WITHOUT optimizer" in str(report)
    assert any(
        record.levelname == "ERROR" and reason in record.message for record in caplog.records
    )
    manifest = json.loads((report.path / "ckptkit.json").read_text())
    assert reason in manifest["source"]["lost"]["optimizer"]
    (note,) = ckptkit.inspect(report.path).notes
    assert note.startswith("saved without optimizer: ")
    assert reason in note
    assert ckptkit.verify(report.path).problems == ()
    assert not (report.path / "optimizer_0").exists()
    assert not any(path.startswith("optimizer_0") for path in manifest["files"])
    fresh = state_of(torch.optim.SGD)
    with pytest.raises(ResumeError, match="not saved with this step") as caught:
        resume(report.path, fresh, layout=layout)
    assert reason in str(caught.value)
    assert resume(report.path, fresh, layout=layout, unfit_optimizer="reset") == report.step
    assert resume(report.path, {"model": fresh["model"]}, layout=layout) == report.step
    pairs = zip(state["model"].parameters(), fresh["model"].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_step_without_its_optimizer_removes_no_older_one(tmp_path: Path) -> None:
    state = state_of(Failing)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, state).result(60)
        state["optimizer"].fails = True
        checkpointer.save(2, state).result(60)
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
            "checkpoint-1",
            "checkpoint-2",
        }
        state["optimizer"].fails = False
        checkpointer.save(3, state).result(60)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}


def test_an_optimizer_that_is_older_than_the_parameters_is_refused(tmp_path: Path) -> None:
    state = state_of(torch.optim.SGD)
    for module in state["model"].modules():  # as sharding replaces them
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    checkpointer = Checkpointer(tmp_path)
    with checkpointer, pytest.raises(UsageError, match="belongs to no model") as caught:
        checkpointer.prepare(state)
    assert "create the optimizer after prepare(model)" in caught.value.hint
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    with Checkpointer(tmp_path) as again:
        again.save(1, state).result(60)


def test_reset_clears_the_state_and_takes_up_hyperparameters_of_its_own_kind(
    savers: dict[str, Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(torch.optim.AdamW)
    train(state, 1)
    report = save_next(savers["accelerate"], state)
    other = state_of(torch.optim.SGD)
    other["optimizer"].param_groups[0]["lr"] = 0.5
    with pytest.raises(ResumeError, match="another optimizer"):
        resume(report.path, other)
    with caplog.at_level(logging.WARNING):
        assert resume(report.path, other, unfit_optimizer="reset") == report.step
    assert "optimizer starts anew" in caplog.text
    assert not other["optimizer"].state
    assert other["optimizer"].param_groups[0]["lr"] == 0.5
    assert "betas" not in other["optimizer"].param_groups[0]
    model = network().to(torch.float32)
    alike = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)
    for parameter in model.parameters():
        alike.state[parameter]["max_exp_avg_sq"] = torch.zeros_like(parameter)
    with pytest.raises(ResumeError, match="max_exp_avg_sq"):
        resume(report.path, {"model": model, "optimizer": alike})
    resumed = resume(report.path, {"model": model, "optimizer": alike}, unfit_optimizer="reset")
    assert resumed == report.step
    assert not alike.state
    assert alike.param_groups[0]["lr"] == 0.01


class Paged(torch.optim.SGD):
    """Stands in for the paged optimizers of bitsandbytes, whose memory needs a GPU."""

    is_paged = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                paged: Any = torch.zeros_like(parameter)
                state["paged"] = paged
                paged.is_paged, paged.page_deviceid = True, 3
            state["paged"] += 1
        return super().step(closure)


def test_paged_state_is_copied_when_devices_are_done_and_comes_back_into_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    state, fresh = state_of(Paged), state_of(Paged)
    train(state, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        waited.clear()
        checkpointer.save(1, state).result(60)
        assert set(waited) == {3}
        waited.clear()
        assert checkpointer.resume(fresh) == 1
        assert set(waited) == {3}
    found = [of["paged"] for of in fresh["optimizer"].state.values()]
    assert len(found) == 4
    assert all(one.is_paged and bool((one == 2).all()) for one in found)


class Container(torch.optim.Optimizer):
    """Several optimizers as one, as torchtitan's container is; the state is in these."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.optimizers = [torch.optim.AdamW([p], lr=lr) for p in parameters]
        groups = [group for inner in self.optimizers for group in inner.param_groups]
        super().__init__(groups, {"lr": lr})

    def step(self, _: Any = None) -> Any:
        for inner in self.optimizers:
            inner.step()


class Telling(torch.optim.SGD):
    """Keeps a number besides the states of parameters."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}


class Around(torch.optim.Optimizer):
    """Has the state of another one as its own, as accelerate's wrapper has."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state


def test_an_optimizer_with_its_state_in_others_is_not_taken_for_one_without(tmp_path: Path) -> None:
    state = state_of(Container)
    train(state, 2)
    report = save(tmp_path / "outer", state)
    reason = "keeps its state in other optimizers, those of its attribute 'optimizers'"
    assert reason in report.lost["optimizer"]
    with pytest.raises(ResumeError, match="'optimizers'"):
        resume(report.path, state_of(Container))
    inner = {"model": state["model"], "optimizer": state["optimizer"].optimizers}
    report = save(tmp_path / "inner", inner)
    assert not report.lost
    fresh = state_of(Container)
    entries = {**fresh, "optimizer": fresh["optimizer"].optimizers}
    assert resume(report.path, entries) == report.step
    moments = [
        inner.state[p]["exp_avg"]
        for made in (state, fresh)
        for inner, p in zip(made["optimizer"].optimizers, made["model"].parameters(), strict=True)
    ]
    assert all(map(torch.equal, moments[:4], moments[4:]))


def test_what_only_the_state_dict_of_an_optimizer_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = state_of(Telling)
    for name in ("a", "b"):
        assert not save(tmp_path / name, made).lost
    assert caplog.text.count("the state_dict() of Telling is not called") == 1
    caplog.clear()
    plain = torch.optim.SGD(made["model"].parameters(), lr=0.1, momentum=0.9)
    around = {"model": made["model"], "optimizer": Around(plain)}
    made["model"](torch.ones(1, 64)).sum().backward()
    plain.step()
    assert not save(tmp_path / "c", around).lost
    assert "state_dict()" not in caplog.text


def by_groups(*layers: int, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """A model with an optimizer that has a group for each of some layers, of a rate of its own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    groups = [{"params": list(model[n].parameters()), "lr": 0.1 + n} for n in layers]
    return {"model": model, "optimizer": kind(groups, lr=0.5)}


def stepped(state: dict[str, Any]) -> dict[str, Any]:
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    return state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_more_groups_than_the_optimizer_is_refused_or_the_rest_dropped(
    savers: dict[str, Checkpointer], layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    saved = stepped(by_groups(0))
    unfrozen = list(saved["model"][1].parameters())
    saved["optimizer"].add_param_group({"params": unfrozen, "lr": 7.0})
    report = save_next(savers[layout], stepped(saved))
    fresh = by_groups(0)
    before = [tensor.clone() for tensor in fresh["model"].parameters()]
    with pytest.raises(ResumeError, match="a different number of parameter groups") as caught:
        resume(report.path, fresh, layout=layout)
    assert "the step has 2, and the optimizer 1" in str(caught.value)
    assert "'1.weight', '1.bias'" in str(caught.value)
    assert "missing_groups='drop'" in str(caught.value.hint)
    assert all(map(torch.equal, before, fresh["model"].parameters()))
    assert not fresh["optimizer"].state
    # What the hint proposes.
    with caplog.at_level(logging.WARNING):
        assert resume(report.path, fresh, layout=layout, missing_groups="drop") == report.step
    assert "the state of groups that it lacks is dropped" in caplog.text
    assert fresh["optimizer"].state_dict()["param_groups"][0]["lr"] == pytest.approx(0.1)
    for mine, other in zip(
        fresh["model"][0].parameters(), saved["model"][0].parameters(), strict=True
    ):
        average = fresh["optimizer"].state[mine]["exp_avg"]
        assert torch.equal(average, saved["optimizer"].state[other]["exp_avg"])
    whole = by_groups(0)
    whole["optimizer"].add_param_group({"params": list(whole["model"][1].parameters())})
    assert resume(report.path, whole, layout=layout) == report.step
    assert [group["lr"] for group in whole["optimizer"].param_groups] == [0.1, 7.0]


def test_dropping_groups_is_an_option_of_one_resume_too(
    savers: dict[str, Checkpointer], tmp_path: Path
) -> None:
    report = save_next(savers["dcp"], stepped(by_groups(0, 1)))
    fresh = by_groups(1)
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        with pytest.raises(UsageError, match="'lose' is not among error, drop"):
            checkpointer.resume(fresh, folder=report.path, missing_groups="lose")  # type: ignore[arg-type]
        with pytest.raises(ResumeError, match="a different number of parameter groups"):
            checkpointer.resume(fresh, folder=report.path)
        other = save_next(savers["accelerate"], stepped(by_groups(0, 1)))
        for step in (other, report):  # of another layout, and of this one
            resumed = checkpointer.resume(fresh, folder=step.path, missing_groups="drop")
            assert resumed == step.step
    assert fresh["optimizer"].param_groups[0]["lr"] == pytest.approx(1.1)


def test_groups_in_another_order_and_more_groups_than_the_step_has(
    savers: dict[str, Checkpointer],
) -> None:
    saved = stepped(by_groups(0, 1))
    report = save_next(savers["accelerate"], saved)
    turned = by_groups(1, 0)
    assert resume(report.path, turned) == report.step
    assert [group["lr"] for group in turned["optimizer"].param_groups] == [1.1, 0.1]
    with pytest.raises(ResumeError, match="of the checkpoint's 2 has the 2 parameters of group 2"):
        resume(report.path, by_groups(0, 1, 2))


def test_a_group_without_parameters_counts_as_torch_counts_it(
    savers: dict[str, Checkpointer],
) -> None:
    state = by_groups(0)
    state["optimizer"].add_param_group({"params": [], "lr": 9.0})
    report = save_next(savers["dcp"], stepped(state))
    with pytest.raises(ResumeError, match="what it lacks has no parameters"):
        resume(report.path, by_groups(0), layout="dcp")
    fresh = by_groups(0)
    fresh["optimizer"].add_param_group({"params": []})
    assert resume(report.path, fresh, layout="dcp") == report.step
    assert fresh["optimizer"].param_groups[1]["lr"] == 9.0


def test_one_of_several_optimizers_lacks_a_group(savers: dict[str, Checkpointer]) -> None:
    def several(*layers: int) -> dict[str, Any]:
        state = by_groups(*layers)
        last = torch.optim.SGD(state["model"][2].parameters(), lr=0.1, momentum=0.9)
        return {"model": state["model"], "optimizer": [state["optimizer"], last]}

    state = several(0, 1)
    state["model"](torch.ones(1, 3)).sum().backward()
    for optimizer in state["optimizer"]:
        optimizer.step()
    report = save_next(savers["dcp"], state)
    with pytest.raises(ResumeError, match=r"optimizer\[0\]: .*number of parameter groups"):
        resume(report.path, several(0), layout="dcp")
    kept = several(1)
    assert resume(report.path, kept, layout="dcp", missing_groups="drop") == report.step
    assert len(kept["optimizer"][1].state) == 2


def test_a_flattened_state_of_parameters_that_no_group_has_is_refused(tmp_path: Path) -> None:
    state = stepped(by_groups(0, 1))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(state["model"], state["optimizer"], options=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every save outside a process group
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "step")
    with pytest.raises(ResumeError, match=r"a state of 2 parameters more: '1\.bias', '1\.weight'"):
        resume(tmp_path / "step", by_groups(0), layout="dcp")
    assert resume(tmp_path / "step", by_groups(0), layout="dcp", missing_groups="drop") == 0


class Wrapped(torch.Tensor):
    """Wraps a tensor, and perhaps another one beside it, as quantised weights do."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, beside: torch.Tensor | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor, beside: torch.Tensor | None = None) -> None:
        self.held, self.beside = inner, beside

    def __tensor_flatten__(self) -> Any:
        return ["held"] if self.beside is None else ["held", "beside"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Wrapped(*inner.values())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].beside)
        plain = torch.utils._pytree.tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def with_wrapped(beside: torch.Tensor | None = None) -> dict[str, Any]:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False))
    model[0].weight = nn.Parameter(Wrapped(torch.randn(3, 3), beside))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}


def test_a_weight_that_wraps_one_tensor_of_its_shape_and_type_is_that_tensor(
    tmp_path: Path,
) -> None:
    state, fresh = with_wrapped(), with_wrapped()
    weight, other = state["model"][0].weight, fresh["model"][0].weight
    weight.grad = torch.ones(3, 3)
    state["optimizer"].step()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result(60)
        weight.held.add_(1)
        step = checkpointer.save(2, state).result(60)
        assert checkpointer.resume(fresh) == 2
    assert torch.equal(other.held, weight.held)
    average = fresh["optimizer"].state[other]["exp_avg"]
    assert type(average) is torch.Tensor
    assert torch.equal(average, state["optimizer"].state[weight]["exp_avg"])
    with ckptkit.open(step) as stored:
        assert torch.equal(stored["0.weight"], weight.held)


def test_a_weight_of_several_tensors_is_refused_by_its_name(tmp_path: Path) -> None:
    state = with_wrapped(torch.ones(3, 3))
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UnsupportedError, match=r"0\.weight: a Wrapped was found, which consist"),
    ):
        checkpointer.prepare({"model": state["model"]})


class Growing(torch.optim.Optimizer):
    """Keeps a number for a parameter, and from its second step on a tensor of its shape."""

    @torch.no_grad()
    def step(self, _: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["m"] = state["m"] + torch.ones_like(parameter) if state else torch.tensor(0.5)


def test_a_resume_from_an_earlier_step_puts_numbers_back_where_tensors_are_now(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = Growing(model.parameters(), {"lr": 0.1})
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            optimizer.step()
            checkpointer.save(step, state).result(60)
        assert checkpointer.resume(state, step=1) == 1
        assert torch.equal(optimizer.state[model.weight]["m"], torch.tensor(0.5))
        assert checkpointer.resume(state, step=2) == 2
    assert torch.equal(optimizer.state[model.weight]["m"], torch.full((2, 3), 1.5))


def index_of(states: dict[str, torch.Tensor]) -> TensorIndex:
    """An index of the optimizer states of these names, without any bytes."""
    tensors = {}
    for name, tensor in states.items():
        fqn, _, kind = name.rpartition("/")
        shape = tuple(tensor.shape)
        key = Key(f"optimizer.state.{fqn}.{kind}")
        tensors[key] = TensorEntry(
            key=key,
            key_path=("optimizer", "state", fqn, kind),
            name=key,  # type: ignore[arg-type]
            tree="",
            part="optimizer",
            dtype=dtype_named(str(tensor.dtype)),
            shape=shape,
            chunks=ChunkTable.of([Chunk(Box((0,) * len(shape), shape), 0)], len(shape)),
        )
    return TensorIndex("dcp", (), RecordTable.of([]), tensors)


def allocated(model: nn.Module, optimizer: Optimizer, states: dict[str, torch.Tensor]) -> None:
    slots = ModelWalk(model, TensorPlaces("", ("model",)), world=Copies()).look().slots
    allocate_state(optimizer, slots, index_of(states), ("optimizer",))


def test_state_is_made_as_the_checkpoint_has_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    states = {
        "weight/step": torch.tensor(0.0),
        "weight/exp_avg": torch.empty(2, 3, dtype=torch.bfloat16),
    }
    allocated(model, optimizer, states)
    state = optimizer.state[model.weight]
    assert state.keys() == {"step", "exp_avg"}
    assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.bfloat16, (2, 3))
    assert model.bias not in optimizer.state


@pytest.mark.parametrize("fused", [False, True])
def test_all_but_the_count_of_steps_lies_where_the_parameter_does(*, fused: bool) -> None:
    model = nn.Linear(3, 2, device="meta")
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["fused"] = fused
    states = {"weight/step": torch.tensor(0.0), "weight/norm": torch.zeros(1)}
    allocated(model, optimizer, states)
    state = optimizer.state[model.weight]
    assert state["norm"].is_meta
    assert state["step"].is_meta == fused


def test_the_padding_of_a_flat_parameters_state_is_zero() -> None:
    flat = nn.Parameter(torch.ones(4))
    slot = whole_layout("weight", torch.ones(3), Replicas(), Replicas())
    slots = {id(flat): (msgspec.structs.replace(slot, held=(4,), start=0, sharded=True),)}
    optimizer = SGD([flat], lr=1.0, momentum=0.9)
    torch.use_deterministic_algorithms(True)  # it fills memory that is not initialised
    try:
        allocate_state(
            optimizer, slots, index_of({"weight/momentum_buffer": torch.ones(3)}), ("optimizer",)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.state[flat]["momentum_buffer"].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_state_that_is_there_is_kept_and_that_of_others_removed() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    allocated(model, optimizer, {"weight/momentum_buffer": torch.empty(2, 3)})
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum
    assert model.bias not in optimizer.state


class Rows(Optimizer):
    """Keeps a number per row, whose place only the optimizer itself knows."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                state = self.state[parameter]
                state.setdefault("rows", torch.zeros(len(parameter)))
                parameter.data -= group["lr"] * math.pi


def test_state_of_another_shape_is_made_by_a_step_without_effect() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = Rows(model.parameters(), {"lr": 0.5})
    states = {"weight/rows": torch.empty(2), "bias/rows": torch.empty(2)}
    allocated(model, optimizer, states)
    assert optimizer.state[model.weight]["rows"].shape == (2,)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
