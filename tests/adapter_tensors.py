"""Entries of tensors by name and shape alone, for tests that read no bytes."""

from __future__ import annotations

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.index import ChunkTable, Fqn, Key, Shape, TensorEntry

FLOAT = dtype_named("float32")


def make_entry(name: str, shape: Shape) -> TensorEntry:
    chunks = ChunkTable.of((), len(shape))
    return TensorEntry(Key(name), (name,), Fqn(name), "", "model", FLOAT, shape, chunks)
