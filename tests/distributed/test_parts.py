"""Files of two ranks that hold parts of tensors: joined, named by proof, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import (
    FormatError,
    IncompleteCheckpointError,
    RefusedError,
    UnsupportedError,
)
from tests.command_line import run_command

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("parts_run.py")


@pytest.fixture(scope="module")
def parts(run_ranks: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parts") / "out"
    run_ranks(SCRIPT, 2, out)
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("case", ["plain", "trained", "decay", "named"])
def test_numbered_states_of_a_dcp_have_the_names_that_their_order_proves(
    parts: Path, tmp_path: Path, case: str
) -> None:
    ckptkit.consolidate(parts / f"dcp_{case}", tmp_path / "out", optimizer=True)
    assert_equal(weights(tmp_path / "out"), load_file(parts / f"{case}_weights.safetensors"))
    saved = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)  # noqa: TID251
    flat = {f"{n}.{k}": v for n, own in saved["state"].items() for k, v in own.items()}
    truth = load_file(parts / f"{case}_states.safetensors")
    assert_equal(flat, truth)
    members = [set(group["params"]) for group in saved["param_groups"]]
    assert set().union(*members) >= saved["state"].keys()
    if case == "decay":
        matrices = {"frozen.weight", "up.weight", "down.weight"} & saved["state"].keys()
        assert [group["lr"] for group in saved["param_groups"]] == [0.1, 0.2]
        assert members[0] == matrices


def test_numbered_states_whose_names_nothing_proves_are_refused_and_the_hint_works(
    parts: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match="has a number and no name") as caught:
        ckptkit.consolidate(parts / "dcp_unproven", tmp_path / "out", optimizer=True)
    assert "leave --optimizer out" in str(caught.value.hint)
    ckptkit.consolidate(parts / "dcp_unproven", tmp_path / "out")
    assert_equal(weights(tmp_path / "out"), load_file(parts / "unproven_weights.safetensors"))


@pytest.mark.parametrize(
    "name", ["model_world_size_2_rank_{}.pt", "model_{}.pt", "ckpt-rank0000{}-of-00002.pt"]
)
@pytest.mark.parametrize("case", ["loop", "other_keys", "extra_state", "bare"])
@pytest.mark.quick(
    "bare-model_{}.pt",
    "extra_state-ckpt-rank0000{}-of-00002.pt",
    "loop-model_world_size_2_rank_{}.pt",
    "other_keys-model_{}.pt",
)
def test_what_a_loop_saved_under_the_names_of_a_framework_is_read_by_its_keys(
    parts: Path, tmp_path: Path, case: str, name: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(2):
        stored = parts / case / f"model_world_size_2_rank_{rank}.pt"
        shutil.copy(stored, source / name.format(rank))
    ckptkit.consolidate(source, tmp_path / "out")
    assert_equal(weights(tmp_path / "out"), load_file(parts / "trained_weights.safetensors"))
    if case == "bare":
        return
    if name == "model_{}.pt":  # the reader does not keep the order, which proves the names
        with pytest.raises(RefusedError, match="has a number and no name"):
            ckptkit.consolidate(source, tmp_path / "both", optimizer=True)
        return
    ckptkit.consolidate(source, tmp_path / "both", optimizer=True)
    saved = torch.load(tmp_path / "both" / "optimizer.bin", weights_only=True)  # noqa: TID251
    flat = {f"{n}.{k}": v for n, own in saved["state"].items() for k, v in own.items()}
    assert_equal(flat, load_file(parts / "trained_states.safetensors"))


@pytest.mark.parametrize("case", ["one_rank", "two_files"])
def test_a_file_that_both_ranks_wrote_is_refused(parts: Path, tmp_path: Path, case: str) -> None:
    refused = (IncompleteCheckpointError, FormatError, UnsupportedError)
    with pytest.raises(refused) as caught:
        ckptkit.consolidate(parts / case, tmp_path / "out")
    assert "save_distributed=True" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["shards", "consolidated"])
def test_what_torch_writes_with_a_file_for_each_rank_is_read(
    parts: Path, tmp_path: Path, case: str
) -> None:
    ckptkit.consolidate(parts / case, tmp_path / "out")
    assert_equal(weights(tmp_path / "out"), load_file(parts / "truth.safetensors"))


def test_dtensors_in_a_tuple_are_refused_in_a_model_and_told_beside_one(
    parts: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"ema\.pair\.0.*one rank wrote its own part"):
        ckptkit.consolidate(parts / "dcp_held", tmp_path / "ema", select="ema")
    shown = run_command("consolidate", parts / "dcp_beside", tmp_path / "out").stderr
    assert_equal(weights(tmp_path / "out"), load_file(parts / "unproven_weights.safetensors"))
    for name in ("held.pair.0", "held.pair.1", "held.deep.0.a.1", "held.set"):
        assert name in shown
    assert "one rank's part of" in shown


def test_dtensors_in_containers_of_ranks_files_are_joined_or_told(
    parts: Path, tmp_path: Path
) -> None:
    shown = run_command("consolidate", parts / "files_held", tmp_path / "out").stderr
    assert "held.set" in shown
    found = {line.name: line.shape for line in ckptkit.inspect(parts / "files_held").tensors}
    assert found["0"] == found["1"] == (4, 3)
