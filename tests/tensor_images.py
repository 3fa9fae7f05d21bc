"""Tensors as values that are equal where element types, shapes and all bits are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of all safetensors files of a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def stored_in_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint, as torch's own reader assembles them."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state
