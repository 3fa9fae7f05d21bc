"""Parameters and buffers that are given other memory, another object or another dtype."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptkit
from ckptkit.core.errors import ResumeError
from ckptkit.training import Checkpointer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*NO_SHARD"),  # as FSDP1 is with one rank
    pytest.mark.usefixtures("all_alone"),
]

LOW = torch.bfloat16


class Steps:
    """Counts the steps of all tests."""

    last = 0

    @classmethod
    def next(cls) -> int:
        cls.last += 1
        return cls.last


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """One for all tests: starting the processes that write costs more than most of them do."""
    with Checkpointer(tmp_path_factory.mktemp("run"), layout="dcp") as opened:
        yield opened


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[2].requires_grad_(requires_grad=False)  # frozen weights are linked from step to step
    return model


def by_fsdp1(model: nn.Module, **options: Any) -> Any:
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=device, use_orig_params=True, **options)


def saved(checkpointer: Checkpointer, model: Any) -> dict[str, torch.Tensor]:
    """Saves the next step, and returns what it holds."""
    step = checkpointer.save(Steps.next(), {"model": model}).result(60)
    with ckptkit.open(step) as checkpoint:
        return {name: checkpoint[name].clone() for name in checkpoint.keys()}  # noqa: SIM118


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


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
@pytest.mark.parametrize("wrapped", ["plain", "ddp", "fsdp1"])
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
    assert checkpointer.resume({"model": model}) == Steps.last
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
    assert checkpointer.resume({"model": model}) == Steps.last
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
