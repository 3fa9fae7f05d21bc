"""nanotron's headers and metadata, arbitrary and nearly right: our own errors, or an index."""

from __future__ import annotations

import json
import struct

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.errors import InputError
from ckptkit.core.geometry import find_defect
from ckptkit.formats.others.nanotron import NanotronReader
from ckptkit.storage.overlay import MemorySource

FOLDER = "7/model/model/decoder/0/pp_block/attn/qkv_proj"
BOUND = st.sampled_from(["None", "0", "2", "4", "-1", "9" * 19, ""]) | st.text(max_size=3)
SLICE = st.lists(BOUND, min_size=2, max_size=4).map(",".join)
BOX = st.lists(SLICE, max_size=3).map("|".join)
PAIRS = st.lists(st.tuples(BOX, BOX).map("#".join), max_size=3).map(";".join)
RIGHT = ["0,2,1|None,None,None#0,2,None|0,2,1", "None,None,None|0,2,None#2,4,None|None,None,None"]
SHAPES = st.sampled_from(["(4, 2)", "(np.int64(4), 2)", "(4,)", "()", "(-4, 2)", "(4, 9e9)"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
META = st.fixed_dictionaries(
    {"version": st.sampled_from(["1.5", "1.5", "2.0"]) | JSON, "tp": st.just(2) | JSON},
    optional={"dp": st.just(1) | JSON, "cp": JSON, "metas": JSON},
)
NAMES = [
    "model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
    "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
]


def file(metadata: dict[str, str]) -> bytes:
    fields = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = json.dumps({"__metadata__": metadata, "data": fields}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def read(files: dict[str, bytes]) -> None:
    reader, source = NanotronReader(), MemorySource(files)
    for candidate in reader.find(sorted(files)):
        try:
            index = reader.read_index(source, candidate)
        except InputError:
            continue
        for entry in index.tensors.values():
            assert find_defect(entry.chunks, entry.shape) is None


@given(
    META,
    st.lists(st.sampled_from(RIGHT) | PAIRS, min_size=2, max_size=2),
    SHAPES | st.text(max_size=9),
    st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_any_header_is_refused_or_describes_a_whole_tensor(
    meta: object, pairs: list[str], shape: str, model_config: bytes
) -> None:
    texts = [
        {"version": "1.5", "unsharded_shape": shape, "local_global_slices_pairs": pair}
        for pair in pairs
    ]
    files = {f"{FOLDER}/{name}": file(text) for name, text in zip(NAMES, texts, strict=True)}
    files["7/checkpoint_metadata.json"] = json.dumps(meta).encode()
    read(files | {"7/model_config.json": model_config})


@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=80)), st.binary(max_size=80))
def test_any_bytes_are_refused_or_read(parameters: dict[str, bytes], config: bytes) -> None:
    meta = json.dumps({"version": "1.5", "tp": 2}).encode()
    read(
        {
            **{f"{FOLDER}/{name}": data for name, data in parameters.items()},
            "7/checkpoint_metadata.json": meta,
            "7/config.yaml": config,
        }
    )


@given(st.lists(st.text("model_-0123of./pnrakt", max_size=40), max_size=6))
def test_any_names_are_recognised_or_not(paths: list[str]) -> None:
    for candidate in NanotronReader().find(sorted({*paths, "7/checkpoint_metadata.json"})):
        assert candidate.files
