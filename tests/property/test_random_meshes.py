"""Two hundred tensors, split at random over random meshes by torch's own writer, come back whole.

What is drawn is drawn from a fixed seed; a failure names the tensor and how it was split.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from tests.property.random_meshes_run import WORLDS, Case, checkpoints

CASES = checkpoints()


def image_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The checkpoints, saved by processes that speak gloo to each other."""
    home = tmp_path_factory.mktemp("meshes")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.property.random_meshes_run", str(home)],
        cwd=repository,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=120,
    )
    return home


def test_there_are_two_hundred_cases_of_many_kinds() -> None:
    cases = [one for held in CASES.values() for one in held]
    assert len(cases) == sum(count for count, _ in WORLDS.values()) == 200
    assert len({one.full.dtype for one in cases}) == 20
    assert {one.mesh.ndim for one in cases} == {1, 2, 3}
    assert {one.full.ndim for one in cases} == {0, 1, 2, 3, 4}
    kinds = {type(placement).__name__ for one in cases for placement in one.placements}
    assert kinds == {"Shard", "Replicate", "_StridedShard"}


@pytest.mark.parametrize("folder", CASES)
def test_a_tensor_split_over_any_mesh_is_bit_equal_to_the_whole(
    folder: str, saved: Path, tmp_path: Path
) -> None:
    # safetensors has no type for the widest complex numbers; those are read one by one.
    wide = [one for one in CASES[folder] if one.full.dtype is torch.complex128]
    others = [one for one in CASES[folder] if one.full.dtype is not torch.complex128]
    ckptkit.consolidate(
        saved / folder, tmp_path / "out", names="live", exclude=[one.name for one in wide]
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {one.name for one in others}
    for one in others:
        check(one, found[one.name])
    with ckptkit.open(saved / folder) as checkpoint:
        for one in [*wide, *others[:3]]:
            check(one, checkpoint[one.name])
    assert ckptkit.verify(saved / folder).ok


def check(one: Case, found: torch.Tensor) -> None:
    assert image_of(found) == image_of(one.full), one
