"""Manifests of torchsnapshot that are damaged, hostile, or say what they should not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.formats.others import torchsnapshot

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
Change = Callable[[dict[str, Any]], object]
WEIGHT = "0/model/first.weight"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshot"
    shutil.copytree(FIXTURES / "torchsnapshot_dtensor" / "checkpoint", folder)
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / ".snapshot_metadata").read_text())
    return document


def rewrite(folder: Path, change: Change) -> None:
    document = manifest_of(folder)
    change(document)
    (folder / ".snapshot_metadata").write_text(json.dumps(document), encoding="utf-8")


def tensor(document: dict[str, Any], path: str = WEIGHT) -> dict[str, Any]:
    found: dict[str, Any] = document["manifest"][path]["shards"][0]["tensor"]
    return found


def shard(document: dict[str, Any], path: str = WEIGHT) -> dict[str, Any]:
    found: dict[str, Any] = document["manifest"][path]["shards"][0]
    return found


BAD: dict[str, tuple[Change, type[CkptkitError], str]] = {
    "a later version": (
        lambda d: d.update(version="2.0.0"),
        UnsupportedError,
        "manifest is of version '2.0.0'; read is 0.1",
    ),
    "no version": (lambda d: d.pop("version"), FormatError, "has other fields than"),
    "fewer ranks than are listed": (
        lambda d: d.update(world_size=1),
        FormatError,
        "is of no rank of a run of 1",
    ),
    "more ranks than are listed": (
        lambda d: d.update(world_size=3),
        IncompleteCheckpointError,
        "lists nothing of rank 2, where the run had 3 ranks",
    ),
    "a number of ranks that takes memory": (
        lambda d: d.update(world_size=10**12),
        IncompleteCheckpointError,
        "'world_size' is '1000000000000'",
    ),
    "a kind of entry that is not known": (
        lambda d: d["manifest"][WEIGHT].update(type="NestedTensor"),
        UnsupportedError,
        "entry is of the kind 'NestedTensor', not modelled",
    ),
    "a type that is a list": (
        lambda d: d["manifest"][WEIGHT].update(type=["Tensor"]),
        UnsupportedError,
        "not modelled",
    ),
    "a serializer that is not known": (
        lambda d: tensor(d).update(serializer="per_tensor_qtensor"),
        UnsupportedError,
        "is stored by 'per_tensor_qtensor', not modelled",
    ),
    "a quantized tensor": (
        lambda d: tensor(d).update(dtype="torch.qint8"),
        UnsupportedError,
        "dtype 'torch.qint8' is not modelled",
    ),
    "a file outside the snapshot": (
        lambda d: tensor(d).update(location="../../etc/passwd"),
        UnsafePathError,
        "names the file '../../etc/passwd', which may be outside the snapshot",
    ),
    "an absolute path": (
        lambda d: tensor(d).update(location="/etc/passwd"),
        UnsafePathError,
        "names the file '/etc/passwd'",
    ),
    "a size that does not fit its bytes": (
        lambda d: (shard(d).update(sizes=[4, 5]), tensor(d).update(shape=[4, 5])),
        FormatError,
        "sizes do not add up",
    ),
    "a block of another shape than its tensor": (
        lambda d: shard(d).update(sizes=[25, 1]),
        FormatError,
        r"has a block of \[25, 1\] that is stored as \[5, 5\]",
    ),
    "a range that is a text": (
        lambda d: tensor(d).update(byte_range="all"),
        FormatError,
        "no list of natural numbers",
    ),
    "a range that runs backwards": (
        lambda d: tensor(d).update(byte_range=[148, 48]),
        FormatError,
        r"has the byte range \[148, 48\]",
    ),
    "bytes of two tensors": (
        lambda d: tensor(d).update(byte_range=[0, 100]),
        FormatError,
        "are of two tensors",
    ),
    "sizes that overflow": (
        lambda d: (shard(d).update(sizes=[2**61, 2**61]), tensor(d).update(shape=[2**61, 2**61])),
        FormatError,
        "overflows",
    ),
    "a block that is missing": (lambda d: d["manifest"].pop(WEIGHT), FormatError, "are of none"),
    "a block that is somewhere else": (
        lambda d: shard(d, "1/model/first.weight").update(offsets=[6, 0]),
        IncompleteCheckpointError,
        r"rows \[5, 6\), columns \[0, 5\) of shape \[10, 5\] are in no file",
    ),
    "blocks of several types": (
        lambda d: tensor(d).update(dtype="torch.int32"),
        FormatError,
        "is stored in several element types",
    ),
    "blocks of several dimensions": (
        lambda d: (shard(d).update(sizes=[25], offsets=[0]), tensor(d).update(shape=[25])),
        FormatError,
        "differ in dimensions",
    ),
    "ranks that disagree on what is shared": (
        lambda d: d["manifest"].update(
            {WEIGHT: {**tensor(d), "type": "Tensor", "replicated": False}}
        ),
        FormatError,
        "ranks disagree on whether 'model/first.weight' is shared",
    ),
    "a tensor of which there is no block": (
        lambda d: [
            d["manifest"].update({f"{rank}/model/none": {"type": "ShardedTensor", "shards": []}})
            for rank in (0, 1)
        ],
        IncompleteCheckpointError,
        "no rank lists a block of 'model/none'",
    ),
    "containers without end": (
        lambda d: d["manifest"].update({"0/" + "a/" * 40 + "b": {"type": "list"}}),
        FormatError,
        "nested more than 32 deep",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_manifest_that_says_what_it_should_not_is_refused(
    kind: str, snapshot: Path, tmp_path: Path
) -> None:
    change, error, message = BAD[kind]
    rewrite(snapshot, change)
    with pytest.raises(error, match=message):
        ckptkit.consolidate(snapshot, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_in_yaml_is_refused_with_what_to_do(snapshot: Path, tmp_path: Path) -> None:
    bomb = "version: 0.0.2\na: &a [x, x]\nb: &b [*a, *a, *a]\nmanifest: [*b, *b, *b]\n"
    (snapshot / ".snapshot_metadata").write_text(bomb, encoding="utf-8")
    with pytest.raises(UnsupportedError, match="is YAML") as refused:
        ckptkit.consolidate(snapshot, tmp_path / "out")
    assert "json.dump" in refused.value.hint


def test_a_manifest_beyond_all_size_is_not_read(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchsnapshot, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(LimitError, match="at most 100 are read"):
        ckptkit.consolidate(snapshot, tmp_path / "out")


def test_a_file_of_a_rank_that_is_too_long_is_named(snapshot: Path, tmp_path: Path) -> None:
    file = min((snapshot / "batched").iterdir())
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(FormatError, match=file.name):
        ckptkit.consolidate(snapshot, tmp_path / "out")


def test_a_snapshot_without_its_manifest_is_no_checkpoint(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / ".snapshot_metadata").unlink()
    with pytest.raises(CkptkitError, match="no checkpoint of a known format"):
        ckptkit.consolidate(snapshot, tmp_path / "out")


def test_shared_tensors_of_ranks_that_differ_are_refused_one_by_one(
    snapshot: Path, tmp_path: Path
) -> None:
    rewrite(snapshot, lambda d: d["manifest"].update({"1/model/more": {**own(d)}}))
    report = ckptkit.inspect(snapshot)
    assert {tree.name for tree in report.trees} == {"model", "0.model", "1.model"}
    with pytest.raises(UnsupportedError, match="whose own tensors in 'model' differ"):
        ckptkit.consolidate(snapshot, tmp_path / "out", select="model")


def own(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["manifest"]["1/model/norm.running_mean"]
    return found


def test_files_of_any_name_inside_a_snapshot_are_not_taken_for_others(
    snapshot: Path, tmp_path: Path
) -> None:
    def rename(document: dict[str, Any]) -> None:
        for entry in document["manifest"].values():
            for part in entry.get("shards", [{"tensor": entry}]):
                if "location" in part["tensor"]:
                    location = part["tensor"]["location"]
                    part["tensor"]["location"] = f"{location}.safetensors"

    rewrite(snapshot, rename)
    for file in list((snapshot / "batched").iterdir()):
        file.rename(file.with_name(f"{file.name}.safetensors"))
    (snapshot / "0").mkdir()
    (snapshot / "0" / "pytorch_model.bin").write_bytes(b"")
    ckptkit.consolidate(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        *[("int", "-3", -3), ("str", "3", "3"), ("bool", "True", True), ("bool", "False", False)],
        *[("bytes", "AAE=", b"\0\1"), ("float", "exSuR+F6hD8=", 0.01)],
    ],
)
def test_a_text_of_the_manifest_is_the_value_that_it_stands_for(
    kind: str, text: str, value: object
) -> None:
    found = torchsnapshot.parse_plain(kind, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *[("int", "3.0"), ("int", "9" * 5000), ("bool", "1"), ("bytes", "A"), ("float", "AAE=")],
        *[("float", "\u00e9"), ("str", None), ("int", 3)],
    ],
)
def test_a_text_that_stands_for_no_value_is_refused(kind: str, text: object) -> None:
    with pytest.raises(FormatError):
        torchsnapshot.parse_plain(kind, text)
