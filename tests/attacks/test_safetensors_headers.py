"""Headers of safetensors files: floods, ranges that overlap, JSON that is hard to parse."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    LimitError,
    TruncatedFileError,
)
from ckptkit.formats.safetensors.reader import SafetensorsReader, parse_header
from ckptkit.storage.overlay import MemorySource

Refusal = Callable[..., CkptkitError]


def image(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def twice(first: object, second: object) -> bytes:
    return f'{{"a":{json.dumps(first)},"a":{json.dumps(second)}}}'.encode()


HEADERS: dict[str, tuple[bytes, type[CkptkitError], str]] = {
    "longer_than_the_file": (
        image({"a": entry([1], 0, 4)}, bytes(4), length=5000),
        TruncatedFileError,
        "5,008",
    ),
    "longer_than_any": (image({}, length=2**63), LimitError, "9,223,372,036,854,775,808"),
    "duplicate_names": (
        image(twice(entry([1], 0, 4), entry([1], 4, 8)), bytes(8)),
        FormatError,
        "'a'",
    ),
    "overlapping_ranges": (
        image({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        FormatError,
        "'b'",
    ),
    "hole": (image({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), FormatError, "'b'"),
    "overflowing_shape": (
        image({"a": entry([2**40, 2**40], 0, 4)}, bytes(4)),
        FormatError,
        "overflows",
    ),
    "negative_size": (
        image({"a": entry([-1, -1], 0, 4)}, bytes(4)),
        FormatError,
        "natural numbers",
    ),
    "negative_range": (image({"a": entry([1], -4, 0)}, bytes(4)), FormatError, "natural numbers"),
    "too_many_dimensions": (
        image({"a": entry([1] * 100_000, 0, 4)}, bytes(4)),
        FormatError,
        "100,000",
    ),
    "data_cut_short": (image({"a": entry([4], 0, 16)}, bytes(8)), TruncatedFileError, "8 missing"),
    "no_json": (image(b"{nonsense"), FormatError, "JSON"),
    "not_even_a_length": (b"\1\2", TruncatedFileError, "2 bytes"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_safetensors_header_is_refused(kind: str, source: Path, refusal: Refusal) -> None:
    data, error_kind, told = HEADERS[kind]
    (source / "model.safetensors").write_bytes(data)
    error = refusal(source, error_kind)
    assert "model.safetensors" in error.where
    assert told in str(error)


HARD: dict[str, bytes] = {
    "nested 200,000 deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "objects 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 100,000 digits": b'{"a":' + b"9" * 100_000 + b"}",
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    "Infinity": b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}',
    "1e999": b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}',
    "the same key inside": b'{"a":{"dtype":"F32","dtype":"U8","shape":[],"data_offsets":[0,4]}}',
    "half of a surrogate pair": b'{"\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "a dtype that is a list": b'{"a":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}}',
    "offsets of 2^64": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551616,5]}}',
    "a bool as a size": b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "UTF-16": "{}".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
}


@pytest.mark.parametrize("kind", HARD)
def test_json_that_is_hard_to_parse_is_refused(kind: str, bounded: Callable[..., Any]) -> None:
    raw = HARD[kind]
    with bounded(seconds=3, most_bytes=60 * len(raw) + (1 << 20)), pytest.raises(InputError):
        parse_header(raw, len(raw) + 12, where="x")


@pytest.mark.slow
def test_a_flood_of_tensors_without_elements_takes_a_multiple_of_its_header(
    bounded: Callable[..., Any],
) -> None:
    """A quarter of the largest header that the format allows, which takes four times as long."""
    one = b'"%09d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    count = 25_000_000 // (len(one) + 7)
    raw = b"{" + b",".join(one % number for number in range(count)) + b"}"
    with bounded(seconds=100, most_bytes=30 * len(raw)):
        assert len(parse_header(raw, len(raw) + 8, where="x").tensors) == count


def test_a_longer_header_is_not_even_read(bounded: Callable[..., Any]) -> None:
    data = struct.pack("<Q", 100_000_001) + b"{"
    source = MemorySource({"m.safetensors": data})
    reader = SafetensorsReader()
    with bounded(seconds=1, most_bytes=1 << 20), pytest.raises(InputError):
        reader.read_index(source, reader.find(["m.safetensors"])[0])
