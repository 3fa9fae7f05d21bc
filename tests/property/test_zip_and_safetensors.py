"""Archives and safetensors images, arbitrary and mutilated: our own errors, or the truth."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import InputError
from ckptkit.core.index import Key, TensorIndex
from ckptkit.formats.pickle.torch_values import parse_values
from ckptkit.formats.pickle.torch_zip import locate_tensor, open_archive, read_directory
from ckptkit.formats.safetensors.reader import SafetensorsReader
from ckptkit.formats.torch_files import TorchFileReader
from tests.campaigns.fuzz.seeds import strict
from tests.files_in_memory import read_files, saved
from tests.property.examples import examples

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
OFFSETS = st.lists(st.integers(-1, 2**65) | st.integers(0, 16), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "X"]) | JSON,
        "shape": OFFSETS | JSON,
        "data_offsets": OFFSETS | JSON,
    }
)
HEADERS = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRIES | JSON)


ARCHIVE = saved(torch.arange(6.0).reshape(2, 3))
FILE = saved({"a": torch.arange(4), "b": [torch.zeros(2, 2).t(), 3]})


def read_safetensors(data: bytes) -> TensorIndex:
    return read_files(SafetensorsReader, {"m.safetensors": data})


def try_everything(data: bytes) -> None:
    attempts: tuple[Callable[[], object], ...] = (
        lambda: read_directory(strict(data), len(data), where="x"),
        lambda: locate_tensor(strict(data), len(data), where="x"),
        lambda: parse_values(open_archive(strict(data), len(data), where="x").pickle(), where="x"),
        lambda: read_files(TorchFileReader, {"m.pt": data}),
        lambda: read_safetensors(data),
    )
    for attempt in attempts:
        try:
            attempt()
        except InputError:
            continue


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_end_in_our_own_errors(data: bytes) -> None:
    try_everything(data)
    try_everything(struct.pack("<Q", len(data)) + data)
    try_everything(b"PK\3\4" + data + ARCHIVE[-98:])


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from([ARCHIVE, FILE]),
    st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, 3000),
)
def test_overwritten_archives_end_in_our_own_errors(
    original: bytes, patches: list[tuple[int, bytes]], length: int
) -> None:
    data = bytearray(original)
    for position, patch in patches:
        data[position % len(data) : position % len(data) + len(patch)] = patch
    try_everything(bytes(data))
    try_everything(bytes(data[:length]))


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_pickles_in_whole_archives_end_in_our_own_errors(
    pickle: bytes,
    prefixed: bool,
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", (b"\x80\x02" if prefixed else b"") + pickle)
        archive.writestr("archive/data/0", bytes(16))
    try_everything(buffer.getvalue())


@settings(max_examples=examples(150), deadline=None)
@given(HEADERS, st.integers(0, 40))
def test_arbitrary_headers_are_refused_or_read_like_the_reference_does(
    header: object, data_bytes: int
) -> None:
    raw = json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")
    data = struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)
    try:
        index = read_safetensors(data)
    except InputError:
        return
    content = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    reference = {name: tuple(info["shape"]) for name, info in content}
    assert {key: entry.shape for key, entry in index.tensors.items()} == reference


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), SHAPES, max_size=5), st.data())
def test_what_safetensors_writes_is_found(
    shapes: dict[str, tuple[int, ...]], data: st.DataObject
) -> None:
    shapes.pop("__metadata__", None)
    dtypes = st.sampled_from([np.float32, np.int8, np.bool_, np.float64, np.uint16])
    tensors: dict[str, Any] = {
        name: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(data.draw(dtypes))
        for name, shape in shapes.items()
    }
    image = safetensors.numpy.save(tensors)
    index = read_safetensors(image)
    assert set(index.tensors) == set(tensors)
    for name, tensor in tensors.items():
        entry = index.tensors[Key(name)]
        record = index.records[entry.chunks[0].record]
        assert (entry.shape, entry.dtype.numpy) == (tensor.shape, tensor.dtype.name)
        assert image[record.start : record.stop] == tensor.tobytes()


@settings(max_examples=examples(60), deadline=None)
@given(SHAPES, st.permutations(range(4)), st.integers(0, 3))
def test_any_view_that_torch_saves_is_found(
    shape: tuple[int, ...], order: list[int], offset: int
) -> None:
    elements = int(np.prod(shape, dtype=int))
    base = torch.arange(elements + offset, dtype=torch.int32)[offset:].reshape(shape)
    view = base.permute([axis for axis in order if axis < len(shape)])
    blob = saved(view)
    payload = locate_tensor(strict(blob), len(blob), where="x")
    data = blob[payload.start : payload.stop]
    assert zlib.crc32(data) == payload.crc32
    assert (payload.shape, payload.row_major) == (
        tuple(view.shape),
        view.is_contiguous(),
    )
    if elements:
        storage = torch.frombuffer(bytearray(data), dtype=torch.int32)
        found = storage.as_strided(payload.shape, payload.strides, payload.storage_offset)
        assert torch.equal(found, view)
