"""Local checkpoints of nvidia-resiliency-ext, whose manager wrote them on two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptkit
from tests.live_truth import FIXTURES, copied, refuse, truth_of, written

CASE = "nvrx_local_fsdp2"
NAME = "iter_0000020_{}_local.pt"


@pytest.mark.parametrize("below", ["", "job_7"])
def test_the_folders_of_ranks_are_one_step(below: str, tmp_path: Path) -> None:
    source = FIXTURES / CASE / "checkpoint" / below
    assert written(source, tmp_path / "out") == truth_of(CASE)
    found = ckptkit.inspect(source)
    assert (found.step, found.world_size) == (20, 2)
    assert found.writer == "nvidia-resiliency-ext, one file a rank"
    assert ckptkit.verify(source).ok


def test_the_newest_iteration_is_taken_and_a_rank_of_another_one_is_missed(tmp_path: Path) -> None:
    run = copied(CASE, tmp_path / "run") / "job_7"
    for rank in (0, 1):
        file = run / str(rank) / NAME.format(rank)
        shutil.copy(file, file.with_name(file.name.replace("20", "10", 1)))
    assert ckptkit.inspect(run).step == 20
    (run / "1" / NAME.format(1)).unlink()
    assert "passed over" in " ".join(ckptkit.inspect(run).notes)
    (run / "1" / NAME.format(1).replace("20", "10", 1)).unlink()
    refuse("rank 1 of 2 are not there", run, tmp_path / "out")


def test_a_copy_of_another_ranks_file_is_taken_where_its_own_is_lost(tmp_path: Path) -> None:
    run = copied(CASE, tmp_path / "run")
    shutil.copy(run / "job_7" / "1" / NAME.format(1), run / "job_7" / "0")
    assert written(run, tmp_path / "with") == truth_of(CASE)
    (run / "job_7" / "1" / NAME.format(1)).unlink()
    assert written(run, tmp_path / "without") == truth_of(CASE)


@pytest.mark.parametrize("name", ["", NAME.format(1)])
def test_the_folder_of_one_rank_is_refused_and_the_hint_works(name: str, tmp_path: Path) -> None:
    run = copied(CASE, tmp_path / "run")
    caught = refuse("the folder of one rank", run / "job_7" / "1" / name, tmp_path / "out")
    proposed = str(caught.value.hint).rpartition(": ")[2]
    assert written(Path(proposed), tmp_path / "out") == truth_of(CASE)


def test_the_state_dict_of_another_class_is_refused_by_its_name(tmp_path: Path) -> None:
    run = copied(CASE, tmp_path / "run")
    for path in run.rglob("*.pt"):
        data = path.read_bytes()
        path.write_bytes(data.replace(b"BasicTensorAwareStateDict", b"OtherTensorAwareStateDict"))
    caught = refuse(None, run, tmp_path / "out")
    assert "OtherTensorAwareStateDict" in str(caught.value) or "CRC" in str(caught.value)


def test_plain_tensors_that_differ_between_ranks_are_no_replicas(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = tmp_path / "run" / str(rank)
        folder.mkdir(parents=True)
        torch.save({"model": {"a.weight": torch.full((3, 4), rank)}}, folder / NAME.format(rank))
    refuse("differ|other values|rank", tmp_path / "run", tmp_path / "out")
