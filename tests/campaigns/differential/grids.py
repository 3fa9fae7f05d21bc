"""Tensors of all element types, split at random over random meshes of up to eight ranks by torch.

`tests/property/random_meshes_run.py` draws and saves them; a test compares those of one seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import ckptkit
from tests.campaigns.differential.offline import load_folder
from tests.campaigns.differential.readers import Compared, UnequalError, compare_one
from tests.property.random_meshes_run import Case

ROOT = Path(__file__).resolve().parents[3]


def save_grids(home: Path, seed: int) -> None:
    """Saves the checkpoints of a seed, by processes that speak gloo to each other."""
    program = "tests.property.random_meshes_run"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program, str(home), str(seed)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=300,
    )


def compare_grids(source: Path, cases: Sequence[Case], out: Path) -> Compared:
    """Consolidates a checkpoint, opens it, and compares with the whole tensors.

    safetensors has no type for the widest complex numbers; those are read one by one.
    """
    wide = [one for one in cases if one.full.dtype is torch.complex128]
    others = [one for one in cases if one.full.dtype is not torch.complex128]
    ckptkit.consolidate(source, out, names="live", exclude=[one.name for one in wide])
    found = load_folder(out)
    if found.keys() != {one.name for one in others}:
        raise UnequalError(f"{source}: other names were written")
    size = sum(compare_one(found[one.name], one.full, str(one)) for one in others)
    with ckptkit.open(source) as checkpoint:
        for one in [*wide, *others[:3]]:
            size += compare_one(checkpoint[one.name], one.full, str(one))
    if not ckptkit.verify(source).ok:
        raise UnequalError(f"{source}: not proven")
    return len(cases), size
