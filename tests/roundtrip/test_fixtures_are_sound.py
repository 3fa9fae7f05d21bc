"""The oracle's own oracle: torch itself reads back from the fixtures what their truth says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
# torch 2.13 refuses metadata of 2.15, whose tensor properties have one field more.
NEWER_THAN_TORCH = "dcp_torch_2_15"
DIRECTORIES = sorted(
    path.parent
    for path in FIXTURES.rglob(".metadata")
    if not path.parent.name.startswith("optimizer") and NEWER_THAN_TORCH not in path.parts
)
PLACES = {
    "pytorch_model_fsdp_1": "truth_1",
    "checkpoint-2": "truth_step_2",
    "actor": "truth_actor",
    "critic": "truth_critic",
    "fsdp1": "truth_fsdp1",
    "dtensor": "truth_dtensor",
}


def truth_beside(directory: Path) -> Path:
    relative = directory.relative_to(FIXTURES)
    name = next((PLACES[part] for part in relative.parts if part in PLACES), "truth")
    return FIXTURES / relative.parts[0] / f"{name}.safetensors"


def stored(directory: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Every tensor below a container key, as torch's own reader assembles it."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.startswith(prefix)
        and "_extra_state" not in name
    }
    state_dict_loader.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "directory", DIRECTORIES, ids=lambda path: "-".join(path.relative_to(FIXTURES).parts)
)
def test_torch_reads_the_truth_back(directory: Path) -> None:
    prefix = "" if "fsdp2_llama_flat" in directory.parts else "model."
    read, truth = stored(directory, prefix), load_file(truth_beside(directory))
    assert read.keys() == truth.keys()
    for name, tensor in truth.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        ours, theirs = read[name].contiguous().flatten(), tensor.flatten()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
