"""Damaged and ambiguous sources, outputs in the wrong place: one clear error, nothing left."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    ChecksumError,
    CkptkitError,
    IncompleteCheckpointError,
    MissingFileError,
    NoSpaceError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    RefusedError,
    TruncatedFileError,
)

Copied = Callable[..., Path]
Refusal = Callable[..., CkptkitError]
Blobs = Callable[[bytes], list[tuple[int, int]]]
Changing = Callable[[Path, Callable[[Metadata], None]], None]

SHARDED = "fsdp2_hsdp"  # four ranks, two replicas
RANKS = range(4)


def data_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"__{rank}_0.distcp"


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


def test_missing_metadata_is_named_with_what_lies_there(copied: Copied, refusal: Refusal) -> None:
    checkpoint = copied(SHARDED)
    (checkpoint / ".metadata").unlink()
    error = refusal(checkpoint, MissingFileError)
    assert error.where == str(checkpoint / ".metadata")
    assert "4 '.distcp' files" in error.message


def test_a_chunk_that_is_stored_nowhere_is_named_with_its_rows(
    copied: Copied, refusal: Refusal, change_metadata: Changing
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


def test_chunks_that_overlap_are_named_with_their_files(
    copied: Copied, refusal: Refusal, change_metadata: Changing
) -> None:
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


# Sources that are not there, or are several


def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path, refusal: Refusal) -> None:
    source = tmp_path / "source"
    source.mkdir()
    error = refusal(source, NotACheckpointError)
    assert error.where == str(source)
    assert ".distcp" in error.hint


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


def test_a_failed_overwrite_leaves_the_old_output(copied: Copied, out: Path, blobs: Blobs) -> None:
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


def test_a_file_may_be_converted_into_a_folder_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(2)}, file)
    ckptkit.convert(file, tmp_path / "out", to="torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "out"]


def test_a_file_as_the_place_of_the_output_is_refused(copied: Copied, out: Path) -> None:
    out.write_text("precious", encoding="utf-8")
    with pytest.raises(OutputError) as caught:
        ckptkit.consolidate(copied(SHARDED), out, overwrite=True)
    assert caught.value.exit_status == 4
    assert out.read_text(encoding="utf-8") == "precious"
    assert list(out.parent.iterdir()) == [out]


def test_an_overwritten_output_may_not_hold_the_source(copied: Copied) -> None:
    checkpoint = copied(SHARDED)
    with pytest.raises(RefusedError, match="is inside the output"):
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
