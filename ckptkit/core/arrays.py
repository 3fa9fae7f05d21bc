"""Memory for elements: numpy's types for them, and buffers that direct I/O takes as they are."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from ckptkit.core.dtypes import DType

_KEPT_BYTES = 8 << 20  # which several arrays of a kernel fill
HUGE_PAGE_BYTES = 2 << 20
"""The huge page of most processors; on others a buffer is aligned to more than it needs."""


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Finds the numpy type of an element type."""
    try:
        return np.dtype(dtype.numpy)
    except TypeError:
        # Imported only for types that numpy lacks: commands that read no data start faster.
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return extension


def keep_freed_memory() -> None:
    """Lets glibc keep small arrays that are freed, up to twice `_KEPT_BYTES` for each thread.

    Else it returns them to the system, and each new array costs a page fault for 4 kB. glibc takes
    the size of the largest mapping that was freed as its limit, by `mallopt(3)`; whether a program
    frees a large one early was chance.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Returns writable zeroed memory that begins at a page; it is freed with its last reference.

    A large buffer begins at a huge page, and is in huge pages where the kernel has some: direct
    I/O then hands the device a few long runs of memory instead of thousands of single pages.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, size_bytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size_bytes, flags=flags))
    # Not every kernel puts a mapping at a huge page; pages that are never touched cost nothing.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    with suppress(OSError):  # a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(memoryview(memory)) % HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + size_bytes]


def address_of(data: memoryview) -> int:
    """Returns the address of the first byte."""
    address, _ = np.frombuffer(data, np.uint8).__array_interface__["data"]
    return int(address)
