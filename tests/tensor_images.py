"""Tensors as values that are equal where element types, shapes and all bits are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

Image = tuple[torch.dtype, tuple[int, ...], bytes]


def image_of(tensor: torch.Tensor) -> Image:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def images(tensors: Mapping[str, torch.Tensor] | Path) -> dict[str, Image]:
    """Returns the images of tensors, or of those in a safetensors file."""
    held = load_file(tensors) if isinstance(tensors, Path) else tensors
    return {name: image_of(tensor) for name, tensor in held.items()}


def same(one: Mapping[str, torch.Tensor] | Path, other: Mapping[str, torch.Tensor] | Path) -> bool:
    return images(one) == images(other)
