"""Files of Meta's Llama, arbitrary and split in any way: our own errors, or the whole tensors."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import InputError
from ckptkit.core.index import Box, TensorIndex
from ckptkit.formats.others.meta import MetaReader
from ckptkit.storage.overlay import MemorySource
from tests.property.examples import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
PARAMS = st.dictionaries(st.sampled_from(KEYS), st.integers(-1, 9) | JSON) | JSON
PATCHES = st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=8)), max_size=3)
SMALL = {"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": 6}


def read(files: dict[str, bytes]) -> TensorIndex | None:
    """Returns the index, or None where the files are no candidate."""
    reader = MetaReader()
    found = reader.find(sorted(files))
    return reader.read_index(MemorySource(files), found[0]) if found else None


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def whole(params: dict[str, int], width: int) -> dict[str, torch.Tensor]:
    hidden, head = params["dim"], params["dim"] // params["n_heads"]
    keys = params.get("n_kv_heads", params["n_heads"]) * head
    shapes = {"tok_embeddings": (params["vocab_size"], hidden), "norm": (hidden,)}
    shapes["output"] = shapes["tok_embeddings"]
    for layer in range(params["n_layers"]):
        shapes |= {
            f"layers.{layer}.attention.wq": (hidden, hidden),
            f"layers.{layer}.attention.wk": (keys, hidden),
            f"layers.{layer}.attention.wv": (keys, hidden),
            f"layers.{layer}.attention.wo": (hidden, hidden),
            f"layers.{layer}.feed_forward.w1": (width, hidden),
            f"layers.{layer}.feed_forward.w2": (hidden, width),
            f"layers.{layer}.ffn_norm": (hidden,),
        }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def split(
    tensors: dict[str, torch.Tensor], params: dict[str, int], files: int, embeddings: int
) -> dict[str, bytes]:
    groups = params.get("n_kv_heads", params["n_heads"])
    found = {"params.json": json.dumps(params).encode()}
    for rank in range(files):
        held = {}
        for name, tensor in tensors.items():
            axis = 1 if ".wo." in name or ".w2." in name else 0
            axis = embeddings if name.startswith("tok_") else axis
            parts = 1 if "norm" in name else files
            parts = min(files, groups) if ".wk." in name or ".wv." in name else parts
            held[name] = tensor.chunk(parts, axis)[rank * parts // files].clone()
        found[f"consolidated.{rank:02d}.pth"] = saved(held)
    return found


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, torch.Tensor], dict[str, bytes]]:
    files = draw(st.sampled_from([1, 2, 4]))
    heads = files * draw(st.integers(1, 2))
    params = {
        "dim": heads * 2 * draw(st.integers(1, 2)),
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": heads,
        "vocab_size": files * draw(st.integers(1, 3)),
    }
    if draw(st.booleans()):
        params["n_kv_heads"] = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    tensors = whole(params, files * draw(st.integers(1, 3)))
    return params, tensors, split(tensors, params, files, draw(st.integers(0, 1)))


SOUND = split(whole(SMALL, 4), SMALL, 2, 0)


@settings(max_examples=examples(60), deadline=None)
@given(models())
def test_any_split_gives_the_whole_tensors(
    model: tuple[dict[str, int], dict[str, torch.Tensor], dict[str, bytes]],
) -> None:
    _, tensors, files = model
    index = read(files)
    assert index is not None
    assert {entry.name for entry in index.of_part("model")} == tensors.keys()
    for entry in index.of_part("model"):
        out = np.full(entry.shape, np.nan, np.float32)
        for chunk in entry.chunks:
            record, place = index.records[chunk.record], chunk.place
            assert isinstance(place, Box)
            assert chunk.strides is None
            start = record.start + (chunk.byte_offset or 0)
            data = files[index.files[record.file].path][start:]
            at = tuple(slice(o, o + n) for o, n in zip(place.offsets, place.sizes, strict=True))
            assert np.isnan(out[at]).all()
            count = int(np.prod(place.sizes))
            out[at] = np.frombuffer(data, np.float32, count).reshape(place.sizes)
        assert np.array_equal(out, tensors[entry.name].numpy())


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SOUND)), st.binary(max_size=300), min_size=1))
def test_arbitrary_bytes_end_in_our_own_errors(changed: dict[str, bytes]) -> None:
    with suppress(InputError):
        read(SOUND | changed)


@settings(max_examples=examples(150), deadline=None)
@given(PARAMS, st.booleans())
def test_arbitrary_sizes_end_in_our_own_errors(params: Any, nested: bool) -> None:
    content = {"model": params} if nested else params
    with suppress(InputError):
        read(SOUND | {"params.json": json.dumps(content).encode()})


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(sorted(SOUND)), PATCHES, st.integers(0, 6000))
def test_overwritten_files_end_in_our_own_errors(
    name: str, patches: list[tuple[int, bytes]], length: int
) -> None:
    data = bytearray(SOUND[name])
    for position, patch in patches:
        data[position % len(data) : position % len(data) + len(patch)] = patch
    for changed in (bytes(data), bytes(data[:length])):
        with suppress(InputError):
            read(SOUND | {name: changed})
