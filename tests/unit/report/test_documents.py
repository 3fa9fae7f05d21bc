"""What pages show: plain values that follow from an inspection, a run, or a difference."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptkit.conversion.diff import Difference, NumericDifference, TensorDifference
from ckptkit.core.index import Problem
from ckptkit.plan.coverage import _MOST_RUNS, _share
from ckptkit.report.page import (
    pack_names,
    plan_difference_report,
    plan_inspection_report,
    render_page,
    rounded,
    shown,
)
from ckptkit.runs.listing import RunListing
from ckptkit.runs.steps import RunStep, StoredFile
from tests.made_up_inspections import inspection_of, mixture_tensors, statistics_of

SMALL = [
    ("model.embed_tokens.weight", "bfloat16", (10, 4)),
    ("model.layers.0.mlp.up_proj.weight", "bfloat16", (4, 4)),
    ("model.norm.weight", "float32", (4,)),
]


def unpacked(packed: list[Any]) -> list[str]:
    """Does what `unpackNames` of data.js does."""
    names, last = [], ""
    for shared, rest in zip(*packed, strict=True):
        last = last[:shared] + rest
        names.append(last)
    return names


@given(st.lists(st.text(max_size=6)))
def test_packed_names_unpack_to_the_same_names(names: list[str]) -> None:
    assert unpacked(pack_names(names)) == names


def test_columns_are_aligned_with_the_names() -> None:
    inspection = inspection_of(SMALL, ranks=2)
    content = plan_inspection_report(inspection, statistics=statistics_of(inspection)).content
    names = unpacked(content["names"])
    assert names == [name for name, _, _ in SMALL]
    assert [content["dtypes"][n] for n in content["dtype"]] == [dtype for _, dtype, _ in SMALL]
    assert [tuple(content["shapes"][n]) for n in content["shape"]] == [s for _, _, s in SMALL]
    assert content["bytes"] == [80, 32, 16]
    assert [content["on_ranks"][n] for n in content["on_rank"]] == [
        (0, 2, 40),
        (0, 2, 16),
        (0, 2, 8),
    ]
    assert content["stats"]["norm"] == [33.3333, 25, 20]


def test_numbers_of_an_optimizer_stay_empty() -> None:
    inspection = inspection_of(SMALL, ranks=1)
    lines = list(inspection.tensors)
    lines[1] = replace(lines[1], part="optimizer", tree="optimizer")
    inspection = replace(inspection, tensors=tuple(lines))
    content = plan_inspection_report(inspection, statistics=statistics_of(inspection)).content
    assert [norm is None for norm in content["stats"]["norm"]] == [False, True, False]


def test_hostile_texts_become_printable_and_short() -> None:
    text = "a\u202eb\x00\x1b[31m" + "x" * 3000
    assert shown(text).isprintable()
    assert shown(text).startswith("a\\u202eb\\x00\\x1b[31mxxx")
    assert len(shown(text)) < 600
    assert "hunter2" not in shown("https://me:hunter2@host/x")


def test_a_missing_file_is_one_problem_of_many_tensors() -> None:
    problems = [Problem("missing-file", "__1_0.distcp", f"it holds {n}") for n in range(3)]
    problems.append(Problem("truncated-file", "__2_0.distcp", "ends early"))
    inspection = replace(inspection_of(SMALL, ranks=2), problems=tuple(problems))
    content = plan_inspection_report(inspection).content
    assert content["problems"] == [
        ("missing-file", "__1_0.distcp", "it holds 0", 3),
        ("truncated-file", "__2_0.distcp", "ends early", 1),
    ]
    assert content["problem_count"] == 4


def test_a_run_has_its_sizes_its_metrics_and_its_world_sizes() -> None:
    stock = tuple(StoredFile(f"checkpoint-2/rng_state_{n}.pth", 1, 0.0, "") for n in range(4))
    steps = (
        RunStep(1, "checkpoint-1", metrics={"loss": 2.5}, world_size=8, size_bytes=7),
        RunStep(2, "checkpoint-2", complete=False, problem="a file is missing", files=stock),
    )
    run = RunListing("runs/a", None, steps, best=frozenset({"checkpoint-1"}))
    content = plan_inspection_report(inspection_of(SMALL, ranks=2), run=run).content["run"]
    assert [step["ranks"] for step in content["steps"]] == [8, 4]
    assert [step["metrics"] for step in content["steps"]] == [[2.5], [None]]
    assert [step["best"] for step in content["steps"]] == [True, False]
    assert content["steps"][1]["problem"] == "a file is missing"


def test_a_difference_says_of_each_tensor_what_became_of_it() -> None:
    gap = NumericDifference("a.w", ("float32",) * 2, 9, 3, 3, 0.5, 1.0, 0.99, (3.0, 3.1), 0, 0.6)
    difference = Difference(
        a="A",
        b="B",
        equal=1,
        only_in_a=("lost",),
        only_in_b=("new",),
        reshaped={"r": ("float32 [1]", "float32 [2]")},
        changed=(TensorDifference("a.w", 4, 0.5),),
        numeric=(gap, replace(gap, name="same", unequal=0, change=0.0)),
    )
    content = plan_difference_report(difference).content
    states = [content["states"][number] for number in content["state"]]
    assert dict(zip(unpacked(content["names"]), states, strict=True)) == {
        "a.w": "changed",
        "same": "equal",
        "r": "another shape or dtype",
        "lost": "only in A",
        "new": "only in B",
    }
    assert content["stats"]["change"][:2] == [0.6, 0]
    assert content["stats"]["unequal"][0] == 4  # bits, which the verdict is about
    assert content["reshaped"] == {2: ("float32 [1]", "float32 [2]")}


def test_a_page_of_10_000_tensors_on_1_024_ranks_is_below_2_mb() -> None:
    inspection = inspection_of(list(mixture_tensors(61, 54)), ranks=1024)
    assert len(inspection.tensors) > 10_000
    document = plan_inspection_report(inspection, statistics=statistics_of(inspection))
    assert len(render_page(document)) < 1_500_000
    assert json.loads(json.dumps(document.to_json()))["kind"] == "inspection"


def test_shares_join_neighbours_and_stay_few() -> None:
    owners, sizes = np.array([0, 1, 2, 2, 5, -1]), np.array([4, 4, 2, 2, 1, 9])
    assert _share(owners, sizes) == ((0, 3, 4), (5, 6, 1))
    ragged = _share(np.arange(1000), np.arange(1000) % 7 + 1)
    assert len(ragged) == _MOST_RUNS
    assert [run[0] for run in ragged[1:]] == [run[1] for run in ragged[:-1]]
    assert sum((stop - start) * size for start, stop, size in ragged) > 0.8 * 4 * 1000


def test_numbers_are_short_and_finite() -> None:
    assert [rounded(value) for value in (1 / 3, 2.0, 16_272_003, float("nan"), None)] == [
        *(0.333333, 2, 16_272_003),
        *(None, None),
    ]
