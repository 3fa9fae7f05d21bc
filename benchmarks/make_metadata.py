"""Makes the `.metadata` of a large run without the run: torch's classes, and files of holes.

Usage: python benchmarks/make_metadata.py OUT --ranks 1024 --tensors 2000
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_COLUMNS = 1024
_OVERHEAD_BYTES = 1577  # of a torch.save archive around one tensor
_LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_norm")

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(tensors: int, ranks: int) -> Shapes:
    """Returns that many small tensors of which every rank has a few rows."""
    shapes = {}
    for tensor in range(tensors):
        layer, part = divmod(tensor, len(_LAYER))
        name = f"model.layers.{layer}.{_LAYER[part]}.weight"
        shapes[name] = ((1 + tensor % 5) * ranks, _COLUMNS)
    return shapes


def _rows(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yields rank, first row and rows of each rank that has any, as `torch.chunk` deals them."""
    each = -(-shape[0] // ranks)
    for rank in range(ranks):
        low = rank * each
        if low < shape[0]:
            yield rank, low, min(each, shape[0] - low)


def _tensor(shape: tuple[int, ...], ranks: int) -> TensorStorageMetadata:
    rest = shape[1:]
    chunks = [
        ChunkStorageMetadata(torch.Size((low, *(0 for _ in rest))), torch.Size((rows, *rest)))
        for _, low, rows in _rows(shape, ranks)
    ]
    properties = TensorProperties(dtype=torch.float32)
    return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _write_files(out: Path, ranks: int, shapes: Shapes) -> dict[MetadataIndex, _StorageInfo]:
    """Makes one file of holes per rank, and says where in it the tensors would lie."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    sizes = [0] * ranks
    for name, shape in shapes.items():
        row_bytes = 4 * math.prod(shape[1:])
        for rank, low, rows in _rows(shape, ranks):
            length = rows * row_bytes + _OVERHEAD_BYTES
            # Names of their own, as in a real save, where they arrive from every rank.
            key, offset = f"model.{name}", (low, *(0 for _ in shape[1:]))
            index = MetadataIndex(key, torch.Size(offset), rank)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", sizes[rank], length)
            sizes[rank] += length
    for rank, size in enumerate(sizes):
        with (out / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(size)
    return places


def make_metadata(out: Path, ranks: int, shapes: Shapes) -> None:
    """Writes `.metadata` and the files it speaks of into a new folder."""
    out.mkdir(parents=True)
    gc.disable()  # millions of objects, none of them garbage
    entries = {f"model.{name}": _tensor(shape, ranks) for name, shape in shapes.items()}
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data={name: tuple(name.split(".", 1)) for name in entries},
        storage_data=_write_files(out, ranks, shapes),
        storage_meta=StorageMeta(checkpoint_id=str(out), save_id="benchmark"),
    )
    metadata.version = "1.0.0"
    with (out / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    options = parser.parse_args()
    shapes = shapes_of(options.tensors, options.ranks)
    make_metadata(options.out, options.ranks, shapes)


if __name__ == "__main__":
    main()
