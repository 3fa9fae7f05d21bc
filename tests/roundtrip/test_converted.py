"""What `convert` writes, opened by the libraries that it is written for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from tests.live_truth import FIXTURES, truth_of
from tests.tensor_images import images

CASES = ["fsdp2_plain", "fsdp2_tensor_parallel", "dcp_dtypes_and_layouts", "fsdp2_llama_flat"]


@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"], ids=["one file", "many files"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("dcp_dtypes_and_layouts-many files", "fsdp2_plain-one file")
def test_torch_loads_every_bin_file_with_weights_only(
    case: str, max_shard_size: str, tmp_path: Path
) -> None:
    source = FIXTURES / case / "checkpoint"
    ckptkit.convert(source, tmp_path / "out", to="torch", max_shard_size=max_shard_size)
    loaded: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.bin"):
        assert zipfile.ZipFile(file).testzip() is None
        loaded |= torch.load(file, weights_only=True)  # noqa: TID251
    assert images(loaded) == truth_of(case)
    assert ckptkit.verify(tmp_path / "out").ok
    assert ckptkit.diff(source, tmp_path / "out").same


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("dcp_dtypes_and_layouts", "fsdp2_tensor_parallel")
def test_stock_dcp_loads_what_was_converted(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "checkpoint"
    ckptkit.convert(source, tmp_path / "out", to="dcp", max_shard_size="4KB")
    truth = load_file(FIXTURES / case / "truth.safetensors")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in truth.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "out" / "pytorch_model_fsdp_0", no_dist=True)
    assert images(state["model"]) == images(truth)
    assert ckptkit.verify(tmp_path / "out").ok
    assert ckptkit.diff(source, tmp_path / "out").same


def test_a_tied_model_gets_back_the_name_that_training_has(tmp_path: Path) -> None:
    ckptkit.convert(FIXTURES / "hf_tied" / "checkpoint", tmp_path / "out", to="dcp")
    with ckptkit.open(tmp_path / "out") as checkpoint:
        head = checkpoint["lm_head.weight"]
        assert torch.equal(head, checkpoint["model.embed_tokens.weight"])


def test_a_checkpoint_survives_all_layouts_in_turn(tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_plain" / "checkpoint"
    ckptkit.convert(source, tmp_path / "a", to="dcp")
    ckptkit.convert(tmp_path / "a", tmp_path / "b", to="torch")
    ckptkit.convert(tmp_path / "b", tmp_path / "c", to="hf")
    assert ckptkit.diff(source, tmp_path / "c").same
