"""Safetensors shards as torch's HuggingFaceStorageWriter writes them, with pieces of our choice."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Pieces = dict[str, tuple[torch.Tensor, list[int]]]

HALVES: list[Pieces] = [
    {"w": (torch.ones(2, 3), [0, 0]), "gain": (torch.tensor(3.25), [])},
    {"w": (torch.full((2, 3), 2.0), [2, 0])},
]
WHOLE = torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)])


def shard_name(rank: int, model_file: int = 1, of: int = 1) -> str:
    return f"shard-{rank:05d}-model-{model_file:05d}-of-{of:05d}.safetensors"


def write_shards(
    folder: Path, ranks: list[Pieces], *, model_file: int = 1, of: int = 1, first: int = 1
) -> None:
    """Writes one shard for each rank, the first of which has the number `first`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, pieces in enumerate(ranks, start=first):
        places = {name: {"saved_offsets": offsets} for name, (_, offsets) in pieces.items()}
        save_file(
            {name: tensor for name, (tensor, _) in pieces.items()},
            folder / shard_name(rank, model_file, of),
            {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
        )


def with_metadata(file: Path, **changes: Any) -> None:
    """Changes texts of a header; None takes one out."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    texts = header["__metadata__"] | changes
    header["__metadata__"] = {name: text for name, text in texts.items() if text is not None}
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
