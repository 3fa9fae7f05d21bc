"""Modules that hold given tensors under given names, for loading into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def build_module(
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: str
) -> nn.Module:
    """Returns a module whose state dict has the tensors; floats are parameters."""
    root = nn.Module()
    for name, (shape, dtype) in specs.items():
        owner, (*path, last) = root, name.split(".")
        for step in path:
            owner = owner._modules.setdefault(step, nn.Module()) or owner
        # Not by the public methods, which refuse names such as `float` that modules have.
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[last] = tensor
    return root


def module_like(
    checkpoint: Any, device: str = "cpu", names: Iterable[str] | None = None
) -> nn.Module:
    """Returns a module with the tensors of an opened checkpoint, without their values."""
    return build_module(
        {
            n: (checkpoint.shape(n), getattr(torch, checkpoint.dtype(n)))
            for n in names or checkpoint
        },
        device,
    )


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two tensors have the same type, shape and bytes."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return all(
        torch.equal(*(side.contiguous().reshape(-1).view(torch.uint8) for side in (a, b)))
        for a, b in [(found.detach(), expected.detach())]
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns what of a tensor belongs to this rank, as torch cuts it."""
    if not isinstance(like, DTensor):
        return whole
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
