"""A planned folder is cut into parts, and its readers are as many as the threads that read."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.outcome import ignore
from ckptkit.plan.plan import OutputFile
from ckptkit.serving.planned_folder import IdleReaders, PlannedFile, PlannedFolder
from ckptkit.serving.plans import ServePlan
from ckptkit.storage.locations import resolve_places

STEP = Path(__file__).resolve().parents[3] / "fixtures/accelerate_fsdp2_tied_with_config/checkpoint"


@given(st.sets(st.integers(1, 99)), st.integers(0, 100), st.integers(0, 100))
def test_parts_are_a_range_without_gaps_cut_where_parts_begin(
    inner: set[int], start: int, stop: int
) -> None:
    starts = [0, *sorted(inner)]
    planned = PlannedFile(OutputFile("x", 100, ()), '"e"', datetime.now(UTC), starts)
    parts = list(planned.cut(start, stop))
    assert [at for low, high in parts for at in range(low, high)] == list(range(start, stop))
    assert {low for low, _ in parts[1:]} == {at for at in starts if start < at < stop}


def test_a_thread_that_reads_another_folder_frees_what_it_kept_of_the_last_one() -> None:
    plan, readers = ServePlan.from_options(resolve_places(STEP, None, {})), IdleReaders()
    with (
        PlannedFolder(plan, ignore, "", readers) as first,
        PlannedFolder(plan, ignore, "", readers) as second,
    ):
        for folder in (first, second, first, first):
            folder.read_into(folder.files["config.json"], 0, memoryview(bytearray(9)))
            assert len(readers._idle) == 1
