"""Runs under torchrun: low-bit optimizers of bitsandbytes and torchao, and what one rank lacks.

Usage: odd_optimizers_run.py FOLDER, on 2 ranks. Each case trains, saves, goes on; then a fresh
state resumes, goes on likewise and has to be equal to the last bit. FOLDER is left for resumes
on other numbers of ranks.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.errors import ResumeError
from ckptkit.training import Checkpointer, load_into
from ckptkit.training.state.dtensors import inner_tensors, unwrap_dtensor
from tests.distributed import cases
from tests.distributed.cases import end, start

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the imports, about deprecated parts of torch
    bits_and_bytes: Any = importlib.import_module("bitsandbytes.optim")
    low_bit: Any = importlib.import_module("torchao.optim")
    float8_training: Any = importlib.import_module("torchao.float8")

STEP = 2
State = dict[str, Any]


class Net(nn.Module):
    """Of `long`, one of two ranks gets a part that cannot be quantised; `short` is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 160)
        self.long = nn.Parameter(torch.randn(145, 64))
        self.short = nn.Linear(64, 4)  # in all an even number of elements: no padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.wide(x)).mean(1, keepdim=True) + x @ self.long.T[:, :64]
        loss: torch.Tensor = self.short(hidden).pow(2).mean()
        return loss


class Narrow(nn.Module):
    """Its heads have one, two and three outputs, of whose biases ranks hold none, one or two."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, outputs) for outputs in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(x) for head in self.heads], 1).pow(2).mean()


def network() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def fsdp2() -> nn.Module:
    net: Any = network()
    return cases.fsdp2(net, net.wide)


def narrow() -> nn.Module:
    torch.manual_seed(3)
    net = Narrow()
    fully_shard(net)
    return net


def fsdp1(*, original: bool) -> nn.Module:
    return cases.fsdp1(network(), orig=original)


def ddp() -> nn.Module:
    return DistributedDataParallel(network())


class Late(torch.optim.Optimizer):
    """Makes DTensors in its second step, one of them by rows; `small` adds a plain tensor."""

    def __init__(self, parameters: Any, lr: float, *, small: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "small": small})

    @torch.no_grad()
    def step(self, _: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.tensor(1.0)
                    if group["small"]:
                        state["scale"] = torch.ones(3)
                    continue
                if "m" not in state:
                    state["m"] = torch.zeros_like(parameter)
                    if parameter.dim() > 1:
                        state["rows"] = torch.zeros_like(parameter).sum(1)
                state["count"] += 1
                state["m"].lerp_(parameter.grad, 0.1)
                if parameter.dim() > 1:
                    state["rows"].add_(state["m"].sum(1))
                if group["small"]:
                    state["scale"].mul_(1.5)
                parameter.add_(state["m"], alpha=-group["lr"])


class Counting(torch.optim.Optimizer):
    """Counts steps in a tensor of one dimension, as Sophia does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"], state["m"] = torch.zeros(1), torch.zeros_like(parameter)
                state["count"] += 1
                state["m"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["m"], alpha=-group["lr"] / state["count"].item())


Make = tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]
CASES: Mapping[str, Make] = {
    "ao8_fsdp2": (fsdp2, low_bit.AdamW8bit),
    "ao4_fsdp2": (fsdp2, low_bit.AdamW4bit),
    "ao_fp8_fsdp2": (fsdp2, low_bit.AdamWFp8),
    "ao8_fsdp1": (lambda: fsdp1(original=True), low_bit.AdamW8bit),
    "ao8_ddp": (ddp, low_bit.AdamW8bit),
    "bnb8_fsdp1": (lambda: fsdp1(original=True), bits_and_bytes.AdamW8bit),
    "bnb8_fsdp1_flat": (lambda: fsdp1(original=False), bits_and_bytes.Adam8bit),
    "bnb8_paged_ddp": (ddp, bits_and_bytes.PagedAdamW8bit),
    "late_fsdp2": (fsdp2, Late),
    "late_small_fsdp2": (fsdp2, partial(Late, small=True)),
    "counting_fsdp2": (narrow, Counting),
    "bnb32_paged_fsdp1": (lambda: fsdp1(original=True), bits_and_bytes.PagedAdamW),
}


def state_of(case: str) -> State:
    build, make = CASES[case]
    model = build()
    return {"model": model, "optimizer": make(model.parameters(), lr=0.01)}


def train(state: State, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        state["model"](torch.randn(4, 64, generator=generator)).backward()
        # What torch.compile would make of the step takes longer than all of this.
        with torch.compiler.set_stance("force_eager"):
            state["optimizer"].step()
        state["optimizer"].zero_grad()


def tensors_of(state: State) -> list[torch.Tensor]:
    found = [local for p in state["model"].parameters() for _, local in inner_tensors(p.detach())]
    for group in state["optimizer"].param_groups:
        for parameter in group["params"]:
            for _, value in sorted(state["optimizer"].state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    found += [inner for _, inner in inner_tensors(value)]
                else:
                    found.append(torch.tensor(value))
    return found


def goes_on(checkpointer: Checkpointer, run: Path, case: str) -> None:
    state = state_of(case)
    train(state, 2)
    assert not checkpointer.save(STEP, state, name=case).report(60).lost
    train(state, 2)
    fresh = state_of(case)
    for parameter in fresh["model"].parameters():
        parameter.data.zero_()
    assert checkpointer.resume(fresh, folder=run / case) == STEP
    train(fresh, 2)
    expected, found = tensors_of(state), tensors_of(fresh)
    assert len(expected) == len(found) > 3
    assert all(map(torch.equal, expected, found)), case
    sys.stdout.write(f"SAME {case} {dist.get_rank()} {len(found)}\n")


class Sparse(torch.optim.SGD):
    """Keeps on the last rank what no file can hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = torch.tensor(1.0)
                if dist.get_rank():
                    self.state[parameter]["odd"] = torch.ones(4, 4).to_sparse()
        return loss


def loses_no_model(folder: Path, layout: Any) -> None:
    model = fsdp2()
    state = {"model": model, "optimizer": Sparse(model.parameters(), lr=0.1, momentum=0.9)}
    train(state, 1)
    run = folder / f"lost_{layout}"
    with Checkpointer(run, layout=layout, keep_last=1) as checkpointer:
        checkpointer.prepare(state)
        for step in (1, 2):
            report = checkpointer.save(step, state).report(60)
            assert "sparse" in report.lost["optimizer"], report
        fresh_model = fsdp2()
        fresh = torch.optim.SGD(fresh_model.parameters(), lr=0.3, momentum=0.9)
        for parameter in fresh_model.parameters():
            parameter.data.zero_()
        try:
            checkpointer.resume({"model": fresh_model, "optimizer": fresh})
        except ResumeError as error:
            sys.stdout.write(f"REFUSED {dist.get_rank()} {error}\n")
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    with Checkpointer(run, layout=layout, unfit_optimizer="reset") as checkpointer:
        assert checkpointer.resume({"model": fresh_model, "optimizer": fresh}) == 2
    for before, after in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert isinstance(before, DTensor)
        assert isinstance(after, DTensor)
        assert torch.equal(before.to_local(), after.to_local())
    assert not fresh.state
    sys.stdout.write(f"KEPT {layout} {dist.get_rank()}\n")


def float8() -> Any:
    """Has weights as torchao's float8 training wraps them; `short` stays as it is."""
    net: Any = network()
    float8_training.convert_to_float8_training(
        net,
        module_filter_fn=lambda _, name: name == "wide",
        config=float8_training.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True),
    )
    return cases.fsdp2(net, net.wide)


def step_of(state: State, number: int) -> None:
    """Takes a step with gradients that are made up, as gloo gathers no float8."""
    for parameter in state["model"].parameters():
        local = torch.full(parameter.to_local().shape, 0.1 * number + dist.get_rank())
        parameter.grad = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def keeps_wrapped_weights(folder: Path) -> None:
    """Weights of a class that wraps one tensor are that tensor, with a scale beside it or not."""
    model = float8()
    wrapped = type(model.wide.weight.to_local())
    assert wrapped.__name__.endswith("CastTensor"), wrapped
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    with Checkpointer(folder / "wrapped") as checkpointer:
        for number in (1, 2):
            step_of(state, number)
            float8_training.precompute_float8_dynamic_scale_for_fsdp(model)
            checkpointer.save(number, state).result(60)
        before = {n: unwrap_dtensor(p).clone() for n, p in model.named_parameters()}
        exported = checkpointer.export(folder / "exported", state={"model": model}).result(60)
        with torch.device("meta"):
            fresh_model = float8()
        optimizer = torch.optim.AdamW(fresh_model.parameters(), lr=0.5)
        fresh = {"model": fresh_model, "optimizer": optimizer}
        assert checkpointer.resume(fresh) == 2
        assert isinstance(fresh_model.wide.weight.to_local(), wrapped)
    expected, found = tensors_of(state), tensors_of(fresh)
    assert len(expected) == len(found) > 9
    assert all(map(torch.equal, expected, found))
    for each in (state, fresh):
        step_of(each, 3)
    assert all(map(torch.equal, tensors_of(state), tensors_of(fresh)))
    for source in (exported, folder / "wrapped" / "checkpoint-2"):
        other = float8()
        load_into(other, source)
        for name, parameter in other.named_parameters():
            assert torch.equal(unwrap_dtensor(parameter), before[name])
    stock = {"model": float8().state_dict()}
    dcp.load(stock, checkpoint_id=folder / "wrapped" / "checkpoint-2" / "pytorch_model_fsdp_0")
    for name, tensor in stock["model"].items():
        assert torch.equal(unwrap_dtensor(tensor), before[name])
    sys.stdout.write(f"WRAPPED {dist.get_rank()}\n")


def misses_no_value(folder: Path) -> None:
    """Rank 0 writes what all ranks have; here it has not got one of the values."""
    state: State = {"model": network(), "seen": [1, 2]}
    with Checkpointer(folder / "values") as checkpointer:
        assert not checkpointer.save(1, state).report(60).lost
        if dist.get_rank() == 1:
            state["notes"] = {"a": 1}
        lost = checkpointer.save(2, state).report(60).lost
    assert list(lost) == ["notes"], lost
    sys.stdout.write(f"MISSED {dist.get_rank()} {lost['notes']}\n")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    start()
    folder = Path(sys.argv[1])
    with Checkpointer(folder / "run") as checkpointer:
        for case in CASES:
            goes_on(checkpointer, folder / "run", case)
    for layout in ("accelerate", "dcp"):
        loses_no_model(folder, layout)
    misses_no_value(folder)
    keeps_wrapped_weights(folder)
    end()


if __name__ == "__main__":
    main()
