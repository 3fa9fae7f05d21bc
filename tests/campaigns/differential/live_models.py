"""Builds, wraps and trains the model of a draw on the ranks, and gathers it with torch alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.built_modules import local, part_of
from tests.campaigns.differential.draws import Draw, Mesh, Spec, Unit

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
EXPONENTS |= {torch.float64: 0x7FF0000000000000}


class Block(nn.Module):
    """Holds the tensors of a unit; the children that it gets later are called too."""

    def __init__(self, unit: Unit | None = None) -> None:
        super().__init__()
        for spec in unit.tensors if unit else ():
            tensor = random_tensor(spec)
            if spec.role == "parameter":
                trained = unit is not None and not unit.frozen
                self.register_parameter(spec.name, nn.Parameter(tensor, requires_grad=trained))
            else:
                self.register_buffer(spec.name, tensor, persistent=spec.role == "buffer")
        if unit and unit.tied:
            self.register_parameter(unit.tied, next(self.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self._parameters.values():
            if parameter is not None and parameter.requires_grad and parameter.numel():
                x = x + parameter.float().square().mean()
        for child in self.children():
            x = child(x)
        return x


class Keeper(Block):
    def __init__(self, unit: Unit | None = None) -> None:
        super().__init__(unit)
        self.held: Any = {"steps": 0, "list": [0, 0.0, ""]}

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


def random_tensor(spec: Spec) -> torch.Tensor:
    """Normal numbers where a parameter may be trained, else any bits."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype in EXPONENTS and spec.role == "parameter":
        return torch.randn(spec.shape, dtype=torch.float32).to(dtype)
    count = torch.Size(spec.shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return (bits & 1 if dtype is torch.bool else bits).view(dtype).reshape(spec.shape)


def build(draw: Draw, seed: int) -> Block:
    torch.manual_seed(seed)
    root = Block()
    for unit in draw.units:
        owner: nn.Module = root
        *parents, last = unit.path.split(".")
        for name in parents:
            if name not in owner._modules:
                owner.add_module(name, Block())
            owner = owner.get_submodule(name)
        owner.add_module(last, (Keeper if unit.extra else Block)(unit))
    return root


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Returns a mesh; groups have threads, so that there should not be many."""
    names = ("outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(model: nn.Module, draw: Draw, mesh: Mesh) -> nn.Module:
    if mesh.strategy == "ddp":
        if any(p.requires_grad for p in model.parameters()):
            return DistributedDataParallel(model, init_sync=False)
        return model
    if mesh.strategy == "fsdp1":
        return _fsdp1(model, draw, mesh)
    if mesh.strategy in ("tp", "fsdp2_tp"):
        parts = mesh_of(*mesh.shape)
        cut(model, parts if len(mesh.shape) == 1 else parts["inner"], draw)
    if mesh.strategy in ("fsdp2", "hsdp", "fsdp2_tp"):
        return _fsdp2(model, draw, mesh)
    return model


def cut(model: nn.Module, mesh: DeviceMesh, draw: Draw) -> None:
    """Spreads parameters as tensor parallelism does, by a dimension that follows from the name."""
    ignored = {one.path for one in draw.units if one.ignored}
    made: dict[int, nn.Parameter] = {}
    for path, owner in model.named_modules():
        if path in ignored:
            continue
        for name, parameter in list(owner._parameters.items()):
            assert parameter is not None
            if id(parameter) not in made:
                digest = zlib.crc32(f"{path}.{name}".encode())
                kinds = [Replicate(), *map(Shard, range(parameter.dim()))]
                placed = kinds[digest % len(kinds)]
                whole = distribute_tensor(parameter.data, mesh, [placed], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]


def _in_order(draw: Draw) -> list[Unit]:
    wrapped = [one for one in draw.units if one.wrapped and not one.ignored]
    return sorted(wrapped, key=lambda one: -one.path.count("."))


def _fsdp2(model: nn.Module, draw: Draw, mesh: Mesh) -> nn.Module:
    parts = mesh_of(*mesh.shape)
    if mesh.strategy == "fsdp2_tp":
        parts = parts["outer"]
    size = parts.size(parts.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        # FSDP2 does not cut a tensor without elements by another dimension than the first.
        if not parameter.numel() or not parameter.dim() or isinstance(parameter, DTensor):
            return None
        longest = max(range(parameter.dim()), key=lambda at: parameter.shape[at])
        return Shard(longest) if parameter.shape[longest] % size == 0 else None

    ignored = {
        p for one in draw.units if one.ignored for p in model.get_submodule(one.path).parameters()
    }
    settings: dict[str, Any] = {
        "mesh": parts,
        "reshard_after_forward": mesh.reshard,
        "ignored_params": ignored,
        "shard_placement_fn": place if mesh.largest else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if mesh.offload else OffloadPolicy(),
    }
    for unit in _in_order(draw):
        fully_shard(model.get_submodule(unit.path), **settings)
    sharded: Any = fully_shard(model, **settings)
    return sharded  # type: ignore[no-any-return]


def _fsdp1(model: nn.Module, draw: Draw, mesh: Mesh) -> nn.Module:
    ignored = [model.get_submodule(one.path) for one in draw.units if one.ignored]
    settings: dict[str, Any] = {
        "use_orig_params": mesh.original,
        "sharding_strategy": ShardingStrategy[mesh.fsdp1],
        "device_id": torch.device("cpu"),
        "ignored_modules": ignored,
        "cpu_offload": CPUOffload(offload_params=mesh.offload),
    }
    if mesh.device_mesh:
        settings["device_mesh"] = mesh_of(*mesh.shape)
    for unit in _in_order(draw):
        owner, _, last = unit.path.rpartition(".")
        parent = model.get_submodule(owner)
        parent._modules[last] = FullyShardedDataParallel(parent.get_submodule(last), **settings)
    return FullyShardedDataParallel(model, **settings)


@dataclass
class Training:
    draw: Draw
    mesh: Mesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    progress: dict[str, Any]

    def state(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        return found if self.scheduler is None else found | {"scheduler": self.scheduler}


def make_model(draw: Draw, mesh: Mesh, seed: int) -> nn.Module:
    """Builds the model for filling; on the meta device where the mesh says so and that can be."""
    transient = any(spec.role == "transient" for unit in draw.units for spec in unit.tensors)
    if mesh.meta and not transient:
        with torch.device("meta"):
            return wrap(build(draw, seed), draw, mesh)
    return wrap(build(draw, seed), draw, mesh)


def make_training(draw: Draw, mesh: Mesh, seed: int) -> Training:
    model = wrap(build(draw, seed), draw, mesh)
    groups: dict[int, list[nn.Parameter]] = {}
    number_of = {one.path: one.group for one in draw.units}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path = clean(name).rpartition(".")[0]
            groups.setdefault(number_of.get(path, 0), []).append(parameter)
    listed: Any = [
        {"params": groups[number], "weight_decay": 0.01 * (1 + number)} for number in sorted(groups)
    ]
    optimizer = getattr(torch.optim, draw.optimizer)(listed, **draw.settings)
    return Training(draw, mesh, model, optimizer, _scheduler(draw, optimizer), {"tokens": 0})


def clean(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def _scheduler(draw: Draw, optimizer: torch.optim.Optimizer) -> Any:
    kinds = torch.optim.lr_scheduler
    match draw.scheduler:
        case "StepLR":
            return kinds.StepLR(optimizer, 2)
        case "MultiStepLR":
            return kinds.MultiStepLR(optimizer, [1, 1, 3])
        case "LambdaLR":
            return kinds.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        case "CosineAnnealingLR":
            return kinds.CosineAnnealingLR(optimizer, 7)
        case "OneCycleLR":
            momentum = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
            return kinds.OneCycleLR(
                optimizer, 0.3, total_steps=20, cycle_momentum=momentum and _cycles(optimizer)
            )
    return None


def _cycles(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("momentum") or optimizer.defaults.get("betas"))


def train(training: Training, steps: int) -> None:
    """Takes steps, and then puts NaN payloads, -0.0, infinities and tiny numbers everywhere."""
    for _ in range(steps):
        take_step(training)
    training.progress["tokens"] += 7 * steps
    training.progress["seen"] = [steps, {"a": 0.5}, None]
    for module in training.model.modules():
        if isinstance(module, Keeper):
            module.held = {"steps": steps, "list": [1, 2.5, "x"]}
    held = [value for state in training.optimizer.state.values() for value in state.values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor) and value.dim()]
    with torch.no_grad():
        for tensor in (*(p.data for p in training.model.parameters()), *tensors):
            poison(local(tensor))


def take_step(training: Training) -> None:
    for parameter in training.model.parameters():
        soothe(local(parameter.data))
    if training.draw.real and _can_pass(training):
        training.model(torch.ones(2)).sum().backward()
    else:
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() * 0.5 + 0.01
    training.optimizer.step()
    training.optimizer.zero_grad()
    if training.scheduler is not None:
        training.scheduler.step()


def _can_pass(training: Training) -> bool:
    if training.mesh.strategy not in ("fsdp1", "fsdp2", "hsdp", "ddp", "plain"):
        return False
    trained = [one for one in training.draw.units if not one.frozen]
    specs = [spec for one in trained for spec in one.tensors if spec.role == "parameter"]
    dtypes = {spec.dtype for one in training.draw.units for spec in one.tensors}
    return bool(specs) and all(0 not in spec.shape for spec in specs) and dtypes <= {"float32"}


def soothe(tensor: torch.Tensor) -> None:
    """Makes the numbers finite and small again, without sending any."""
    if tensor.is_floating_point() and tensor.dtype in EXPONENTS:
        tensor.nan_to_num_(0.25, 1.0, -1.0).clamp_(-2.0, 2.0)


def poison(tensor: torch.Tensor) -> None:
    """Changes some elements by their own bits, so that replicas stay equal."""
    if tensor.dtype not in EXPONENTS or not tensor.numel():
        return
    bits = tensor.view(INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    chosen = (bits * 0x6D2B + 0x3D) >> 5 & 31
    exponent = EXPONENTS[tensor.dtype]
    bits.copy_(torch.where(chosen == 0, bits | exponent, bits))  # NaN with a payload, or infinity
    sign = torch.full_like(bits, -(1 << width - 1))
    bits.copy_(torch.where(chosen == 1, sign, bits))  # -0.0
    bits.copy_(torch.where(chosen == 2, bits & ~exponent, bits))  # too small to be normal


Truth = dict[str, Any]


def gather_model(model: nn.Module, mesh: Mesh) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the whole tensors of a model, and its extra states."""
    whole = StateDictOptions(full_state_dict=mesh.strategy == "fsdp1")
    weights = get_model_state_dict(model, options=whole)
    return gather_tensors(weights), {
        k: v for k, v in weights.items() if not isinstance(v, torch.Tensor)
    }


def gather(training: Training) -> Truth:
    """Returns the whole state, gathered by torch; the same on all ranks."""
    tensors, extra = gather_model(training.model, training.mesh)
    held: Any = {"state": {}, "param_groups": []}
    if training.optimizer.state:
        whole = StateDictOptions(full_state_dict=training.mesh.strategy == "fsdp1")
        held = get_optimizer_state_dict(training.model, training.optimizer, options=whole)
    states = {
        f"{name}/{key}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, values in held["state"].items()
        for key, value in values.items()
    }
    own = training.scheduler.state_dict() if training.scheduler is not None else {}
    return {
        "model": tensors,
        "extra": extra,
        "optimizer": gather_tensors(states),
        "groups": [{k: v for k, v in one.items() if k != "params"} for one in held["param_groups"]],
        "lr": [one["lr"] for one in training.optimizer.param_groups],
        "scheduler": own,
        "progress": dict(training.progress),
    }


def gather_tensors(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Puts the parts of all ranks together, by bytes; no element passes through arithmetic."""
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
            parts[name] = (part_of(numbers, tensor).flatten(), as_bits(tensor.to_local()))
        elif isinstance(tensor, torch.Tensor):
            plain[name] = tensor.detach().clone().contiguous()
    everywhere: list[Any] = [None] * dist.get_world_size()
    if any(isinstance(tensor, DTensor) for tensor in found.values()):
        dist.all_gather_object(everywhere, parts)
        for name in parts:
            whole = torch.empty((found[name].numel(), found[name].element_size())).byte()
            for of_rank in everywhere:
                where, bits = of_rank[name]
                whole[where] = bits
            plain[name] = whole.flatten().view(found[name].dtype).reshape(found[name].shape)
    return plain


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
