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
    """Reads tensors of some origins; for one thread at a time.

    The origins are opened anew: what is read to be checked or compared is read again, and its
    checksums are verified again, when it is written.
    """

    def __init__(self, *origins: Origin) -> None:
        self._origins = {
            origin.name: Origin(origin.name, origin.source, origin.index) for origin in origins
        }
        self._readers = {name: TensorReader(origin) for name, origin in self._origins.items()}

    def read(self, origin: str, key: Key, span: Span) -> NDArray[Any]:
        """Returns elements of a stored tensor, in an array that only the caller uses."""
        dtype = self._origins[origin].index.tensors[key].dtype
        data = bytearray((span.stop - span.start) * dtype.itemsize)
        self._readers[origin].fill(key, span, memoryview(data))
        return np.frombuffer(data, numpy_dtype(dtype))

    def read_whole(self, origin: str, entry: TensorEntry) -> NDArray[Any]:
        return self.read(origin, entry.key, Span(0, entry.elements))

    def read_blocks(
        self, origin: str, entry: TensorEntry, elements: int | None = None
    ) -> Iterator[NDArray[Any]]:
        """Yields the elements of a tensor, as many at a time as one read takes."""
        step = elements or max(1, RUN_BYTES // entry.dtype.itemsize)
        for start in range(0, entry.elements, step):
            yield self.read(origin, entry.key, Span(start, min(start + step, entry.elements)))

    def are_equal(self, first: tuple[str, TensorEntry], second: tuple[str, TensorEntry]) -> bool:
        """Compares two stored tensors, each with its origin: element types, shapes, bytes."""
        if (first[1].dtype, first[1].shape) != (second[1].dtype, second[1].shape):
            return False
        blocks = zip(self.read_blocks(*first), self.read_blocks(*second), strict=True)
        return all(same_bytes(a.view(np.uint8).data, b.view(np.uint8).data) for a, b in blocks)

    def compute(self, operand: Operand, span: Span) -> NDArray[Any]:
        inputs = [self.read(d.origin, d.key, d.place) for d in operand.demands(span)]
        return operand.values(span, inputs)

    def unverified(self, origin: str) -> set[Key]:
        """Returns the tensors that were read and have bytes without a stored checksum."""
        return self._origins[origin].unverified

    def finish(self) -> None:
        """Verifies the checksums of what was read in part."""
        for origin in self._origins.values():
            origin.checksums.finish()
