"""Any bytes give a value or one of our errors, and shortcuts never change the outcome."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.dcp.metadata import ALLOWED, DcpMetadata, parse_metadata
from ckptkit.formats.pickle.pickles import parse_pickle
from tests.property.examples import examples

OPCODES = [bytes([code]) for code in b"(.012NIJKMLFGVXTUBCtl]ae}sudpqrghjcRbQ\x80\x81\x85\x86\x87"]
OPCODES += [bytes([code]) for code in range(0x88, 0x99)]
FRAGMENTS = st.sampled_from(
    [
        *OPCODES,
        b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81",
        b"K\x01",
        b"\x8c\x01a\x94",
        b"h\x00",
        b"j\x01\x00\x00\x00",
        b"}\x94(",
        b")\x85\x94R\x94",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.none(), inner)
    ),
)


def assert_bounded(data: bytes) -> None:
    tracemalloc.start()
    with suppress(CkptkitError):
        parse_metadata(data, where="")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * len(data) + 500_000


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_our_errors(data: bytes) -> None:
    assert_bounded(data)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(FRAGMENTS, max_size=60).map(b"".join))
def test_arbitrary_opcodes_give_values_or_our_errors(data: bytes) -> None:
    assert_bounded(data + b".")
    with suppress(CkptkitError):
        parse_pickle(data + b".", ALLOWED, where="")


@settings(max_examples=examples(100), deadline=None)
@given(VALUES, st.sampled_from([3, 4, 5]))
def test_pickled_values_come_back_equal(value: Any, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol), {}, where="") == value


@st.composite
def checkpoints(draw: st.DrawFn) -> Metadata:
    """Draws consistent metadata whose objects are shared in some of the possible ways."""
    ranks = draw(st.integers(1, 60))
    index: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    end = draw(st.sampled_from([0, 200, 65_000, 2**31 - 5000, 2**40]))
    fresh = draw(st.booleans())
    for number, rank in enumerate(draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))):
        key = f"m.{number}.w" + draw(st.sampled_from(["", "é", "\x94", "x" * 260]))
        rows = draw(st.sampled_from([1, 3, 300, 70_000]))
        rest = torch.Size([draw(st.integers(1, 3)) for _ in range(rank - 1)])
        count = ranks if rank else 1
        size = torch.Size([rows, *rest]) if rank else torch.Size([])
        chunks = []
        for i in range(count):
            offset = torch.Size([rows * i, *[0] * (rank - 1)]) if rank else torch.Size([])
            chunks.append(ChunkStorageMetadata(offset, torch.Size(list(size)) if fresh else size))
        shape = torch.Size([rows * count, *rest]) if rank else size
        index[key] = TensorStorageMetadata(TensorProperties(torch.int8), shape, chunks)
    for i in range(ranks):
        for key, entry in index.items():
            if i < len(entry.chunks):
                offset = entry.chunks[i].offsets
                at = MetadataIndex((key + " ")[:-1] if fresh else key, offset, i or None)
                if draw(st.booleans()):
                    object.__setattr__(at, "offset", offset)
                length = entry.chunks[i].sizes.numel() + 1000
                stored[at] = _StorageInfo(f"__{i}_0.distcp", end, length)
                end += length
    if draw(st.booleans()):
        index["object"] = BytesStorageMetadata()
        stored[MetadataIndex("object")] = _StorageInfo("__0_0.distcp", end, 9)
    return Metadata(index, None, stored, draw(st.sampled_from([None, StorageMeta("x")])))


def same(one: DcpMetadata, other: DcpMetadata) -> bool:
    columns = ("offsets", "sizes", "file", "start", "length")
    return (
        (one.blobs, one.paths, one.planner_data, one.writer, list(one.tensors))
        == (other.blobs, other.paths, other.planner_data, other.writer, list(other.tensors))
    ) and all(
        (a.dtype, a.shape, a.transforms) == (b.dtype, b.shape, b.transforms)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        for a, b in zip(one.tensors.values(), other.tensors.values(), strict=True)
    )


@settings(max_examples=examples(40), deadline=None)
@given(checkpoints(), st.sampled_from([2, 4, 5]))
def test_shortcuts_do_not_change_the_outcome(metadata: Metadata, protocol: int) -> None:
    data = pickle.dumps(metadata, protocol)
    fast = parse_metadata(data, where="")
    assert same(fast, parse_metadata(data, where="", shortcuts=False))
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            infos = [metadata.storage_data[MetadataIndex(key, c.offsets)] for c in entry.chunks]
            assert fast.tensors[key].start.tolist() == [info.offset for info in infos]
            assert fast.tensors[key].offsets.tolist() == [list(c.offsets) for c in entry.chunks]


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


def outcome(data: bytes, *, shortcuts: bool) -> DcpMetadata | None:
    try:
        return parse_metadata(data, where="", shortcuts=shortcuts)
    except CkptkitError:
        return None


def test_metadata_cut_anywhere_is_refused() -> None:
    data = pickle.dumps(sample(2), 4)
    for length in range(len(data)):
        with pytest.raises(CkptkitError):
            parse_metadata(data[:length], where="")


@pytest.mark.parametrize(
    ("ranks", "flips"),
    [(2, examples(3000)), pytest.param(40, examples(1000), marks=pytest.mark.slow)],
)
def test_flipped_bits_give_one_of_our_errors_or_the_same_from_both_paths(
    ranks: int, flips: int
) -> None:
    data = bytearray(pickle.dumps(sample(ranks), 4))
    chosen = random.Random(0)  # noqa: S311
    for _ in range(flips):
        bit = chosen.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        fast, slow = (outcome(bytes(data), shortcuts=shortcuts) for shortcuts in (True, False))
        assert fast is slow or (fast and slow and same(fast, slow))
        data[bit // 8] ^= 1 << bit % 8


def test_a_hostile_template_takes_bounded_time_and_memory() -> None:
    data = pickle.dumps(sample(600), 4)
    chunk = data.index(b"ChunkStorageMetadata")
    start = data.index(b")\x81\x94}\x94(", data.index(b"ub", chunk))
    opening = data[start - 2 : start + 7]
    hostile = data[: start - 2] + opening * 30_000
    forged = data[: start - 2] + (opening + b"\x8c\x20" + b" " * 200) * 3000
    for bytes_ in (hostile, forged, hostile + struct.pack("<Q", 0)):
        tracemalloc.start()
        began = time.perf_counter()
        with pytest.raises(CkptkitError):
            parse_metadata(bytes_, where="")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * len(bytes_) + 2_000_000
        assert time.perf_counter() - began < 20
