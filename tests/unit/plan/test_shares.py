"""Shares of a plan: all of it, none twice, and about as much each."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.errors import UsageError
from ckptkit.core.object_parts import MIN_PART_BYTES, MOST_PARTS
from ckptkit.core.threads import Throttle
from ckptkit.plan.plan import (
    SHARE_BYTES,
    TASK_BYTES,
    Literal,
    OutputFile,
    Plan,
    RawCopy,
    Share,
    cut_object_parts,
    lay_out_file,
    parse_slice,
    split_plan,
    tasks_of,
    tasks_of_parts,
)


def plan_of(sizes: list[int]) -> Plan:
    """Files of so many bytes, an empty header before each."""
    files: list[OutputFile] = []
    for number, size in enumerate(sizes):
        name = f"f{number}"
        body = RawCopy("source", name)
        files.append(lay_out_file(name, [(0, Literal(b""), None), (size, body, None)]))
    return Plan(tuple(files), {})


@given(st.lists(st.integers(0, 3 * TASK_BYTES), max_size=6), st.integers(1, 9))
def test_shares_are_the_plans_tasks_each_once_and_in_order(sizes: list[int], count: int) -> None:
    plan = plan_of(sizes)
    dealt = [task for number in range(count) for task in tasks_of(plan, Share(number, count))]
    assert dealt == list(plan.tasks())


@given(st.lists(st.integers(0, 3 * TASK_BYTES), max_size=6), st.integers(1, 9))
def test_shares_in_parts_have_every_part_whole(sizes: list[int], count: int) -> None:
    plan = plan_of(sizes)
    dealt = [list(tasks_of(plan, Share(n, count, in_parts=True))) for n in range(count)]
    assert [task for tasks in dealt for task in tasks] == list(plan.tasks())
    for number, file in enumerate(plan.files):
        parts = cut_object_parts(file)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts)][: len(parts)]
        assert sum(part.stop - part.start for part in parts) == file.size_bytes
        assert all(part.stop - part.start >= MIN_PART_BYTES for part in parts[:-1])
        for part in parts:
            owners = {
                share
                for share, tasks in enumerate(dealt)
                for task in tasks
                if task.file == number and part.start <= task.start < part.stop
            }
            assert len(owners) == 1


@given(st.integers(1, 9 * TASK_BYTES), st.sets(st.integers(0, 12)))
def test_the_tasks_of_parts_are_found_again(size: int, chosen: set[int]) -> None:
    plan = plan_of([TASK_BYTES, size])
    parts = [part for part in cut_object_parts(plan.files[1]) if part.number in chosen]
    tasks = list(tasks_of_parts(plan, {"f1": parts}))
    covered = [(task.file, task.start, task.stop) for task in tasks]
    assert sum(stop - start for _, start, stop in covered) == sum(p.stop - p.start for p in parts)
    assert all(any(p.start <= start < p.stop for p in parts) for _, start, _ in covered)
    assert {file for file, _, _ in covered} <= {1}


def test_no_object_has_more_parts_than_a_store_takes() -> None:
    file = plan_of([20_000 * TASK_BYTES + 5]).files[0]
    assert len(cut_object_parts(file)) <= MOST_PARTS


def test_shares_differ_by_a_task_at_most() -> None:
    plan = plan_of([50 * TASK_BYTES, 3 * TASK_BYTES, 47 * TASK_BYTES])
    lengths = [len(list(tasks_of(plan, Share(number, 7)))) for number in range(7)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("tasks", "workers", "count"),
    [(0, 4, 1), (1, 4, 1), (5, 4, 5), (1_000, 4, 32), (100_000, 4, 100_000 // 32)],
)
def test_workers_get_several_shares_each_that_are_neither_tiny_nor_huge(
    tasks: int, workers: int, count: int
) -> None:
    assert SHARE_BYTES == 32 * TASK_BYTES
    shares = split_plan(plan_of([tasks * TASK_BYTES]), workers)
    assert [share.number for share in shares] == list(range(count))
    assert {share.count for share in shares} == {count}


def test_a_slice_is_read_as_srun_counts() -> None:
    assert parse_slice("0/1") == Share(0, 1)
    assert str(parse_slice("3/12")) == "3/12"


@pytest.mark.parametrize("text", ["", "4/4", "1", "-1/4", "a/b", "0/0", "1/2/3", "0/9999999"])
def test_what_is_no_slice_is_refused_with_what_to_pass(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_slice(text)
    assert "$SLURM_PROCID/$SLURM_NTASKS" in caught.value.hint


def test_a_throttle_lets_no_more_through_than_its_rate() -> None:
    throttle = Throttle(1_000_000)
    began = time.monotonic()
    for _ in range(10):
        throttle.take(20_000)
    assert time.monotonic() - began >= 0.2
    Throttle(None).take(1 << 60)
