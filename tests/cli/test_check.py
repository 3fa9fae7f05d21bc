"""`--check nan` and `--check inf`: numbers that are found while an output is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import ChecksumError, NotFiniteError, UsageError
from ckptkit.options import Layout
from tests.command_line import run_command as run
from tests.object_store import ObjectStore
from tests.sharded import write_sharded

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "fixtures" / "peft_fsdp2" / "checkpoint"


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A step in shards with three NaN, far apart in a large tensor, and one infinity."""
    chance = torch.Generator().manual_seed(2)
    weight = torch.randn(2_300, 2_000, generator=chance)
    weight[0, 5] = weight[1_200, 7] = weight[2_299, 1_999] = float("nan")
    tensors = {
        "good.weight": torch.randn(300, 100, generator=chance),
        "bad.weight": weight,
        "mask": torch.tensor([0.0, float("-inf")]).bfloat16(),
        "ids": torch.arange(6),
    }
    folder = tmp_path / "runs" / "checkpoint-7"
    write_sharded(folder, tensors, ranks=2)
    return folder


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("layout", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.quick("bfloat16-hf", "keep-dcp", "keep-torch")
def test_nan_is_found_before_the_commit(
    diverged: Path, tmp_path: Path, layout: Layout, dtype: str
) -> None:
    line = ("convert", diverged, tmp_path / "out", "--to", layout, "--dtype", dtype)
    result = run(*line, "--check", "nan", "--resume")
    assert result.returncode == 4
    assert "tensor 'bad.weight': has 3 NaN among 4,600,000 elements" in result.stderr
    assert "infinite" not in result.stderr
    assert not (tmp_path / "out").exists()
    assert run(*line).returncode == 0


def test_only_what_is_asked_for_is_refused(diverged: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="'mask': has 1 infinite among 2"):
        ckptkit.consolidate(diverged, tmp_path / "out", check=["inf"])
    assert left_behind(tmp_path) == ["runs"]
    found = ckptkit.consolidate(
        diverged, tmp_path / "out", check=["nan"], exclude=["bad.*"], dtype="float16"
    )
    assert found.options["check"] == ["nan"]
    with pytest.raises(UsageError, match="'zero' is not among nan, inf"):
        ckptkit.consolidate(diverged, tmp_path / "other", check=["zero"])  # type: ignore[list-item]
    assert run("consolidate", diverged, tmp_path / "x", "--check", "all").returncode == 2


def test_a_slice_with_nan_is_refused_and_the_others_commit_nothing(
    diverged: Path, tmp_path: Path
) -> None:
    statuses = []
    for number in range(3):
        line = ("consolidate", diverged, tmp_path / "out", "--slice", f"{number}/3")
        statuses.append(run(*line, "--check", "nan").returncode)
    assert 4 in statuses
    assert not (tmp_path / "out").exists()


def test_an_average_and_a_merge_are_checked_too(diverged: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "checkpoint-8"
    ckptkit.consolidate(diverged, tmp_path / "single")
    tensors = load_file(tmp_path / "single" / "model.safetensors")
    write_sharded(other, {n: torch.nan_to_num(tensor) for n, tensor in tensors.items()}, ranks=2)
    with pytest.raises(NotFiniteError, match="3 NaN"):
        ckptkit.average([other, diverged], tmp_path / "out", check=["nan"])
    line = ("adapter", "merge", ADAPTER, tmp_path / "merged", "--lora-alpha", "16")
    hints = ("--no-use-rslora", "--check", "nan", "--check", "inf")
    good = run(*line, *hints, "--json")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["options"]["check"] == ["nan", "inf"]
    assert not (tmp_path / "out").exists()


def test_a_merge_with_nan_is_refused(tmp_path: Path) -> None:
    line = ("adapter", "merge", ADAPTER, tmp_path / "base", "--lora-alpha", "16")
    assert run(*line, "--no-use-rslora").returncode == 0
    weights = load_file(tmp_path / "base" / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "ckptkit.json").unlink()
    adapter = tmp_path / "adapter"
    taken = ("adapter", "extract", ADAPTER, adapter, "--lora-alpha", "16", "--no-use-rslora")
    assert run(*taken).returncode == 0
    options: Any = {"base": tmp_path / "base", "allow_other_base": True, "check": ["nan"]}
    with pytest.raises(NotFiniteError, match=f"'{name}': has 1 NaN"):
        ckptkit.merge_adapter(adapter, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_a_store_would_copy_is_checked_as_well(
    diverged: Path, object_store: ObjectStore
) -> None:
    bucket = object_store.bucket("checked")
    bucket.clear()
    url = bucket.put_tree(diverged, "run")
    stores: Any = {"src_options": object_store.options, "dst_options": object_store.options}
    with pytest.raises(NotFiniteError, match="3 NaN"):
        ckptkit.consolidate(url, f"{bucket.url}/out", check=["nan"], **stores)
    assert bucket.keys("out/") == []
    assert bucket.unfinished_uploads() == []


def test_damaged_bytes_are_no_divergence(diverged: Path, tmp_path: Path) -> None:
    """A flipped bit may make NaN of a number; the checksum says which of both it is."""
    shard = diverged / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    at = data.index(torch.tensor([float("nan")]).numpy().tobytes()) + 4_003
    data[at] = data[at - 4] = 0x7F
    data[at - 1] = data[at - 5] = 0xFF
    shard.write_bytes(data)
    with pytest.raises(ChecksumError):
        ckptkit.consolidate(diverged, tmp_path / "out", check=["nan"])
    assert left_behind(tmp_path) == ["runs"]
