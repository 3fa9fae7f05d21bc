"""`ckptkit stats` and `ckptkit diff --numeric`, as a shell and as Python see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.core.errors import ChecksumError, NotFiniteError, UsageError
from tests.command_line import run_command as run
from tests.object_store import ObjectStore

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config" / "checkpoint"
ZERO = ROOT / "fixtures" / "deepspeed_0_18_zero3" / "checkpoint"
DIFFERENT = "different, 2 tensors, 0 equal"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    tensors = {
        "plain": np.array([3.0, -4.0, 0.0, -0.0], np.float32),
        "broken.weight": np.array([np.nan, 1, np.inf, np.nan], ml_dtypes.bfloat16),
        "mask": np.array([-np.inf, 0], np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7, np.int64),
        "flags": np.array([True, False]),
        "tiny": np.array([0.5, 2], ml_dtypes.float8_e4m3fn),
        "ø\x1b[31m": np.ones(2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_the_numbers_of_each_tensor_are_shown_in_order(odd: Path) -> None:
    shown = json.loads(run("stats", odd, "--json").stdout)
    found = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert found["plain"] | {"name": ""} == {
        "name": "",
        "dtype": "float32",
        "shape": [4],
        "elements": 4,
        "norm": 5.0,
        "minimum": -4.0,
        "maximum": 3.0,
        "mean": -0.25,
        "zeros": 2,
        "zero_share": 0.5,
        "nan": 0,
        "infinite": 0,
    }
    assert [found["broken.weight"][field] for field in ("nan", "infinite", "norm")] == [2, 1, 1.0]
    assert found["empty"]["minimum"] is None
    assert [found["scalar"][field] for field in ("shape", "maximum")] == [[], 7]
    assert (shown["nan"], shown["infinite"], shown["zeros"]) == (2, 2, 4)
    page = run("stats", odd).stdout
    assert "\x1b" not in page
    assert "total" in page.splitlines()[-1]
    with safe_open(odd / "model.safetensors", "numpy") as stored:
        assert {tensor["name"] for tensor in shown["tensors"]} == set(stored.keys())


def test_nan_fails_only_where_it_is_asked_to(odd: Path) -> None:
    assert run("stats", odd).returncode == 0
    failed = run("stats", odd, "--fail-on", "nan", "--quiet")
    assert failed.returncode == 4
    assert "'broken.weight' has 2 NaN among 4 elements" in failed.stderr
    assert "mask" not in failed.stderr
    both = run("stats", odd, "--fail-on", "inf", "--fail-on", "nan", "--json")
    assert both.returncode == 4
    document = json.loads(both.stdout)
    assert document["error"]["code"] == "not-finite"
    assert "'broken.weight' has 2 NaN and 1 infinite among 4" in document["error"]["message"]
    with safe_open(odd / "model.safetensors", "numpy") as stored:
        assert {tensor["name"] for tensor in document["tensors"]} == set(stored.keys())
    without = ("--exclude", "broken*", "--exclude", "mask")
    assert run("stats", odd, "--fail-on", "nan", "--fail-on", "inf", *without).returncode == 0
    assert run("stats", odd, "--fail-on", "zero").returncode == 2


def test_a_page_can_be_sorted(odd: Path) -> None:
    lines = run("stats", odd, "--sort", "norm").stdout.splitlines()[2:-1]
    assert [line.split()[0] for line in lines[:2]] == ["scalar", "plain"]
    lines = run("stats", odd, "--sort", "nan").stdout.splitlines()[2:-1]
    assert lines[0].split()[0] == "broken.weight"


def test_shards_and_the_model_made_of_them_have_the_same_numbers(tmp_path: Path) -> None:
    ckptkit.convert(LLAMA, tmp_path / "whole", to="torch")
    shards, whole = ckptkit.stats(LLAMA), ckptkit.stats(tmp_path / "whole")
    by_name = {tensor.name: tensor for tensor in shards.tensors}
    with ckptkit.open(tmp_path / "whole") as checkpoint:
        assert [tensor.name for tensor in whole.tensors] == list(checkpoint.keys())
    assert all(by_name[tensor.name] == tensor for tensor in whole.tensors)
    for tensor in shards.tensors:
        with ckptkit.open(LLAMA) as checkpoint:
            values = np.asarray(checkpoint.read(tensor.name, "numpy"), np.float64)
        assert tensor.norm == pytest.approx(np.linalg.norm(values), rel=1e-12)
        assert (tensor.minimum, tensor.maximum) == (values.min(), values.max())
    assert shards.step is None
    assert shards.norm == pytest.approx(np.sqrt(sum((t.norm or 0) ** 2 for t in shards.tensors)))


def test_the_states_of_an_optimizer_can_be_measured_too() -> None:
    without, all_of_it = ckptkit.stats(ZERO), ckptkit.stats(ZERO, optimizer=True)
    names = {tensor.name for tensor in all_of_it.tensors}
    assert any(name.startswith("optimizer.") for name in names)
    assert {tensor.name for tensor in without.tensors} == {
        name for name in names if not name.startswith("optimizer.")
    }


def test_a_flipped_bit_is_found_and_no_number_is_shown(flipped: Path) -> None:
    for words in (
        ("stats", flipped),
        ("stats", flipped, "--json"),
        ("diff", flipped, LLAMA, "--numeric"),
        ("diff", LLAMA, flipped, "--numeric", "--atol", "1e30", "--json"),
    ):
        result = run(*words)
        assert result.returncode == 3
        assert "checksum-mismatch" in result.stderr + result.stdout
        assert "cosine" not in result.stdout
        assert "norm" not in result.stdout
    with pytest.raises(ChecksumError):
        ckptkit.stats(flipped)
    for sides in ((flipped, LLAMA), (LLAMA, flipped)):
        with pytest.raises(ChecksumError):
            ckptkit.diff(*sides, numeric=True)


@pytest.mark.parametrize("case", ["fsdp2_actor_and_critic", "fsdp2_model_and_ema"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_comparison_advises_no_option_that_it_lacks(case: str, is_first: bool) -> None:
    several = ROOT / "fixtures" / case / "checkpoint"
    sides = (several, LLAMA) if is_first else (LLAMA, several)
    result = run("diff", *sides)
    assert result.returncode == 4
    assert "hint: give the path of one of them" in result.stderr
    assert "choose one with --select" not in result.stderr


def test_a_model_at_a_url_has_the_same_numbers(odd: Path, object_store: ObjectStore) -> None:
    url = object_store.bucket("stats").put_tree(odd, "odd")
    remote = ckptkit.stats(url, src_options=object_store.options)
    assert remote.tensors == ckptkit.stats(odd).tensors


def test_the_error_is_there_for_programs_too(odd: Path) -> None:
    refusal = ckptkit.stats(odd).find_refusal("nan")
    assert isinstance(refusal, NotFiniteError)
    assert ckptkit.stats(odd, include=["plain"]).find_refusal("nan", "inf") is None


@pytest.fixture
def rounded(tmp_path: Path) -> tuple[Path, Path]:
    """A model in float32, and rounded to bfloat16."""
    random = np.random.default_rng(1)
    tensors: dict[str, Any] = {
        "a": random.standard_normal((8, 300)).astype(np.float32),
        "b": np.array([0.0, 1.0, np.inf, np.nan], np.float32),
        "steps": np.array(3, np.int64),
    }
    (tmp_path / "fine").mkdir()
    (tmp_path / "coarse").mkdir()
    save_file(tensors, tmp_path / "fine" / "model.safetensors")
    coarse: dict[str, Any] = dict(tensors)
    coarse |= {name: tensors[name].astype(ml_dtypes.bfloat16) for name in ("a", "b")}
    save_file(coarse, tmp_path / "coarse" / "model.safetensors")
    return tmp_path / "fine", tmp_path / "coarse"


def test_models_of_other_types_are_compared_by_their_numbers(rounded: tuple[Path, Path]) -> None:
    assert run("diff", *rounded).returncode == 6  # of another dtype
    exactly = run("diff", *rounded, "--numeric", "--json")
    assert exactly.returncode == 6
    document = json.loads(exactly.stdout)
    found = {gaps["name"]: gaps for gaps in document["numeric"]}
    sides = [load_file(side / "model.safetensors")["a"].astype(np.float64) for side in rounded]
    gaps = np.abs(sides[0] - sides[1])
    assert found["a"]["dtypes"] == ["float32", "bfloat16"]
    assert found["a"]["largest"] == gaps.max()
    assert found["a"]["relative"] == (gaps / np.abs(sides[1])).max()
    cosine = (sides[0] * sides[1]).sum() / np.linalg.norm(sides[0]) / np.linalg.norm(sides[1])
    assert found["a"]["cosine"] == pytest.approx(cosine, rel=1e-12)
    assert found["a"]["unequal"] == found["a"]["beyond"] == np.count_nonzero(gaps)
    assert found["b"]["unequal"] == found["steps"]["unequal"] == 0
    assert document["reshaped"] == {}
    assert document["equal"] == 2
    page = run("diff", *rounded, "--numeric", "--rtol", "0.004")
    assert page.returncode == 0, page.stdout
    assert "float32 bfloat16" in page.stdout


def test_a_tolerance_decides_what_is_the_same(rounded: tuple[Path, Path]) -> None:
    fine, coarse = rounded
    assert not ckptkit.diff(fine, coarse, numeric=True, rtol=1e-5).same
    assert ckptkit.diff(fine, coarse, numeric=True, rtol=2**-8).same
    assert ckptkit.diff(fine, coarse, numeric=True, atol=0.1).same
    assert ckptkit.diff(fine, fine, numeric=True).numeric[0].cosine == pytest.approx(1)
    with pytest.raises(UsageError, match="no tolerance"):
        ckptkit.diff(fine, coarse, numeric=True, rtol=-1.0)
    with pytest.raises(UsageError, match="bits are compared"):
        ckptkit.diff(fine, coarse, rtol=1.0)
    assert run("diff", fine, coarse, "--numeric", "--atol", "much").returncode == 2


def test_a_comparison_shows_each_tensor_once_and_whether_it_is_within_the_tolerance(
    tmp_path: Path,
) -> None:
    for name, gap in (("a", 0.0), ("b", 0.25)):
        (tmp_path / name).mkdir()
        near, far, equal = (np.full(3, 1 + gap * factor, np.float32) for factor in (1, 4, 0))
        tensors = {"near": near, "far": far, "equal": equal}
        save_file(tensors, tmp_path / name / "model.safetensors")
    pages = [
        run("diff", tmp_path / "a", tmp_path / "b", "--numeric", "--atol", atol).stdout
        for atol in ("0", "0.5", "5")
    ]
    assert all(page.count("near") == page.count("far") == 1 for page in pages)
    groups = [[line.strip() for line in page.splitlines() if ":" in line] for page in pages]
    assert groups[0][0].endswith(": 1 tensor with equal values")
    apart = "with other values, the furthest apart first:"
    close = "with other values that are within the tolerance, the furthest apart first:"
    assert [group[1:] for group in groups] == [
        [f"2 tensors {apart}"],
        [f"1 tensor {apart}", f"1 tensor {close}"],
        [f"2 tensors {close}"],
    ]


def test_another_shape_is_a_difference_and_nan_beside_a_number_too(tmp_path: Path) -> None:
    for name, values in (("a", [1.0, np.nan]), ("b", [np.nan, np.nan])):
        (tmp_path / name).mkdir()
        other = np.zeros((2, 1) if name == "a" else (1, 2))
        tensors: dict[str, Any] = {"w": np.array(values, np.float32), "v": other}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = ckptkit.diff(tmp_path / "a", tmp_path / "b", numeric=True, atol=100.0)
    assert list(found.reshaped) == ["v"]
    assert [(change.name, change.elements) for change in found.changed] == [("w", 1)]
    assert found.numeric[0].lone == 1
    page = run("diff", tmp_path / "a", tmp_path / "b", "--numeric").stdout
    assert "NaN or infinite on one side only, or in different ways: 1 value (w 1), in none" in page
    assert "NaN" not in run("diff", tmp_path / "a", tmp_path / "a", "--numeric").stdout
    assert repr(found) == f"<Difference '{tmp_path}/a against {tmp_path}/b': {DIFFERENT}>"
