"""Runs under torchrun: sets parameters' `.data` under FSDP1, as averages of weights do, and saves.

Usage: assigned_run.py FOLDER CASE:KIND...
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.training import Checkpointer
from tests.distributed.cases import run_cases

LOW = torch.bfloat16
LOWERED: dict[str, Any] = {"param_dtype": LOW, "reduce_dtype": LOW, "buffer_dtype": LOW}
MIXED = MixedPrecision(**LOWERED)
KINDS: dict[str, dict[str, Any]] = {
    "full_shard": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed": {"sharding_strategy": ShardingStrategy.FULL_SHARD, "mixed_precision": MIXED},
    "mixed_grad_op": {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": MIXED,
    },
    "mixed_no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": MIXED},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "mixed_hybrid": {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "mixed_precision": MIXED,
    },
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}
Tensors = dict[str, torch.Tensor]


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 3))
    model[3].requires_grad_(requires_grad=not more.get("use_orig_params", True))
    options: dict[str, Any] = (
        {"use_orig_params": True, "device_id": torch.device("cpu")} | KINDS[kind] | more
    )
    if "hybrid" in kind:
        options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], **options)
    return FullyShardedDataParallel(model, **options)


def state_of(model: nn.Module) -> dict[str, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.1)}


def train(state: dict[str, Any]) -> None:
    inputs = torch.arange(30.0).reshape(6, 5)
    for _ in range(2):
        state["model"](inputs).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def stock(model: nn.Module) -> Tensors:
    """What FSDP's own state dict holds."""
    kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: Tensors, expected: Tensors, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (what, name, found[name].dtype, tensor.dtype)
        assert torch.equal(found[name], tensor), (what, name)


def assert_holds(step: Path, expected: Tensors, what: str) -> None:
    with ckptkit.open(step) as checkpoint:
        found = {name: checkpoint[name].clone() for name in expected}
    assert_equal(found, expected, what)


def average(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 + 1


def averaged(tensors: Tensors, model: nn.Module) -> Tensors:
    buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_buffers()}
    return {k: t if k in buffers else average(t) for k, t in tensors.items()}


def swap_in(model: nn.Module) -> dict[str, torch.Tensor]:
    backup = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = average(parameter.data)
    return backup


def swap_out(model: nn.Module, backup: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]


def swaps(folder: Path, kind: str) -> None:
    """An average is saved as it is, and what was put aside for it is what training goes on with."""
    with Checkpointer(folder / "swaps", layout="dcp") as checkpointer:
        for before in ("building", "training", "an evaluation"):
            model = build(kind)
            state, step = state_of(model), 10 * (1 + len(before))
            if before != "building":
                train(state)
            if before == "an evaluation":
                with torch.no_grad():
                    model.eval()(torch.zeros(2, 5))
            expected = stock(build(kind) if before == "building" else model)
            for number in range(2):  # the second time with what is known from the first
                backup = swap_in(model)
                inside = checkpointer.save(step + 3 * number, state).result(60)
                swap_out(model, backup)
                assert_holds(inside, averaged(expected, model), f"{kind}, after {before}: inside")
                after = checkpointer.save(step + 3 * number + 1, state).result(60)
                assert_holds(after, expected, f"{kind}, after {before}: outside")
            assert_equal(stock(model), expected, f"{kind}, after {before}: went on")
            train(state)


def resumes(folder: Path, kind: str) -> None:
    """What a resume has loaded stays after the next forward pass."""
    state = state_of(build(kind))
    train(state)
    with Checkpointer(folder / "resumes", layout="dcp") as checkpointer:
        checkpointer.save(1, state).result(60)
        expected = stock(state["model"])
        fresh = state_of(build(kind))
        train(fresh)
        train(fresh)
        swap_in(fresh["model"])
        assert checkpointer.resume(fresh) == 1
        with torch.no_grad():
            fresh["model"].eval()(torch.zeros(2, 5))
        assert_equal(stock(fresh["model"]), expected, f"{kind}: resumed")
        if kind == "offload":  # FSDP1 adds the gradients of earlier steps there, with any state
            return
        fresh["model"].train()
        train(state)
        train(fresh)
        assert_equal(stock(fresh["model"]), stock(state["model"]), f"{kind}: went on")
        assert_equal_states(fresh, state)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    pairs = zip(one["optimizer"].state.values(), other["optimizer"].state.values(), strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in b)


def in_low_precision(folder: Path, kind: str) -> None:
    """Gradients that stay in low precision change nothing about what is saved."""
    low = MixedPrecision(**LOWERED, keep_low_precision_grads=True, cast_root_forward_inputs=False)
    model = build(kind, mixed_precision=low)
    with Checkpointer(folder / "low", layout="dcp") as checkpointer:
        model(torch.ones(4, 5, dtype=LOW)).sum().backward()
        step = checkpointer.save(1, {"model": model}).result(60)
        assert_holds(step, stock(model), f"{kind}: low precision")


def replaces(folder: Path, kind: str) -> None:
    """Parameters that modules are given anew are saved; what FSDP cannot take up is refused."""
    model = build(kind)
    train(state_of(model))
    with Checkpointer(folder / "replaces", layout="dcp") as checkpointer:
        inner = model.module[0].module
        inner.weight = nn.Parameter(average(inner.weight.data))
        step = checkpointer.save(1, {"model": model}).result(60)
        assert_holds(step, stock(model), f"{kind}: a new parameter")
        for wrong in (
            inner.weight.data.double(),
            inner.weight.data.repeat(2, *([1] * (inner.weight.dim() - 1))),
        ):
            right, inner.weight.data = inner.weight.data, wrong
            error = checkpointer.save(2, {"model": model}).exception(60)
            assert "0.weight: the parameter was replaced by one of shape" in str(error), error
            inner.weight.data = right
        checkpointer.save(3, {"model": model}).result(60)
    flat = build(kind, use_orig_params=False)
    train(state_of(flat))
    with Checkpointer(folder / "flat", layout="dcp") as checkpointer:
        for parameter in flat.parameters():
            parameter.data = average(parameter.data)
        error = checkpointer.save(1, {"model": flat}).exception(60)
        assert isinstance(error, CkptkitError), kind
        assert "of a flat parameter was set" in str(error), error


def buffers(folder: Path, kind: str) -> None:
    """Buffers that mixed precision casts are saved and exported as stock does, and resumed."""
    state = state_of(build(kind))
    with Checkpointer(folder / "buffers") as checkpointer:
        before = checkpointer.save(1, state).result(60)
        assert_holds(before, stock(build(kind)), f"{kind}: before the first pass")
        train(state)
        after = checkpointer.save(2, state).result(60)
        expected = stock(state["model"])
        assert expected["1.running_mean"].dtype == torch.float32
        assert_holds(after, expected, f"{kind}: after it")
        handle = checkpointer.export(folder / "out", state={"model": state["model"]})
        assert_holds(handle.result(60), expected, f"{kind}: exported")
        trained = state_of(build(kind))
        train(trained)
        for fresh in (state_of(build(kind)), trained):
            assert checkpointer.resume(fresh, step=2) == 2
            assert_equal(stock(fresh["model"]), expected, f"{kind}: resumed")
            again = checkpointer.save(3, fresh).result(60)
            assert_holds(again, expected, f"{kind}: saved again")


def allow_offloading() -> None:
    """Has FSDP1 offload parameters where there is no GPU, which it refuses.

    Its memory for transfers is another copy of the shard, as it is with a GPU.
    """
    kind: Any = torch.Tensor
    kind.pin_memory = lambda self, *_: self.clone()
    stream: Any = torch.cpu.Stream
    stream.synchronize = lambda _: None


CASES: dict[str, Callable[[Path, str], None]] = {
    "swaps": swaps,
    "resumes": resumes,
    "low": in_low_precision,
    "replaces": replaces,
    "buffers": buffers,
}


if __name__ == "__main__":
    allow_offloading()
    run_cases(CASES)
