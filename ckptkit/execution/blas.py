"""One thread per matrix product: numpy's BLAS would start as many as there are cores for each.

Workers are threads already. A BLAS with threads of its own lets one worker in at a time, and
its threads compete with the workers for the cores.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# As OpenBLAS is named in numpy's wheels, in those with 64-bit integers, and where a system or
# conda provides it. Other libraries (Accelerate, MKL, BLIS) are left as they are.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
_lock = threading.Lock()
_users: list[int] = []  # the number of threads to return to, once for every user


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Lets every matrix product of this process run in the thread that asks for it."""
    found = _threads()
    if found is None:
        yield
        return
    get, limit = found
    with _lock:
        _users.append(_users[-1] if _users else get())
        limit(1)
    try:
        yield
    finally:
        with _lock:
            before = _users.pop()
            if not _users:
                limit(before)


@cache
def _threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Finds the functions that say and set how many threads OpenBLAS uses."""
    import ctypes  # only a merge of adapters pays for it

    # Symbols of the libraries that an extension was linked with are found through its handle.
    try:
        library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    except (ImportError, OSError):
        return None
    for name in _NAMES:
        get = getattr(library, name.format("get_num_threads"), None)
        limit = getattr(library, name.format("set_num_threads"), None)
        if get is not None and limit is not None:
            get.argtypes, get.restype = (), ctypes.c_int
            limit.argtypes, limit.restype = (ctypes.c_int,), None
            return get, limit
    return None
