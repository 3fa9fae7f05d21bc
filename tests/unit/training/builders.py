"""What tests of saving share: a process group of one rank, wrappers, and what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptkit
from ckptkit.core.index import Box
from ckptkit.training.state.collect import BoundState, Layout, bind
from ckptkit.training.state.pieces import Piece


@contextmanager
def one_rank() -> Iterator[None]:
    """Makes this process a process group of its own."""
    stores: Any = dist  # its stubs name no store
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def by_fsdp1(model: nn.Module, *, use_orig_params: bool = True, **options: Any) -> Any:
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, device_id=device, use_orig_params=use_orig_params, **options
    )


def bound_alone(state: Mapping[str, Any], layout: Layout = "dcp") -> BoundState:
    return bind(state, layout=layout, rank=0, world_size=1)


def whole_piece(name: str, local: torch.Tensor, unit: str = "model_0", **more: Any) -> Piece:
    """A tensor of a model, all of it on this rank."""
    shape = tuple(local.shape)
    place = Box((0,) * len(shape), shape)
    return Piece(unit, ("model", name), shape, (place,), local, **more)


def stock_load(data: bytes) -> Any:
    return torch.load(BytesIO(data), weights_only=True)  # noqa: TID251  torch is the oracle


def content(step: Path) -> dict[str, torch.Tensor]:
    """The tensors of a step, read by other means than a resume."""
    with ckptkit.open(step) as checkpoint:
        return {name: checkpoint[name].clone() for name in checkpoint.keys()}  # noqa: SIM118


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
