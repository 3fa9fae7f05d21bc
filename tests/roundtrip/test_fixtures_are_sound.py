"""The oracle's own oracle: torch itself reads back from the fixtures what their truth says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
# torch 2.13 refuses metadata of 2.15, whose tensor properties have one field more.
NEWER_THAN_TORCH = ("dcp_torch_2_15", "torchtitan_0_3_steps")
# It takes safetensors images for archives.
UNREADABLE_TO_TORCH = {"dcp_images_fsdp2", "dcp_images_grid"}
NOTHING_IN_IT = "peft_fsdp1_empty"
DIRECTORIES = sorted(
    path.parent
    for path in FIXTURES.rglob(".metadata")
    if not path.parent.name.startswith("optimizer")
    # Other names: test_megatron_fixtures_are_sound.py, test_torchtitan.py, and
    # test_mapped_frameworks.py, which has those of OLMo-core, whose classes torch does not import.
    and not path.is_relative_to(FIXTURES / "reports")
    and not path.relative_to(FIXTURES)
    .parts[0]
    .startswith(
        (
            *("megatron_model_", "megatron_fsdp_", "torchtitan_fam"),
            *("megatron_hybrid_", "megatron_mtp_", "megatron_optimizer_"),
            *("olmo_core_", "torchtune_family_"),
            "dlrover_",  # without archives, which torch reads
        )
    )
    and not {*NEWER_THAN_TORCH, NOTHING_IN_IT, *UNREADABLE_TO_TORCH} & set(path.parts)
)
PLACES = {
    "pytorch_model_fsdp_1": "truth_1",
    "checkpoint-2": "truth_step_2",
    "actor": "truth_actor",
    "critic": "truth_critic",
    "fsdp1": "truth_fsdp1",
    "dtensor": "truth_dtensor",
}
PREFIXES = {
    "fsdp2_llama_flat": "",
    "fsdp2_wrapped": "model._orig_mod.",
    "lightning_fabric_sharded": "network.",
    "lightning_trainer_sharded": "state_dict.",
    "megatron_tensor_parallel": "",
    "torchtitan_model_only": "",
    "torchtitan_steps": "",
}
ADAPTERS_ALONE = {"peft_trl_fsdp2", "peft_trl_fsdp2_ckptkit"}  # under the names of PEFT's files
BASE_ALONE = "base_model_0"
SCALES = re.compile(r"weight\.((nested_)?(absmax|quant_map)|quant_state\.bitsandbytes__\w+)")


def truth_beside(directory: Path) -> Path:
    relative = directory.relative_to(FIXTURES)
    name = next((PLACES[part] for part in relative.parts if part in PLACES), "truth")
    if relative.parts[0].startswith("peft_"):
        name = "truth"
    if relative.parts[0] in ADAPTERS_ALONE:
        name = "truth" if directory.name == BASE_ALONE else "adapter_truth"
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
        and not name.startswith("optimizer.")
        and not SCALES.search(name)
    }
    state_dict_loader.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "directory", DIRECTORIES, ids=lambda path: "-".join(path.relative_to(FIXTURES).parts)
)
@pytest.mark.quick("fsdp2_plain-checkpoint", "dcp_zstd_grid-checkpoint")
def test_torch_reads_the_truth_back(directory: Path) -> None:
    prefix = PREFIXES.get(directory.relative_to(FIXTURES).parts[0], "model.")
    read, truth = stored(directory, prefix), load_file(truth_beside(directory))
    if directory.name == BASE_ALONE:  # the rest of the model lies beside it
        truth = {name: truth[name] for name in truth if name in read}
    truth = {name: tensor for name, tensor in truth.items() if not SCALES.search(name)}
    assert read.keys() == truth.keys()
    for name, tensor in truth.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        ours, theirs = read[name].contiguous().flatten(), tensor.flatten()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
