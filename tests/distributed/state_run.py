"""Compares what the ranks hold, found in silence, with what torch gathers; run by torchrun."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckptkit.training.state.collect import bind
from ckptkit.training.state.pieces import Holdings, Piece, select_owned
from tests.distributed import cases
from tests.distributed.cases import FULL, end, grid, nobody_talks, start

Built = tuple[nn.Module, torch.optim.Optimizer]
Scenario = Callable[[], Built]


class Odd(nn.Module):
    """Sizes that divide by nothing, four dimensions, a scalar, a buffer, frozen weights, ties."""

    def __init__(self, *, scalar: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.first = nn.Linear(33, 65)
        self.norm = nn.BatchNorm1d(65, affine=False)
        self.module = nn.Sequential(nn.Linear(65, 7), nn.Linear(7, 33, bias=False))
        self.small = nn.Linear(65, 1)
        self.frozen = nn.Linear(65, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 33, bias=False)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if tied:
            self.head.weight = self.module.get_parameter("1.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        hidden = self.norm(first.float()).to(first.dtype)
        inner = self.module[0](hidden)
        out: torch.Tensor = self.module[1](inner).sum() + self.head(inner).square().sum()
        out += self.small(hidden).sum() + self.frozen(hidden).sum()
        image = torch.ones(1, 3, 5, 5, dtype=self.conv.weight.dtype)
        loss: torch.Tensor = out * getattr(self, "scale", 1.0) + self.conv(image).sum()
        return loss


def model(**options: bool) -> Odd:
    torch.manual_seed(0)
    return Odd(**options)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int = 4) -> Built:
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        module(torch.randn(batch, 33)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def fsdp2(*, mesh: Any = None, tied: bool = False, **options: Any) -> nn.Module:
    module = model(tied=tied)
    return cases.fsdp2(module, module.first, module.module[0], module.small, mesh=mesh, **options)


def fsdp1(
    strategy: str,
    *,
    original: bool,
    nested: bool = True,
    tied: bool = False,
    **options: Any,
) -> FullyShardedDataParallel:
    module = model(tied=tied)
    if not original:
        module.frozen.requires_grad_(True)
    if strategy.lstrip("_").startswith("HYBRID") and "device_mesh" not in options:
        options["process_group"] = groups_of_two()
    policy = ModuleWrapPolicy({nn.Linear}) if nested else None
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        **options,
    )


def meshed_fsdp1(strategy: str, *, original: bool) -> nn.Module:
    hybrid = strategy == "HYBRID_SHARD"
    mesh = init_device_mesh("cpu", (2, 2) if hybrid else (dist.get_world_size(),))
    return fsdp1(strategy, original=original, device_mesh=mesh)


def ignoring() -> nn.Module:
    module = model()
    return FullyShardedDataParallel(
        module,
        use_orig_params=True,
        ignored_modules=[module.small],
        device_id=torch.device("cpu"),
    )


def groups_of_two() -> tuple[Any, Any]:
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // 2], between[rank % 2]


def with_adamw(build: Callable[[], nn.Module]) -> Scenario:
    def scenario() -> Built:
        module = build()
        return trained(module, adamw(module))

    return scenario


def after_evaluation(build: Callable[[], nn.Module]) -> Scenario:
    def scenario() -> Built:
        module = build()
        built = trained(module, adamw(module))
        module.eval()
        with torch.no_grad():
            module(torch.randn(4, 33))
        return built

    return scenario


def with_sgd(build: Callable[[], nn.Module], **options: Any) -> Scenario:
    def scenario() -> Built:
        module = build()
        return trained(module, torch.optim.SGD(module.parameters(), **options))

    return scenario


def tensor_lr() -> Built:
    module = fsdp2()
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-2), foreach=False)
    return trained(module, optimizer)


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model(scalar=True, **options))


def compiled_and_checkpointed() -> Built:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = model()
    module.module[0] = checkpoint_wrapper(module.module[0])
    fully_shard(module.module[0])
    fully_shard(module)
    optimizer = adamw(module)
    trained(module, optimizer)
    return torch.compile(module), optimizer  # type: ignore[return-value]


def channels_last(*, original: bool) -> Built:
    wrapped = FullyShardedDataParallel(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, (3, 1))).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for _ in range(2):
        wrapped(torch.randn(1, 3, 6, 6)).sum().backward()
        optimizer.step()
    return wrapped, optimizer


def hsdp() -> nn.Module:
    return fsdp2(mesh=grid())


def fsdp_and_tp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(
        nn.Linear(33, 66), nn.ReLU(), nn.Linear(66, 10), nn.LayerNorm(10), nn.Linear(10, 1)
    )
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    for layer in module:
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return module


def summed(build: Callable[[], nn.Module]) -> Scenario:
    def scenario() -> Built:
        torch.manual_seed(0)
        module = build()
        optimizer = adamw(module)
        for step in range(2):
            torch.manual_seed(step)
            module(torch.randn(4, 33)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return module, optimizer

    return scenario


def both(name: str, **options: Any) -> Iterator[tuple[str, Scenario]]:
    for original in (True, False):
        label = f"{name} original={original} {sorted(options)}"
        yield label, with_adamw(partial(fsdp1, name, original=original, **options))


def on_two() -> dict[str, Scenario]:
    bf16 = MixedPrecision(torch.bfloat16, torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    named: list[tuple[str, Scenario]] = [
        ("fsdp2", with_adamw(fsdp2)),
        ("fsdp2 tied", with_adamw(lambda: fsdp2(tied=True))),
        ("fsdp2 bf16", with_adamw(lambda: fsdp2(mp_policy=policy))),
        ("fsdp2 offloaded", with_adamw(lambda: fsdp2(offload_policy=CPUOffloadPolicy(False)))),
        ("fsdp2 evaluated", after_evaluation(fsdp2)),
        ("fsdp2 sgd", with_sgd(fsdp2, lr=0.1)),
        ("fsdp2 momentum", with_sgd(fsdp2, lr=0.1, momentum=0.9)),
        ("fsdp2 tensor lr", tensor_lr),
        ("compiled", compiled_and_checkpointed),
        ("ddp", with_adamw(ddp)),
        ("ddp tied", with_adamw(lambda: ddp(tied=True))),
        ("fsdp1 sgd", with_sgd(lambda: fsdp1("FULL_SHARD", original=True), lr=0.1)),
        *both("FULL_SHARD"),
        *both("FULL_SHARD", nested=False, tied=True),
        *both("SHARD_GRAD_OP", mixed_precision=bf16),
        *both("NO_SHARD"),
        ("FULL_SHARD ignoring", with_adamw(ignoring)),
    ]
    for original in (True, False):
        build = partial(fsdp1, "SHARD_GRAD_OP", original=original)
        named.append((f"SHARD_GRAD_OP evaluated {original}", after_evaluation(build)))
        named.append((f"channels last {original}", partial(channels_last, original=original)))
        meshed = partial(meshed_fsdp1, "FULL_SHARD", original=original)
        named.append((f"FULL_SHARD meshed {original}", with_adamw(meshed)))
    return dict(named)


def on_four() -> dict[str, Scenario]:
    named: list[tuple[str, Scenario]] = [
        ("hsdp", with_adamw(hsdp)),
        ("fsdp and tp", summed(fsdp_and_tp)),
        *both("FULL_SHARD"),
        *both("HYBRID_SHARD"),
        ("HYBRID_SHARD meshed", with_adamw(partial(meshed_fsdp1, "HYBRID_SHARD", original=True))),
        *both("_HYBRID_SHARD_ZERO2"),
    ]
    return dict(named)


def boxes(piece: Piece) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    at = 0
    for place in piece.places:
        where = tuple(slice(o, o + s) for o, s in zip(place.offsets, place.sizes, strict=True))
        if len(piece.places) == 1:
            assert tuple(piece.local.shape) == place.sizes, piece.key
            yield where, piece.local
        else:
            count = math.prod(place.sizes)
            yield where, piece.local[at : at + count].view(place.sizes)
            at += count


def gathered(holdings: Holdings) -> dict[str, dict[str, Any]]:
    """Puts the parts that the ranks own together, and counts how often each element is there."""
    mine = [
        (p.unit, [".".join(map(str, path)) for path in (p.key_path, *p.aliases)], p.shape, where,
         local.detach().clone().contiguous())
        for p, here in zip(holdings.pieces, select_owned(holdings.pieces), strict=True)
        if here
        for where, local in boxes(p)
    ]  # fmt: skip
    objects = [(v.unit, ".".join(map(str, v.key_path)), v.value) for v in holdings.objects]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (mine, objects))
    found: dict[str, dict[str, Any]] = {}
    counts: dict[tuple[str, str], torch.Tensor] = {}
    for unit, keys, shape, where, local in itertools.chain(*(tensors for tensors, _ in parts)):
        for key in keys:
            full = found.setdefault(unit, {}).setdefault(key, torch.zeros(shape, dtype=local.dtype))
            count = counts.setdefault((unit, key), torch.zeros(shape, dtype=torch.int))
            full[where] = local
            count[where] += 1
    for key, count in counts.items():
        assert bool((count == 1).all()), (key, count)
    for unit, name, value in itertools.chain(*(values for _, values in parts)):
        assert name not in found.setdefault(unit, {}), name
        found[unit][name] = value
    return found


def compare(label: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    assert not missing, (label, "missing", missing)
    assert not extra, (label, "extra", extra)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, (label, key, found[key].dtype, value.dtype)
            assert torch.equal(found[key], value), (label, key, found[key], value)
        else:
            assert found[key] == value, (label, key, found[key], value)


def perturb(pieces: Sequence[Piece]) -> None:
    """Changes the state in the memory that the pieces name, as a step or a resume does."""
    with torch.no_grad():
        for piece in pieces:
            piece.local.add_(1)


def check(label: str, scenario: Scenario) -> None:
    module, optimizer = scenario()
    rank, world = dist.get_rank(), dist.get_world_size()
    bound = bind(
        {"model": module, "optimizer": optimizer}, layout="accelerate", rank=rank, world_size=world
    )
    with nobody_talks(stores=True):
        holdings = bound.holdings(7)
    if "evaluated" not in label:  # there, what torch gathers is what was whole before
        perturb(holdings.pieces)
    with nobody_talks(stores=True):
        again = bound.holdings(8)
        targets = bound.pieces()
    for one, two in zip(holdings.pieces, again.pieces, strict=True):
        assert one.origin is two.origin or "param_groups" in one.key_path, label
    # Tensors in groups are restored as values.
    cut = [piece for piece in again.pieces if "param_groups" not in piece.key_path]
    for one, two in zip(cut, targets, strict=True):
        assert one.key_path == two.key_path, label
        assert one.local.data_ptr() == two.local.data_ptr(), label
    found = gathered(again)
    model_state = get_model_state_dict(module, options=FULL)
    state = get_optimizer_state_dict(module, optimizer, options=FULL)
    if rank == 0:  # the statistics of batch norm differ from rank to rank
        model_keys = flatten_state_dict({"model": model_state})[0]
        compare(label, found["pytorch_model_fsdp_0"], model_keys)
        compare(label, found["optimizer_0"], flatten_state_dict({"optimizer": state})[0])


def check_that_silence_bites() -> None:
    flat, sharded = fsdp1("FULL_SHARD", original=True), fsdp2()
    weight: Any = sharded.get_parameter("conv.weight")
    for loud in (dist.barrier, flat.state_dict, weight.full_tensor):
        with pytest.raises(AssertionError, match=r"communicates|collective"), nobody_talks():
            loud()


def main() -> None:
    start()
    check_that_silence_bites()
    scenarios = on_two() if dist.get_world_size() == 2 else on_four()
    for label, scenario in scenarios.items():
        if len(sys.argv) < 2 or any(word in label for word in sys.argv[1:]):
            check(label, scenario)
            if dist.get_rank() == 0:
                sys.stdout.write(f"agrees: {label}\n")
                sys.stdout.flush()
    end()


if __name__ == "__main__":
    main()
