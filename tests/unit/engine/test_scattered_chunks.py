"""Chunks that are not stored row-major: how often, and how much at once, they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import (
    Box,
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    Record,
    RecordTable,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.engine.executor import ExecutionSettings, Executor
from ckptkit.engine.kernels import make_products
from ckptkit.engine.outcome import ignore
from ckptkit.engine.reader import RUN_BYTES, Origin, TensorReader
from ckptkit.engine.segment_reader import COMPUTE_ELEMENTS, Inputs
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.plan import SOURCE, Plan
from ckptkit.plan.selection import DTypePolicy
from ckptkit.storage.overlay import MemorySource
from tests.memory_target import MemoryTarget

ROWS, COLUMNS = 2_000, 1_500
# float16 holds its values too.
TRUTH: NDArray[Any] = (np.arange(ROWS * COLUMNS, dtype=np.float32) % 2_039).reshape(ROWS, COLUMNS)


class CountedReads(MemorySource):
    """A source that notes the lengths of its reads."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.lengths: list[int] = []

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        self.lengths.append(len(target))
        super().read_into(path, start, target)


def transposed() -> tuple[Origin, CountedReads]:
    """A tensor whose one chunk is stored column by column."""
    data = np.ascontiguousarray(TRUTH.T).tobytes()
    source = CountedReads({"f": data})
    chunk = Chunk(Box((0, 0), TRUTH.shape), 0, 0, (1, ROWS))
    entry = TensorEntry(
        Key("w"),
        ("w",),
        Fqn("w"),
        "",
        "model",
        dtype_named("float32"),
        TRUTH.shape,
        ChunkTable.of([chunk], 2),
    )
    records = RecordTable.of([Record(0, 0, len(data))])
    index = TensorIndex("test", [source.stat("f")], records, {entry.key: entry})
    return Origin(SOURCE, source, index), source


def test_a_transposed_chunk_is_passed_over_once_however_long_the_range() -> None:
    origin, source = transposed()
    assert TRUTH.nbytes > 2 * RUN_BYTES
    data = bytearray(TRUTH.nbytes)
    TensorReader(origin).fill(Key("w"), Span(0, TRUTH.size), memoryview(data))
    assert data == TRUTH.tobytes()
    assert sum(source.lengths) < 1.1 * TRUTH.nbytes
    assert max(source.lengths) <= RUN_BYTES


def test_the_rows_that_a_range_begins_and_ends_in_are_no_passes_of_their_own() -> None:
    origin, source = transposed()
    span = Span(COLUMNS // 2, TRUTH.size - COLUMNS // 2)
    data = bytearray((span.stop - span.start) * TRUTH.itemsize)
    TensorReader(origin).fill(Key("w"), span, memoryview(data))
    assert data == TRUTH.reshape(-1)[span.start : span.stop].tobytes()
    assert sum(source.lengths) < 1.1 * TRUTH.nbytes


def test_a_cast_passes_over_a_transposed_chunk_once_for_each_large_block() -> None:
    origin, source = transposed()
    entries = list(origin.index.tensors.values())
    products = make_products(entries, DTypePolicy("float16"), {})
    plan = Plan(tuple(layout_hf_weights(products, 10**9)), {})
    target = MemoryTarget()
    Executor(plan, Inputs({SOURCE: origin}, {}), target, ExecutionSettings(1), ignore).run()
    target.commit(plan.files[-1].path)
    assert target.files["model.safetensors"].endswith(TRUTH.astype(np.float16).tobytes())
    passes = -(-TRUTH.size // COMPUTE_ELEMENTS)
    assert sum(source.lengths) < 1.1 * passes * TRUTH.nbytes
