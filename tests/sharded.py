"""Checkpoints of several ranks as torch.distributed.checkpoint writes them, made in one process."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, DcpTensor, Place, make_metadata


def write_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: int) -> None:
    """Writes tensors in as many shards of rows as there are ranks, each as `torch.save` has it."""
    folder.mkdir(parents=True)
    files = [bytearray() for _ in range(ranks)]
    stored = [_stored(key, tensor, files) for key, tensor in tensors.items()]
    for rank, data in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(data)
    (folder / METADATA_NAME).write_bytes(make_metadata(stored, []))


def _stored(key: str, tensor: torch.Tensor, files: list[bytearray]) -> DcpTensor:
    rows = math.ceil(tensor.shape[0] / len(files))
    places: list[Place] = []
    for rank, data in enumerate(files):
        chunk = tensor[rank * rows : (rank + 1) * rows].clone()
        if chunk.numel():
            saved = io.BytesIO()
            torch.save(chunk, saved)
            offsets = (rank * rows, *[0] * (tensor.dim() - 1))
            place = (offsets, tuple(chunk.shape), f"__{rank}_0.distcp", len(data), saved.tell())
            places.append(place)
            data.extend(saved.getvalue())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return DcpTensor((key,), dtype, tuple(tensor.shape), tuple(places))
