"""Tensors of adapters and bases: by name and shape alone, or in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, dtype_named
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    Fqn,
    Key,
    Record,
    RecordTable,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.engine.reader import Origin
from ckptkit.storage.overlay import MemorySource

FLOAT = dtype_named("float32")


def make_entry(name: str, shape: Shape) -> TensorEntry:
    chunks = ChunkTable.of((), len(shape))
    return TensorEntry(Key(name), (name,), Fqn(name), "", "model", FLOAT, shape, chunks)


def make_origin(name: str, arrays: Mapping[str, NDArray[Any]]) -> Origin:
    source = MemorySource({name: array.tobytes() for name, array in arrays.items()})
    entries = {}
    for number, (own, array) in enumerate(arrays.items()):
        chunks = ChunkTable.of([Chunk(Span(0, array.size), number, 0)], array.ndim)
        dtype = BY_NAME[array.dtype.name]
        entries[Key(own)] = TensorEntry(
            Key(own), (own,), Fqn(own), "", "model", dtype, array.shape, chunks
        )
    records = [Record(number, 0, array.nbytes) for number, array in enumerate(arrays.values())]
    stats = [source.stat(path) for path in arrays]
    return Origin(name, source, TensorIndex("test", stats, RecordTable.of(records), entries))
