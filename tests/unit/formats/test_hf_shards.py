"""Safetensors shards of DCP that are not as they should be, and what may lie beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    FormatError,
    IncompleteCheckpointError,
    InputError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.formats.safetensors.hf_shards import UNPROVEN
from tests.live_truth import FIXTURES, copied
from tests.made_up_shards import HALVES, WHOLE, Pieces, shard_name, with_metadata, write_shards

INDEX = "model.safetensors.index.json"
RIGHT = {"w": WHOLE, "gain": torch.tensor(3.25)}


def consolidated(source: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptkit.consolidate(source, out, names="live", **options)
    return load_file(out / "model.safetensors")


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    write_shards(tmp_path / "run", HALVES)
    return tmp_path / "run"


def test_pieces_numbers_and_empty_pieces_are_put_together(tmp_path: Path) -> None:
    ranks: list[Pieces] = [
        {
            "tiny": (torch.ones(1, 5), [0, 0]),
            "few": (torch.tensor([7]), [0]),
            "none": (torch.zeros(0, 4), [0, 0]),
        },
        {
            "tiny": (torch.zeros(0, 5), [1, 0]),
            "few": (torch.zeros(0, dtype=torch.int64), [1]),
            "flag": (torch.tensor(True), []),
            "none": (torch.zeros(0, 4), [0, 0]),
        },
    ]
    write_shards(tmp_path / "run", ranks)
    found = consolidated(tmp_path / "run", tmp_path / "out")
    assert torch.equal(found["tiny"], torch.ones(1, 5))
    assert torch.equal(found["few"], torch.tensor([7]))
    assert found["flag"].dtype == torch.bool
    assert found["flag"].item() is True
    assert found["none"].shape == (0, 4)


def test_each_missing_shard_is_refused(tmp_path: Path) -> None:
    case = "dcp_hf_two_files"
    for name in sorted(path.name for path in (FIXTURES / case / "checkpoint").glob("shard-*")):
        source = copied(case, tmp_path / name)
        (source / name).unlink()
        with pytest.raises((MissingFileError, IncompleteCheckpointError)):
            consolidated(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("case", "ranks"), [("dcp_hf_fsdp2", 2), ("dcp_hf_two_files", 3)])
def test_a_missing_last_rank_shows_where_rows_of_no_matrix_are_columns_of_another(
    case: str, ranks: int, tmp_path: Path
) -> None:
    """Without any configuration, since rows are cut and columns are not."""
    source = copied(case, tmp_path / "run")
    assert not ckptkit.inspect(source).problems
    for file in source.glob(f"shard-{ranks:05d}-*"):
        file.unlink()
    found = f"with {ranks} shards of each: those after the last one are missing"
    with pytest.raises(IncompleteCheckpointError, match=found):
        consolidated(source, tmp_path / "out")
    with ckptkit.open(source) as checkpoint, pytest.raises(IncompleteCheckpointError, match=found):
        checkpoint.read("embed.weight")
    assert not ckptkit.verify(source).ok


def test_a_missing_last_shard_shows_in_the_shapes_of_another_model(
    halves: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({"w": torch.zeros(4, 3)}, base / "model.safetensors")
    assert torch.equal(consolidated(halves, tmp_path / "whole", base=base)["w"], WHOLE)
    (halves / shard_name(2)).unlink()
    notes: list[str] = []

    def listen(event: object) -> None:
        plan = getattr(event, "plan", None)
        notes.extend(getattr(plan, "notes", getattr(event, "notes", ())))

    consolidated(halves, tmp_path / "unproven", listener=listen)
    assert UNPROVEN in notes
    for option in ("base", "like"):
        with pytest.raises(IncompleteCheckpointError, match=r"reach to \[2, 3\], there it has"):
            consolidated(halves, tmp_path / "out", **{option: base})


def test_layers_that_a_configuration_has_more_are_missing(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"layers.0.weight": (torch.ones(2), [0])}])
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    with pytest.raises(IncompleteCheckpointError, match="last 2 of 3 layers"):
        ckptkit.inspect(tmp_path)


def test_a_padded_vocabulary_is_no_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"wte.weight": (torch.ones(8, 2), [0, 0])}])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7, "n_embd": 2}))
    found = ckptkit.inspect(tmp_path)
    assert not found.problems
    assert not found.notes


def test_a_configuration_that_cannot_be_read_proves_nothing(halves: Path) -> None:
    (halves / "config.json").write_text("{")
    assert UNPROVEN in ckptkit.inspect(halves).notes


def test_a_rank_that_wrote_no_file_is_believed_where_an_index_names_all_tensors(
    tmp_path: Path,
) -> None:
    """As in a pipeline, where the first stage has nothing of the last model file."""
    run = tmp_path / "run"
    write_shards(run, [{"a": (torch.ones(2), [0])}], model_file=1, of=2)
    write_shards(run, [{"b": (torch.ones(2), [0])}], model_file=2, of=2, first=2)
    with pytest.raises(MissingFileError, match="2 of 4 shards are there") as caught:
        ckptkit.inspect(run)
    assert INDEX in caught.value.hint
    write_index(run, "a", "b")
    assert consolidated(run, tmp_path / "out").keys() == {"a", "b"}
    write_index(run, "a", "b", "c")
    with pytest.raises(MissingFileError, match="2 of 4 shards are there"):
        ckptkit.inspect(run)


def test_numbers_longer_than_any_real_one_are_no_reason_to_fall(
    halves: Path, tmp_path: Path
) -> None:
    (tmp_path / "moved").mkdir()
    (halves / shard_name(1)).rename(tmp_path / "moved" / shard_name(10**20))
    write_index(tmp_path / "moved", "w", "gain")
    with pytest.raises(FormatError, match="rank 1e\\+20"):
        ckptkit.inspect(tmp_path / "moved")
    name = f"layers.{'1' * 5_000}.weight"
    write_shards(tmp_path / "other", [{name: (torch.ones(2, 2), [0, 0])}])
    assert [line.name for line in ckptkit.inspect(tmp_path / "other").tensors] == [name]


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_a_shard_under_another_name_is_not_taken_for_a_model(
    halves: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "moved").mkdir()
    for rank in (1, 2):
        shutil.copy(halves / shard_name(rank), tmp_path / "moved" / name)
        if rank == 1:  # every tensor begins where its piece does
            assert not ckptkit.inspect(tmp_path / "moved").problems
            continue
        with pytest.raises(UnsupportedError, match=r"the shard of tensor 'w' from \[2, 0\] on"):
            ckptkit.inspect(tmp_path / "moved")


def write_index(folder: Path, *names: str) -> None:
    document = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.bin")}
    (folder / INDEX).write_text(json.dumps(document))


def test_a_model_file_of_which_no_shard_is_there_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path, HALVES, model_file=2, of=2)
    with pytest.raises(MissingFileError, match="no shard is of model file 1 of 2"):
        ckptkit.inspect(tmp_path)


def test_shards_of_another_number_of_model_files_are_of_another_save(halves: Path) -> None:
    write_shards(halves, HALVES[1:], of=2, first=3)
    with pytest.raises(FormatError, match="'-of-00001' and '-of-00002'"):
        ckptkit.inspect(halves)


@pytest.mark.parametrize(
    "stale",
    [
        {"w": (torch.zeros(1, 3), [3, 0])},  # from a save by four ranks
        {"gain": (torch.tensor(1.0), [])},
        {"w": (torch.zeros(2, 3), [2, 0])},  # at the same place as another
    ],
)
def test_a_stale_shard_of_another_world_size_is_refused(
    stale: Pieces, halves: Path, tmp_path: Path
) -> None:
    write_shards(halves, [stale], first=3)
    with pytest.raises(IncompleteCheckpointError, match="stored") as caught:
        consolidated(halves, tmp_path / "out")
    assert shard_name(3) in str(caught.value)
    assert ckptkit.inspect(halves).problems
    assert not ckptkit.verify(halves).ok


@pytest.mark.parametrize(
    ("piece", "found"),
    [
        ((torch.zeros(2, 3, dtype=torch.float16), [4, 0]), "has dtype float32"),
        ((torch.zeros(2), [4]), "has dimensions 2"),
    ],
)
def test_pieces_of_tensors_that_differ_are_refused(
    piece: tuple[torch.Tensor, list[int]], found: str, halves: Path
) -> None:
    write_shards(halves, [{"w": piece}], first=3)
    with pytest.raises(FormatError, match=found):
        ckptkit.inspect(halves)


def test_a_hole_between_pieces_is_refused(halves: Path, tmp_path: Path) -> None:
    write_shards(halves, [{"w": (torch.zeros(1, 3), [7, 0])}], first=3)
    with pytest.raises(IncompleteCheckpointError, match=r"rows \[4, 7\).* are in no file"):
        consolidated(halves, tmp_path / "out")


@pytest.mark.parametrize(
    ("texts", "error", "found"),
    [
        ({"DCP_SHARDING_INFO": None}, UnsupportedError, "no 'DCP_SHARDING_INFO'"),
        ({"DCP_VERSION": "2.0"}, UnsupportedError, "'DCP_VERSION' is '2.0'"),
        ({"DCP_VERSION": None}, UnsupportedError, "'DCP_VERSION' is None"),
        ({"DCP_SHARDING_INFO": "{"}, FormatError, "not JSON"),
        ({"DCP_SHARDING_INFO": "[]"}, FormatError, "not a JSON object"),
        ({"DCP_SHARDING_INFO": "{}"}, FormatError, "disagree on 'w'"),
        ({"DCP_SHARDING_INFO": '{"w": 3}'}, FormatError, "not a list of 2 numbers"),
        ({"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [2]}}'}, FormatError, "list of 2 numbers"),
        ({"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [-2, 0]}}'}, FormatError, "natural"),
        ({"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [true, 0]}}'}, FormatError, "natural"),
        ({"DCP_SHARDING_INFO": f'{{"w": {{"saved_offsets": [{2**63}, 0]}}}}'}, FormatError, "nat"),
        (
            {"DCP_SHARDING_INFO": f'{{"w": {{"saved_offsets": [{2**62}, {2**62}]}}}}'},
            FormatError,
            "overflows",
        ),
    ],
)
def test_a_header_that_lies_is_refused(
    texts: dict[str, str], error: type[InputError], found: str, halves: Path
) -> None:
    with_metadata(halves / shard_name(2), **texts)
    with pytest.raises(error, match=found):
        ckptkit.inspect(halves)


# Beside other things


def with_model(folder: Path, tensors: dict[str, torch.Tensor], *, sharded: str = "sharded") -> Path:
    write_shards(folder / sharded, HALVES)
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    return folder


@pytest.mark.parametrize("sharded", ["sharded", ""])
def test_a_whole_model_is_taken_and_its_shards_are_named(sharded: str, tmp_path: Path) -> None:
    run = with_model(tmp_path / "run", RIGHT, sharded=sharded)
    found = ckptkit.inspect(run)
    assert found.format == "safetensors"
    assert any("holds the shards of the same model: left alone" in note for note in found.notes)
    assert consolidated(run, tmp_path / "out").keys() == {"w", "gain"}


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"w": WHOLE}, "it lacks tensor 'gain'"),
        ({"w": WHOLE[:2], "gain": torch.tensor(3.25)}, r"float32 \[2, 3\] against"),
        ({"w": WHOLE, "gain": torch.tensor(0.0)}, "another number in 'gain'"),
        ({"w": WHOLE, "gain": torch.tensor(3.25), "x": torch.ones(2)}, "it alone has tensor 'x'"),
    ],
)
def test_a_model_that_is_not_what_its_shards_are_leaves_the_choice(
    tensors: dict[str, torch.Tensor], found: str, tmp_path: Path
) -> None:
    run = with_model(tmp_path / "run", tensors)
    with pytest.raises(AmbiguousSourceError, match=found):
        ckptkit.inspect(run)
    assert torch.equal(consolidated(run, tmp_path / "anew", select="sharded")["w"], WHOLE)
    name = "model-00001-of-00001.safetensors"
    theirs = consolidated(run, tmp_path / "as_it_is", select=name)
    assert all(torch.equal(theirs[key], tensors[key]) for key in theirs)


def test_a_model_whose_consolidation_was_interrupted_leaves_the_choice(tmp_path: Path) -> None:
    run = with_model(tmp_path / "run", RIGHT)
    file = run / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(AmbiguousSourceError, match="it is not whole"):
        ckptkit.inspect(run)
    assert consolidated(run, tmp_path / "anew", select="sharded")["gain"].item() == 3.25


def test_a_whole_model_needs_none_of_its_shards(tmp_path: Path) -> None:
    run = with_model(tmp_path / "run", RIGHT)
    (run / "sharded" / shard_name(1)).unlink()
    assert ckptkit.inspect(run).format == "safetensors"


def test_shards_beside_distcp_files_leave_the_choice(tmp_path: Path) -> None:
    run = copied("fsdp2_hsdp", tmp_path / "run")
    write_shards(run, HALVES)
    with pytest.raises(AmbiguousSourceError, match="holds 2 models") as caught:
        consolidated(run, tmp_path / "out")
    assert ".metadata" in str(caught.value)
    assert shard_name(1) in str(caught.value)


def test_of_two_steps_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    write_shards(tmp_path / "step-1", HALVES)
    write_shards(tmp_path / "step-2", HALVES)
    (tmp_path / "step-2" / shard_name(1)).unlink()
    found = ckptkit.inspect(tmp_path)
    assert found.step == 1
    assert any("step-2 was passed over" in note for note in found.notes)


def test_what_training_leaves_beside_shards_is_left_alone(halves: Path, tmp_path: Path) -> None:
    torch.save({"last_epoch": torch.tensor(3)}, halves / "extra.pt")
    found = ckptkit.inspect(halves)
    assert found.format == "dcp-hf"
    assert any("extra.pt" in note for note in found.notes)
    assert torch.equal(consolidated(halves, tmp_path / "out")["w"], WHOLE)
