"""`.metadata` files made with torch's own classes are read right, and damaged ones refused.

Runs of small objects are taken in one step, and only where that changes nothing. The save plans
that Megatron-Core adds are compared with the tables.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptkit import inspect
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    FormatError,
    InputError,
    TruncatedFileError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.formats.dcp.metadata import ALLOWED, DcpBlob, DcpMetadata, parse_metadata
from ckptkit.formats.dcp.shortcuts import FastMachine, PlanRun, ShortcutError
from tests.sampled import sampled

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
@pytest.mark.parametrize("ranks", sampled([1, 2, 4, 300], [1, 2, 4]))
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
@pytest.mark.parametrize("ranks", sampled([4, 60], [4]))
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


def assert_right(parsed: DcpMetadata, metadata: Metadata) -> None:
    for key in parsed.tensors:
        assert found_rows(parsed, key) == expected_rows(metadata, key)


def machine_after(data: bytes) -> FastMachine:
    machine = FastMachine(data, ALLOWED, where="")
    machine.run()
    return machine


def assert_nearly_all_in_runs(machine: FastMachine) -> None:
    assert machine.run_skipped[-1] > 0.9 * machine.next_slot()


def test_shortcuts_take_nearly_everything() -> None:
    metadata = sample(700)
    data = pickle.dumps(metadata, 4)
    assert_nearly_all_in_runs(machine_after(data))
    assert_right(parse(data), metadata)


def shared_sample() -> Metadata:
    metadata = sample(300)
    for index in metadata.storage_data:
        if index.offset:
            chunks = entry(metadata, index.fqn).chunks
            chunk = chunks[index.index]
            object.__setattr__(index, "offset", chunk.offsets)
            chunk.sizes = chunks[0].sizes
    return metadata


def test_objects_shared_between_the_tables_are_resolved() -> None:
    metadata = shared_sample()
    data = pickle.dumps(metadata, 4)
    assert_nearly_all_in_runs(machine_after(data))
    assert_right(parse(data), metadata)


def test_a_size_defined_in_the_same_run_is_resolved_by_the_shortcut() -> None:
    metadata = sample(60)
    chunks = entry(metadata, FIRST).chunks
    for chunk in chunks[10:20]:
        chunk.sizes = chunks[10].sizes
    data = pickle.dumps(metadata, 4)
    assert machine_after(data).patterns  # it did not give up
    assert_right(parse(data), metadata)


def test_a_reference_to_a_later_slot_is_refused() -> None:
    data = pickle.dumps(shared_sample(), 4)
    machine = machine_after(data)
    # A chunk whose sizes are fetched from the memo is made to fetch what a later one stores there.
    pattern = re.compile(re.escape(machine.gets["sizes"]) + rb"j(.{4})ub", re.DOTALL)
    at = list(pattern.finditer(data))[50].start(1)
    rows = data[:at].count(machine.gets["ChunkStorageMetadata"] + b")")
    for row in (rows + 8, -1):  # of the same run, and of the last one
        later = struct.pack("<I", machine.size_slots.slots[row])
        changed = data[:at] + later + data[at + 4 :]
        for shortcuts in (True, False):
            with pytest.raises(FormatError, match=r"memo slot .* is empty"):
                parse(changed, shortcuts=shortcuts)


def test_a_reference_to_an_object_inside_a_run_is_left_to_the_ordinary_machine() -> None:
    metadata = sample(50, tensors=1)
    metadata.state_dict_metadata["other"] = tensor((50, 3), 50)
    metadata.planner_data["other"] = ("other",)
    for rank in range(50):
        info = _StorageInfo(f"__{rank}_0.distcp", 10**9, 1500)
        metadata.storage_data[MetadataIndex("other", (rank, 0), rank)] = info
    # A chunk object listed twice is referred to by its slot in the memo.
    chunks = entry(metadata, FIRST).chunks
    entry(metadata, "other").chunks[7] = chunks[7]
    data = pickle.dumps(metadata, 4)
    with pytest.raises(ShortcutError):
        machine_after(data)
    assert_right(parse(data), metadata)


RANKS, TENSORS = 3, 240


MANY = 700  # their items fill more than one batch of a pickled list


def piece(rank: int, number: int) -> WriteItem:
    box = torch.Size([rank * 2, 0])
    written = TensorWriteData(
        ChunkStorageMetadata(box, torch.Size([2, 300])),
        TensorProperties(dtype=torch.bfloat16),
        torch.Size([2 * RANKS, 300]),
    )
    index = MetadataIndex(f"decoder.{number}.weight", torch.Size([rank * 2, 0]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=written)


def extra_state(rank: int, number: int) -> WriteItem:
    index = MetadataIndex(f"decoder.{number}._extra_state/shard_{rank}_{RANKS}")
    return WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(64))


def as_received(plan: SavePlan) -> SavePlan:
    """Copies a plan as a gather does, without objects in common with the plan of rank 0."""
    items = copy.deepcopy(plan.items)
    for item in items:
        object.__setattr__(item.index, "fqn", (item.index.fqn + " ")[:-1])
    return SavePlan(items, planner_data={})


def with_plans(*, objects: bool = False, tensors: int = TENSORS) -> Metadata:
    """Makes what rank 0 writes, with the plans of the other ranks as they arrive there."""
    plans = []
    for rank in range(RANKS):
        items = []
        for number in range(tensors):
            items.append(piece(rank, number))
            if objects and number % 3:
                items.append(extra_state(rank, number))
        plan = SavePlan(items, planner_data={})
        plans.append(as_received(plan) if rank else plan)
    _, metadata = create_default_global_save_plan(plans)
    metadata.storage_data = {}
    for rank, plan in enumerate(plans):
        for at, item in enumerate(plan.items):
            info = _StorageInfo(f"__{rank}_0.distcp", 3000 * at, 3000)
            index = MetadataIndex(item.index.fqn, item.index.offset)
            metadata.storage_data[index] = info
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    return metadata


def tables(parsed: DcpMetadata) -> Any:
    tensors = {
        key: (found.shape, found.dtype, found.offsets.tolist(), found.start.tolist())
        for key, found in parsed.tensors.items()
    }
    return tensors, parsed.blobs, parsed.paths


@pytest.mark.parametrize(
    ("objects", "tensors"), [(False, TENSORS), pytest.param(True, MANY, marks=pytest.mark.slow)]
)
def test_nearly_all_items_are_skipped_and_the_tables_are_those_without_plans(
    tensors: int, *, objects: bool
) -> None:
    metadata = with_plans(objects=objects, tensors=tensors)
    data = pickle.dumps(metadata, 4)
    machine = FastMachine(data, ALLOWED, where="")
    root: Any = machine.run()
    items = [item for plan in root.state["all_local_plans"] for item in plan.state["items"]]
    runs = [item for item in items if isinstance(item, PlanRun)]
    assert sum(len(run.fqn) for run in runs) + len(items) - len(runs) >= RANKS * tensors
    assert len(items) < RANKS * tensors / 10
    found = parse(data)
    assert found.is_megatron
    assert tables(found) == tables(parse(data, shortcuts=False))
    del metadata.all_local_plans  # type: ignore[attr-defined]
    without = parse(metadata)
    assert tables(found) == tables(without)
    assert not without.is_megatron


@pytest.mark.parametrize("shortcuts", [True, False])
def test_plans_that_lack_a_piece_are_refused_with_both_numbers(*, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    del plans[1].items[200]
    with pytest.raises(FormatError, match=r"have 719 pieces of tensors, the tables 720") as got:
        parse(metadata, shortcuts=shortcuts)
    assert "the piece at [2, 0] is in the tables only" in got.value.message
    assert "decoder.200.weight" in str(got.value.where)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_plans_with_a_piece_elsewhere_are_refused(*, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[2].items[133].index, "offset", torch.Size([3, 0]))
    with pytest.raises(FormatError, match=r"have 720 pieces of tensors, the tables 720"):
        parse(metadata, shortcuts=shortcuts)


@pytest.mark.parametrize("shortcuts", [True, False])
@pytest.mark.parametrize("number", [1, 133])
def test_plans_with_an_unknown_tensor_are_refused(number: int, *, shortcuts: bool) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[2].items[number].index, "fqn", "nowhere")
    with pytest.raises(FormatError, match="the index does not name it") as got:
        parse(metadata, shortcuts=shortcuts)
    assert "nowhere" in str(got.value.where)


def test_a_piece_that_two_ranks_planned_is_stored_once() -> None:
    metadata = with_plans(tensors=20)
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    plans[1].items.append(plans[0].items[5])
    assert tables(parse(metadata)) == tables(parse(with_plans(tensors=20)))


@pytest.mark.parametrize("plans", [None, [], {}, [1], [[]], [WriteItemType.SHARD], "plans"])
def test_what_is_no_list_of_plans_is_refused(plans: object) -> None:
    metadata = with_plans(tensors=20)
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    if plans is None:  # as if there were none
        assert parse(metadata).is_megatron
        return
    for shortcuts in (True, False):
        with pytest.raises(InputError):
            parse(metadata, shortcuts=shortcuts)


def test_a_list_of_items_in_two_plans_is_refused() -> None:
    metadata = with_plans(tensors=20)
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    plans[1] = SavePlan(plans[0].items)
    with pytest.raises(FormatError, match="that only this save plan has"):
        parse(metadata)


class Gadget:
    """A class that would run a command where a pickle is executed."""

    def __reduce__(self) -> Any:
        return (exec, ("print('executed')",))


@pytest.mark.parametrize("at", [0, 200, -1])
def test_a_class_that_no_plan_has_is_refused_anywhere(
    at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = with_plans()
    plans: Any = metadata.all_local_plans  # type: ignore[attr-defined]
    object.__setattr__(plans[1].items[at], "bytes_io_data", Gadget())
    with pytest.raises(UnsafePickleError, match=r"builtins.exec"):
        parse(metadata)
    assert capsys.readouterr().out == ""


def test_a_tail_that_changes_the_tables_is_read_as_every_reader_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plans are interpreted like all else, so that nothing after them goes unseen."""
    metadata = with_plans(tensors=20)
    data = pickle.dumps(metadata, 4)
    assert data.endswith(b"eub.")
    name = b"decoder.3.weight"
    key = b"\x8c" + bytes([len(name)]) + name
    # After the plans, before the fields are set: a second table of stored items.
    for tail in (b"\x8c\x0cstorage_data}ub.", b"\x8c\x0cplanner_data}" + key + b"Nsub."):
        hostile = data[:-3] + tail
        outcomes = []
        for shortcuts in (True, False):
            with pytest.raises(InputError) as got:
                parse(hostile, shortcuts=shortcuts)
            outcomes.append(got.value.message)
        assert outcomes == ["pickle gives a dictionary the same key twice"] * 2
    assert capsys.readouterr().out == ""


def test_plans_that_are_cut_short_are_refused_at_every_length() -> None:
    data = pickle.dumps(with_plans(tensors=40), 4)
    start = data.index(b"all_local_plans")
    for length in range(start, len(data), 97):
        for shortcuts in (True, False):
            with pytest.raises((TruncatedFileError, FormatError)):
                parse(data[:length], shortcuts=shortcuts)
