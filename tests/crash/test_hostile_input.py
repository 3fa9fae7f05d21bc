"""Hostile pickles, paths and headers: refused by name, and nothing of theirs happens."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    LimitError,
    TruncatedFileError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedError,
)

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
Blobs = Callable[[bytes], list[tuple[int, int]]]
Changing = Callable[[Path, Callable[[Metadata], None]], None]

SHARDED = "fsdp2_hsdp"  # four ranks, two replicas
WITNESS = "ckptkit_test_witness"  # a module that leaves a trace when it is imported


def data_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"__{rank}_0.distcp"


# Hostile pickles


def op(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function of one string."""
    return b"\x80\x02c" + f"{module}\n{name}\n(".encode() + text(argument) + b"tR."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that comes into being when the witness module is imported, or a command runs."""
    folder = tmp_path / "importable"
    folder.mkdir()
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w').close()\ndef call(*_): pass\n"
    (folder / f"{WITNESS}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return trace


def hostile_pickles(trace: Path) -> dict[str, bytes]:
    touch = f"touch {trace}"
    create = f'open(r"{trace}", "w")'
    return {
        "os.system": op("os", "system", touch),
        "posix.system": op("posix", "system", touch),
        "builtins.eval": op("builtins", "eval", create),
        "builtins.exec": op("builtins", "exec", create),
        "builtins.__import__": op("builtins", "__import__", WITNESS),
        "torch.load": op("torch", "load", str(trace)),
        "subprocess.Popen": op("subprocess", "Popen", touch),
        WITNESS: op(WITNESS, "call", "x"),
        "torch.Size": op("torch", "Size", touch),
        "_get_layout": op("torch.serialization", "_get_layout", touch),
    }


KINDS = list(hostile_pickles(Path("trace")))


def assert_nothing_happened(trace: Path) -> None:
    assert not trace.exists()
    assert WITNESS not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_metadata_is_refused_and_nothing_is_imported_or_called(
    kind: str, copied: Copied, refusal: Refusal, witness: Path
) -> None:
    checkpoint = copied(SHARDED)
    (checkpoint / ".metadata").write_bytes(hostile_pickles(witness)[kind])
    error = refusal(checkpoint, UnsafePickleError)
    assert ".metadata" in error.where
    assert kind.rpartition(".")[2] in error.message
    assert_nothing_happened(witness)


def archive_with(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "_get_layout"])
def test_a_hostile_torch_file_is_refused_and_nothing_is_imported_or_called(
    kind: str, tmp_path: Path, refusal: Refusal, witness: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(archive_with(hostile_pickles(witness)[kind]))
    error = refusal(source, FormatError if kind == "torch.Size" else UnsafePickleError)
    assert "pytorch_model.bin" in error.where
    assert_nothing_happened(witness)


def test_a_hostile_pickle_inside_a_chunk_is_refused(
    copied: Copied, refusal: Refusal, witness: Path, blobs: Blobs
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, 0)
    whole = file.read_bytes()
    start, stop = blobs(whole)[0]
    archive = whole[start:stop]
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        original = opened.read("archive/data.pkl")
    hostile = hostile_pickles(witness)["os.system"][:-1].ljust(len(original) - 1, b"N") + b"."
    swapped = archive.replace(original, hostile)
    for content in (original, hostile):
        assert len(content) == len(original)
    before, after = (zlib.crc32(content).to_bytes(4, "little") for content in (original, hostile))
    swapped = swapped.replace(before, after)
    file.write_bytes(whole[:start] + swapped + whole[stop:])
    error = refusal(checkpoint, UnsafePickleError)
    assert file.name in error.where
    assert "system" in error.message
    assert_nothing_happened(witness)


class _Call:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


@pytest.mark.parametrize(
    "arguments",
    [
        ("storage", 0, (2**62, 2**62), (1, 1), False, {}),
        (None, 0, (2,), (1,), False, {}),
        ("storage", -1, (2,), (1,), False, {}),
        ("storage", 0, (2,), (-1,), False, {}),
        (),
    ],
    ids=["overflow", "no_storage", "negative_offset", "negative_stride", "none"],
)
def test_an_allowed_name_with_hostile_arguments_is_refused(
    arguments: tuple[Any, ...], tmp_path: Path, out: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rebuild = torch._utils._rebuild_tensor_v2
    pickled = pickle.dumps({"weight": _Call(rebuild, *arguments)}, protocol=2)
    (source / "pytorch_model.bin").write_bytes(archive_with(pickled))
    with pytest.raises(CkptkitError) as caught:
        ckptkit.consolidate(source, out)
    assert caught.value.exit_status == 3
    assert list(out.parent.iterdir()) == []


def test_a_pickle_that_asks_for_gigabytes_in_nine_bytes_is_refused_at_once(
    copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)
    (checkpoint / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")  # LONG_BINPUT
    tracemalloc.start()
    try:
        refusal(checkpoint, FormatError)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


# Paths that lead out of the checkpoint


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/__0_0.distcp", "a/../../b.distcp", ""])
def test_a_relative_path_that_leads_out_is_refused(
    path: str, copied: Copied, refusal: Refusal, change_metadata: Changing
) -> None:
    checkpoint = copied(SHARDED)

    def redirect(metadata: Metadata) -> None:
        for stored in metadata.storage_data.values():
            if stored.relative_path == "__2_0.distcp":
                stored.relative_path = path

    change_metadata(checkpoint, redirect)
    error = refusal(checkpoint, UnsafePathError)
    assert repr(path) in str(error)


def test_a_link_out_of_the_checkpoint_is_refused(
    copied: Copied, refusal: Refusal, tmp_path: Path
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, 2)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    error = refusal(checkpoint, UnsafePathError)
    assert error.where == str(file)
    assert "cp -rL" in error.hint


# safetensors headers


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
def test_a_hostile_safetensors_header_is_refused(
    kind: str, tmp_path: Path, refusal: Refusal
) -> None:
    data, error_kind, told = HEADERS[kind]
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(data)
    error = refusal(source, error_kind)
    assert "model.safetensors" in error.where
    assert told in str(error)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2**40, 2**40), "overflows"),
        ((-3, 4), "negative"),
        ((1,) * 5_000, "5,000 dimensions"),
        ((10**9,) * 3, "overflows"),
    ],
)
def test_a_hostile_shape_in_metadata_is_refused(
    shape: tuple[int, ...], told: str, copied: Copied, refusal: Refusal, change_metadata: Changing
) -> None:
    checkpoint = copied(SHARDED)

    def reshape(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.up.weight"].size = torch.Size(shape)  # type: ignore[union-attr]

    change_metadata(checkpoint, reshape)
    error = refusal(checkpoint, FormatError)
    assert "model.up.weight" in str(error)
    assert told in str(error)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, refusal: Refusal) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with zipfile.ZipFile(source / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    tracemalloc.start()
    started = time.monotonic()
    try:
        error = refusal(source, UnsupportedError)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5
    assert "compress" in str(error)
