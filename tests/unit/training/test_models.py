"""Models as they are wrapped and changed: saves between steps and from hooks, given memory."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ckptkit.core.errors import ResumeError, UnsupportedError, UsageError
from ckptkit.training import Checkpointer
from tests.sampled import sampled
from tests.unit.training.builders import assert_equal, by_fsdp1, content, one_rank

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")  # as FSDP1 is with one rank

INPUTS = torch.arange(8.0).reshape(2, 4).requires_grad_()  # or backward hooks warn
STEPS = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """Most tests take this one: starting the processes that write costs more than they do."""
    with Checkpointer(tmp_path_factory.mktemp("run"), layout="dcp") as opened:
        yield opened


class Network(nn.Module):
    """Two layers, the second of which can fail, and may be run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = self.again = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        between = self.first(inputs)
        if self.fails:
            raise OSError("the data is away")
        if self.again:
            result: torch.Tensor = checkpoint(self.second, between, use_reentrant=False)
            return result
        return torch.as_tensor(self.second(between))


def by_fsdp2(**options: Any) -> Network:
    model = Network()
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    fully_shard(model)
    return model


def expected_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = model.state_dict()
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "a backward hook": lambda module, call: module.register_full_backward_hook(call),
    "a backward pre-hook": lambda module, call: module.register_full_backward_pre_hook(call),
    "a hook of a gradient": lambda module, call: next(  # type: ignore[no-untyped-call]
        module.parameters()
    ).register_post_accumulate_grad_hook(call),
    "a forward hook": lambda module, call: module.register_forward_hook(call),
    "a forward pre-hook": lambda module, call: module.register_forward_pre_hook(call),
}


@pytest.mark.parametrize("again", sampled([False, True], [False]))
@pytest.mark.parametrize("hook", HOOKS)
def test_a_save_from_a_hook_under_fsdp2_is_refused_by_name(
    checkpointer: Checkpointer, hook: str, *, again: bool
) -> None:
    model = by_fsdp2()
    model.again = again
    refused: list[str] = []

    def call(*_: Any) -> None:
        with pytest.raises(UsageError, match=r"(back|for)ward pass of FSDP: .* hook") as caught:
            checkpointer.save(next(STEPS), {"model": model})
        refused.append(caught.value.hint)

    # Of the parameters of a unit the hooks run while those of another are whole.
    handle = HOOKS[hook](model.first, call)
    model(INPUTS).sum().backward()
    handle.remove()
    assert "between two steps" in refused[0]
    expected = {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    model(INPUTS).sum().backward()  # nothing was freed, or reduced twice
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), expected[name])  # type: ignore[union-attr]
    assert_equal(
        content(checkpointer.save(next(STEPS), {"model": model}).result(60)), expected_of(model)
    )


@pytest.mark.parametrize("call", ["prepare", "export", "resume"])
def test_other_calls_from_a_hook_are_refused_as_well(
    checkpointer: Checkpointer, tmp_path: Path, call: str
) -> None:
    model = by_fsdp2()
    state = {"model": model}
    checkpointer.save(next(STEPS), state).result(60)
    calls: dict[str, Callable[[], object]] = {
        "prepare": lambda: checkpointer.prepare(state),
        "export": lambda: checkpointer.export(tmp_path / "out", state=state),
        "resume": lambda: checkpointer.resume(state),
    }
    refused: list[str] = []

    def hook(*_: Any) -> None:
        try:
            calls[call]()
        except Exception as error:  # noqa: BLE001  a resume tells all ranks, by another class
            refused.append(str(error))

    model.first.register_full_backward_hook(hook)
    model(INPUTS).sum().backward()
    assert len(refused) == 1
    assert "backward pass of FSDP" in refused[0]


def test_a_save_from_a_backward_hook_under_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    model = by_fsdp1(Network())
    refused: list[str] = []
    with Checkpointer(tmp_path) as checkpointer:

        def call(*_: Any) -> None:
            with pytest.raises(UsageError, match="backward pass of FSDP") as caught:
                checkpointer.save(1, {"model": model})
            refused.append(str(caught.value))

        model.module.first.register_full_backward_hook(call)
        model(INPUTS).sum().backward()
        assert refused
        assert_holds(checkpointer.save(2, {"model": model}).result(60), model)


def test_a_save_inside_of_summon_full_params_is_refused_by_name(tmp_path: Path) -> None:
    model = by_fsdp1(Network())
    model(INPUTS).sum().backward()
    with Checkpointer(tmp_path) as checkpointer:
        with (
            FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(UsageError, match="summon_full_params"),
        ):
            checkpointer.save(1, {"model": model})
        assert_holds(checkpointer.save(2, {"model": model}).result(60), model)


def assert_holds(step: Path, model: nn.Module) -> None:
    assert_equal(content(step), expected_of(model))


def fail_forward(model: Any) -> None:
    getattr(model, "module", model).fails = True
    with pytest.raises(OSError, match="away"):
        model(INPUTS)
    getattr(model, "module", model).fails = False


def fail_backward(model: Any) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the data is away")

    handle = getattr(model, "module", model).first.register_full_backward_hook(broken)
    with pytest.raises(OSError, match="away"):
        model(INPUTS).sum().backward()
    handle.remove()


def accumulate(model: Any) -> None:
    quiet = model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()
    if isinstance(model, Network):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
    with quiet:
        model(INPUTS).sum().backward()


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(INPUTS)


BEFORE: dict[str, Callable[[Any], object]] = {
    "a step": lambda model: model(INPUTS).sum().backward(),
    "an exception in the forward pass": fail_forward,
    "an exception in the backward pass": fail_backward,
    "a part of gradient accumulation": accumulate,
    "an evaluation": evaluate,
    "a forward pass": lambda model: model(INPUTS),
}
MODELS: dict[str, Callable[[], Any]] = {
    "fsdp2": by_fsdp2,
    "fsdp2, not resharded": lambda: by_fsdp2(reshard_after_forward=False),
    "fsdp1": lambda: by_fsdp1(Network()),
}


@pytest.mark.parametrize("model", sampled(MODELS, ["fsdp2", "fsdp1"]))
@pytest.mark.parametrize("before", BEFORE)
def test_a_save_between_steps_is_not_refused(
    checkpointer: Checkpointer, before: str, model: str
) -> None:
    network = MODELS[model]()
    expected = expected_of(network)
    BEFORE[before](network)
    assert_equal(content(checkpointer.save(next(STEPS), {"model": network}).result(60)), expected)

    def from_another_call() -> Path:  # of a module that is not the one that is sharded
        found: list[Path] = []

        class Outer(nn.Module):
            def forward(self) -> None:
                found.append(checkpointer.save(next(STEPS), {"model": network}).result(60))

        Outer()()
        return found[0]

    assert_equal(content(from_another_call()), expected)


@pytest.mark.parametrize("how", ["an attribute", "an entry of _parameters"])
def test_a_parameter_that_fully_shard_does_not_use_is_refused(
    checkpointer: Checkpointer, how: str
) -> None:
    model = by_fsdp2()
    other = nn.Parameter(torch.zeros_like(model.first.weight))
    model(INPUTS)
    if how == "an attribute":
        model.first.weight = other
    else:
        model.first._parameters["weight"] = other
    with pytest.raises(UnsupportedError, match=r"first\.weight.*fully_shard"):
        checkpointer.save(next(STEPS), {"model": model}).result(60)
    model.load_state_dict(model.state_dict(), assign=True)
    assert_equal(
        content(checkpointer.save(next(STEPS), {"model": model}).result(60)), expected_of(model)
    )


def test_a_parameter_that_is_given_before_the_first_pass_is_saved(tmp_path: Path) -> None:
    model = by_fsdp2()
    model.first.weight = nn.Parameter(torch.zeros_like(model.first.weight))
    with Checkpointer(tmp_path) as checkpointer:
        assert_holds(checkpointer.save(1, {"model": model}).result(60), model)
        model(INPUTS)
        assert_holds(checkpointer.save(2, {"model": model}).result(60), model)
    assert not expected_of(model)["first.weight"].any()


@pytest.mark.parametrize("frozen", sampled([False, True], [True]))
def test_a_model_is_moved_and_cast_between_saves_as_without_them(
    frozen: bool, tmp_path: Path
) -> None:
    """torch swaps the contents of DTensors then, which must have no weak references."""
    model = by_fsdp2()
    model.first.requires_grad_(not frozen)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.second.parameters())}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        assert_equal(content(tmp_path / "checkpoint-1"), expected_of(model))
        model.cpu()
        checkpointer.save(2, state).result()
        assert_equal(content(tmp_path / "checkpoint-2"), expected_of(model))
        storages = [weakref.ref(storage_of(tensor)) for tensor in model.parameters()]
        model.double()
        assert [storage() for storage in storages] == [None] * len(storages)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1)
        checkpointer.save(3, state).result()
    assert_equal(content(tmp_path / "checkpoint-3"), expected_of(model))


def storage_of(tensor: Any) -> Any:
    return tensor.to_local().untyped_storage()


def trained(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    model(INPUTS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def swap_all(state: dict[str, Any]) -> None:
    """Swaps the content of every parameter, buffer and tensor of an optimizer's state."""
    of_optimizer = state["optimizer"].state.values()
    tensors = [t for values in of_optimizer for t in values.values() if torch.is_tensor(t)]
    for tensor in (*state["model"].parameters(), *state["model"].buffers(), *tensors):
        if isinstance(tensor, DTensor):
            other: Any = DTensor.from_local(
                tensor.to_local().detach().clone() + 1, tensor.device_mesh, tensor.placements
            )
        else:
            other = tensor.detach().clone() + 1
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("frozen", sampled([False, True], [True]))
@pytest.mark.parametrize("make", sampled([Network, by_fsdp2], [by_fsdp2]))
def test_no_reference_that_torch_refuses_to_swap_survives_a_save_or_a_resume(
    make: Callable[[], nn.Module], frozen: bool, tmp_path: Path
) -> None:
    model: Any = make()
    model.first.requires_grad_(not frozen)
    model.register_buffer("seen", torch.ones(3))
    state = trained(model)
    with Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        checkpointer.prepare(state)
        swap_all(state)
        expected: dict[str, torch.Tensor] = {}
        for step in (1, 2, 3):
            expected = expected_of(model)
            handle = checkpointer.save(step, state)
            swap_all(state)  # while it is written
            assert_equal(content(handle.result(60)), expected)
        assert checkpointer.resume(state) == 3
        assert all(torch.equal(t, expected[n]) for n, t in expected_of(model).items())
        swap_all(state)
        expected = expected_of(model)
        assert_equal(content(checkpointer.save(4, state).result(60)), expected)
        checkpointer.export(tmp_path / "model", state={"model": model}).result(60)
        swap_all(state)


@pytest.mark.parametrize("frozen", sampled([False, True], [True]))
@pytest.mark.parametrize("make", [Network, by_fsdp2])
def test_a_model_is_cast_and_loaded_by_swapping_after_saves_of_it(
    make: Callable[[], nn.Module], frozen: bool, tmp_path: Path
) -> None:
    model: Any = make()
    model.first.requires_grad_(not frozen)
    state = trained(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state).result(60)
            model.to(torch.float64)
            assert_holds(checkpointer.save(2, state).result(60), model)
            model.load_state_dict({n: torch.zeros_like(t) for n, t in model.state_dict().items()})
            expected = expected_of(model)
            assert not any(tensor.any() for tensor in expected.values())
            assert_equal(content(checkpointer.save(3, state).result(60)), expected)
            assert checkpointer.resume(state) == 3
            model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_frozen_weight_that_was_replaced_at_its_address_is_written_anew(tmp_path: Path) -> None:
    model: Any = Network()
    model.first.requires_grad_(requires_grad=False)
    state = trained(model)
    memory = torch.zeros(4, 4)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            if step > 2:
                memory.fill_(step)
            model.first.weight = nn.Parameter(memory, requires_grad=False)
            assert_holds(checkpointer.save(step, state).result(60), model)


LOW = torch.bfloat16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[2].requires_grad_(requires_grad=False)  # frozen weights are linked from step to step
    return model


def saved(checkpointer: Checkpointer, model: Any) -> dict[str, torch.Tensor]:
    """Saves the next step, and returns what it holds."""
    return content(checkpointer.save(next(STEPS), {"model": model}).result(60))


def halve_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data / 2


def halve_by_entry(model: Any) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                grows = parameter.requires_grad
                module._parameters[name] = nn.Parameter(parameter.detach() / 2, requires_grad=grows)


def halve_by_attribute(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                grows = parameter.requires_grad
                setattr(module, name, nn.Parameter(parameter.detach() / 2, requires_grad=grows))


def halve_by_assignment(model: Any) -> None:
    model.load_state_dict(halved(model), assign=True)


def halved(model: Any) -> dict[str, torch.Tensor]:
    trained = {name for name, _ in model.named_parameters()}
    return {k: t / 2 if k in trained else t.clone() for k, t in model.state_dict().items()}


HALVES: dict[str, Callable[[Any], None]] = {
    "parameter.data": halve_data,
    "an entry of _parameters": halve_by_entry,
    "an attribute": halve_by_attribute,
    "load_state_dict(assign=True)": halve_by_assignment,
}


@pytest.mark.parametrize("how", HALVES)
@pytest.mark.parametrize("wrapped", sampled(["plain", "ddp", "fsdp1"], ["fsdp1"]))
def test_what_a_parameter_was_given_is_saved_and_resumed(
    checkpointer: Checkpointer, wrapped: str, how: str
) -> None:
    if wrapped == "fsdp1" and "assign" in how:
        pytest.skip("FSDP1 loads state dicts in its own way")
    inner = network()
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda model: model,
        "ddp": DistributedDataParallel,
        "fsdp1": by_fsdp1,
    }
    model = wraps[wrapped](inner)
    model(torch.ones(3, 4))
    expected = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    for _ in range(2):
        assert_equal(saved(checkpointer, model), expected)
    HALVES[how](inner)
    expected = {
        name: tensor / 2 if "running" not in name and "num" not in name else tensor
        for name, tensor in expected.items()
    }
    for _ in range(2):
        assert_equal(saved(checkpointer, model), expected)
    HALVES[how](inner)
    assert checkpointer.resume({"model": model})
    model.eval()(torch.ones(3, 4))  # FSDP1 takes up what it finds
    assert_equal(saved(checkpointer, model), expected)


def test_frozen_weights_that_were_swapped_out_are_those_of_the_step(
    checkpointer: Checkpointer,
) -> None:
    inner = network()
    model = by_fsdp1(inner)
    saved(checkpointer, model)
    before = saved(checkpointer, model)
    backup = {name: parameter.data for name, parameter in inner.named_parameters()}
    halve_data(inner)
    inside = saved(checkpointer, model)
    assert torch.equal(inside["2.weight"], before["2.weight"] / 2)
    for name, parameter in inner.named_parameters():
        parameter.data = backup[name]
    assert_equal(saved(checkpointer, model), before)


def with_buffers(dtype: torch.dtype, **options: Any) -> Any:
    model = network()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = (buffer + 0.3).to(dtype)
    return by_fsdp1(model, mixed_precision=MixedPrecision(**options)) if options else model


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("stored", [LOW, torch.float32])
def test_buffers_are_resumed_from_either_dtype_before_and_after_the_first_pass(
    checkpointer: Checkpointer, stored: torch.dtype, passes: int
) -> None:
    # Without a wrapper, buffers are saved as they are.
    expected = saved(checkpointer, with_buffers(stored))
    assert expected["1.running_mean"].dtype == stored
    model = with_buffers(torch.float32, param_dtype=LOW, buffer_dtype=LOW)
    for _ in range(passes):
        model.eval()(torch.ones(3, 4))
    assert checkpointer.resume({"model": model})
    again = saved(checkpointer, model)
    wanted = expected["1.running_mean"].to(LOW if passes else stored).float()
    assert again["1.running_mean"].dtype == torch.float32
    assert torch.equal(again["1.running_mean"], wanted)


@pytest.mark.parametrize("options", [{}, {"param_dtype": LOW}])
def test_buffers_that_nothing_casts_are_never_resumed_in_another_dtype(
    checkpointer: Checkpointer, options: dict[str, Any]
) -> None:
    saved(checkpointer, with_buffers(LOW))
    with pytest.raises(ResumeError, match=r"running_mean: dtype bfloat16 was found"):
        checkpointer.resume({"model": with_buffers(torch.float32, **options)})
    odd = with_buffers(torch.float32, buffer_dtype=torch.float16)
    with pytest.raises(ResumeError, match=r"running_mean: dtype bfloat16 was found"):
        checkpointer.resume({"model": odd})


def test_fully_shard_leaves_buffers_as_they_are(checkpointer: Checkpointer) -> None:
    model, kind = network(), importlib.import_module("torch.distributed.fsdp")
    policy = kind.MixedPrecisionPolicy(param_dtype=LOW, output_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model)
    model(torch.ones(3, 4))
    found = saved(checkpointer, model)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32, torch.int64}
