"""Damaged, hostile and ambiguous sources: one clear error each, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
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
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    ChecksumError,
    CkptkitError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    OutputExistsError,
    RefusedError,
    TruncatedFileError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedError,
)

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]

SHARDED = "fsdp2_hsdp"  # four ranks, two replicas
RANKS = range(4)
WITNESS = "ckptkit_test_witness"  # a module that leaves a trace when it is imported


def data_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"__{rank}_0.distcp"


def blobs(data: bytes) -> list[tuple[int, int]]:
    """Where the archives of a `.distcp` file that hold elements begin and end."""
    ends = [at + 22 for at in range(len(data)) if data.startswith(b"PK\5\6", at)]
    found = zip([0, *ends], ends, strict=False)
    return [(start, stop) for start, stop in found if has_elements(data[start:stop])]


def has_elements(archive: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.getinfo("archive/data/0").file_size > 0


def record_start(archive: bytes, ending: str) -> int:
    """Where the content of a record begins, told by its local header."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        info = next(i for i in opened.infolist() if i.filename.endswith(ending))
    name, extra = struct.unpack_from("<HH", archive, info.header_offset + 26)
    return int(info.header_offset + 30 + name + extra)


def overwrite(path: Path, position: int, change: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[position] = change(data[position])
    path.write_bytes(data)


def change_metadata(checkpoint: Path, change: Callable[[Metadata], None]) -> None:
    """Rewrites `.metadata` with torch's own classes; the file is one of our fixtures."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301, TID251
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# Incomplete and damaged sources


@pytest.mark.parametrize("rank", RANKS)
def test_a_missing_rank_file_is_named_with_the_rows_it_held(
    rank: int, copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)
    data_file(checkpoint, rank).unlink()
    error = refusal(checkpoint, MissingFileError)
    assert f"__{rank}_0.distcp" in str(error)
    assert "it holds" in str(error)
    assert "model." in str(error)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("left", [0.0, 0.5, -1])
def test_a_truncated_rank_file_is_named_with_both_lengths(
    left: float, rank: int, copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, rank)
    whole = file.stat().st_size
    size = whole - 1 if left < 0 else int(whole * left)
    os.truncate(file, size)
    error = refusal(checkpoint, TruncatedFileError)
    assert file.name in str(error)
    assert f"{size:,}" in str(error)


@pytest.mark.parametrize("rank", RANKS)
def test_a_flipped_bit_in_the_data_of_any_chunk_fails_its_checksum(
    rank: int, copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, rank)
    whole = file.read_bytes()
    for start, stop in blobs(whole):
        position = start + record_start(whole[start:stop], "data/0")
        overwrite(file, position, lambda byte: byte ^ 16)
        error = refusal(checkpoint, ChecksumError)
        assert file.name in error.where
        assert "tensor 'model." in error.where
        assert "stored" in error.message
        file.write_bytes(whole)


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_a_flipped_bit_in_a_zip_header_is_refused(
    record: str, copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, 1)
    start, stop = blobs(file.read_bytes())[0]
    archive = file.read_bytes()[start:stop]
    header = record_start(archive, record)
    header = archive.rindex(b"PK\3\4", 0, header)
    overwrite(file, start + header + 1, lambda byte: byte ^ 1)
    error = refusal(checkpoint, FormatError)
    assert file.name in error.where


def test_a_flipped_bit_in_the_zip_directory_is_refused(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)
    file = data_file(checkpoint, 0)
    overwrite(file, file.read_bytes().index(b"PK\1\2"), lambda byte: byte ^ 1)
    assert file.name in refusal(checkpoint, FormatError).where


def test_a_flipped_bit_in_the_metadata_is_refused(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)
    overwrite(checkpoint / ".metadata", 0, lambda byte: byte ^ 1)
    assert ".metadata" in refusal(checkpoint, FormatError).where


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_metadata_is_refused(length: int, copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)
    os.truncate(checkpoint / ".metadata", length)
    assert ".metadata" in refusal(checkpoint, TruncatedFileError).where


def test_missing_metadata_is_named_with_what_lies_there(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)
    (checkpoint / ".metadata").unlink()
    error = refusal(checkpoint, MissingFileError)
    assert error.where == str(checkpoint / ".metadata")
    assert "4 '.distcp' files" in error.message


def test_a_chunk_that_is_stored_nowhere_is_named_with_its_rows(
    copied: Copied, refusal: Refusal
) -> None:
    checkpoint = copied(SHARDED)

    def forget(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["model.up.weight"]
        chunk = tensor.chunks.pop()  # type: ignore[union-attr]
        for index in list(metadata.storage_data):
            if index.fqn == "model.up.weight" and index.offset == chunk.offsets:
                del metadata.storage_data[index]

    change_metadata(checkpoint, forget)
    error = refusal(checkpoint, IncompleteCheckpointError)
    assert "model.up.weight" in str(error)
    assert "rows [6, 11)" in str(error)


def test_chunks_that_overlap_are_named_with_their_files(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)

    def move(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["model.up.weight"]
        chunk = max(tensor.chunks, key=lambda c: c.offsets)  # type: ignore[union-attr]
        for index in list(metadata.storage_data):
            if index.fqn == "model.up.weight" and index.offset == chunk.offsets:
                stored = metadata.storage_data.pop(index)
                lower = torch.Size([chunk.offsets[0] - 1, 0])
                metadata.storage_data[type(index)(index.fqn, lower, index.index)] = stored
                chunk.offsets = lower

    change_metadata(checkpoint, move)
    error = refusal(checkpoint, IncompleteCheckpointError)
    assert "stored 2 times" in str(error)
    assert ".distcp" in str(error)


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
    copied: Copied, refusal: Refusal, witness: Path
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
    for old, new in ((original, hostile),):
        crcs = [zlib.crc32(text).to_bytes(4, "little") for text in (old, new)]
        swapped = swapped.replace(*crcs)
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
    path: str, copied: Copied, refusal: Refusal
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
    shape: tuple[int, ...], told: str, copied: Copied, refusal: Refusal
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


# Sources that are not there, or are several


def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path, refusal: Refusal) -> None:
    source = tmp_path / "source"
    source.mkdir()
    error = refusal(source, NotACheckpointError)
    assert error.where == str(source)
    assert ".distcp" in error.hint


def test_a_path_that_is_not_there_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(NotACheckpointError, match="no such file") as caught:
        ckptkit.consolidate(tmp_path / "nowhere", out)
    assert caught.value.where == str(tmp_path / "nowhere")
    assert list(out.parent.iterdir()) == []


def test_two_different_checkpoints_are_named_and_either_can_be_chosen(
    copied: Copied, refusal: Refusal, out: Path
) -> None:
    run = copied(SHARDED, "first").parent
    copied("fsdp2_llama_flat", "second")
    error = refusal(run, AmbiguousSourceError, status=4)
    assert "'first'" in error.message
    assert "'second'" in error.message
    assert "--select first" in error.hint
    assert len(ckptkit.consolidate(run, out, select="first").tensors) == 15
    error = _refused(run, out.with_name("other"), select="third")
    assert "'third'" in error.message
    assert "'first', 'second'" in error.message


def _refused(src: Path, out: Path, **options: Any) -> CkptkitError:
    with pytest.raises(CannotPlanError) as caught:
        ckptkit.consolidate(src, out, **options)
    assert caught.value.exit_status == 4
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize(
    ("fixture", "names"),
    [
        ("fsdp2_actor_and_critic", ["actor", "critic"]),
        ("fsdp2_model_and_ema", ["model", "ema"]),
        ("accelerate_fsdp2_two_models", ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"]),
    ],
)
def test_several_models_are_named_and_each_can_be_chosen(
    fixture: str, names: list[str], copied: Copied, refusal: Refusal, out: Path
) -> None:
    checkpoint = copied(fixture)
    error = refusal(checkpoint, AmbiguousSourceError, status=4)
    assert all(repr(name) in error.message for name in names)
    assert "--select" in error.hint
    for name in names:
        assert ckptkit.consolidate(checkpoint, out.with_name(name), select=name).tensors


def test_an_incomplete_newest_step_is_passed_over_and_named(copied: Copied, out: Path) -> None:
    run = copied(SHARDED, "checkpoint-9").parent
    for step in (10, 100):
        copied(SHARDED, f"checkpoint-{step}")
    data_file(run / "checkpoint-100", 3).unlink()
    assert ckptkit.consolidate(run, out).source["path"] == str(run / "checkpoint-10")
    notes = "\n".join(ckptkit.inspect(run).notes)
    assert "checkpoint-100 was passed over: " in notes
    assert "__3_0.distcp' is missing" in notes


def test_a_step_that_is_cut_short_is_passed_over(copied: Copied, out: Path) -> None:
    run = copied(SHARDED, "checkpoint-1").parent
    copied(SHARDED, "checkpoint-2")
    os.truncate(data_file(run / "checkpoint-2", 0), 100)
    assert ckptkit.consolidate(run, out).source["step"] == 1


def test_a_step_is_not_passed_over_for_want_of_memory(copied: Copied, refusal: Refusal) -> None:
    run = copied(SHARDED, "checkpoint-1").parent
    copied(SHARDED, "checkpoint-2")
    error = refusal(run, NoSpaceError, status=4, memory_limit="1MB")
    assert error.where == "--memory-limit"


def test_a_run_without_a_complete_step_is_refused(copied: Copied, refusal: Refusal) -> None:
    run = copied(SHARDED, "checkpoint-1").parent
    copied(SHARDED, "checkpoint-2")
    for step in (1, 2):
        (run / f"checkpoint-{step}" / ".metadata").unlink()
    error = refusal(run, NotACheckpointError)
    assert "checkpoint-2 was passed over" in error.message


# Outputs in the wrong place


def test_an_output_that_exists_is_left_alone(copied: Copied, out: Path) -> None:
    out.mkdir()
    (out / "mine.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(OutputExistsError) as caught:
        ckptkit.consolidate(copied(SHARDED), out)
    assert (caught.value.exit_status, caught.value.where) == (5, str(out))
    assert "--overwrite" in caught.value.hint
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_a_failed_overwrite_leaves_the_old_output(copied: Copied, out: Path) -> None:
    checkpoint = copied(SHARDED)
    ckptkit.consolidate(checkpoint, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    file = data_file(checkpoint, 1)
    start, stop = blobs(file.read_bytes())[0]
    position = start + record_start(file.read_bytes()[start:stop], "data/0")
    overwrite(file, position, lambda byte: byte ^ 1)
    with pytest.raises(ChecksumError):
        ckptkit.consolidate(checkpoint, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("inner", ["", "merged", "a/b/merged"])
def test_an_output_inside_the_source_is_refused(inner: str, copied: Copied) -> None:
    checkpoint = copied(SHARDED)
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(RefusedError) as caught:
        ckptkit.consolidate(checkpoint, checkpoint / inner)
    assert caught.value.exit_status == 4
    assert "beside" in caught.value.hint
    assert sorted(checkpoint.rglob("*")) == before


def test_an_overwritten_output_may_not_hold_the_source(copied: Copied) -> None:
    checkpoint = copied(SHARDED)
    with pytest.raises(RefusedError, match="lies inside the output"):
        ckptkit.consolidate(checkpoint, checkpoint.parent, overwrite=True)
    assert (checkpoint / ".metadata").is_file()


def test_an_output_inside_the_source_through_a_link_is_refused(
    copied: Copied, tmp_path: Path
) -> None:
    checkpoint = copied(SHARDED)
    (tmp_path / "link").symlink_to(checkpoint)
    with pytest.raises(RefusedError, match="inside the source"):
        ckptkit.consolidate(checkpoint, tmp_path / "link" / "merged")


# What would load as another model


def test_an_adapter_is_refused_unless_live_names_are_asked_for(
    tmp_path: Path, refusal: Refusal, out: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ["base_model.model.q_proj.base_layer.weight", "base_model.model.q_proj.lora_A.w.weight"]
    save_file({name: torch.ones(2, 2) for name in names}, source / "model.safetensors")
    error = refusal(source, RefusedError, status=4)
    assert "adapter" in error.message
    assert "--names live" in error.hint
    assert list(ckptkit.consolidate(source, out, names="live").tensors) == names


def test_a_failed_tie_check_leaves_nothing(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied("accelerate_fsdp2_tied_with_config")
    shutil.rmtree(checkpoint / "optimizer_0", ignore_errors=True)
    (file,) = checkpoint.rglob("__0_0.distcp")
    for start, stop in blobs(file.read_bytes()):
        position = start + record_start(file.read_bytes()[start:stop], "data/0")
        overwrite(file, position, lambda byte: byte ^ 1)
    refusal(checkpoint, ChecksumError)
