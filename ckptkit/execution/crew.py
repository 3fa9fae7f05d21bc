"""Threads that share one iterator of work; the first error stops all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Worker = Callable[[Iterator[Item]], None]


def run_crew(workers: int, items: Iterator[Item], work: Worker[Item]) -> None:
    """Runs `work` in that many threads, each with an iterator that takes from `items`.

    Raises:
        BaseException: The first error of any thread, after all have stopped; also what a
            signal raises in the calling thread while it waits.
    """
    _Crew(workers, items, work).run()


class _Crew(Generic[Item]):
    def __init__(self, workers: int, items: Iterator[Item], work: Worker[Item]) -> None:
        self._items, self._work = items, work
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run_one, name=f"ckptkit-{i}", daemon=True)
            for i in range(workers)
        ]

    def run(self) -> None:
        running = 0
        try:
            for thread in self._threads:
                thread.start()
                running += 1
            while running:
                self._ended.acquire()
                running -= 1
        finally:
            # A signal may have ended the wait. Joining is no way to wait on: an interrupted
            # join takes a running thread for a finished one.
            self._stop.set()
            for _ in range(running):
                self._ended.acquire()
        if self._errors:
            raise self._errors[0]

    def _run_one(self) -> None:
        try:
            self._work(self._shared())
        except BaseException as error:  # noqa: BLE001  handed on to the caller's thread
            self._errors.append(error)
            self._stop.set()
        finally:
            self._ended.release()

    def _shared(self) -> Iterator[Item]:
        while not self._stop.is_set():
            with self._lock:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item
