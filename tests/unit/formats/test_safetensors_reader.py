"""Reading safetensors headers: what the reference writer writes, and every broken rule."""

from __future__ import annotations

import json
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import ckptkit
from ckptkit.core.dtypes import BY_SAFETENSORS
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    MissingFileError,
    TruncatedFileError,
    UnsafePathError,
    UnsupportedError,
)
from ckptkit.core.index import Box, Key, TensorIndex
from ckptkit.formats.parsing import list_unnamed
from ckptkit.formats.safetensors.reader import SafetensorsReader
from tests import files_in_memory as in_memory


def image(header: object, data_bytes: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_files(files: dict[str, bytes]) -> TensorIndex:
    return in_memory.read_files(SafetensorsReader, files)


def read(data: bytes) -> TensorIndex:
    return read_files({"model.safetensors": data})


def names(*paths: str) -> list[tuple[str, ...]]:
    return [candidate.files for candidate in SafetensorsReader().find(paths)]


def bytes_of(index: TensorIndex, key: str, files: dict[str, bytes]) -> bytes:
    (chunk,) = index.tensors[Key(key)].chunks
    record = index.records[chunk.record]
    assert (chunk.byte_offset, chunk.strides, record.crc32) == (0, None, None)
    assert chunk.place == Box(
        (0,) * len(index.tensors[Key(key)].shape), index.tensors[Key(key)].shape
    )
    return files[index.files[record.file].path][record.start : record.stop]


@pytest.mark.parametrize("name", list(BY_SAFETENSORS))
def test_every_dtype_is_found_where_the_reference_writer_put_it(name: str) -> None:
    dtype = BY_SAFETENSORS[name]
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(getattr(torch, dtype.name)).reshape(2, 3)
    data = safetensors.torch.save({"a": tensor, "scalar": tensor[0, 0].clone()})
    index = read(data)
    assert (index.tensors[Key("a")].dtype, index.tensors[Key("a")].shape) == (dtype, (2, 3))
    assert index.tensors[Key("scalar")].shape == ()
    assert bytes_of(index, "a", {"model.safetensors": data}) == bytes(raw.tolist())


def test_empty_tensors_and_metadata_are_read() -> None:
    tensors = {"none": torch.zeros(0), "flat": torch.zeros(3, 0, 2), "one": torch.ones(1)}
    index = read(safetensors.torch.save(tensors, metadata={"format": "pt", "note": "é"}))
    assert index.tensors[Key("flat")].shape == (3, 0, 2)
    assert index.values == {("__metadata__", "format"): "pt", ("__metadata__", "note"): "é"}
    assert {e.part for e in index.tensors.values()} == {"model"}
    assert (index.format, index.aliases, index.problems) == ("safetensors", (), ())


def test_a_file_without_tensors_is_read() -> None:
    assert read(image({})).tensors == {}
    assert read(image({"__metadata__": None})).values == {}


def test_wrapper_segments_are_cut_out_of_names_but_not_of_keys() -> None:
    index = read(safetensors.torch.save({"_orig_mod.a.weight": torch.zeros(1)}))
    ((key, found),) = index.tensors.items()
    assert (key, found.name) == ("_orig_mod.a.weight", "a.weight")


def numbered(*parts: dict[str, Any], index: bool = True) -> dict[str, bytes]:
    paths = [f"m/model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    files = {p: safetensors.torch.save(t) for p, t in zip(paths, parts, strict=True)}
    if index:
        weight_map = {n: p[2:] for p, t in zip(paths, parts, strict=True) for n in t}
        content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        files["m/model.safetensors.index.json"] = json.dumps(content).encode()
    return files


A, B = {"a": torch.zeros(2)}, {"b": torch.ones(3, dtype=torch.int8)}


def with_index_of(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    """Returns files with an index that has no tensors but some."""
    path = "m/model.safetensors.index.json"
    weight_map = json.loads(files[path])["weight_map"]
    content = {"weight_map": {name: weight_map[name] for name in names}}
    return {**files, path: json.dumps(content).encode()}


def test_an_index_that_leaves_out_a_file_of_its_own_numbering_is_refused() -> None:
    files = with_index_of(numbered(A, B), "a")
    with pytest.raises(FormatError, match="'b' in no file, it is in 'model-00002-of-00002"):
        read_files(files)
    del files["m/model-00002-of-00002.safetensors"]
    with pytest.raises(MissingFileError, match="names 1 file; 'model-00002-of-00002"):
        read_files(files)


def test_a_file_of_the_numbering_without_tensors_need_not_be_in_the_index() -> None:
    assert sorted(read_files(numbered(A, {}, B)).tensors) == ["a", "b"]


def test_the_files_of_another_numbering_do_not_matter_to_an_index() -> None:
    files = numbered(A, B)
    files["m/model-00001-of-00003.safetensors"] = files["m/model-00001-of-00002.safetensors"]
    assert sorted(read_files(files).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (["x-1-of-3.bin"], ["x-2-of-3.bin", "x-3-of-3.bin"]),
        (["x-00000-of-00002.bin"], ["x-00001-of-00002.bin"]),
        (["a/x-9-of-10.bin", "y.bin", "z-1-of-1.bin"], [f"a/x-{n}-of-10.bin" for n in (1, 2)]),
        ([f"x-1-of-{'9' * 200}.bin"], [f"x-{n}-of-{'9' * 200}.bin" for n in (2, 3)]),
    ],
)
def test_what_completes_a_numbering(paths: list[str], missing: list[str]) -> None:
    assert list(islice(list_unnamed(paths), 2)) == missing


@pytest.mark.parametrize("index", [True, False])
def test_a_numbered_set_is_one_model_with_or_without_its_index(index: bool) -> None:
    files = numbered(A, B, index=index)
    found = read_files(files)
    assert sorted(found.tensors) == ["a", "b"]
    assert sorted(file.path for file in found.files) == sorted(files)
    assert bytes_of(found, "b", files) == b"\1\1\1"


def test_a_missing_file_of_a_set_is_named() -> None:
    for index, message in (
        (True, "index names 2 files; missing are 'model-00002-of-00002.safetensors'"),
        (False, "1 of 2 files are there; 'model-00002-of-00002' is missing"),
    ):
        files = numbered(A, B, index=index)
        del files["m/model-00002-of-00002.safetensors"]
        with pytest.raises(MissingFileError) as caught:
            read_files(files)
        assert str(caught.value) == f"memory/m: {message}"


def test_an_index_of_older_shards_beside_a_whole_model_may_be_removed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    model.save_pretrained(tmp_path)
    with pytest.raises(MissingFileError) as caught:
        ckptkit.inspect(tmp_path)
    assert "remove the index 'model.safetensors.index.json'" in caught.value.hint
    (tmp_path / "model.safetensors.index.json").unlink()
    assert not ckptkit.inspect(tmp_path).problems


def test_an_index_that_contradicts_its_files_is_refused() -> None:
    for old, new, message in (
        (
            '"a"',
            '"x"',
            "index has tensor 'x' in 'model-00001-of-00002.safetensors', it is in no file",
        ),
        ("-00001-", "-00002-", "index has tensor 'a' in 'model-00002-of-00002.safetensors', it is"),
        (', "b": "model-00002-of-00002.safetensors"', "", "index has tensor 'b' in no file, it is"),
    ):
        files = numbered(A, B)
        text = files["m/model.safetensors.index.json"].decode()
        assert old in text
        files["m/model.safetensors.index.json"] = text.replace(old, new).encode()
        if not new:
            files["m/model-00001-of-00002.safetensors"] = safetensors.torch.save(A | B)
            files["m/model-00002-of-00002.safetensors"] = safetensors.torch.save({})
        elif new == "-00002-":
            files["m/model-00001-of-00002.safetensors"] = safetensors.torch.save({})
        with pytest.raises(FormatError) as caught:
            read_files(files)
        assert message in str(caught.value)


def test_the_same_tensor_in_two_files_is_refused() -> None:
    with pytest.raises(FormatError, match="tensor 'a' is in 'model-00001-of-00002"):
        read_files(numbered(A, A, index=False))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", FormatError),
        (b"[]", FormatError),
        (b"{}", FormatError),
        (b'{"weight_map": {"a": 1}}', FormatError),
        (b'{"weight_map": {"a": "x", "a": "y"}}', FormatError),
        (b'{"weight_map": {}}', InputError),
        (b'{"weight_map": {"a": "../model.safetensors"}}', UnsafePathError),
        (b'{"weight_map": {"a": "/model.safetensors"}}', UnsafePathError),
        (b'{"weight_map": {"a": "a/../../x"}}', UnsafePathError),
        (b'{"weight_map": {"a": "a\\\\x"}}', UnsafePathError),
        (b'{"weight_map": {"a": "C:x"}}', UnsafePathError),
        (b'{"weight_map": {"a": ""}}', UnsafePathError),
        (b'{"weight_map": {"a": "x//y"}}', UnsafePathError),
        (b'{"weight_map": {"a": "\\u0000"}}', UnsafePathError),
    ],
)
def test_a_broken_index_is_refused(content: bytes, error: type[CkptkitError]) -> None:
    with pytest.raises(error):
        read_files(numbered(A, index=False) | {"m/model.safetensors.index.json": content})


def test_files_are_grouped_as_they_belong_together() -> None:
    index = "m/model.safetensors.index.json"
    pieces = ("m/model-00001-of-00002.safetensors", "m/model-00002-of-00002.safetensors")
    assert names(index, *pieces, "m/adapter_model.safetensors", "m/config.json") == [
        (*pieces, index),
        ("m/adapter_model.safetensors",),
    ]
    assert names("b.safetensors", "a.safetensors", "c/d.safetensors", "e.bin") == [
        ("a.safetensors",),
        ("b.safetensors",),
        ("c/d.safetensors",),
    ]
    assert names("m/x.safetensors", index) == [(index, "m/x.safetensors")]


def test_the_reason_names_the_main_file() -> None:
    files = sorted(numbered(A, B))
    (found,) = SafetensorsReader().find(files)
    assert found.reason == "'model.safetensors.index.json' beside 2 other files of the same model"


# ---------------------------------------------------------------- broken rules


def test_a_short_file_says_how_much_is_missing() -> None:
    data = safetensors.torch.save({"a": torch.zeros(1000)})
    with pytest.raises(TruncatedFileError) as caught:
        read(data[:-1234])
    assert str(caught.value) == (
        f"memory/model.safetensors: header declares data through byte {len(data):,} but the file "
        f"ends at byte {len(data) - 1234:,} (1,234 missing)"
    )


def test_every_truncation_is_refused_as_one() -> None:
    data = safetensors.torch.save({"a": torch.zeros(3), "b": torch.zeros(2)})
    for length in range(len(data)):
        with pytest.raises(TruncatedFileError):
            read(data[:length])


def test_a_header_longer_than_the_reference_takes_is_not_read() -> None:
    with pytest.raises(LimitError, match="header claims 100,000,001 bytes"):
        read(struct.pack("<Q", 100_000_001) + b"{}")


F32 = entry("F32", [2], [0, 8])


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        (b"", 0),
        (b"[]", 0),
        (b" {}", 0),
        (b"{} x", 0),
        (b"{\xff}", 0),
        (b'{"a":NaN}', 0),
        (b'{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1),
        (b'{"a":' * 100_000, 0),
        (b'{"a":1' + b"0" * 5000 + b"}", 0),
        (b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},' * 2 + b"}", 1),
        (b'{"a":1,"a":1}', 0),
        ({"a": 1}, 0),
        ({"a": {}}, 0),
        ({"a": F32 | {"more": 1}}, 8),
        ({"a": F32}, 9),
        ({"a": entry("F32", [2], [0, 4])}, 4),
        ({"a": entry("F32", [2], [8, 0])}, 8),
        ({"a": entry("F32", [2], [1, 9])}, 9),
        ({"a": entry("F32", [2], [0, 8, 9])}, 8),
        ({"a": entry("F32", [2], [0])}, 8),
        ({"a": entry("F32", [2], [-8, 0])}, 8),
        ({"a": entry("F32", [-2], [0, 8])}, 8),
        ({"a": entry("F32", [-2, -1], [0, 8])}, 8),
        ({"a": entry("F32", [True, 2], [0, 8])}, 8),
        ({"a": entry("F32", [2.0], [0, 8])}, 8),
        ({"a": entry("F32", 2, [0, 8])}, 8),
        ({"a": entry("F32", None, [0, 8])}, 8),
        ({"a": entry("F32", [2**62, 2**62], [0, 8])}, 8),
        ({"a": entry("F32", [2**62, 0, 2**62], [0, 0])}, 0),
        ({"a": entry("F32", [2**64], [0, 8])}, 8),
        ({"a": entry("U8", [1] * 100_000, [0, 1])}, 1),
        ({"a": F32, "b": F32}, 8),
        ({"a": F32, "b": entry("F32", [2], [4, 12])}, 12),
        ({"a": F32, "b": entry("F32", [2], [9, 17])}, 17),
        ({"a": F32, "__metadata__": {"a": 1}}, 8),
        ({"a": F32, "__metadata__": ["a"]}, 8),
        ({"a": F32, "__metadata__": []}, 8),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(header: object, data_bytes: int) -> None:
    with pytest.raises(FormatError):
        read(image(header, data_bytes))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "f32", "", 32, None, ["F32"]])
def test_an_unknown_dtype_is_named(dtype: object) -> None:
    with pytest.raises(
        UnsupportedError, match=r"tensor 'a': dtype .* is not modelled; known are F64"
    ):
        read(image({"a": entry(dtype, [2], [0, 8])}, 8))


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_whatever_the_reference_reader_refuses_is_refused(mask: int) -> None:
    data = safetensors.torch.save({"a": torch.zeros(3), "b.w": torch.zeros(2, 2)}, {"k": "v"})
    (length,) = struct.unpack("<Q", data[:8])
    for position in range(8 + length):
        damaged = bytearray(data)
        damaged[position] ^= mask
        try:
            safetensors.deserialize(bytes(damaged))  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError:
            with pytest.raises(InputError):
                read(bytes(damaged))
