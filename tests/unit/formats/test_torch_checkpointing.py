"""Files numbered by rank: which are taken for such, and what is wrong with them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CkptkitError,
    FormatError,
    LimitError,
    MissingFileError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.formats.others import torch_checkpointing
from ckptkit.formats.pickle.pickles import parse_pickle
from ckptkit.storage.local.source import LocalSource

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
Change = Callable[[dict[str, Any]], object]


def copied(case: str, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / case / "checkpoint", folder)
    return folder


def rewrite(folder: Path, change: Change) -> None:
    file = folder / "metadata.pkl"
    document = parse_pickle(file.read_bytes(), {}, where=str(file))
    assert isinstance(document, dict)
    change(document)
    file.write_bytes(pickle.dumps(document))


def group(document: dict[str, Any], path: str = '["up.weight"]') -> dict[str, Any]:
    found: dict[str, Any] = tensors_of(document)[path][0]
    return found


def packed(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group(document)["sharding_metadata"]
    return found


def layouts(document: dict[str, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = document["metadata"]["model"]["rank_to_layout_info"]
    return found


def tensors_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["metadata"]["model"]["nested_path_to_metadata"]
    return found


def data(**values: Any) -> Change:
    return lambda document: packed(document)["data"].update(values)


BAD: dict[str, tuple[Change, type[CkptkitError], str]] = {
    "an earlier version": (
        lambda d: d.update(version="1.0"),
        UnsupportedError,
        "metadata is of version '1.0'; read is 2.0",
    ),
    "no version": (lambda d: d.pop("version"), UnsupportedError, "of version '1.0'"),
    "another number of ranks": (
        lambda d: d.update(world_size=3),
        FormatError,
        "item 'model' does not name the files of 3 ranks",
    ),
    "a number of ranks that is none": (
        lambda d: d.update(world_size=-1),
        FormatError,
        "does not contain the number of ranks",
    ),
    "a way of spreading that is not known": (
        lambda d: packed(d).update(type="default_tensor_v1"),
        UnsupportedError,
        "is spread as 'default_tensor_v1', where DTensors are read",
    ),
    "a placement that is not known": (
        data(placements=[{"type": "Partial"}]),
        UnsupportedError,
        "tensor is placed as 'Partial'",
    ),
    "a placement without a hash": (
        data(placements=[{"type": {}}]),
        UnsupportedError,
        "tensor is placed as ",
    ),
    "a split along no dimension": (
        data(placements=[{"type": "Shard", "dim": 2}]),
        FormatError,
        "tensor of 2 dimensions is split along 2",
    ),
    "a strided split of nothing": (
        data(placements=[{"type": "StridedShard", "dim": 0, "split_factor": 0}]),
        FormatError,
        "strided split has no split factor",
    ),
    "placements for another mesh": (
        data(placements=[]),
        FormatError,
        "has not one placement for each dimension",
    ),
    "a mesh of other ranks": (
        data(mesh_spec={"mesh_shape": (2,), "mesh_data": (0, 7), "device_type": "cpu"}),
        FormatError,
        "a mesh has other ranks than the run of 2",
    ),
    "another shape than the parts have": (
        data(global_shape=[14, 7]),
        FormatError,
        "has parts of other shapes than its placements give",
    ),
    "several ways at once": (
        lambda d: tensors_of(d).update({'["up.weight"]': [group(d), group(d)]}),
        UnsupportedError,
        "is spread by ranks in several ways",
    ),
    "a file elsewhere": (
        lambda d: layouts(d)[0].update(file_path="../other.safetensors"),
        UnsafePathError,
        "layout names '../other.safetensors', which may be outside the folder",
    ),
    "a file that is not there": (
        lambda d: layouts(d)[1].update(file_path="model_of_1.safetensors"),
        MissingFileError,
        "'model_of_1.safetensors', the file of rank 1, is not there",
    ),
    "bytes without a form": (
        lambda d: layouts(d)[0].update(serialization_format={"type": "RawSerialization"}),
        UnsupportedError,
        "tensors of 'model' are stored by 'RawSerialization'",
    ),
    "bytes in a form without a hash": (
        lambda d: layouts(d)[0].update(serialization_format={"type": []}),
        UnsupportedError,
        "tensors of 'model' are stored by ",
    ),
    "a tensor less": (
        lambda d: tensors_of(d).pop('["up.weight"]'),
        FormatError,
        "'model_0.safetensors' holds 'up.weight', which the metadata does not describe",
    ),
    "a tensor more": (
        lambda d: tensors_of(d).update({'["more"]': [group(d)]}),
        FormatError,
        "rank 0 has no part of 'more'",
    ),
    "no path": (
        lambda d: tensors_of(d).update({"{}": [group(d)]}),
        FormatError,
        "names a tensor by something that is no path",
    ),
    "no dictionary": (lambda d: d.update(metadata=[]), FormatError, "items is not a dictionary"),
}


@pytest.mark.parametrize("kind", BAD)
def test_metadata_that_says_what_it_should_not_is_refused(kind: str, tmp_path: Path) -> None:
    change, error, message = BAD[kind]
    folder = copied("torch_checkpointing_safetensors", tmp_path)
    rewrite(folder, change)
    with pytest.raises(error, match=message):
        ckptkit.consolidate(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_metadata_with_an_object_in_place_of_a_value_is_refused(tmp_path: Path) -> None:
    folder = copied("torch_checkpointing_safetensors", tmp_path)
    rewrite(folder, lambda d: d.update(version=Path("2.0")))
    with pytest.raises(UnsupportedError, match="pathlib"):
        ckptkit.consolidate(folder, tmp_path / "out")


def shared_items(document: dict[str, Any]) -> None:
    document["metadata"] = dict.fromkeys(map(str, range(5_000)), document["metadata"]["model"])


def shared_path(document: dict[str, Any]) -> None:
    spread = {"nested_path_to_metadata": {f'["{"w" * 10_000}"]': [group(document)]}}
    item = document["metadata"]["model"] | spread
    document["metadata"] = {f"{number}": dict(item) for number in range(50)}


@pytest.mark.parametrize("bomb", [shared_items, shared_path])
def test_shared_parts_of_metadata_take_neither_time_nor_memory(
    bomb: Change, tmp_path: Path
) -> None:
    folder = copied("torch_checkpointing_safetensors", tmp_path)
    rewrite(folder, bomb)
    with pytest.raises(LimitError, match="unfolds into more values than it has bytes"):
        ckptkit.consolidate(folder, tmp_path / "out")


def test_ranks_that_many_meshes_share_are_kept_once(tmp_path: Path) -> None:
    count = 1000
    ranks = list(range(count))
    split = {"global_shape": [count], "placements": [{"type": "Shard", "dim": 0}]}
    tensors = {
        f'["w{number}"]': [
            {
                "sharding_metadata": {
                    "type": "DTensorShardingMetadata",
                    "data": {**split, "mesh_spec": {"mesh_shape": [count], "mesh_data": ranks}},
                }
            }
        ]
        for number in range(200)
    }
    item = {"rank_to_layout_info": dict.fromkeys(range(count)), "nested_path_to_metadata": tensors}
    document = {"version": "2.0", "world_size": count, "metadata": {"model": item}}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(document))
    with LocalSource(tmp_path) as source:
        _, found = torch_checkpointing.read_sharding_metadata(source, "metadata.pkl")
    assert len({id(spread.ranks) for spread in found["model"].tensors.values()}) == 1


def test_metadata_beyond_all_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_checkpointing, "MAX_METADATA_BYTES", 100)
    folder = copied("torch_checkpointing_safetensors", tmp_path)
    with pytest.raises(LimitError, match="at most 100 are read"):
        ckptkit.consolidate(folder, tmp_path / "out")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("torch_experimental", "checkpoint_{}.pt"),
        ("torch_checkpointing", "model_{}.pt"),
        ("torch_checkpointing_bare", "model_{}.pt"),
        ("torch_checkpointing_safetensors", "model_{}.safetensors"),
    ],
)
def test_the_file_of_a_rank_that_is_missing_is_named(
    case: str, file: str, rank: int, tmp_path: Path
) -> None:
    folder = copied(case, tmp_path)
    (folder / file.format(rank)).unlink()
    with pytest.raises(MissingFileError, match=rf"rank {rank} of 2|_{rank}\."):
        ckptkit.consolidate(folder, tmp_path / "out")


def test_ranks_of_different_steps_are_refused(tmp_path: Path) -> None:
    folder = copied("torch_checkpointing", tmp_path)
    torch.save(3, folder / "step_1.pt")
    with pytest.raises(FormatError, match=r"'step_1\.pt' is of another step than"):
        ckptkit.consolidate(folder, tmp_path / "out")


def test_a_file_under_the_name_of_another_rank_is_refused(tmp_path: Path) -> None:
    folder = copied("torch_experimental", tmp_path)
    shutil.copyfile(folder / "checkpoint_0.pt", folder / "checkpoint_1.pt")
    with pytest.raises(FormatError, match="named after rank 1, and was written by another"):
        ckptkit.consolidate(folder, tmp_path / "out")


@pytest.mark.parametrize("case", ["torch_experimental", "torch_checkpointing"])
def test_a_file_of_a_larger_run_is_refused(case: str, tmp_path: Path) -> None:
    folder = copied(case, tmp_path)
    last = next(folder.glob("*_1.pt"))
    shutil.copyfile(last, last.with_name(last.name.replace("_1", "_5")))
    with pytest.raises(FormatError, match=r"rank 5\b|'(model|checkpoint)_5\.pt'"):
        ckptkit.consolidate(folder, tmp_path / "out")


def test_two_saves_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = copied("torch_checkpointing", tmp_path)
    shutil.copytree(FIXTURES / "torch_experimental" / "checkpoint", folder, dirs_exist_ok=True)
    with pytest.raises(FormatError, match=r"'model_0\.pt' and 'checkpoint_0\.pt' are of two"):
        ckptkit.consolidate(folder, tmp_path / "out")


def test_safetensors_of_ranks_without_metadata_are_refused_and_not_taken_for_models(
    tmp_path: Path,
) -> None:
    folder = copied("torch_checkpointing_safetensors", tmp_path)
    (folder / "metadata.pkl").unlink()
    for source in (folder, folder / "model_0.safetensors"):
        with pytest.raises(UnsupportedError, match=r"no 'metadata\.pkl' describes how the tensors"):
            ckptkit.consolidate(source, tmp_path / "out")


def test_models_numbered_by_epoch_are_still_models(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for epoch in range(3):
        torch.save(
            {"weight": torch.full((2, 3), float(epoch))}, folder / f"epoch_of_net_{epoch}.pt"
        )
        save_file({"weight": torch.zeros(3)}, folder / f"model_{epoch}.safetensors")
    ckptkit.consolidate(folder / "epoch_of_net_1.pt", tmp_path / "out")
    assert (load_file(tmp_path / "out" / "model.safetensors")["weight"] == 1).all()
    with pytest.raises(AmbiguousSourceError):
        ckptkit.consolidate(folder, tmp_path / "other")


def test_one_file_of_several_ranks_stands_for_all(tmp_path: Path) -> None:
    source = FIXTURES / "torch_experimental" / "checkpoint" / "checkpoint_1.pt"
    ckptkit.consolidate(source, tmp_path / "out", names="live")
    truth = load_file(FIXTURES / "torch_experimental" / "truth.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == truth.keys()
