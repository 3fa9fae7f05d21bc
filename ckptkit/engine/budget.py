"""How many workers fit into the allowed memory, and one BLAS thread for each of them.

Workers are threads already. numpy's BLAS would start as many threads as there are cores for each
matrix product: it admits one worker at a time then, and its threads compete with the workers for
the cores.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from ckptkit.core.errors import NoSpaceError
from ckptkit.engine.reader import RUN_BYTES
from ckptkit.plan.plan import TASK_BYTES

# Output block, gather scratch, and the memory of kernels: a cast reads up to 4 MB at a time; a
# merge reads 2 MB of a 16-bit base and has 1 MB to 3 MB of intermediate results. The factors of
# a merge come on top, those of the tensors that are being written.
WORKER_BYTES = TASK_BYTES + RUN_BYTES + (4 << 20)
STRAIGHT_TASK_BYTES = 2 * TASK_BYTES
"""The size of a task where nearly all of it is read directly into its buffer."""
STRAIGHT_WORKER_BYTES = STRAIGHT_TASK_BYTES + RUN_BYTES
"""Output block and gather scratch, where nothing is computed."""
DISTANT_WORKERS = 8
"""At most so many where they wait for a store and not for a core."""


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """How an execution may use the machine.

    Attributes:
        workers: Threads that read, check and write.
        bytes_per_second: How much they may read together, and how much write; None for no limit.
        worker_bytes: Memory that each of them takes.
        task_bytes: What each of them does at a time.
    """

    workers: int
    bytes_per_second: int | None = None
    worker_bytes: int = WORKER_BYTES
    task_bytes: int = TASK_BYTES

    def with_more(self, bytes_each: int) -> ExecutionSettings:
        """Returns as many workers as fit into the same memory if each takes more, at least one."""
        each = self.worker_bytes + bytes_each
        workers = max(1, self.workers * self.worker_bytes // each)
        return replace(self, workers=workers, worker_bytes=each)


def settle_workers(
    wanted: int | None,
    *,
    cores: int,
    budget_bytes: int,
    limit_bytes: int | None,
    used_bytes: int,
    worker_bytes: int = WORKER_BYTES,
) -> int:
    """Chooses the number of workers.

    Args:
        wanted: The user's number, or None: one more than cores, since a worker that waits for
            the disk needs no core, and at most eight.
        cores: Cores of this machine that the process may use.
        budget_bytes: What buffers may take together.
        limit_bytes: What the whole process may take, or None.
        used_bytes: What the process takes already, the plan included.
        worker_bytes: What one worker takes.

    Returns:
        At least 1.
    """
    room = budget_bytes
    if limit_bytes is not None and limit_bytes - used_bytes < budget_bytes:
        room = max(0, limit_bytes - used_bytes)
        if room < worker_bytes:
            raise NoSpaceError(
                f"{limit_bytes:,} bytes leave {room:,} for buffers and one worker needs"
                f" {worker_bytes:,}; {used_bytes:,} are in use with the plan",
                where="--memory-limit",
                hint=f"allow at least {used_bytes + worker_bytes:,} bytes",
            )
    if room < worker_bytes:
        raise NoSpaceError(
            f"{room:,} bytes are allowed for buffers and one worker needs {worker_bytes:,}",
            where="--memory-budget",
            hint=f"pass --memory-budget {worker_bytes}B or more",
        )
    return max(1, min(wanted or min(cores + 1, 8), room // worker_bytes))


# As OpenBLAS is named in numpy's wheels, in those with 64-bit integers, and where a system or
# conda provides it. Other libraries (Accelerate, MKL, BLIS) are left as they are.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
_lock = threading.Lock()
_users: list[int] = []  # the number of threads to return to, once for every user


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Runs every matrix product of this process in the calling thread."""
    functions = _threads()
    if functions is None:
        yield
        return
    get, limit = functions
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
