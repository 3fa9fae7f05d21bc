"""`.metadata` files made with torch's own classes are read right, and damaged ones refused."""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit import inspect
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    FormatError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.formats.dcp.metadata import DcpBlob, DcpMetadata, parse_metadata

Edit = Callable[[Metadata], None]
FIRST = "model.layers.0.weight"


def parse(value: Metadata | bytes, protocol: int = 4, *, shortcuts: bool = True) -> DcpMetadata:
    data = value if isinstance(value, bytes) else pickle.dumps(value, protocol)
    return parse_metadata(data, where=".metadata", shortcuts=shortcuts)


def tensor(shape: tuple[int, ...], ranks: int, dtype: torch.dtype = torch.float32) -> Any:
    rows = -(-shape[0] // ranks) if shape else 0
    if not shape:
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    else:
        starts = range(0, shape[0], rows)
        boxes = [
            ((start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
            for start in starts
        ]
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def sample(ranks: int = 4, tensors: int = 6) -> Metadata:
    """Makes what `dcp.save` of a nested state writes."""
    index: dict[str, Any] = {"model.scale": tensor((), 1), "step": BytesStorageMetadata()}
    for i in range(tensors):
        shape = (ranks * (i + 1), 3, *[2] * (i % 5))
        index[f"model.layers.{i}.weight"] = tensor(shape, ranks, torch.bfloat16)
    planner = {key: tuple(key.split(".", 1)) for key in index}
    stored: dict[Any, Any] = {}
    ends: dict[str, int] = {}
    for rank in range(ranks):
        path = f"__{rank}_0.distcp"
        for key, described in index.items():
            chunks = getattr(described, "chunks", [None])
            if rank < len(chunks):
                offsets = chunks[rank] and chunks[rank].offsets
                # As after the gather, names are equal strings and not the same one.
                name = (key + " ")[:-1]
                start = ends.get(path, 0)
                length = 1500 + rank + 8 * 2**16 * (rank > 2)
                stored[MetadataIndex(name, offsets, rank)] = _StorageInfo(path, start, length)
                ends[path] = start + length
    meta = StorageMeta(pathlib.PurePosixPath("/runs/a"), "save", None, [])
    return Metadata(index, planner, stored, meta, "1.0.0")


def entry(metadata: Metadata, key: str) -> Any:
    return metadata.state_dict_metadata[key]


def expected_rows(metadata: Metadata, key: str) -> list[tuple[Any, ...]]:
    rows = []
    for chunk in entry(metadata, key).chunks:
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        place = (info.relative_path, info.offset, info.length)
        rows.append((tuple(chunk.offsets), tuple(chunk.sizes), *place))
    return rows


def found_rows(parsed: DcpMetadata, key: str) -> list[tuple[Any, ...]]:
    found = parsed.tensors[key]
    columns = (found.offsets, found.sizes, found.file, found.start, found.length)
    return [
        (tuple(offsets), tuple(sizes), parsed.paths[file], start, length)
        for offsets, sizes, file, start, length in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


@pytest.mark.parametrize("shortcuts", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4, 300])
def test_every_chunk_is_found_where_it_is_stored(
    *, shortcuts: bool, protocol: int, ranks: int
) -> None:
    metadata = sample(ranks)
    parsed = parse(metadata, protocol, shortcuts=shortcuts)
    tensors = [key for key in metadata.state_dict_metadata if key != "step"]
    assert list(parsed.tensors) == tensors
    for key in tensors:
        source = entry(metadata, key)
        assert parsed.tensors[key].shape == tuple(source.size)
        assert parsed.tensors[key].dtype == BY_NAME[str(source.properties.dtype)[6:]]
        assert found_rows(parsed, key) == expected_rows(metadata, key)
        assert parsed.tensors[key].file.dtype == np.int32
        assert parsed.tensors[key].offsets.dtype == np.int64
    step = metadata.storage_data[MetadataIndex("step")]
    assert parsed.blobs == {"step": DcpBlob("step", 0, step.offset, step.length)}
    assert parsed.planner_data == metadata.planner_data
    assert parsed.version == "1.0.0"


def test_names_that_are_not_ascii_are_read() -> None:
    metadata = sample(40, tensors=0)
    key = "modèle.poids \x94✓"
    metadata.state_dict_metadata = {key: tensor((40, 2), 40)}
    metadata.planner_data = None
    metadata.storage_data = {
        MetadataIndex((key + " ")[:-1], (i, 0), i): _StorageInfo("é.distcp", 99 * i, 99)
        for i in range(40)
    }
    parsed = parse(metadata)
    assert found_rows(parsed, key) == expected_rows(metadata, key)
    assert parsed.paths == ("é.distcp",)


def test_files_by_older_versions_of_torch_are_told_apart() -> None:
    metadata = sample()
    assert parse(metadata).writer == "torch 2.9 or later"
    metadata.version = None
    assert parse(metadata).writer == "torch 2.4 to 2.8"
    metadata.storage_meta = None
    assert parse(metadata).writer == "torch 2.3"
    for key in parse(metadata).tensors:
        dtype = entry(metadata, key).properties.dtype
        entry(metadata, key).properties = sharded.TensorProperties(dtype=dtype)
    assert parse(metadata).writer == "torch 2.1 or 2.2"


def test_absent_fields_are_as_good_as_none() -> None:
    metadata = sample()
    for name in ("storage_meta", "version", "planner_data"):
        delattr(metadata, name)
    parsed = parse(metadata)
    assert (parsed.planner_data, parsed.version) == (None, None)
    assert len(parsed.tensors) == 7


def test_the_stride_that_newer_torch_appends_to_properties_is_accepted() -> None:
    one = sample(1, tensors=0)
    del one.state_dict_metadata["step"], one.planner_data["step"]
    del one.storage_data[MetadataIndex("step")]
    data = pickle.dumps(one, 4).replace(b"\x89t\x94b", b"\x89Nt\x94b", 1)
    assert list(parse(data).tensors) == ["model.scale"]


def test_an_empty_checkpoint_has_nothing() -> None:
    parsed = parse(Metadata({}, {}, {}, StorageMeta()))
    assert (parsed.tensors, parsed.blobs, parsed.paths) == ({}, {}, ())


def empty_chunk(metadata: Metadata) -> ChunkStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((0, 3)))
    entry(metadata, FIRST).chunks += [chunk, copy.deepcopy(chunk)]
    return chunk


@pytest.mark.parametrize("stored", [True, False])
def test_chunks_without_elements_may_share_a_place_or_have_none(*, stored: bool) -> None:
    metadata = sample()
    plain = found_rows(parse(metadata), FIRST)
    chunk = empty_chunk(metadata)
    if stored:
        index = MetadataIndex(FIRST, chunk.offsets, 4)
        metadata.storage_data[index] = _StorageInfo("__1_0.distcp", 10**9, 1500)
    assert found_rows(parse(metadata), FIRST) == plain


def test_what_several_ranks_stored_of_a_tensor_without_elements_is_one_chunk() -> None:
    metadata = sample()
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((0, 4)))
    empty = entry(metadata, FIRST)
    empty.size, empty.chunks = torch.Size((0, 4)), [chunk]
    for index in [index for index in metadata.storage_data if index.fqn == FIRST]:
        del metadata.storage_data[index]
    for rank in (7, 8, 9):
        index = MetadataIndex(FIRST, (rank, rank))
        metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", 10**9, 1500)
    data = pickle.dumps(metadata, 4)
    for rank in b"\x07\x08\x09":
        assert b"K%cK%c\x86" % (rank, rank) in data
        data = data.replace(b"K%cK%c\x86" % (rank, rank), b"K\x00K\x00\x86")
    for shortcuts in (True, False):
        assert len(parse(data, shortcuts=shortcuts).tensors[FIRST].file) == 0


def test_transforms_are_listed() -> None:
    metadata = sample()
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.layers.1.weight":
            info.transform_descriptors = ["ZStandard"]
            info.length = 3
    found = parse(metadata).tensors
    assert found["model.layers.1.weight"].transforms == (("ZStandard",),)
    assert found[FIRST].transforms == ()


def entry_of(metadata: Metadata, rank: int = 0) -> Any:
    return metadata.storage_data[MetadataIndex(FIRST, (rank, 0))]


def in_index(name: str, value: Any) -> Edit:
    return lambda metadata: setattr(entry(metadata, FIRST), name, value)


def in_chunk(name: str, value: Any) -> Edit:
    return lambda m: setattr(entry(m, FIRST).chunks[1], name, value)


def in_entry(name: str, value: Any) -> Edit:
    return lambda metadata: setattr(entry_of(metadata, 1), name, value)


def in_properties(**changes: Any) -> Edit:
    def edit(metadata: Metadata) -> None:
        found = entry(metadata, FIRST)
        found.properties = dataclasses.replace(found.properties, **changes)

    return edit


def chunk_listed_twice(metadata: Metadata) -> None:
    chunks = entry(metadata, FIRST).chunks
    chunks.append(copy.deepcopy(chunks[0]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m.storage_data.pop(MetadataIndex(FIRST, (1, 0))),
            r"stored nowhere, at \[1, 0\]",
        ),
        (lambda m: entry(m, FIRST).chunks.pop(1), "none of its chunks"),
        (lambda m: m.state_dict_metadata.pop(FIRST), "it is stored, but the index does not"),
        (lambda m: m.state_dict_metadata.pop("step"), "it is stored, but the index does not"),
        (lambda m: m.storage_data.pop(MetadataIndex("step")), "stored 0 times, not once"),
        (lambda m: m.planner_data.pop(FIRST), "missing from 'planner_data'"),
        (lambda m: m.planner_data.update(other=("other",)), "'planner_data' names 'other'"),
        (lambda m: m.planner_data.update({FIRST: ("model", "layers")}), "does not spell"),
        (lambda m: m.planner_data.update({FIRST: ("m" * 10**6,) * 10**5}), "does not spell"),
        (chunk_listed_twice, r"two chunks begin at the same element, at \[0, 0\]"),
        (in_chunk("offsets", torch.Size((2, 0))), "two chunks begin at the same element"),
        (in_chunk("offsets", torch.Size((1,))), "does not have the 2 dimensions"),
        (in_chunk("sizes", torch.Size((1, 3, 1))), "does not have the 2 dimensions"),
        (in_chunk("sizes", torch.Size((1, 4))), "partly outside"),
        (in_chunk("sizes", torch.Size((1, -3))), "partly outside"),
        (in_chunk("sizes", torch.Size((2**62, 3))), "partly outside"),
        (in_chunk("offsets", (2**63, 0)), "not a short tuple of integers"),
        (in_chunk("offsets", (True, 0)), "not a short tuple of integers"),
        (in_chunk("offsets", None), "not a short tuple of integers"),
        (in_index("size", torch.Size((4, -3))), "negative"),
        (in_index("size", (2**40, 2**40)), "overflows"),
        (in_index("size", (0, 2**40, 2**40)), "overflows"),
        (in_index("size", (1,) * 65), "65 dimensions, more than 64"),
        (in_index("size", (1,) * 10**5), "100,000 dimensions"),
        (in_index("size", None), "not a tuple of integers"),
        (in_index("chunks", None), "not a list"),
        (in_index("chunks", [None]), "expected a ChunkStorageMetadata"),
        (in_index("properties", None), "properties are not"),
        (in_entry("offset", -1), "negative start"),
        (in_entry("length", -1), "negative start"),
        (in_entry("offset", 2**63 - 1), "end beyond"),
        (in_entry("offset", 2**64), "not an integer below"),
        (in_entry("offset", 1.5), "not an integer below"),
        (in_entry("relative_path", None), "not a string"),
        (in_entry("relative_path", "__0_0.distcp"), "overlap those of"),
        (lambda m: setattr(entry_of(m), "length", 10**6), "overlap those of"),
        (in_entry("transform_descriptors", [1]), "descriptor is not a string"),
        (in_entry("transform_descriptors", ["x"] * 17), "not a short list"),
        (lambda m: setattr(m, "storage_data", None), "no table 'storage_data'"),
        (lambda m: setattr(m, "planner_data", [1]), "not a dictionary"),
    ],
)
@pytest.mark.parametrize("ranks", [4, 60])
def test_tables_that_contradict_each_other_are_refused(
    edit: Edit, message: str, ranks: int
) -> None:
    metadata = sample(ranks)
    edit(metadata)
    data = pickle.dumps(metadata, 4)
    for shortcuts in (True, False):
        with pytest.raises(FormatError, match=message) as caught:
            parse(data, shortcuts=shortcuts)
        assert caught.value.where.startswith(".metadata")
        assert caught.value.hint


def test_a_chunk_that_is_stored_twice_is_refused() -> None:
    metadata = sample()
    metadata.storage_data[MetadataIndex(FIRST, (9, 9))] = _StorageInfo("x", 0, 9)
    data = pickle.dumps(metadata, 4).replace(b"K\x09K\x09\x86", b"K\x00K\x00\x86")
    for shortcuts in (True, False):
        with pytest.raises(FormatError, match=r"one chunk is stored twice, at \[0, 0\]"):
            parse(data, shortcuts=shortcuts)


def test_a_chunk_list_shared_by_two_tensors_is_refused() -> None:
    metadata = sample()
    entry(metadata, "model.layers.1.weight").chunks = entry(metadata, FIRST).chunks
    with pytest.raises(FormatError, match="not a list that only this tensor has"):
        parse(metadata)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "..", "a\\..\\b", "\\x", "C:\\x", "a\0b"]
)
def test_data_files_outside_the_folder_are_refused(path: str) -> None:
    metadata = sample()
    entry_of(metadata, 1).relative_path = path
    for shortcuts in (True, False):
        with pytest.raises(UnsafePathError):
            parse(metadata, shortcuts=shortcuts)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (in_properties(layout=torch.sparse_coo), "layout is 'torch.sparse_coo'"),
        (in_properties(dtype=torch.qint8), "dtype 'qint8' is not modelled"),
        (in_properties(dtype=torch.complex32), "dtype 'complex32' is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(edit: Edit, message: str) -> None:
    metadata = sample()
    edit(metadata)
    with pytest.raises(UnsupportedError, match=message):
        parse(metadata)


class _Runs:
    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("true",), "system'"),
        (eval, ("1",), "builtins.eval'"),  # noqa: S307
        (torch.load, ("x",), "load'"),  # noqa: TID251
        (pathlib.PurePosixPath, ("a", "b"), None),
        (print, ("a",), None),
    ],
)
def test_hostile_calls_are_refused(function: Any, args: Any, name: str | None) -> None:
    metadata = sample()
    metadata.extra = _Runs(function, args)  # type: ignore[attr-defined]
    if name is None:
        parse(metadata)
        return
    with pytest.raises(UnsafePickleError, match=name):
        parse(metadata)


def test_a_chunk_that_is_stored_in_fewer_bytes_than_its_elements_is_marked() -> None:
    metadata = sample()
    in_entry("length", 5)(metadata)
    assert parse(metadata).short == {FIRST}
    assert parse(sample()).short == frozenset()


@pytest.mark.parametrize("shortcuts", [True, False])
def test_classes_of_the_same_names_have_the_meaning_of_torchs(*, shortcuts: bool) -> None:
    """OLMo-core has its own class for torch's `_StorageInfo`, ByteCheckpoint for `Metadata`."""
    data = pickle.dumps(sample(), 2)
    named = data.replace(
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        b"colmo_core.distributed.checkpoint.filesystem\n_StorageInfo\n",
    )
    assert named != data
    found = parse(named, shortcuts=shortcuts)
    assert found.library == "OLMo-core"
    assert list(found.tensors) == list(parse(data).tensors)
    other = data.replace(b"filesystem\n_StorageInfo\n", b"filesystem\n_StorageFacts\n")
    with pytest.raises(UnsupportedError, match=r"'torch\.distributed.*_StorageFacts' where torch"):
        parse(other, shortcuts=shortcuts)


def test_a_file_with_a_rank_longer_than_any_real_one_is_of_no_known_rank(
    tmp_path: pathlib.Path,
) -> None:
    metadata = sample(ranks=1)
    for info in metadata.storage_data.values():
        info.relative_path = f"__{10**20}_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = inspect(tmp_path)
    assert found.world_size is None
    assert {problem.code for problem in found.problems} == {"missing-file"}
