"""Files of torch and safetensors as bytes: written, indexed, and read from their places."""

from __future__ import annotations

import io
import zlib
from typing import Any

import torch

from ckptkit.core.index import Box, Key, TensorIndex
from ckptkit.formats.base import FormatReader
from ckptkit.storage.overlay import MemorySource


def saved(value: object, **options: Any) -> bytes:
    """Returns what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def read_files(reader: type[FormatReader], files: dict[str, bytes]) -> TensorIndex:
    (candidate,) = reader().find(sorted(files))
    return reader().read_index(MemorySource(files), candidate)


def tensor_at(index: TensorIndex, key: str, files: dict[str, bytes]) -> torch.Tensor:
    """Returns a tensor from its place in the files, whose checksum is compared if there is one."""
    entry = index.tensors[Key(key)]
    (chunk,) = entry.chunks
    record = index.records[chunk.record]
    data = bytearray(files[index.files[record.file].path][record.start : record.stop])
    assert record.crc32 in {None, zlib.crc32(data)}
    assert chunk.place == Box((0,) * len(entry.shape), entry.shape)
    dtype = getattr(torch, entry.dtype.name)
    if not entry.elements:
        return torch.zeros(entry.shape, dtype=dtype)
    assert chunk.byte_offset is not None
    storage = torch.frombuffer(data, dtype=dtype)
    strides = chunk.strides or torch.zeros(entry.shape, device="meta").stride()
    return storage.as_strided(entry.shape, strides, chunk.byte_offset // entry.dtype.itemsize)
