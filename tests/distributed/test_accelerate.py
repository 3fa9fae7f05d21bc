"""accelerate with FSDP: what it saves and loads, saved and loaded by ckptkit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankHost, RunRanks, make_runner

SCRIPT = Path(__file__).with_name("accelerate_run.py")
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
