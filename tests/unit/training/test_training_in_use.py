"""Saves from hooks, in the middle of what FSDP does, and saves between steps."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import ckptkit
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.training import Checkpointer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*NO_SHARD"),  # as FSDP1 is with one rank
    pytest.mark.usefixtures("all_alone"),
]

INPUTS = torch.arange(8.0).reshape(2, 4).requires_grad_()  # or backward hooks warn
STEPS = itertools.count(1)


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """Most tests take this one: starting the processes that write costs more than they do."""
    with Checkpointer(tmp_path_factory.mktemp("run")) as opened:
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


def by_fsdp1(**options: Any) -> Any:
    device = torch.device("cpu")
    return FullyShardedDataParallel(Network(), device_id=device, use_orig_params=True, **options)


def expected_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = model.state_dict()
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def assert_holds(step: Path, expected: dict[str, torch.Tensor]) -> None:
    with ckptkit.open(step) as checkpoint:
        assert set(checkpoint.keys()) == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(checkpoint[name], tensor), name


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "a backward hook": lambda module, call: module.register_full_backward_hook(call),
    "a backward pre-hook": lambda module, call: module.register_full_backward_pre_hook(call),
    "a hook of a gradient": lambda module, call: next(  # type: ignore[no-untyped-call]
        module.parameters()
    ).register_post_accumulate_grad_hook(call),
    "a forward hook": lambda module, call: module.register_forward_hook(call),
    "a forward pre-hook": lambda module, call: module.register_forward_pre_hook(call),
}


@pytest.mark.parametrize("again", [False, True])
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
    assert_holds(checkpointer.save(next(STEPS), {"model": model}).result(60), expected_of(model))


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
    model = by_fsdp1()
    refused: list[str] = []
    with Checkpointer(tmp_path) as checkpointer:

        def call(*_: Any) -> None:
            with pytest.raises(UsageError, match="backward pass of FSDP") as caught:
                checkpointer.save(1, {"model": model})
            refused.append(str(caught.value))

        model.module.first.register_full_backward_hook(call)
        model(INPUTS).sum().backward()
        assert refused
        assert_holds(checkpointer.save(2, {"model": model}).result(60), expected_of(model))


def test_a_save_inside_of_summon_full_params_is_refused_by_name(tmp_path: Path) -> None:
    model = by_fsdp1()
    model(INPUTS).sum().backward()
    with Checkpointer(tmp_path) as checkpointer:
        with (
            FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(UsageError, match="summon_full_params"),
        ):
            checkpointer.save(1, {"model": model})
        assert_holds(checkpointer.save(2, {"model": model}).result(60), expected_of(model))


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
    "fsdp1": by_fsdp1,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("before", BEFORE)
def test_a_save_between_steps_is_not_refused(
    checkpointer: Checkpointer, before: str, model: str
) -> None:
    network = MODELS[model]()
    expected = expected_of(network)
    BEFORE[before](network)
    assert_holds(checkpointer.save(next(STEPS), {"model": network}).result(60), expected)

    def from_another_call() -> Path:  # of a module that is not the one that is sharded
        found: list[Path] = []

        class Outer(nn.Module):
            def forward(self) -> None:
                found.append(checkpointer.save(next(STEPS), {"model": network}).result(60))

        Outer()()
        return found[0]

    assert_holds(from_another_call(), expected)


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
    assert_holds(checkpointer.save(next(STEPS), {"model": model}).result(60), expected_of(model))


def test_a_parameter_that_is_given_before_the_first_pass_is_saved(tmp_path: Path) -> None:
    model = by_fsdp2()
    model.first.weight = nn.Parameter(torch.zeros_like(model.first.weight))
    with Checkpointer(tmp_path) as checkpointer:
        assert_holds(checkpointer.save(1, {"model": model}).result(60), expected_of(model))
        model(INPUTS)
        assert_holds(checkpointer.save(2, {"model": model}).result(60), expected_of(model))
    assert not expected_of(model)["first.weight"].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_is_moved_and_cast_between_saves_as_without_them(
    frozen: bool, tmp_path: Path
) -> None:
    """torch swaps the contents of DTensors then, which must have no weak references."""
    model = by_fsdp2()
    model.first.requires_grad_(not frozen)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.second.parameters())}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        assert_holds(tmp_path / "checkpoint-1", expected_of(model))
        model.cpu()
        checkpointer.save(2, state).result()
        assert_holds(tmp_path / "checkpoint-2", expected_of(model))
        storages = [weakref.ref(storage_of(tensor)) for tensor in model.parameters()]
        model.double()
        assert [storage() for storage in storages] == [None] * len(storages)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1)
        checkpointer.save(3, state).result()
    assert_holds(tmp_path / "checkpoint-3", expected_of(model))


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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [Network, by_fsdp2])
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
            assert_holds(handle.result(60), expected)
        assert checkpointer.resume(state) == 3
        assert all(torch.equal(t, expected[n]) for n, t in expected_of(model).items())
        swap_all(state)
        expected = expected_of(model)
        assert_holds(checkpointer.save(4, state).result(60), expected)
        checkpointer.export(tmp_path / "model", state={"model": model}).result(60)
        swap_all(state)


@pytest.mark.parametrize("frozen", [False, True])
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
            assert_holds(checkpointer.save(2, state).result(60), expected_of(model))
            model.load_state_dict({n: torch.zeros_like(t) for n, t in model.state_dict().items()})
            expected = expected_of(model)
            assert not any(tensor.any() for tensor in expected.values())
            assert_holds(checkpointer.save(3, state).result(60), expected)
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
            assert_holds(checkpointer.save(step, state).result(60), expected_of(model))
