"""Manifests: what was written is read back, and anything else is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

import ckptkit
from ckptkit.core.errors import FormatError, UnsafePathError
from ckptkit.core.manifest import FileRecord, Manifest, TensorRecord, parse_manifest

WRITTEN = Manifest(
    kind="model",
    source={"path": "run"},
    options={},
    versions={"ckptkit": "0"},
    tensors={"w": TensorRecord("float32", (2, 3), "model.safetensors", "d", "crc32")},
    tied={"head": "w"},
    files={"model.safetensors": FileRecord(24), "config.json": FileRecord(2, "d")},
)


def test_a_manifest_is_read_back() -> None:
    assert parse_manifest(WRITTEN.to_json(), where="here") == WRITTEN


def changed(path: tuple[str, ...], value: object) -> bytes:
    document: Any = json.loads(WRITTEN.to_json())
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    del document["checksum"]
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("files", "config.json", "size_bytes"), float("inf"), "inf was found"),
        (("files", "config.json", "size_bytes"), 1.5, "1.5 was found"),
        (("files", "config.json", "size_bytes"), -1, "-1 was found"),
        (("files", "config.json", "size_bytes"), True, "True was found"),
        (("tensors", "w", "shape"), [2, "3"], "'3' was found"),
        (("tensors", "w", "shape"), 6, "iterable"),
        (("tensors",), ["w"], "'tensors' is a list where an object was expected"),
        (("tensors",), [], "'tensors' is a list where an object was expected"),
        (("tensors", "w"), 1, "'w' is an int"),
        (("files",), "none", "'files' is a str"),
        (("files", "config.json"), None, "'config.json' is None where"),
        (("tied",), [["head", "w"]], "'tied' is a list"),
        (("source",), [], "'source' is a list"),
        (("ckptkit_manifest",), 2, "manifest version 2 found against 1"),
    ],
)
def test_a_field_of_another_kind_is_refused_with_its_name(
    path: tuple[str, ...], value: object, told: str
) -> None:
    with pytest.raises(FormatError, match=told) as caught:
        parse_manifest(changed(path, value), where="here")
    assert caught.value.where == "here"


@pytest.mark.parametrize(
    "path", ["../../../etc/hostname", "/etc/hostname", "a/../../b", "", ".", "a\0b", "..\\b"]
)
def test_a_file_outside_of_the_folder_is_refused(path: str) -> None:
    manifest = msgspec.structs.replace(WRITTEN, files={path: FileRecord(1)})
    with pytest.raises(UnsafePathError, match="where a path inside the folder was expected"):
        parse_manifest(manifest.to_json(), where="here")


def test_numbers_that_json_cannot_hold_become_null() -> None:
    nan, endless = float("nan"), float("inf")
    source = {"metrics": {"loss": nan, "acc": 0.5}, "more": [endless, (-endless, 1)]}
    text = msgspec.structs.replace(WRITTEN, source=source).to_json().decode()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(text, parse_constant=refuse)
    expected = {"metrics": {"loss": None, "acc": 0.5}, "more": [None, [None, 1]]}
    assert read["source"] == expected


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"1e400", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a ckptkit manifest"):
        parse_manifest(data, where="here")


def test_a_number_without_bound_is_refused() -> None:
    document = json.loads(WRITTEN.to_json())
    del document["checksum"]
    data = json.dumps(document).encode().replace(b'"size_bytes": 24', b'"size_bytes": 1e400')
    with pytest.raises(FormatError, match="inf was found"):
        parse_manifest(data, where="here")


def test_a_huge_manifest_is_refused_by_its_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "ckptkit.json"
    manifest.touch()
    os.truncate(manifest, 3 << 30)  # a hole; reading it would take as much memory

    def read(*_: object) -> bytes:
        raise AssertionError("it was read")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(FormatError, match="3,221,225,472 bytes were found against at most"):
        ckptkit.verify(tmp_path)
