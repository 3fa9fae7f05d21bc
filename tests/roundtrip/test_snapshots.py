"""Snapshots of torchsnapshot, and files of ranks by torch_checkpointing, against live state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, RefusedError, TruncatedFileError
from tests.tensor_images import image_of, images

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SNAPSHOTS = (
    "torchsnapshot_ddp",
    "torchsnapshot_fsdp1",
    "torchsnapshot_chunked",
    "torchsnapshot_dtensor",
)
OF_RANKS = (
    "torch_experimental",
    "torch_checkpointing",
    "torch_checkpointing_bare",
    "torch_checkpointing_safetensors",
)


@pytest.mark.parametrize("case", [*SNAPSHOTS, *OF_RANKS])
@pytest.mark.quick(
    "torch_checkpointing_safetensors",
    "torch_experimental",
    "torchsnapshot_chunked",
    "torchsnapshot_dtensor",
)
def test_a_real_checkpoint_is_bit_equal_to_the_live_model(case: str, tmp_path: Path) -> None:
    source, out = FIXTURES / case / "checkpoint", tmp_path / "out"
    truth = images(FIXTURES / case / "truth.safetensors")
    ckptkit.consolidate(source, out, names="live")
    assert images(out / "model.safetensors") == truth
    assert ckptkit.verify(source).ok
    with ckptkit.open(source) as checkpoint:
        assert {name: image_of(checkpoint[name]) for name in truth} == truth
    ckptkit.convert(source, tmp_path / "dcp", to="dcp", names="live")
    assert ckptkit.diff(source, tmp_path / "dcp").same


@pytest.mark.parametrize("case", ["torchsnapshot_fsdp1", *OF_RANKS])
def test_the_state_of_the_optimizer_is_the_live_one(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    ckptkit.convert(source, tmp_path / "out", to="torch", optimizer=True)
    saved = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    found = {
        f"state.{name}.{kind}": image_of(value)
        for name, kinds in saved["state"].items()
        for kind, value in kinds.items()
    }
    assert found == images(FIXTURES / case / "truth_optimizer.safetensors")


def test_settings_of_the_optimizer_are_numbers_again_and_its_members_a_list(tmp_path: Path) -> None:
    source = FIXTURES / "torchsnapshot_fsdp1" / "checkpoint"
    ckptkit.convert(source, tmp_path / "out", to="torch", optimizer=True)
    saved = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    (group,) = saved["param_groups"]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (0.01, 1e-8, 0.01)
    assert group["amsgrad"] is False
    assert group["decoupled_weight_decay"] is True
    assert isinstance(group["params"], list)
    assert set(saved["state"]) <= set(group["params"])


def test_states_that_ddp_numbered_are_listed_and_not_guessed_at(tmp_path: Path) -> None:
    source = FIXTURES / "torchsnapshot_ddp" / "checkpoint"
    truth = load_file(FIXTURES / "torchsnapshot_ddp" / "truth_optimizer.safetensors")
    listed = ckptkit.inspect(source).to_json()["tensors"]
    shapes = {t["name"]: t["shape"] for t in listed if t["part"] == "optimizer"}
    assert shapes == {name: list(tensor.shape) for name, tensor in truth.items()}
    with pytest.raises(RefusedError, match="a number and no name"):
        ckptkit.convert(source, tmp_path / "out", to="torch", optimizer=True)


@pytest.mark.parametrize(
    ("case", "found", "writer", "step"),
    [
        ("torchsnapshot_dtensor", "torchsnapshot", "torchsnapshot", None),
        ("torch_checkpointing", "torch-checkpointing", "torch_checkpointing", 2),
        ("torch_checkpointing_bare", "torch-checkpointing", "torch.save on every rank", 2),
        (
            "torch_experimental",
            "torch-checkpointing",
            "torch.distributed.checkpoint's experimental checkpointer",
            2,
        ),
    ],
)
def test_what_is_found_is_told(case: str, found: str, writer: str, step: int | None) -> None:
    report = ckptkit.inspect(FIXTURES / case / "checkpoint")
    told = (report.format, report.writer, report.world_size, report.step)
    assert told == (found, writer, 2, step)
    assert not report.problems


def test_what_each_rank_saved_for_itself_is_rank_0s_and_is_named() -> None:
    report = ckptkit.inspect(FIXTURES / "torchsnapshot_fsdp1" / "checkpoint")
    (note,) = (note for note in report.notes if "model/" in note)
    assert note.startswith("5 tensors that each rank saved for itself are rank 0's: model/")


def test_models_that_differ_by_rank_are_told_apart_by_rank(tmp_path: Path) -> None:
    folder = FIXTURES / "torchsnapshot_rank_models"
    with pytest.raises(AmbiguousSourceError, match=r"'0\.model', '1\.model'"):
        ckptkit.consolidate(folder / "checkpoint", tmp_path / "out")
    for rank, truth in ((0, "truth.safetensors"), (1, "truth_rank1.safetensors")):
        out = tmp_path / f"out{rank}"
        ckptkit.consolidate(folder / "checkpoint", out, select=f"{rank}.model")
        assert images(out / "model.safetensors") == images(folder / truth)


def test_a_value_that_torchsnapshot_did_not_write_is_missed(tmp_path: Path) -> None:
    # torchsnapshot 0.1.0 takes the memory of bfloat16 tensors for float32, and leaves out the
    # last of an odd number of values.
    source = FIXTURES / "torchsnapshot_odd_bfloat16" / "checkpoint"
    assert (source / "replicated/model/weight").stat().st_size == 3 * 5 * 2 - 2
    with pytest.raises(TruncatedFileError, match="end at byte 30 but the file ends at byte 28"):
        ckptkit.consolidate(source, tmp_path / "out")
    ckptkit.consolidate(source, tmp_path / "rest", exclude=["weight"])
    assert images(tmp_path / "rest" / "model.safetensors").keys() == {"bias"}
