"""Runs of small objects are taken in one step, and only where that changes nothing."""

from __future__ import annotations

import pickle
import re
import struct
from typing import Any

import pytest
import torch
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

from ckptkit.core.errors import FormatError
from ckptkit.formats.dcp.metadata import ALLOWED, DcpMetadata, parse_metadata
from ckptkit.formats.dcp.shortcuts import FastMachine, ShortcutError

FIRST = "model.0.weight"


def sample(ranks: int) -> Metadata:
    index: dict[str, Any] = {"step": BytesStorageMetadata()}
    stored: dict[Any, Any] = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 900)}
    for number in range(3):
        key = f"model.{number}.weight"
        chunks = [
            ChunkStorageMetadata(torch.Size((2 * rank, 0)), torch.Size((2, 5)))
            for rank in range(ranks)
        ]
        index[key] = TensorStorageMetadata(TensorProperties(), torch.Size((2 * ranks, 5)), chunks)
        for rank, chunk in enumerate(chunks):
            name = (key + " ")[:-1]  # as after the gather, equal and not the same
            info = _StorageInfo(f"__{rank}_0.distcp", 1000 + 1500 * number, 1500)
            stored[MetadataIndex(name, chunk.offsets, rank)] = info
    planner = {key: tuple(key.split(".")) for key in index}
    return Metadata(index, planner, stored, StorageMeta("a"), "1.0.0")


def parse(data: bytes, *, shortcuts: bool = True) -> DcpMetadata:
    return parse_metadata(data, where=".metadata", shortcuts=shortcuts)


def chunks_of(metadata: Metadata, key: str) -> list[ChunkStorageMetadata]:
    found = metadata.state_dict_metadata[key]
    assert isinstance(found, TensorStorageMetadata)
    return found.chunks


def assert_right(parsed: DcpMetadata, metadata: Metadata) -> None:
    for key, found in parsed.tensors.items():
        chunks = chunks_of(metadata, key)
        infos = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in chunks]
        assert found.offsets.tolist() == [list(chunk.offsets) for chunk in chunks]
        assert found.sizes.tolist() == [list(chunk.sizes) for chunk in chunks]
        assert [parsed.paths[file] for file in found.file] == [i.relative_path for i in infos]
        assert found.start.tolist() == [info.offset for info in infos]
        assert found.length.tolist() == [info.length for info in infos]


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
            chunks = chunks_of(metadata, index.fqn)
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
    chunks = chunks_of(metadata, FIRST)
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
    metadata = sample(50)
    # A chunk object listed twice is referred to by its slot in the memo.
    chunks = chunks_of(metadata, FIRST)
    chunks_of(metadata, "model.1.weight")[7] = chunks[7]
    data = pickle.dumps(metadata, 4)
    with pytest.raises(ShortcutError):
        machine_after(data)
    assert_right(parse(data), metadata)
