"""Stored tensors as numpy arrays: whole, in part, or block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.index import Key, Span, TensorEntry
from ckptkit.engine.kernels import Operand
from ckptkit.engine.reader import RUN_BYTES, Origin, TensorReader, same_bytes


class ArrayReader:
    """Reads tensors of some origins, by default of the first; for one thread at a time.

    The origins are opened anew: what is read to be checked or compared is read again, and its
    checksums are verified again, when it is written.
    """

    def __init__(self, *origins: Origin) -> None:
        self._first = origins[0].name
        self._origins = {
            origin.name: Origin(origin.name, origin.source, origin.index) for origin in origins
        }
        self._readers = {name: TensorReader(origin) for name, origin in self._origins.items()}

    def read(self, key: Key, span: Span, origin: str = "") -> NDArray[Any]:
        """Returns elements of a stored tensor, in an array that only the caller uses."""
        origin = origin or self._first
        dtype = self._origins[origin].index.tensors[key].dtype
        data = bytearray((span.stop - span.start) * dtype.itemsize)
        self._readers[origin].fill(key, span, memoryview(data))
        return np.frombuffer(data, numpy_dtype(dtype))

    def read_whole(self, entry: TensorEntry, origin: str = "") -> NDArray[Any]:
        return self.read(entry.key, Span(0, entry.elements), origin).reshape(entry.shape)

    def read_blocks(
        self, entry: TensorEntry, origin: str = "", *, elements: int | None = None
    ) -> Iterator[NDArray[Any]]:
        """Yields the elements of a tensor, as many at a time as one read takes."""
        step = elements or max(1, RUN_BYTES // entry.dtype.itemsize)
        for start in range(0, entry.elements, step):
            yield self.read(entry.key, Span(start, min(start + step, entry.elements)), origin)

    def are_equal(
        self,
        first: TensorEntry,
        second: TensorEntry,
        origins: tuple[str, str] = ("", ""),
        *,
        transposed: bool = False,
    ) -> bool:
        """Compares two stored tensors, each of its origin: element types, shapes, bytes."""
        shape = second.shape[::-1] if transposed else second.shape
        if (first.dtype, first.shape) != (second.dtype, shape):
            return False
        if transposed:
            whole = map(self.read_whole, (first, second), origins)
            one, other = (values.view(f"u{first.dtype.itemsize}") for values in whole)
            return np.array_equal(one, other.T)
        blocks = map(self.read_blocks, (first, second), origins)
        return all(
            same_bytes(a.view(np.uint8).data, b.view(np.uint8).data)
            for a, b in zip(*blocks, strict=True)
        )

    def compute(self, operand: Operand, span: Span) -> NDArray[Any]:
        inputs = [self.read(d.key, d.place, d.origin) for d in operand.demands(span)]
        return operand.values(span, inputs)

    def unverified(self, origin: str) -> set[Key]:
        """Returns the tensors that were read and have bytes without a stored checksum."""
        return self._origins[origin].unverified

    def finish(self) -> None:
        """Verifies the checksums of what was read in part."""
        for origin in self._origins.values():
            origin.checksums.finish()
