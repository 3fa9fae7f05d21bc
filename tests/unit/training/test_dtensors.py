"""Meshes of more dimensions than a test machine has cores, one rank after the other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.errors import UnsupportedError
from ckptkit.training.state.collect import bind
from ckptkit.training.state.pieces import Piece, select_owned
from tests.sampled import sampled

NAMES = ("rep", "shard", "tp")


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process one rank of a world whose collectives do nothing."""
    debug = importlib.import_module("torch.distributed.tensor.debug")
    debug._clear_sharding_prop_cache()  # it keeps meshes, with the coordinates of a rank before
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 12), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 1), nn.Linear(1, 9)
    )


def in_three_dimensions() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    module = network()
    plan: dict[str, Any] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    for layer in module.children():
        fully_shard(layer, mesh=mesh["rep", "shard"])
    return module


class Stage(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def in_stages() -> nn.Module:
    """Each coordinate of the first dimension has parameters of its own."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "shard"))
    stage = mesh.get_local_rank("stage")
    module = Stage()
    module.add_module(f"stage{stage}", network())
    fully_shard(module, mesh=mesh["shard"])
    return module


def owned_by_all(build: Callable[[], nn.Module], world_size: int) -> list[list[Piece]]:
    found = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            module = build()
            optimizer = torch.optim.AdamW(module.parameters())
            state: dict[str, Any] = {"model": module, "optimizer": optimizer}
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            bound = bind(state, layout="accelerate", rank=rank, world_size=world_size)
            pieces = bound.holdings(1).pieces
            found.append(
                [one for one, mine in zip(pieces, select_owned(pieces), strict=True) if mine]
            )
    return found


def in_stages_of_one_rank() -> nn.Module:
    """Each rank has a stage of its own, wrapped for no other reason than to tell so."""
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("stage", "alone"))
    module = Stage()
    module.add_module(f"stage{mesh.get_local_rank('stage')}", network())
    fully_shard(module, mesh=mesh["alone"])
    return module


def in_stages_of_ddp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "copies"))
    module = Stage()
    module.add_module(f"stage{mesh.get_local_rank('stage')}", network())
    parallel: Any = DistributedDataParallel
    wrapped: nn.Module = parallel(module, process_group=mesh["copies"].get_group(), init_sync=False)
    return wrapped


_TENSORS_OF = {
    in_three_dimensions: 10 * 4,
    in_stages: 2 * 10 * 4,
    in_stages_of_one_rank: 8 * 10 * 4,
    in_stages_of_ddp: 2 * 10 * 4,
}


@pytest.mark.parametrize("build", sampled(_TENSORS_OF, [in_stages_of_ddp]))
def test_each_element_has_one_owner(build: Callable[[], nn.Module]) -> None:
    counts: dict[str, torch.Tensor] = {}
    for pieces in owned_by_all(build, 8):
        for piece in pieces:
            count = counts.setdefault(piece.key, torch.zeros(piece.shape, dtype=torch.int))
            for place in piece.places:
                assert tuple(piece.local.shape) == place.sizes
                ranges = zip(place.offsets, place.sizes, strict=True)
                count[tuple(slice(start, start + size) for start, size in ranges)] += 1
    assert len(counts) == _TENSORS_OF[build]
    assert all(bool((count == 1).all()) for count in counts.values())


def test_stages_write_hyperparameters_of_their_own_parameters_each_once() -> None:
    keys: list[tuple[str | int, ...]] = []
    for rank in range(8):
        with as_rank(rank, 8):
            module = in_stages()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            state = {"model": module, "optimizer": optimizer}
            optimizer.state["count"] = 3  # type: ignore[index]  # beside those of parameters
            bound = bind(state, layout="accelerate", rank=rank, world_size=8)
            keys += [value.key_path for value in bound.holdings(1).objects]
    assert len(keys) == len(set(keys))
    names = [f"stage{stage}.{layer}.weight" for stage in (0, 1) for layer in range(5)]
    assert {("optimizer", "param_groups", name, "lr") for name in names} <= set(keys)
    assert ("optimizer", "state", "count") in keys


class Parts(nn.Module):
    """Experts on meshes of their own, between weights on all ranks."""


def with_experts() -> nn.Module:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))
    module = Parts()
    module.experts = nn.Parameter(distribute_tensor(torch.ones(6, 3), grid["ep"], [Shard(0)]))
    everywhere = init_device_mesh("cpu", (4,))
    module.other = nn.Parameter(distribute_tensor(torch.ones(8, 2), everywhere, [Shard(0)]))
    return module


def with_experts_that_ddp_ignores() -> nn.Module:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))
    module = Parts()
    module.experts = nn.Parameter(distribute_tensor(torch.ones(6, 3), grid["ep"], [Shard(0)]))
    for number in range(4):
        module.register_parameter(f"other{number}", nn.Parameter(torch.ones(8, 2)))
    parallel: Any = DistributedDataParallel
    parallel._set_params_and_buffers_to_ignore_for_model(module, ["experts"])
    wrapped: nn.Module = parallel(module, init_sync=False)
    return wrapped


@pytest.mark.parametrize("build", [with_experts, with_experts_that_ddp_ignores])
def test_experts_on_a_slice_of_a_mesh_are_written_once_by_one_of_their_copies(
    build: Callable[[], nn.Module],
) -> None:
    owners: dict[str, list[int]] = {}
    for rank in range(4):
        with as_rank(rank, 4):
            bound = bind({"model": build()}, layout="dcp", rank=rank, world_size=4)
            pieces = bound.pieces()
            for piece, mine in zip(pieces, select_owned(pieces), strict=True):
                if mine:
                    owners.setdefault(f"{piece.key} {piece.places[0].offsets}", []).append(rank)
    assert len(owners) == 2 + 4
    assert all(len(ranks) == 1 for ranks in owners.values()), owners
    assert {rank for ranks in owners.values() for rank in ranks} == {0, 1, 2, 3}


def test_a_part_that_is_no_block_is_refused() -> None:
    strided = importlib.import_module("torch.distributed.tensor.placement_types")
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        placement = strided._StridedShard(0, split_factor=2)
        weight = distribute_tensor(torch.ones(8, 2), mesh, [placement])
        module = nn.Linear(2, 8, bias=False)
        module.weight = nn.Parameter(weight)
        with pytest.raises(UnsupportedError, match="scatter"):
            bind({"model": module}, layout="dcp", rank=1, world_size=4).pieces()


def test_a_state_without_a_place_in_the_tensor_is_bound_to_its_rank() -> None:
    with as_rank(1, 2):
        module = nn.Linear(4, 6, bias=False)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["scales"] = torch.arange(7.0)
        state = {"model": module, "optimizer": optimizer}
        holdings = bind(state, layout="accelerate", rank=1, world_size=2).holdings(1)
    start = ("optimizer", "rank_bound", "1", "weight")
    (piece,) = (piece for piece in holdings.pieces if piece.key_path[:4] == start)
    assert piece.key_path[4:] == ("scales",)
    assert piece.shape == (7,)
    layout = next(o.value for o in holdings.objects if o.key_path[1:3] == ("rank_layout", "1"))
    facts = json.loads(str(layout))
    assert facts["world_size"] == 2
    assert facts["parameters"]["weight"]["places"] == [[[[3, 0], [3, 4]]]]
    assert facts["parameters"]["weight"]["kinds"] == [[["scales"], "Tensor"]]
