"""Options, checked at the border."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.core.errors import UsageError
from ckptkit.options import (
    DEFAULT_BUDGET_BYTES,
    ConsolidateRequest,
    Resources,
    matches,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        (" 5 GB ", 5_000_000_000),
        ("64MB", 64_000_000),
        ("1KB", 1_000),
        ("2TB", 2_000_000_000_000),
        ("1GiB", 1 << 30),
        ("1.5GB", 1_500_000_000),
        ("0.5 KiB", 512),
        ("17", 17),
        (17, 17),
        ("17B", 17),
    ],
)
def test_a_size_is_read_in_units_of_thousands(text: str | int, size_bytes: int) -> None:
    assert parse_size(text, option="--x") == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "5 parsecs", "-5GB", "5G B", "5e3", "1,000", "0", "0GB", "0.1B", "9" * 16, "5GB x"],
)
def test_what_is_no_size_is_refused_with_the_option_and_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, option="--max-shard-size")
    assert caught.value.where.startswith("--max-shard-size")
    assert caught.value.hint == "pass --max-shard-size 5GB"
    assert caught.value.exit_status == 2


@given(st.text(max_size=12) | st.integers())
@example("1" * 15 + "TiB")
def test_any_text_is_a_positive_size_or_a_usage_error(text: str | int) -> None:
    try:
        assert parse_size(text, option="--x") >= 1
    except UsageError:
        return


@given(st.integers(1, 10**14), st.sampled_from(["", "B", "KB", "MB", "GB", "KiB", "GiB"]))
def test_a_written_size_is_read_exactly(number: int, unit: str) -> None:
    factors = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "GiB": 2**30}
    assert parse_size(f"{number}{unit}", option="--x") == number * factors[unit]


@pytest.mark.parametrize(
    "options", [{"dtype": "int8"}, {"names": "best"}, {"layout": "onnx"}, {"dtype": ""}]
)
def test_a_choice_outside_the_list_is_refused_with_the_list(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is not among") as caught:
        ConsolidateRequest(**options)
    assert caught.value.where.startswith("--")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("bf6", "bfloat16"),
        ("flaot16", "float16"),
        ("float23", "float32"),
        ("FP16", "float16"),
        ("INT8", "int8-channel"),
        ("fp8", "fp8-block or fp8-channel"),
        ("fp4", "nvfp4 or mxfp4"),
        ("fp8_block", "fp8-block"),
    ],
)
def test_the_choice_that_is_most_alike_is_proposed(given: str, nearest: str) -> None:
    with pytest.raises(UsageError, match="is not among") as caught:
        ConsolidateRequest(dtype=given)  # type: ignore[arg-type]
    assert caught.value.hint == f"pass --dtype {nearest}"


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "onnx"},
        {"dtype": ""},
        *({"dtype": dtype} for dtype in ("fp9", "float8", "mxfp8", "int16", "float64", "q4")),
    ],
)
def test_where_no_choice_is_alike_none_is_proposed(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is not among") as caught:
        ConsolidateRequest(**options)
    assert caught.value.hint == "pass one of these"


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        ((), (), ["a.weight", "a.bias", "b.weight"]),
        (("a.*",), (), ["a.weight", "a.bias"]),
        ((), ("*.bias",), ["a.weight", "b.weight"]),
        (("a.*", "b.*"), ("a.*",), ["b.weight"]),
        (("a",), (), []),
        (("A.*",), (), []),
        (("[ab].weight",), (), ["a.weight", "b.weight"]),
    ],
)
def test_patterns_fit_whole_names_and_exclusion_comes_last(
    include: tuple[str, ...], exclude: tuple[str, ...], wanted: list[str]
) -> None:
    request = ConsolidateRequest(include=include, exclude=exclude)
    names = ["a.weight", "a.bias", "b.weight"]
    assert [name for name in names if request.wants(name)] == wanted


def test_without_patterns_nothing_matches() -> None:
    assert not matches("a", ())


def test_resources_have_a_budget_unless_told_otherwise() -> None:
    assert Resources.from_options({}).memory_budget_bytes == DEFAULT_BUDGET_BYTES
    resources = Resources.from_options(
        {"workers": 3, "memory_budget": "1GB", "memory_limit": "2GB"}
    )
    assert (resources.workers, resources.memory_budget_bytes) == (3, 10**9)
    assert resources.memory_limit_bytes == 2 * 10**9


def test_no_worker_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="not at least 1"):
        Resources.from_options({"workers": 0})
