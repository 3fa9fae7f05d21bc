"""Runs under torchrun: pipeline stages and experts, saved, resumed, and told apart.

Usage: stages_run.py FOLDER ACTION CASE... `here` (4 ranks) trains, saves and resumes from cases: a
pipeline of 2 stages on 2 ranks each, one with two stages per rank, three expert-parallel models,
one without either, and one with state that has no place in the full parameters; `elsewhere` (2
ranks) resumes on plain FSDP2, and loads a pipeline with stock tools. What each state is as a whole
is written by `here`, from torch's own gathering.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.errors import ResumeError
from ckptkit.training import Checkpointer
from tests.distributed.cases import end, fsdp2, full, start

STEP = 3
WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return hidden


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(4, WIDTH, 5))
        self.experts.down = nn.Parameter(torch.randn(4, 5, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)


def layers(numbers: range) -> nn.Module:
    """The layers of some numbers, under their names in the whole model."""
    torch.manual_seed(7)
    whole = [Layer() for _ in range(4)]
    return nn.Sequential(OrderedDict((f"layer{n}", whole[n]) for n in numbers))


def optimizer_of(parts: list[nn.Module]) -> torch.optim.Optimizer:
    """Every stage has groups of its own, some have one that others lack."""
    weights = [p for part in parts for p in part.parameters() if p.ndim > 1]
    others = [p for part in parts for p in part.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


class Marking(torch.optim.AdamW):
    """Keeps, as low-bit optimizers do, what has no place in the full parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.state:
            self.state[parameter]["marks"] = torch.arange(2.0) + dist.get_rank()
        return loss


def marked() -> dict[str, Any]:
    state = in_pipeline(interleaved=True)
    return {**state, "optimizer": [Marking(part.parameters()) for part in state["model"]]}


def marks(folder: Path, checkpointer: Checkpointer) -> None:
    """Two optimizers of each rank keep such state; elsewhere it is refused."""
    state = marked()
    for parameter in (p for part in state["model"] for p in part.parameters()):
        parameter.grad = parameter.detach().clone()
    for optimizer in state["optimizer"]:
        optimizer.step()
    assert not checkpointer.save(STEP, state, name="marked").report(60).lost
    fresh = marked()
    resumed(checkpointer, folder, "marked", fresh)
    found, expected = whole(fresh), whole(state)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    other = in_pipeline(interleaved=False)
    try:
        checkpointer.resume(
            {**other, "optimizer": Marking(other["model"].parameters())},
            folder=folder / "run" / "marked",
        )
    except ResumeError as error:
        say(f"REFUSED {error}")


def in_pipeline(*, interleaved: bool) -> dict[str, Any]:
    """Two stages of two ranks each; interleaved, each rank has two smaller ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    ranges = [range(stage, stage + 1), range(stage + 2, stage + 3)]
    parts = [layers(r) for r in (ranges if interleaved else [range(2 * stage, 2 * stage + 2)])]
    for part in parts:
        fsdp2(part, *part.children(), mesh=mesh["dp"])
    if interleaved:
        return {"model": parts, "optimizer": [optimizer_of([part]) for part in parts]}
    return {"model": parts[0], "optimizer": optimizer_of(parts)}


def cut_experts(mesh: Any) -> Experts:
    torch.manual_seed(8)
    model = Experts()
    for name, parameter in list(model.experts.named_parameters()):
        cut = distribute_tensor(parameter.data, mesh, [Shard(0)])
        setattr(model.experts, name, nn.Parameter(cut))
    return model


def with_experts(*, sharded_again: bool) -> dict[str, Any]:
    """Experts over `ep`, the rest over all ranks; sharded again, experts over `dp_mod_ep` too."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = cut_experts(grid["ep"])
    own = set(model.experts.parameters())
    if sharded_again:
        fully_shard(model.experts, mesh=grid["dp_mod_ep"])
        fully_shard(model, mesh=world)
    else:
        fully_shard(model, mesh=world, ignored_params=own)
    return {"model": model, "optimizer": optimizer_of([model])}


def with_experts_that_ddp_ignores() -> dict[str, Any]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))
    model = cut_experts(grid["ep"])
    names = [f"experts.{name}" for name, _ in model.experts.named_parameters()]
    parallel: Any = DistributedDataParallel
    parallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return {"model": parallel(model), "optimizer": optimizer_of([model])}


def plain(name: str = "") -> dict[str, Any]:
    """The whole model of a case, on one mesh of all ranks."""
    torch.manual_seed(9)
    model = Experts() if name.startswith("experts") else layers(range(4))
    fsdp2(model, *model.children())
    return {"model": model, "optimizer": optimizer_of([model])}


CASES: Mapping[str, Any] = {
    "pipeline": lambda: in_pipeline(interleaved=False),
    "interleaved": lambda: in_pipeline(interleaved=True),
    "experts": lambda: with_experts(sharded_again=False),
    "experts_again": lambda: with_experts(sharded_again=True),
    "experts_ddp": with_experts_that_ddp_ignores,
    "plain": plain,
}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def train(state: Mapping[str, Any], steps: int) -> None:
    """Steps with gradients that follow from the parameters, however these are sharded."""
    for _ in range(steps):
        for part, optimizer in zip(listed(state["model"]), listed(state["optimizer"]), strict=True):
            for parameter in part.parameters():
                parameter.grad = parameter.detach() * 0.5 + 0.25
            optimizer.step()
            optimizer.zero_grad()


def whole(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Gathers the parts that this rank has a share in."""
    found: dict[str, torch.Tensor] = {}
    for part, optimizer in zip(listed(state["model"]), listed(state["optimizer"]), strict=True):
        for name, parameter in getattr(part, "module", part).named_parameters():
            found[f"model.{name}"] = full(parameter)
            for key, value in optimizer.state[parameter].items():
                found[f"state.{name}.{key}"] = full(value)
    return found


def hyperparameters(state: Mapping[str, Any]) -> Iterator[Any]:
    for optimizer in listed(state["optimizer"]):
        for group in optimizer.param_groups:
            yield group["lr"], group["weight_decay"], group["betas"]


def say(text: str) -> None:
    sys.stdout.write(f"{text} {dist.get_rank()}\n")


def save(folder: Path, checkpointer: Checkpointer, cases: list[str]) -> None:
    for name in cases:
        state = CASES[name]()
        train(state, STEP)
        for optimizer in listed(state["optimizer"]):
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        assert not checkpointer.save(STEP, state, name=name).report(60).lost
        checkpointer.export(folder / f"export_{name}").result(60)
        mine = whole(state)
        if dist.get_rank() in {0, 2}:
            save_file(mine, folder / f"{name}_{dist.get_rank()}.safetensors")
        dist.barrier()


def truth(folder: Path, name: str) -> dict[str, torch.Tensor]:
    parts = [load_file(folder / f"{name}_{rank}.safetensors") for rank in (0, 2)]
    return {**parts[0], **parts[1]}


def compare(folder: Path, name: str, state: Mapping[str, Any], *, all_of: bool) -> None:
    expected, found = truth(folder, name), whole(state)
    if all_of:
        assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), (name, key)
    for lr, weight_decay, betas in hyperparameters(state):
        assert (lr, betas) == (0.5, (0.9, 0.999)), (name, lr, betas)
        assert weight_decay in {0.0, 0.1}


def resumed(checkpointer: Checkpointer, folder: Path, name: str, state: dict[str, Any]) -> None:
    for part in listed(state["model"]):
        for parameter in part.parameters():
            parameter.data.zero_()
    assert checkpointer.resume(state, folder=folder / "run" / name) == STEP
    say(f"RESUMED {name}")


def resume(folder: Path, checkpointer: Checkpointer, cases: list[str]) -> None:
    for name in cases:
        state = CASES[name]()
        resumed(checkpointer, folder, name, state)
        compare(folder, name, state, all_of=name.startswith("experts"))
    for name in [n for n in ("pipeline", "plain") if n in cases]:  # cut otherwise than when saved
        for other in sorted({"pipeline", "interleaved"} - {name}):
            state = CASES[other]()
            resumed(checkpointer, folder, name, state)
            compare(folder, name, state, all_of=False)


def here(folder: Path, checkpointer: Checkpointer, cases: list[str]) -> None:
    whole_models = [name for name in cases if name != "marked"]
    save(folder, checkpointer, whole_models)
    resume(folder, checkpointer, whole_models)
    if "marked" in cases:
        marks(folder, checkpointer)


def elsewhere(folder: Path, checkpointer: Checkpointer, cases: list[str]) -> None:
    for name in cases:
        state = plain(name)
        resumed(checkpointer, folder, name, state)
        compare(folder, name, state, all_of=True)
        groups = state["optimizer"].param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    if "pipeline" in cases:
        stock(folder)


def stock(folder: Path) -> None:
    """Loads a pipeline's optimizer with torch's own tools, flattened."""
    state = plain("pipeline")
    train(state, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = state["model"], state["optimizer"]
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.load({"optimizer": flat}, checkpoint_id=folder / "run" / "pipeline" / "optimizer_0")
    expected = truth(folder, "pipeline")
    for key, tensor in expected.items():
        if key.startswith("state."):
            assert torch.equal(full(flat[key]), tensor), key
    assert flat["param_groups.layer2.up.weight.lr"] == 0.5
    assert flat["param_groups.layer3.up.bias.weight_decay"] == 0.0
    say("STOCK")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    start()
    folder, action, *cases = Path(sys.argv[1]), *sys.argv[2:]
    with Checkpointer(folder / "run") as checkpointer:
        {"here": here, "elsewhere": elsewhere}[action](folder, checkpointer, cases)
    end()


if __name__ == "__main__":
    main()
