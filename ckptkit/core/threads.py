"""Threads of this process: one that calls functions in order, several that share an iterator.

Also a limit on bytes per second that all threads keep together, what the process uses of the
machine, and what it does at its end.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
_PROCESSOR = Path("/proc/cpuinfo")
T = TypeVar("T")
Item = TypeVar("Item")
Worker = Callable[[Iterator[Item]], None]


class WorkerThread:
    """A daemon thread that calls functions one after another, in the order they were submitted.

    Unlike the thread of a `ThreadPoolExecutor` it is not joined when the interpreter exits: a call
    that hangs in storage or in C++ must not keep a program alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Has a function called; the future holds what it returns or raises."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def submit_unwatched(self, call: Callable[[], object]) -> None:
        """Has a function called whose future nothing reads: what it raises is logged."""
        self.submit(call).add_done_callback(_log_error)

    def stop(self) -> None:
        """Ends the thread after the calls submitted so far, without waiting for them."""
        self._calls.put(None)

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread after the calls submitted so far, and waits for it."""
        self.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  raised again by the future
                    future.set_exception(error)
            # Or the thread would keep what the call refers to until the next one comes.
            del entry, future, call


def _log_error(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a background call failed", exc_info=error)


def weak_callback(method: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls a method while its object exists, without keeping it alive.

    For hooks that cannot be removed, such as those of `os.register_at_fork`.
    """
    alive = weakref.WeakMethod(method)

    def call() -> None:
        living = alive()
        if living is not None:
            living()

    return call


def repeat(seconds: float, call: Callable[[], object], name: str) -> threading.Event:
    """Calls a function again and again, in a daemon thread, until the event is set."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended


def call_to_end(call: Callable[[], T]) -> T:
    """Calls a function in a thread, so that a signal is raised after its end and not within it.

    For requests that change something in a store: one that is interrupted while its answer is on
    the way has been done, or will be, and what cleans up would not know.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ckptkit-call") as thread:
        return thread.submit(call).result()


def run_crew(
    workers: int,
    items: Iterator[Item],
    work: Worker[Item],
    stopped: threading.Event | None = None,
) -> None:
    """Runs `work` in that many threads, each with an iterator that takes from `items`.

    `stopped` is set at the first error or signal, for work that waits for something.
    """
    stop, lock = stopped or threading.Event(), threading.Lock()
    errors: list[BaseException] = []

    def run(ended: threading.Event) -> None:
        try:
            work(_take(items, lock, stop))
        except BaseException as error:  # noqa: BLE001  handed on to the caller's thread
            errors.append(error)
            stop.set()
        finally:
            ended.set()

    def wait() -> None:
        """Waits for every thread that runs; may be interrupted, and called again.

        An interrupted join would take a running thread for a finished one. A thread without an
        identity has not begun: if it begins after the crew was stopped, it finds nothing to do.
        """
        for thread, ended in crew:
            if thread.ident is not None:
                ended.wait()

    crew = [
        (threading.Thread(target=run, args=(ended,), name=f"ckptkit-{i}", daemon=True), ended)
        for i, ended in enumerate([threading.Event() for _ in range(workers)])
    ]
    try:
        for thread, _ in crew:
            thread.start()
        wait()
    finally:
        # A signal may have ended the start or the wait at any point.
        stop.set()
        wait()
    if errors:
        raise errors[0]


def _take(items: Iterator[Item], lock: threading.Lock, stop: threading.Event) -> Iterator[Item]:
    """Yields items that several threads share, until there are none or the crew is stopped."""
    while not stop.is_set():
        with lock:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class Throttle:
    """Delays threads that move bytes so that all together keep a rate; `stopped` ends all waits."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.stopped = threading.Event()

    def take(self, size_bytes: int) -> None:
        """Books bytes that were moved, and waits until the next may be."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size_bytes / self._rate
            wait = self._free_at - now
        self.stopped.wait(wait)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_words() -> frozenset[str]:
    """Returns the words of /proc/cpuinfo, such as vendor and flags; none on other systems."""
    try:
        return frozenset(_PROCESSOR.read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return frozenset()


def memory_in_use_bytes() -> int:
    """Returns the resident memory of the process; its peak where only that is known; else 0."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def call_at_exit(call: Callable[[], object]) -> Callable[[], object]:
    """Has a function called when this process ends; returns what takes that back.

    In a process that multiprocessing forked, `atexit` does not run; its own finalizers do.
    """
    import multiprocessing.util

    if multiprocessing.parent_process() is not None:
        return multiprocessing.util.Finalize(None, call, exitpriority=0).cancel
    atexit.register(call)
    return partial(atexit.unregister, call)


@contextmanager
def few_collections() -> Iterator[None]:
    """Disables the garbage collector, which would traverse millions of live objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
