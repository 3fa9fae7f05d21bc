"""Reading from afar straight into a task's buffer: which bytes, with how many requests, proven."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ChecksumError
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    FileRange,
    Fqn,
    Key,
    Record,
    RecordTable,
    TensorEntry,
    TensorIndex,
)
from ckptkit.engine.locate import Locator
from ckptkit.engine.reader import Origin, TensorReader
from ckptkit.engine.remote_reads import LEAST_BYTES, read_direct
from ckptkit.plan.plan import (
    SOURCE,
    TASK_BYTES,
    Copy,
    Task,
    TensorSpec,
    cut_into_tasks,
    lay_out_file,
)
from ckptkit.storage.overlay import MemorySource

NAME = Key("weight")
COLUMNS = 1024
ROWS = 5 * TASK_BYTES // (4 * COLUMNS) // 2  # two and a half times what one task takes


class RemoteFiles(MemorySource):
    """A directory in memory that counts what it is asked for, as a remote one would be."""

    is_remote = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.asked: list[FileRange] = []

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        for wanted, view in reads:
            self.asked.append(wanted)
            self.read_into(wanted.path, wanted.start, view)


def _origin(tensor: np.ndarray, boxes: Sequence[Box], *, damaged: bool = False) -> Origin:
    """Puts each box of a tensor into a file of its own, behind a few other bytes."""
    files, records, chunks = {}, [], []
    for number, box in enumerate(boxes):
        cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        data = tensor[cut].tobytes()
        stored = bytes([data[0] ^ damaged]) + data[1:]
        files[f"__{number}_0.distcp"] = bytes(7) + stored + b"tail"
        records.append(Record(number, 7, 7 + len(data), "raw", zlib.crc32(data)))
        chunks.append(Chunk(box, number, 0))
    entry = TensorEntry(
        *(NAME, ("weight",), Fqn("weight"), "", "model", dtype_named("float32")),
        *(tensor.shape, ChunkTable.of(chunks, tensor.ndim)),
    )
    source = RemoteFiles(files)
    stats = [source.stat(path) for path in files]
    return Origin(SOURCE, source, TensorIndex("t", stats, RecordTable.of(records), {NAME: entry}))


def _looked_into(origin: Origin) -> Origin:
    entry = origin.index.tensors[NAME]
    locator = Locator(origin.source, origin.index)
    for row in range(len(entry.chunks)):
        origin.keep_located((NAME, row), locator.locate(entry, entry.chunks, row))
    return origin


def _tasks(tensor: np.ndarray, most_bytes: int) -> list[Task]:
    spec = TensorSpec(Fqn("weight"), dtype_named("float32"), tensor.shape)
    file = lay_out_file("out", [(tensor.nbytes, Copy(SOURCE, NAME), spec)])
    return list(cut_into_tasks(0, file, most_bytes))


def _filled(origin: Origin, tensor: np.ndarray, most_bytes: int) -> tuple[bytes, list[int]]:
    readers, data, filled = {SOURCE: TensorReader(origin)}, bytearray(), []
    for task in _tasks(tensor, most_bytes):
        view = memoryview(bytearray(task.stop - task.start))
        filled.append(len(list(read_direct(task, view, readers))))
        data += view
    return bytes(data), filled


@pytest.fixture(scope="module")
def tensor() -> np.ndarray:
    return np.random.default_rng(3).random((ROWS, COLUMNS), np.float32)


def _rows(*counts: int) -> list[Box]:
    starts = np.cumsum([0, *counts]).tolist()
    return [Box((at, 0), (n, COLUMNS)) for at, n in zip(starts, counts, strict=False)]


def test_runs_are_read_with_one_request_each_and_neighbours_together(tensor: np.ndarray) -> None:
    third = ROWS // 3
    origin = _looked_into(_origin(tensor, _rows(third, third, ROWS - 2 * third)))
    data, filled = _filled(origin, tensor, 2 * TASK_BYTES)
    assert data == tensor.tobytes()
    assert filled == [2, 1]
    source = origin.source
    assert isinstance(source, RemoteFiles)
    assert len(source.asked) == 4  # three chunks, the last of them in two tasks
    assert sum(one.size_bytes for one in source.asked) == tensor.nbytes
    origin.checksums.finish()
    assert len(source.asked) == 4


def test_a_damaged_run_is_an_error_with_its_last_piece(tensor: np.ndarray) -> None:
    origin = _looked_into(_origin(tensor, _rows(ROWS // 2, ROWS - ROWS // 2), damaged=True))
    with pytest.raises(ChecksumError, match="CRC-32"):
        _filled(origin, tensor, 2 * TASK_BYTES)


def test_what_is_not_one_run_is_left_to_others(tensor: np.ndarray) -> None:
    halves = [Box((0, at), (ROWS, COLUMNS // 2)) for at in (0, COLUMNS // 2)]
    many = _rows(*[LEAST_BYTES // (4 * COLUMNS) // 4] * 10)
    rest = many[-1].offsets[0] + many[-1].sizes[0]
    many.append(Box((rest, 0), (ROWS - rest, COLUMNS)))
    scattered = _looked_into(_origin(tensor, halves))
    not_looked_into = _origin(tensor, _rows(ROWS))
    assert _filled(scattered, tensor, TASK_BYTES)[1] == [0, 0, 0]
    assert _filled(not_looked_into, tensor, TASK_BYTES)[1] == [0, 0, 0]
    assert _filled(_looked_into(_origin(tensor, many)), tensor, TASK_BYTES)[1] == [0, 1, 1]


def test_a_large_tensor_begins_a_task_so_that_chunks_and_tasks_lie_in_step() -> None:
    spec = TensorSpec(Fqn("w"), dtype_named("float32"), (TASK_BYTES,))
    small = TensorSpec(Fqn("s"), dtype_named("float32"), (4,))
    file = lay_out_file(
        "out",
        [(16, Copy(SOURCE, NAME), small), (4 * TASK_BYTES, Copy(SOURCE, NAME), spec)],
    )
    tasks = list(cut_into_tasks(0, file, 2 * TASK_BYTES))
    assert [task.start for task in tasks] == [0, 16, 16 + 2 * TASK_BYTES]
    assert tasks[-1].stop == file.size_bytes
