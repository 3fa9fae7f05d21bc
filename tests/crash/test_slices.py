"""Slices of one output, written by processes that know nothing of each other but its folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from msgspec.structs import replace

import ckptkit
from ckptkit.adapters.merge import AdapterChoice, MergeJob, run_merge
from ckptkit.conversion import job as jobs
from ckptkit.conversion.job import JobResult, run_job
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.conversion.write import PlannedOutput, write_output
from ckptkit.core.errors import (
    ChecksumError,
    OutputError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
)
from ckptkit.engine.outcome import BytesWritten, Event, ignore
from ckptkit.lora.changes import MergeRequest
from ckptkit.options import ConsolidateRequest, Layout, Resources
from ckptkit.plan.plan import Share
from ckptkit.storage.places import PathLike
from tests.files import contents, flip_bit

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ONE = Resources(workers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose records have checksums, and are larger than a task."""
    folder = tmp_path_factory.mktemp("slices")
    chance = np.random.default_rng(0)
    tensors = {
        f"layers.{number}.weight": chance.random((1_250_000 * (1 + number),), np.float32)
        for number in range(4)
    } | {f"layers.{number}.norm": chance.random((7,), np.float32) for number in range(4)}
    (folder / "model").mkdir()
    safetensors.numpy.save_file(tensors, folder / "model/model.safetensors", {"format": "pt"})
    ckptkit.convert(folder / "model", folder / "dcp", to="dcp", max_shard_size="25MB")
    return folder / "dcp"


def slice_of(
    source: Path, out: Path, number: int, count: int, *, layout: Layout = "hf", **options: str
) -> JobResult:
    request = ConsolidateRequest(layout=layout, max_file_bytes=30_000_000, **options)  # type: ignore[arg-type]
    return run_slice(ConversionJob(source, out, request, resources=ONE), number, count)


def run_slice(job: ConversionJob, number: int, count: int, **options: Any) -> JobResult:
    return run_job(replace(job, share=Share(number, count)), **options)


def leftovers(out: Path) -> list[Path]:
    return [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]


@pytest.mark.parametrize("layout", ["hf", "torch", "dcp"])
@pytest.mark.quick("dcp")
def test_slices_in_any_order_make_what_one_process_makes(
    source: Path, tmp_path: Path, layout: Layout
) -> None:
    ckptkit.convert(source, tmp_path / "whole", to=layout, max_shard_size=30_000_000)
    out = tmp_path / "sliced"
    for number, missing in ((2, (0, 1)), (0, (1,))):
        done = slice_of(source, out, number, 3, layout=layout)
        assert (done.missing, done.manifest) == (missing, None)
        assert not out.exists()
    last = slice_of(source, out, 1, 3, layout=layout)
    assert last.manifest is not None
    assert contents(out) == contents(tmp_path / "whole")
    assert ckptkit.verify(out).ok
    assert not leftovers(out)
    with pytest.raises(OutputExistsError):
        slice_of(source, out, 1, 3, layout=layout)


def test_of_slices_that_finish_together_one_commits(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda number: slice_of(source, out, number, 4), range(4)))
    assert sum(one.manifest is not None for one in done) == 1
    assert ckptkit.verify(out).ok
    assert not leftovers(out)


def write_slice(job: Any, out: PathLike, share: Share) -> None:
    """Writes a slice of what is not a conversion."""
    with (
        jobs.Slice(out, share, ignore, overwrite=False) as strategy,
        job.plan_output() as planned,
    ):
        write_output(planned, strategy, ignore)


def test_a_merge_can_be_sliced(tmp_path: Path) -> None:
    """Its kernels prepare themselves, and it reads two sources."""
    source, request = FIXTURES / "peft_qdora_fsdp2_ckptkit", MergeRequest(max_file_bytes=20_000)
    out, whole = (
        MergeJob(
            adapters=[AdapterChoice(path=source / "checkpoint")],
            destination=tmp_path / name,
            request=request,
            resources=ONE,
        )
        for name in ("out", "whole")
    )
    run_merge(whole)
    for number in (1, 2, 0):
        write_slice(out, tmp_path / "out", Share(number, 3))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def command(source: Path, out: Path, which: str, *options: str) -> list[str]:
    start = [sys.executable, "-m", "ckptkit_cli", "consolidate", str(source), str(out)]
    return [*start, "--slice", which, "--workers", "1", *options]


def until_written(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until something of a large tensor lies in the hidden folder."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit and process.poll() is None:
        for path in out.parent.glob(f".{out.name}.*/files/*.safetensors"):
            with path.open("rb") as file:
                if any(file.read(1 << 20)[500_000:]):
                    return
        time.sleep(0.02)
    raise AssertionError(f"nothing was written: {process.poll()}")


def test_a_killed_slice_is_run_again_and_others_are_not(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.Popen(command(source, out, "0/3", "--bandwidth", "10MB"))
    try:
        until_written(out, killed)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
    job = ConversionJob(source, out, ConsolidateRequest(), resources=ONE)
    for number in (1, 2):
        assert 0 in run_slice(job, number, 3).missing
    events: list[Event] = []
    run_slice(job, 1, 3, listener=events.append)
    assert not any(isinstance(event, BytesWritten) for event in events)  # it is there already
    assert run_slice(job, 0, 3).manifest is not None
    ckptkit.consolidate(source, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    assert not leftovers(out)


def test_slices_of_different_plans_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slice_of(source, out, 0, 2)
    with pytest.raises(RefusedError, match="of another plan") as caught:
        slice_of(source, out, 1, 2, dtype="bfloat16")
    assert f"rm -r '{leftovers(out)[0]}'" in caught.value.hint
    with pytest.raises(RefusedError, match="of 2, and this one is of 3"):
        slice_of(source, out, 1, 3)
    assert slice_of(source, out, 1, 2).manifest is not None


def test_a_slice_whose_part_was_removed_does_not_take_an_earlier_output_for_its_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(source, out)
    request = ConsolidateRequest(dtype="bfloat16")
    job = ConversionJob(source, out, request, resources=ONE, overwrite=True)
    execute = jobs.Slice.execute

    def execute_and_abandon(strategy: jobs.Slice) -> None:
        execute(strategy)
        assert strategy._target is not None
        strategy._target.abandon()

    monkeypatch.setattr(jobs.Slice, "execute", execute_and_abandon)
    with pytest.raises(OutputError, match="was removed by another process"):
        run_slice(job, 0, 2)
    assert not leftovers(out)


def test_slices_left_over_from_an_older_source_are_recognised(source: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    slice_of(copy, out, 0, 2)
    for path in copy.rglob("*.distcp"):
        os.utime(path, ns=(1, 1))
    with pytest.raises(RefusedError, match="of another plan: the source"):
        slice_of(copy, out, 1, 2)
    shutil.rmtree(leftovers(out)[0])
    assert slice_of(copy, out, 1, 2).missing == (0,)
    assert slice_of(copy, out, 0, 2).manifest is not None


def test_a_source_that_changes_between_a_slice_and_the_commit_leaves_nothing(
    source: Path, tmp_path: Path
) -> None:
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    slice_of(copy, out, 0, 2)

    class Changing:
        """Another save comes once this slice has its plan."""

        @contextmanager
        def plan_output(self) -> Iterator[PlannedOutput]:
            request = ConsolidateRequest(max_file_bytes=30_000_000)
            with ConversionJob(copy, out, request, resources=ONE).plan_output() as planned:
                for path in copy.rglob("*.distcp"):
                    os.utime(path, ns=(1, 1))
                yield planned

    with pytest.raises(SourceChangedError):
        write_slice(Changing(), out, Share(1, 2))
    assert not out.exists()
    assert not leftovers(out)


def test_damage_in_a_record_that_two_slices_share_is_found_by_the_last(
    source: Path, tmp_path: Path
) -> None:
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    data = min(copy.rglob("*.distcp"))
    flip_bit(data, 12_345_678)
    for number in range(6):
        slice_of(copy, out, number, 7)
    with pytest.raises(ChecksumError):
        slice_of(copy, out, 6, 7)
    assert not out.exists()
    assert not leftovers(out)


def test_a_url_is_refused_with_what_to_do_instead(source: Path) -> None:
    job = ConversionJob(source, "memory://out", ConsolidateRequest(), resources=ONE)
    with pytest.raises(RefusedError, match="a URL was found where --slice needs a directory"):
        write_slice(job, job.destination, Share(0, 2))
