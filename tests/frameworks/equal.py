"""Loads two steps with torch alone, and compares all that is in them: `equal.py STEP STEP`.

Of values that are no tensors, types are compared: clocks and names of runs are among them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def load(folder: Path) -> dict[str, Any]:
    """Returns what is in a folder, flat, as torch's own converter loads it."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    planner.flatten_state_dict = True
    reader = FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return flat(state, "")


def flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= flat(inner, f"{name}.{key}")
        return found
    return {name: value}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main(a: Path, b: Path) -> None:
    assert "ckptkit" not in sys.modules
    tensors = values = 0
    parts = [path.parent.relative_to(b) for path in b.rglob(".metadata")]
    assert parts
    for part in parts:
        ours, stock = load(a / part), load(b / part)
        assert ours.keys() == stock.keys(), ours.keys() ^ stock.keys()
        for name, value in stock.items():
            if isinstance(value, torch.Tensor):
                found = ours[name]
                assert (found.dtype, found.shape) == (value.dtype, value.shape), name
                assert torch.equal(bits(found), bits(value)), name
                tensors += 1
            else:
                assert type(ours[name]) is type(value), name
                values += 1
    print(f"{tensors} tensors equal, {values} values")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
