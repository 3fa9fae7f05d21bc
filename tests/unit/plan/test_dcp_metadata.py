"""The `.metadata` that we write is the one that torch would, and that our fast parser takes."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.core.dtypes import BY_NAME
from ckptkit.formats.dcp.metadata import ALLOWED, parse_metadata
from ckptkit.formats.dcp.shortcuts import FastMachine
from ckptkit.plan.layouts.dcp_metadata import DcpObject, DcpTensor, make_metadata
from tests.sampled import sampled

BLOB_BYTES = 1 << 30  # so that places in a file need more than four bytes


def as_torch(tensors: list[DcpTensor], objects: list[DcpObject]) -> Metadata:
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    for tensor in tensors:
        chunks = [ChunkStorageMetadata(torch.Size(p[0]), torch.Size(p[1])) for p in tensor.places]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        described[tensor.key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, (offsets, _, file, start, length) in enumerate(tensor.places):
            index = MetadataIndex(tensor.key, offsets, number)
            stored[index] = _StorageInfo(file, start, length)
    for item in objects:
        described[item.key] = BytesStorageMetadata()
        stored[MetadataIndex(item.key)] = _StorageInfo(item.file, item.start, item.length)
    return Metadata(described, paths_of(tensors, objects), stored, None, "1.0.0")


def paths_of(tensors: list[DcpTensor], objects: list[DcpObject]) -> dict[str, Any]:
    return {t.key: t.path for t in tensors} | {item.key: item.path for item in objects}


def sample(ranks: int, tensors: int = 5) -> tuple[list[DcpTensor], list[DcpObject]]:
    made = []
    for number in range(tensors):
        start = number * BLOB_BYTES
        shape = (2 * ranks, *range(30, 30 + number))
        places = [
            ((2 * r, *[0] * number), (2, *shape[1:]), f"__{r}_0.distcp", start, BLOB_BYTES)
            for r in range(ranks)
        ]
        dtype = list(BY_NAME)[number % len(BY_NAME)]
        made.append(DcpTensor(("model", number, "weight"), dtype, shape, places))
    made.append(DcpTensor(("step",), "float32", (), [((), (), "object.distcp", 5000, 700)]))
    made.append(DcpTensor(("none",), "int64", (0, 4), []))
    objects = [DcpObject(("é" * 200, i), "object.distcp", 900 * i, 900) for i in range(3)]
    return made, objects


@pytest.mark.parametrize("ranks", sampled([1, 2, 1000, 1001, 2500], [1, 2, 1001]))
def test_torch_reads_the_metadata_that_it_would_have_made(tmp_path: Path, ranks: int) -> None:
    tensors, objects = sample(ranks)
    (tmp_path / ".metadata").write_bytes(make_metadata(tensors, objects))
    found = FileSystemReader(tmp_path).read_metadata()
    expected = as_torch(tensors, objects)
    found.storage_meta = None  # which the reader fills in
    assert found == expected
    # Positions are hints that equality does not look at.
    hints = [(index.fqn, index.index) for index in expected.storage_data]
    assert sorted(map(str, hints)) == sorted(str((i.fqn, i.index)) for i in found.storage_data)
    assert list(vars(found)) == list(vars(expected))


@pytest.mark.parametrize("tensors", [0, 1, 7])
def test_few_things_are_written_right_too(tensors: int) -> None:
    made, objects = sample(2, tensors)
    for some, others in ((made[:tensors], []), (made[:tensors], objects), ([], objects[:1])):
        data = make_metadata(some, others)
        assert pickle.loads(data) == as_torch(some, others)  # noqa: S301, TID251


def opcodes(data: bytes) -> set[str]:
    return {opcode.name for opcode, *_ in pickletools.genops(data)}


def test_only_opcodes_of_the_real_pickler_are_used() -> None:
    tensors, objects = sample(40)
    ours = opcodes(make_metadata(tensors, objects))
    assert ours <= opcodes(pickle.dumps(as_torch(tensors, objects), 4)) | {"LONG_BINGET"}


def test_the_fast_parser_takes_nearly_all_of_it_in_runs() -> None:
    tensors, objects = sample(700)
    data = make_metadata(tensors, objects)
    machine = FastMachine(data, ALLOWED, where="")
    machine.run()
    assert machine.run_skipped[-1] > 0.9 * machine.next_slot()
    parsed = parse_metadata(data, where=".metadata")
    slowly = parse_metadata(data, where=".metadata", shortcuts=False)
    for tensor in tensors:
        for found in (parsed.tensors[tensor.key], slowly.tensors[tensor.key]):
            assert found.offsets.tolist() == [list(place[0]) for place in tensor.places]
            assert [parsed.paths[file] for file in found.file] == [p[2] for p in tensor.places]
            assert found.start.tolist() == [place[3] for place in tensor.places]
    assert parsed.planner_data == paths_of(tensors, objects)


def test_chunks_are_shared_by_ties() -> None:
    (first, *_), _ = sample(3)
    tied = DcpTensor(("model", "head"), first.dtype, first.shape, first.places)
    parsed = parse_metadata(make_metadata([first, tied], []), where="")
    assert parsed.tensors["model.head"].start.tolist() == parsed.tensors[first.key].start.tolist()
