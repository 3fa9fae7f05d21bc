"""Two hundred tensors, split at random over random meshes by torch's own writer, come back whole.

What is drawn is drawn from a fixed seed; a failure names the tensor and how it was split. `make
differential` draws from other seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.differential.grids import compare_grids
from tests.property import random_meshes_run
from tests.property.random_meshes_run import SEED, WORLDS, checkpoints
from tests.ranks import RunRanks

CASES = checkpoints()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    """The checkpoints of all worlds; the program forks their ranks itself."""
    home = tmp_path_factory.mktemp("meshes")
    run_ranks(Path(random_meshes_run.__file__), 1, home, SEED)
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
    compare_grids(saved / folder, CASES[folder], tmp_path / "out")
