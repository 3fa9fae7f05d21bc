"""Orbax's nodes, arrays and trees, arbitrary and nearly right: our own errors, or an index."""

from __future__ import annotations

import json
import struct

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.crc import crc32c
from ckptkit.core.errors import InputError
from ckptkit.core.geometry import find_defect
from ckptkit.formats.others.orbax import OrbaxReader
from ckptkit.storage.overlay import MemorySource, OverlaySource

NUMBER = st.integers(0, 5) | st.integers(0, 2**70)
NUMBERS = st.lists(NUMBER | st.binary(max_size=6), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
SIZES = st.lists(st.integers(0, 5), max_size=3) | st.lists(st.integers(0, 2**62), max_size=3)
CODEC = st.sampled_from(
    [
        {"name": "bytes"},
        {"name": "zstd", "configuration": {"level": 1}},
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [1, 2],
                "codecs": [{"name": "bytes"}],
                "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            },
        },
    ]
)
ZARR2 = st.fixed_dictionaries(
    {
        "shape": SIZES | JSON,
        "chunks": SIZES | JSON,
        "dtype": st.sampled_from(["<f4", "bfloat16", "|b1", ">f4", "<M8"]) | JSON,
        "compressor": st.sampled_from([None, {"id": "zstd"}, {"id": "gzip"}]) | JSON,
        "fill_value": st.none() | JSON,
        "order": st.sampled_from(["C", "F"]) | JSON,
    }
)
ZARR3 = st.fixed_dictionaries(
    {
        "shape": SIZES | JSON,
        "chunk_grid": st.fixed_dictionaries(
            {
                "name": st.just("regular"),
                "configuration": st.fixed_dictionaries({"chunk_shape": SIZES | JSON}),
            }
        )
        | JSON,
        "chunk_key_encoding": st.just({"name": "default"}) | JSON,
        "data_type": st.sampled_from(["float32", "int4"]) | JSON,
        "codecs": st.lists(CODEC, max_size=2) | JSON,
        "fill_value": st.just(0) | JSON,
    }
)


def node(magic: int, fields: list[int | bytes]) -> bytes:
    body = bytearray(b"\0\0")
    for value in fields:
        rest = value if isinstance(value, int) else 0
        while rest > 0x7F:
            body.append(0x80 | rest & 0x7F)
            rest >>= 7
        body += value if isinstance(value, bytes) else bytes([rest])
    data = struct.pack(">IQ", magic, 0)[:4] + struct.pack("<Q", len(body) + 16) + bytes(body)
    return data + struct.pack("<I", crc32c(data))


def read(files: dict[str, bytes]) -> None:
    reader, source = OrbaxReader(), OverlaySource([MemorySource(files)])
    for candidate in reader.find(sorted(files)):
        try:
            index = reader.read_index(source, candidate)
        except InputError:
            continue
        for entry in index.tensors.values():
            assert not find_defect(entry.chunks, entry.shape) or not len(entry.chunks)


@given(NUMBERS, NUMBERS, st.booleans())
def test_any_manifest_and_any_node_are_refused_or_read(
    manifest: list[int | bytes], tree: list[int | bytes], is_right: bool
) -> None:
    data = node(0x0CDB20DE, tree)
    if is_right:
        versions: list[int | bytes] = [1, 1, b"\0", 0, 0, len(data), 3, 0, 0, bytes(8), 0]
        manifest = [bytes(16), 0, 1, 1, 4, 0, 1, 3, 0, b"d/x", *versions]
    read({"3/manifest.ocdbt": node(0x0CDB3A2A, manifest), "3/d/x": data})


@given(st.binary(max_size=60), JSON)
def test_any_bytes_are_no_database(data: bytes, tree: object) -> None:
    read({"manifest.ocdbt": data, "_METADATA": json.dumps(tree).encode()})


@given(ZARR2 | JSON, ZARR3 | JSON, st.binary(max_size=40), JSON)
def test_any_metadata_of_an_array_is_refused_or_describes_a_whole_tensor(
    second: object, third: object, data: bytes, tree: object
) -> None:
    files = {"a/.zarray": json.dumps(second).encode(), "b/zarr.json": json.dumps(third).encode()}
    names = ["0", "0.0", "0.1", "1.0", "c/0", "c/0/0", "c/0/1", "c"]
    for name in names:
        files[f"a/{name}"] = files[f"b/{name}"] = data
    read(files | {"_METADATA": json.dumps({"tree_metadata": tree}).encode()})
    read(files | {"_METADATA": b"{}"})
