"""Workers, memory limits, file sizes, options and progress of whole runs."""

from __future__ import annotations

import json
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    NoSpaceError,
    UsageError,
)
from ckptkit.engine.outcome import BytesWritten, Event, OutputCommitted, Started

TENSOR = 12 << 20  # bytes: more than one leaf, so that several tasks make one tensor


def save_sharded(place: Path, tensors: int, *, size_bytes: int = TENSOR) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{i}.weight": torch.rand(size_bytes // 4096, 1024, generator=generator)
        for i in range(tensors)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without torch.distributed, which is meant
        dcp.save({"model": state}, checkpoint_id=place, no_dist=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    save_sharded(place, 3)
    return place


def data_file(source: Path) -> Path:
    (file,) = source.glob("*.distcp")
    return file


# Resources


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_any_number_of_workers_writes_the_same_bytes(dtype: str, source: Path, out: Path) -> None:
    for workers in (1, 4):
        ckptkit.consolidate(
            source,
            out.with_name(f"out{workers}"),
            dtype=dtype,
            workers=workers,
            memory_budget="1GB",
        )
    assert outputs(out.with_name("out1")) == outputs(out.with_name("out4"))


def test_a_memory_limit_that_leaves_no_room_is_refused(source: Path, out: Path) -> None:
    with pytest.raises(NoSpaceError, match="1,000,000") as caught:
        ckptkit.consolidate(source, out, memory_limit="1MB")
    assert (caught.value.exit_status, caught.value.where) == (4, "--memory-limit")
    assert "allow at least" in caught.value.hint
    assert list(out.parent.iterdir()) == []


def test_a_memory_budget_that_leaves_no_room_is_refused(source: Path, out: Path) -> None:
    with pytest.raises(NoSpaceError) as caught:
        ckptkit.consolidate(source, out, memory_budget="1MB")
    assert caught.value.where == "--memory-budget"
    ckptkit.consolidate(source, out, memory_budget=caught.value.hint.split()[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_shard_size", "5 parsecs"), ("max_shard_size", 0), ("workers", 0), ("dtype", "int8")],
)
def test_an_option_without_a_valid_value_is_a_usage_error(
    option: str, value: object, source: Path, out: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        ckptkit.consolidate(source, out, **{option: value})  # type: ignore[arg-type]
    assert caught.value.exit_status == 2
    assert caught.value.hint
    assert list(out.parent.iterdir()) == []


def test_progress_adds_up_and_ends_with_the_commit(source: Path, out: Path) -> None:
    events: list[Event] = []
    lock = threading.Lock()

    def listen(event: Event) -> None:
        with lock:
            events.append(event)

    ckptkit.consolidate(source, out, listener=listen)
    written = sum(event.size_bytes for event in events if isinstance(event, BytesWritten))
    assert [event.total_bytes for event in events if isinstance(event, Started)] == [written]
    assert events[-1] == OutputCommitted(str(out))
    manifest = json.loads((out / "ckptkit.json").read_text(encoding="utf-8"))
    assert written == sum(file["size_bytes"] for file in manifest["files"].values())


def test_an_output_of_several_files_is_split_at_the_size_that_was_asked_for(
    source: Path, out: Path
) -> None:
    ckptkit.consolidate(source, out, max_shard_size=2 * TENSOR)
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert [len(load_file(file)) for file in files] == [2, 1]


def test_a_flipped_bit_deep_in_a_large_chunk_is_found_by_any_number_of_workers(
    source: Path, out: Path
) -> None:
    file = data_file(source)
    data = bytearray(file.read_bytes())
    data[-TENSOR // 2] ^= 1
    file.write_bytes(data)
    started = time.monotonic()
    for workers in (1, 4):
        with pytest.raises(ChecksumError, match=r"CRC-32"):
            ckptkit.consolidate(source, out, workers=workers, memory_budget="1GB")
    assert time.monotonic() - started < 60
    assert list(out.parent.iterdir()) == []
