"""DCP as safetensors shards, as safetensors images and compressed: real ones against live state.

And against torch's own consolidation of shards, where that is right; where it is not, tests show
what it makes of the same files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import ckptkit
from ckptkit.core.errors import AmbiguousSourceError, MissingFileError, UnsupportedError
from tests.live_truth import FIXTURES, refuse, truth_of, written
from tests.made_up_shards import HALVES, WHOLE, Pieces, write_shards
from tests.tensor_images import images

SHARDS = ("dcp_hf_fsdp2", "dcp_hf_two_files", "dcp_hf_grid", "dcp_hf_pretrained")
IN_DISTCP = ("dcp_images_fsdp2", "dcp_images_grid", "dcp_zstd_fsdp2", "dcp_zstd_grid")
WITH_OPTIMIZER = ("dcp_images_fsdp2", "dcp_zstd_fsdp2")
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("case", [*SHARDS, *IN_DISTCP])
@pytest.mark.quick("dcp_hf_two_files", "dcp_images_grid", "dcp_zstd_grid")
def test_a_real_checkpoint_is_bit_equal_to_the_live_model(case: str, tmp_path: Path) -> None:
    source, live = FIXTURES / case / "checkpoint", truth_of(case)
    assert written(source, tmp_path / "out") == live
    found = ckptkit.verify(source)
    assert found.ok
    assert bool(found.unverified) == ("zstd" not in case), "only archives have checksums"
    assert ckptkit.diff(source, tmp_path / "out").same
    with ckptkit.open(source) as checkpoint:
        assert images({name: checkpoint[name] for name in checkpoint}) == live


@pytest.mark.parametrize("case", ["dcp_hf_grid", "dcp_images_grid", "dcp_zstd_grid"])
def test_other_layouts_are_written_from_it(case: str, tmp_path: Path) -> None:
    source, live = FIXTURES / case / "checkpoint", truth_of(case)
    ckptkit.convert(source, tmp_path / "torch", to="torch")
    loaded = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)  # noqa: TID251
    assert images(loaded) == live
    ckptkit.convert(source, tmp_path / "dcp", to="dcp")
    assert written(tmp_path / "dcp", tmp_path / "again") == live


@pytest.mark.parametrize("case", WITH_OPTIMIZER)
def test_the_optimizer_beside_it_is_the_live_one(case: str, tmp_path: Path) -> None:
    ckptkit.convert(FIXTURES / case / "checkpoint", tmp_path / "out", to="torch", optimizer=True)
    state = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)["state"]  # noqa: TID251
    found = {f"state.{n}.{kind}": v for n, kinds in state.items() for kind, v in kinds.items()}
    assert images(found) == truth_of(case, "truth_optimizer")


def test_what_is_found_is_told() -> None:
    shards = ckptkit.inspect(FIXTURES / "dcp_hf_two_files" / "checkpoint")
    assert (shards.format, shards.world_size, shards.problems) == ("dcp-hf", 3, ())
    assert any("--base" in note for note in shards.notes)
    assert not ckptkit.inspect(FIXTURES / "dcp_hf_pretrained" / "checkpoint").notes
    imaged = ckptkit.inspect(FIXTURES / "dcp_images_fsdp2" / "checkpoint")
    assert (imaged.format, imaged.world_size, imaged.problems) == ("dcp", 3, ())
    assert imaged.writer.endswith("SerializationFormat.SAFETENSORS")
    compressed = ckptkit.inspect(FIXTURES / "dcp_zstd_fsdp2" / "checkpoint")
    assert (compressed.format, compressed.world_size, compressed.problems) == ("dcp", 3, ())
    assert compressed.writer.endswith("compressed with zstd")


def test_a_tensor_that_torch_consolidated_wrongly_is_not_taken_without_a_word(
    tmp_path: Path,
) -> None:
    """The real thing: torch 2.13 has written 0 for the live value 1.5."""
    source = FIXTURES / "dcp_hf_consolidated" / "checkpoint"
    live = truth_of("dcp_hf_consolidated")
    with pytest.raises(AmbiguousSourceError, match=r"another number in 'model\.gate'") as caught:
        ckptkit.consolidate(source, tmp_path / "out")
    assert "--select sharded" in caught.value.hint
    assert written(source, tmp_path / "out", select="sharded") == live
    theirs = written(source, tmp_path / "as_it_is", select="model.safetensors.index.json")
    assert {name for name in live if theirs[name] != live[name]} == {"model.gate"}


def test_shards_beside_the_model_that_they_became_are_named_and_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "dcp_hf_pretrained" / "checkpoint", source / "sharded")
    names = load_file(FIXTURES / "dcp_hf_pretrained" / "truth.safetensors")
    consolidate_safetensors_files(
        str(source / "sharded"), str(source), dict.fromkeys(names, 1), num_threads=1
    )
    found = ckptkit.inspect(source)
    assert found.format == "safetensors"
    assert "'sharded' holds the shards of the same model: left alone" in found.notes
    assert written(source, tmp_path / "out") == truth_of("dcp_hf_pretrained")


class Both:
    """The same shards consolidated by torch and by us."""

    def __init__(self, tmp_path: Path, ranks: list[Pieces]) -> None:
        self.folder, self._out = tmp_path / "shards", tmp_path
        write_shards(self.folder, ranks)

    def theirs(self, *names: str) -> Path:
        out = self._out / "theirs"
        out.mkdir()
        consolidate_safetensors_files(str(self.folder), str(out), dict.fromkeys(names, 1))
        return out / "model-00001-of-00001.safetensors"

    def ours(self) -> Tensors:
        ckptkit.consolidate(self.folder, self._out / "ours", names="live")
        return load_file(self._out / "ours" / "model.safetensors")


@pytest.mark.parametrize(("lost", "theirs"), [(1, "zeros"), (2, "a smaller shape")])
def test_torch_takes_no_notice_of_a_missing_shard_and_we_do(
    lost: int, theirs: str, tmp_path: Path
) -> None:
    both = Both(tmp_path, HALVES)
    (both.folder / f"shard-0000{lost}-model-00001-of-00001.safetensors").unlink()
    found = load_file(both.theirs("w"))["w"]
    if theirs == "zeros":
        assert torch.equal(found, torch.cat([torch.zeros(2, 3), WHOLE[2:]]))
        with pytest.raises(MissingFileError, match="shard-00001-model"):
            both.ours()
    else:
        assert found.shape == (2, 3)
        manifest = ckptkit.inspect(both.folder)
        assert any("a shard missing at the end" in note for note in manifest.notes)


def test_torch_writes_a_file_that_nobody_reads_for_a_mapping_with_a_name_too_many(
    tmp_path: Path,
) -> None:
    both = Both(tmp_path, HALVES)
    with pytest.raises(Exception, match=r"[Hh]eader|dtype|variant"):
        load_file(both.theirs("w", "tied.weight"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(("w", "gain", "tied.weight"), "x")}
    (both.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert both.ours().keys() == {"w", "gain"}
    notes = ckptkit.inspect(both.folder).notes
    assert any("no shard has: 'tied.weight'" in note for note in notes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_save_without_collectives_is_refused_by_name(tmp_path: Path) -> None:
    """The real thing: a `.metadata` for each rank, and none of the whole."""
    state = {"model": {"weight": torch.ones(3, 2)}}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True, use_collectives=False)
    refuse("use_collectives=False", tmp_path / "run", tmp_path / "out", kind=UnsupportedError)
