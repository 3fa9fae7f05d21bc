"""Makes the `.metadata` of a large run without the run: torch's classes, and files of holes.

Usage: python benchmarks/make_metadata.py OUT --ranks 1024 --tensors 2000
"""

from __future__ import annotations

import argparse
import gc
import pickle
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


def _rows(tensor: int) -> int:
    return 1 + tensor % 5


def _name(tensor: int) -> str:
    layer, part = divmod(tensor, len(_LAYER))
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _tensor(tensor: int, ranks: int) -> TensorStorageMetadata:
    rows = _rows(tensor)
    chunks = [
        ChunkStorageMetadata(torch.Size((rank * rows, 0)), torch.Size((rows, _COLUMNS)))
        for rank in range(ranks)
    ]
    properties = TensorProperties(dtype=torch.float32)
    return TensorStorageMetadata(properties, torch.Size((rows * ranks, _COLUMNS)), chunks)


def _write_files(out: Path, ranks: int, tensors: int) -> dict[MetadataIndex, _StorageInfo]:
    """Makes one file of holes per rank, and says where in it the tensors would lie."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(ranks):
        path, at = f"__{rank}_0.distcp", 0
        for tensor in range(tensors):
            length = _rows(tensor) * _COLUMNS * 4 + _OVERHEAD_BYTES
            # Names of their own, as in a real save, where they arrive from every rank.
            key = f"model.{_name(tensor)}"
            index = MetadataIndex(key, torch.Size((rank * _rows(tensor), 0)), rank)
            places[index] = _StorageInfo(path, at, length)
            at += length
        with (out / path).open("wb") as file:
            file.truncate(at)
    return places


def make_metadata(out: Path, ranks: int, tensors: int) -> None:
    """Writes `.metadata` and the files it speaks of into a new folder."""
    out.mkdir(parents=True)
    gc.disable()  # millions of objects, none of them garbage
    entries = {f"model.{_name(tensor)}": _tensor(tensor, ranks) for tensor in range(tensors)}
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data={name: tuple(name.split(".", 1)) for name in entries},
        storage_data=_write_files(out, ranks, tensors),
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
    make_metadata(options.out, options.ranks, options.tensors)


if __name__ == "__main__":
    main()
