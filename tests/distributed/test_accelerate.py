"""accelerate with FSDP and without: what it saves and loads, saved and loaded by ckptkit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import ChecksumError
from tests.ranks import RankHost, RunRanks, make_runner

SCRIPT = Path(__file__).with_name("accelerate_run.py")
WHOLE = Path(__file__).with_name("accelerate_whole_run.py")
ZERO = Path(__file__).with_name("accelerate_zero_run.py")
# What accelerate imports when it prepares a model.
PREPARING = ("datasets", "deepspeed", "torchdata.stateful_dataloader")


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    """As that of all tests; accelerate and what it imports is imported once."""
    host = RankHost("accelerate", *PREPARING)
    yield make_runner(host)
    host.close()


@pytest.fixture(autouse=True)
def sharded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_saves_and_loads_mean_what_they_mean_in_accelerate(
    version: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    done = run_ranks(SCRIPT, 2, tmp_path, version)
    assert done.stdout.splitlines() == [
        "a job in bfloat16 was loaded before its first forward pass",
        "weights that accelerate has widened were loaded",
        "the first forward pass left them as they were",
        "the newest was loaded after its save",
        "the oldest went",
        "accelerate loaded what ckptkit wrote",
        "accelerate found the newest by itself",
        "an iteration that is there was refused",
        "ckptkit loaded what accelerate wrote",
        "a folder with a name of its own was loaded",
        "what ckptkit cannot save was saved by accelerate",
        "the accelerator's own methods go through ckptkit",
        "the model was written without a gather, beside a step and alone",
        "the whole state was put together without a gather",
        "a step was loaded that only the node's own disk had",
        "the end of the training told of a failure",
    ]
    assert "of_the_user holds notes.txt, which ckptkit did not write" in done.stderr
    assert done.stderr.count("accelerate itself saves") == 2
    assert "accelerate itself gathers" not in done.stderr
    assert done.stderr.count("from now on each save is waited for") == 1


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_without_sharding_are_those_of_accelerate(
    ranks: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    done = run_ranks(WHOLE, ranks, tmp_path)
    states = " ".join(f"random_states_{rank}.pkl" for rank in range(ranks))
    first, last = "custom_checkpoint_0.pkl dl_state_dict.bin", f"{states} scheduler.bin"
    assert done.stdout.splitlines() == [
        f"the files are those of accelerate: {first} model.safetensors optimizer.bin {last}",
        f"the files are those of accelerate: {first} optimizer.bin pytorch_model.bin {last}",
        "accelerate resumed from what ckptkit wrote",
        "what accelerate wrote was loaded",
        "the oldest went, and the newest was loaded after its save",
        "hooks and objects were saved as in accelerate",
        "what failed on one rank failed on all, and the next save went well",
        "accelerate itself saved where files would have to be cut",
        "accelerate itself saved to the directory that the program runs in",
        "steps were loaded that only the nodes' own disks had",
    ]
    assert done.stderr.count("accelerate itself saves") == 2
    for name in ("ours_True/model.safetensors", "ours_False/optimizer.bin"):
        file = tmp_path / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert not ckptkit.verify(file.parent).ok, name
    with pytest.raises(ChecksumError, match=r"ours_True/model\.safetensors"):
        ckptkit.consolidate(tmp_path / "ours_True", tmp_path / "made")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_kill_in_a_save_of_whole_files_leaves_the_step_before(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(WHOLE, 2, tmp_path, "dies", status=None)
    run = tmp_path / "checkpoints"
    assert [p.name for p in run.iterdir() if not p.name.startswith(".")] == ["checkpoint_0"]
    assert list(run.glob(".checkpoint_1*/optimizer.bin"))
    noted = (
        "dl_state_dict.bin: 2 ranks had taken 1 batches each, and each of 1 goes on after as many"
    )
    for ranks in (2, 1):
        done = run_ranks(WHOLE, ranks, tmp_path, "again")
        assert done.stdout == "the step before was loaded\n"
        assert done.stderr.count(noted) == (ranks == 1)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_deepspeed_are_those_that_it_writes(
    stage: int, run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.delenv("ACCELERATE_USE_CPU")  # with which accelerate leaves it out
    done = run_ranks(ZERO, 2, tmp_path, stage)
    told = [line for line in done.stdout.splitlines() if "what" in line or "the files" in line]
    assert told == [
        "the files are those of DeepSpeed",
        "DeepSpeed resumed from what ckptkit wrote",
        "what DeepSpeed wrote was loaded",
    ]
    assert "accelerate itself" not in done.stderr
    found = sorted(path.name for path in (tmp_path / "ours/pytorch_model").iterdir())
    assert found == sorted(path.name for path in (tmp_path / "stock/pytorch_model").iterdir())
