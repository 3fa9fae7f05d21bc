"""Reads every byte of tensors once, in parallel, without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.core.errors import InputError
from ckptkit.core.index import Key, Span, TensorEntry
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.execution.crew import run_crew
from ckptkit.execution.events import BytesWritten, Listener, Started
from ckptkit.execution.tensors import Origin, TensorReader

Item = tuple[TensorEntry, int]  # a tensor and the number of one of its leaves


@dataclass(frozen=True, slots=True)
class Scan:
    """What reading found.

    Attributes:
        failures: What went wrong first, by key of the tensor.
        size_bytes: How much was read.
    """

    failures: dict[Key, InputError]
    size_bytes: int


def leaf_span(entry: TensorEntry, leaf: int) -> Span:
    """Returns the elements of one leaf of a tensor's digest."""
    step = LEAF_BYTES // entry.dtype.itemsize
    return Span(leaf * step, min((leaf + 1) * step, entry.elements))


def same_bytes(first: memoryview, second: memoryview) -> bool:
    """Compares two buffers of one length; `memoryview` itself compares byte by byte."""
    whole = len(first) // 8 * 8
    one, other = (np.frombuffer(side[:whole], np.uint64) for side in (first, second))
    return np.array_equal(one, other) and first[whole:] == second[whole:]


def scan(
    origin: Origin,
    entries: Sequence[TensorEntry],
    visit: Callable[[TensorEntry, int, memoryview], None],
    *,
    workers: int,
    listener: Listener,
) -> Scan:
    """Reads tensors leaf by leaf and shows each leaf to `visit`, from several threads.

    A tensor that cannot be read is noted, and the others are read all the same.

    Returns:
        What failed, and how much was read.
    """
    failures: dict[Key, InputError] = {}
    total = sum(entry.size_bytes for entry in entries)
    listener(Started(total))

    def work(items: Iterator[Item]) -> None:
        reader = TensorReader(origin)
        buffer = memoryview(bytearray(LEAF_BYTES))
        for entry, leaf in items:
            span = leaf_span(entry, leaf)
            view = buffer[: (span.stop - span.start) * entry.dtype.itemsize]
            try:
                reader.fill(entry.key, span, view)
            except InputError as error:
                failures.setdefault(entry.key, error)
                continue
            visit(entry, leaf, view)
            listener(BytesWritten(len(view)))

    run_crew(workers, _leaves(entries), work)
    for error in _late_failures(origin):
        failures.setdefault(Key(error.where), error)
    return Scan(failures, total)


def _late_failures(origin: Origin) -> Iterator[InputError]:
    """Settles what is still open in the ledger; each failure closes one record."""
    while True:
        try:
            origin.ledger.finish()
        except InputError as error:
            yield error
        else:
            return


def _leaves(entries: Sequence[TensorEntry]) -> Iterator[Item]:
    for entry in entries:
        for leaf in range(-(-entry.size_bytes // LEAF_BYTES)):
            yield entry, leaf
