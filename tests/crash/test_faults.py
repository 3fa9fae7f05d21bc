"""Full disks, signals, races, sources that change: whole outputs or none. Limits and progress."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import (
    ChecksumError,
    CkptkitError,
    InputError,
    NoSpaceError,
    OutputExistsError,
    SourceChangedError,
)
from ckptkit.engine.executor import Executor
from ckptkit.engine.outcome import BytesWritten, Event, OutputCommitted, Started
from tests.files import contents, flip_bit
from tests.made_up_inspections import inspection_of

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


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes long enough to be disturbed; it is not to be changed."""
    place = tmp_path_factory.mktemp("big") / "checkpoint"
    save_sharded(place, 8)
    return place


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_sharded(place, 3)
    return place


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "source"))


class AtEvent:
    """Does something when the first task has been written, in the thread that wrote it."""

    def __init__(self, action: Callable[[], object], *, number: int = 1) -> None:
        self._action = action
        self._left = number
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, BytesWritten):
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._action()


# A full disk


def test_an_output_that_cannot_fit_is_refused_before_anything_is_written(
    source: Path, tiny_disk: Path
) -> None:
    with pytest.raises(NoSpaceError, match="are free") as caught:
        ckptkit.consolidate(source, tiny_disk / "out")
    assert caught.value.exit_status == 4
    assert caught.value.hint
    assert list(tiny_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    tiny_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sharded(tmp_path / "small", 1, size_bytes=1 << 20)
    run = Executor.run_in_parts

    def run_on_full_disk(*arguments: Any) -> Iterator[None]:
        filler = tiny_disk / "filler"
        filler.write_bytes(bytes(1_500_000))
        try:
            yield from run(*arguments)
        finally:
            filler.unlink()

    monkeypatch.setattr(Executor, "run_in_parts", run_on_full_disk)
    with pytest.raises(NoSpaceError) as caught:
        ckptkit.consolidate(tmp_path / "small", tiny_disk / "out")
    assert caught.value.exit_status == 4
    assert list(tiny_disk.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_page_and_nothing_else(tiny_disk: Path) -> None:
    small = inspection_of([("w", "float32", (2,))], ranks=1)
    page = ckptkit.write_report(small, tiny_disk / "r.html")
    before = page.read_bytes()
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes((2 << 20) - len(before) - (64 << 10)))
    with pytest.raises(NoSpaceError, match="bytes more"):
        ckptkit.write_report(small, page, overwrite=True)
    assert page.read_bytes() == before
    assert sorted(tiny_disk.iterdir()) == [filler, page]


# Signals

SCRIPT = """
import os, signal, sys, time
import ckptkit
from ckptkit.engine.outcome import BytesWritten
from ckptkit_cli._output import Stopped, raise_on_signals

def listener(event):
    if isinstance(event, BytesWritten):
        os.write(1, b"written\\n")  # of two threads; print writes a line in two parts
        time.sleep(0.2)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
raise_on_signals()
try:
    ckptkit.consolidate(sys.argv[1], sys.argv[2], listener=listener)
except Stopped as stop:
    sys.exit(stop.exit_status)
print("done", flush=True)
"""


@contextmanager
def running(source: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A consolidation in another process that is in the middle of its work."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_signal_in_the_middle_leaves_nothing(
    number: signal.Signals, status: int, big: Path, out: Path
) -> None:
    with running(big, out) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_no_output_and_the_next_run_sweeps_up(
    big: Path, out: Path
) -> None:
    with running(big, out) as process:
        process.kill()
        process.communicate(timeout=60)
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == 1  # nobody could remove the work folder
    ckptkit.consolidate(big, out)
    assert list(out.parent.iterdir()) == [out]
    assert ckptkit.verify(out).ok


def test_what_a_kill_after_the_commit_left_goes_when_the_next_run_is_refused(
    source: Path, out: Path
) -> None:
    ckptkit.consolidate(source, out, names="live")
    committed, begun = (out.with_name(f".out.ckptkit-{digit * 16}") for digit in "01")
    committed.mkdir()
    (committed / ".lock").touch()
    (begun / "files").mkdir(parents=True)
    (begun / "parts").mkdir()
    with pytest.raises(OutputExistsError):
        ckptkit.consolidate(source, out, names="live")
    assert sorted(out.parent.iterdir()) == [begun, out]


def test_a_listener_that_fails_stops_the_run_and_leaves_nothing(source: Path, out: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptkit.consolidate(source, out, listener=AtEvent(fail))
    assert list(out.parent.iterdir()) == []


# Races


def test_of_two_consolidations_into_one_output_exactly_one_wins(source: Path, out: Path) -> None:
    both_wrote = threading.Barrier(2)
    results: list[CkptkitError | str] = []

    def consolidate() -> None:
        waiting = AtEvent(lambda: both_wrote.wait(timeout=60))
        try:
            ckptkit.consolidate(source, out, workers=1, listener=waiting)
            results.append("won")
        except CkptkitError as error:
            results.append(error)

    threads = [threading.Thread(target=consolidate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lost,) = (result for result in results if result != "won")
    assert isinstance(lost, OutputExistsError)
    assert lost.exit_status == 5
    assert list(out.parent.iterdir()) == [out]
    assert ckptkit.verify(out).ok


# Sources that change while they are read


def data_file(source: Path) -> Path:
    (file,) = source.glob("*.distcp")
    return file


def rewrite(file: Path) -> None:
    """Puts other bytes into the same file, as a save into the same folder would."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + (1 << 20)] = bytes(1 << 20)
    file.write_bytes(data)


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("change", [rewrite, touch, truncate, replace, remove])
@pytest.mark.quick("remove", "touch", "truncate")
def test_a_source_that_changes_while_it_is_read_never_becomes_an_output(
    change: Callable[[Path], None], source: Path, out: Path
) -> None:
    file = data_file(source)
    with pytest.raises(InputError) as caught:
        ckptkit.consolidate(source, out, workers=1, listener=AtEvent(lambda: change(file)))
    assert caught.value.exit_status == 3
    assert file.name in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_metadata_that_changes_while_data_is_read_is_noticed(source: Path, out: Path) -> None:
    changed = AtEvent(lambda: touch(source / ".metadata"))
    with pytest.raises(SourceChangedError, match=r"\.metadata"):
        ckptkit.consolidate(source, out, listener=changed)


def test_a_source_without_checksums_that_is_rewritten_is_noticed(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "plain" / "model.safetensors"
    file.parent.mkdir()
    save_file({"a": np.ones(4 << 20, np.float32), "b": np.ones(4 << 20, np.float32)}, file)
    with pytest.raises(SourceChangedError):
        ckptkit.consolidate(file.parent, out, workers=1, listener=AtEvent(lambda: rewrite(file)))
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_side_file_that_changes_size_is_noticed(size: int, source: Path, out: Path) -> None:
    tokenizer = source / "tokenizer.json"
    tokenizer.write_bytes(b"{}" * 5_000)
    resize = AtEvent(lambda: os.truncate(tokenizer, size))
    with pytest.raises(InputError, match="tokenizer"):
        ckptkit.consolidate(source, out, workers=1, listener=resize)
    assert list(out.parent.iterdir()) == []


# Resources


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
    assert contents(out.with_name("out1")) == contents(out.with_name("out4"))


def test_a_memory_budget_that_leaves_no_room_is_refused(source: Path, out: Path) -> None:
    with pytest.raises(NoSpaceError) as caught:
        ckptkit.consolidate(source, out, memory_budget="1MB")
    assert caught.value.where == "--memory-budget"
    ckptkit.consolidate(source, out, memory_budget=caught.value.hint.split()[2])


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


def test_a_flipped_bit_deep_in_a_large_chunk_is_found_by_any_number_of_workers(
    source: Path, out: Path
) -> None:
    file = data_file(source)
    flip_bit(file, -TENSOR // 2)
    started = time.monotonic()
    for workers in (1, 4):
        with pytest.raises(ChecksumError, match=r"CRC-32"):
            ckptkit.consolidate(source, out, workers=workers, memory_budget="1GB")
    assert time.monotonic() - started < 60
    assert list(out.parent.iterdir()) == []
