"""Reads parts of objects for all clients together, in a few threads and a few buffers.

A body is sent from buffers that all clients share: the client that waits longest gets the next
one. While one is sent, the next ones are filled, as far as no other client waits for a buffer. A
client that takes too long over a buffer that others wait for loses its connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.threads import Throttle, WorkerThread, memory_in_use_bytes, usable_cores
from ckptkit.engine.executor import settle_workers
from ckptkit.engine.prefetch import READ_AHEAD_BYTES
from ckptkit.engine.reader import RUN_BYTES
from ckptkit.options import Resources
from ckptkit.plan.plan import TASK_BYTES, OutputFile
from ckptkit.serving.served_folder import FolderReader, ServedFolder
from ckptkit.serving.served_objects import BLOCK_BYTES, ReadUnit, ServedObject, cut_into_units

# Gather scratch, the memory of kernels, and the leaf that was computed last.
_READER_BYTES = RUN_BYTES + (4 << 20) + TASK_BYTES
_BLOCKS_OF_A_UNIT = TASK_BYTES // BLOCK_BYTES
PATIENCE_SECONDS = 10.0
"""What a client may take over one buffer while others wait: 0.4 MB/s."""
_LOOKS = 10  # for slow clients, in that time


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """How much is read at a time.

    Attributes:
        threads: That read.
        blocks: Buffers of `BLOCK_BYTES` for what is sent.
        bytes_per_second: How much is read, None for no limit.
    """

    threads: int
    blocks: int
    bytes_per_second: int | None = None

    @classmethod
    def from_resources(cls, resources: Resources, *, is_remote: bool) -> ReadingLimits:
        """Divides the memory budget between threads and buffers."""
        budget = resources.memory_budget_bytes
        each = _READER_BYTES + (READ_AHEAD_BYTES if is_remote else 0)
        threads = settle_workers(
            resources.workers,
            cores=usable_cores(),
            budget_bytes=budget,
            limit_bytes=resources.memory_limit_bytes,
            used_bytes=memory_in_use_bytes(),
            worker_bytes=each + _BLOCKS_OF_A_UNIT * BLOCK_BYTES,
        )
        blocks = (budget - threads * each) // BLOCK_BYTES
        return cls(threads, blocks, resources.bytes_per_second)


class _ReaderThread:
    """A thread, and the reader of the folder that it has read from last."""

    def __init__(self, number: int, throttle: Throttle) -> None:
        self.thread = WorkerThread(f"ckptkit-reader-{number}")
        self._throttle = throttle
        self._reader: FolderReader | None = None

    def fill(
        self, folder: ServedFolder, file: OutputFile, unit: ReadUnit, views: list[memoryview]
    ) -> None:
        self._throttle.take(unit.stop - unit.start)
        if self._reader is None or self._reader.folder is not folder:
            self._reader = None  # its buffers are freed before others are made
            self._reader = FolderReader(folder)
        self._reader.fill(file, unit.start, views)

    def forget(self) -> None:
        self._reader = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A client that waits for buffers, since a time of the event loop."""

    count: int
    future: asyncio.Future[list[memoryview]]
    since: float


@dataclass(slots=True, eq=False)
class _Sending:
    """A client that sends from a buffer, since a time of the event loop."""

    cut: Callable[[], None]
    since: float = 0.0


@dataclass(slots=True)
class _Filling:
    """A unit of a body that is being read, and its buffers."""

    blocks: list[memoryview]
    views: list[memoryview]
    task: asyncio.Future[None]


class SharedReading:
    """The threads and the buffers; its methods are for the thread of the event loop.

    Attributes:
        free_blocks: How many buffers no client has.
    """

    def __init__(self, limits: ReadingLimits) -> None:
        self._throttle = Throttle(limits.bytes_per_second)
        self._ahead = limits.threads + 1  # one is sent while each thread fills another
        self._threads = [_ReaderThread(n, self._throttle) for n in range(limits.threads)]
        self._idle: asyncio.LifoQueue[_ReaderThread] = asyncio.LifoQueue()
        for thread in self._threads:
            self._idle.put_nowait(thread)
        self._blocks = [aligned_buffer(BLOCK_BYTES) for _ in range(limits.blocks)]
        self._waiting: deque[_Waiting] = deque()
        self._sending: list[_Sending] = []
        self._is_looking = False  # for slow clients

    @property
    def free_blocks(self) -> int:
        return len(self._blocks)

    async def read(
        self,
        folder: ServedFolder,
        entry: ServedObject,
        start: int,
        stop: int,
        cut: Callable[[], None],
    ) -> AsyncGenerator[memoryview, None]:
        """Yields the bytes `[start, stop)` of an object in proven parts, each valid until the next.

        Has to be closed where it is not read to its end.

        Args:
            folder: What has the object.
            entry: The object.
            start: First byte.
            stop: First byte after them.
            cut: Breaks the connection off, if the client is too slow while others wait.
        """
        units, file = cut_into_units(entry, start, stop), entry.file
        unit = next(units, None)
        pending: deque[_Filling] = deque()
        sending = _Sending(cut)
        try:
            while unit is not None or pending:
                while unit is not None and len(pending) < self._ahead:
                    # Who holds a buffer must not wait for another one.
                    blocks = self._take_now(unit) if pending else await self._take(unit)
                    if blocks is None:
                        break
                    pending.append(self._begin(folder, file, unit, blocks))
                    unit = next(units, None)
                await asyncio.shield(pending[0].task)
                self._sending.append(sending)
                for view in pending[0].views:
                    sending.since = asyncio.get_running_loop().time()
                    yield view
                    self._give([pending[0].blocks.pop(0)])
                self._sending.remove(sending)
                pending.popleft()
        finally:
            if sending in self._sending:
                self._sending.remove(sending)
            for filling in pending:
                with suppress(Exception):  # the error of the first one is raised
                    await asyncio.shield(filling.task)
                self._give(filling.blocks)

    def forget(self) -> None:
        """Has each thread free what it has kept of the folder that it read last."""
        for thread in self._threads:
            thread.thread.submit_unwatched(thread.forget)

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        self._throttle.stopped.set()
        for thread in self._threads:
            thread.thread.stop()

    def _begin(
        self, folder: ServedFolder, file: OutputFile, unit: ReadUnit, blocks: list[memoryview]
    ) -> _Filling:
        views, left = [], unit.stop - unit.start
        for block in blocks:
            views.append(block[: min(left, BLOCK_BYTES)])
            left -= len(views[-1])
        return _Filling(blocks, views, asyncio.ensure_future(self._fill(folder, file, unit, views)))

    async def _fill(
        self, folder: ServedFolder, file: OutputFile, unit: ReadUnit, views: list[memoryview]
    ) -> None:
        reader = await self._idle.get()
        try:
            call = partial(reader.fill, folder, file, unit, views)
            await asyncio.wrap_future(reader.thread.submit(call))
        finally:
            self._idle.put_nowait(reader)

    async def _take(self, unit: ReadUnit) -> list[memoryview]:
        """Returns buffers for a unit, in the order in which they were asked for."""
        count = min(unit.blocks, _BLOCKS_OF_A_UNIT)
        if not self._waiting and len(self._blocks) >= count:
            return [self._blocks.pop() for _ in range(count)]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[memoryview]] = loop.create_future()
        self._waiting.append(_Waiting(count, future, loop.time()))
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(PATIENCE_SECONDS / _LOOKS, self._cut_slow)
        return await future

    def _cut_slow(self) -> None:
        """Cuts clients that are slow while others wait, and looks again while some do."""
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        self._is_looking = bool(self._waiting)
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        # The one that waits is patient too: buffers may come back by themselves.
        if loop.time() - self._waiting[0].since > PATIENCE_SECONDS / 2:
            for sending in self._sending:
                if loop.time() - sending.since > PATIENCE_SECONDS:
                    sending.cut()
        loop.call_later(PATIENCE_SECONDS / _LOOKS, self._cut_slow)

    def _take_now(self, unit: ReadUnit) -> list[memoryview] | None:
        if self._waiting or len(self._blocks) < unit.blocks:
            return None
        return [self._blocks.pop() for _ in range(unit.blocks)]

    def _give(self, blocks: list[memoryview]) -> None:
        self._blocks += blocks
        while self._waiting and len(self._blocks) >= self._waiting[0].count:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                waiting.future.set_result([self._blocks.pop() for _ in range(waiting.count)])
