"""Runs a plan on this machine: threads that read, check, transform, digest and write.

`settle_workers` says how many of them fit into the allowed memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.arrays import aligned_buffer, keep_freed_memory, numpy_dtype
from ckptkit.core.checksums import leaf_sums
from ckptkit.core.errors import ChecksumError, NoSpaceError, NotFiniteError
from ckptkit.core.index import Key
from ckptkit.core.manifest import LEAF_BYTES
from ckptkit.core.threads import Throttle, run_crew
from ckptkit.engine.checksum_tracker import DeferredChecksums
from ckptkit.engine.kernels import Preparations
from ckptkit.engine.outcome import (
    BlocksShared,
    BytesWritten,
    Digests,
    Listener,
    Outcome,
    Sealed,
    Started,
    task_parts,
)
from ckptkit.engine.reader import RUN_BYTES
from ckptkit.engine.remote_reads import make_store_copies, read_direct
from ckptkit.engine.segment_reader import Inputs, SegmentReader
from ckptkit.engine.shared_blocks import copy_edges
from ckptkit.options import NotFinite, Proof, Sharing
from ckptkit.plan.plan import (
    TASK_BYTES,
    Plan,
    SegmentRange,
    Task,
    Trailer,
    copied_ranges,
    cut_into_tasks,
)
from ckptkit.storage.base import Sink
from ckptkit.storage.local.disk import PAGE_BYTES

# Output block, gather scratch, and the memory of kernels: a cast reads up to 4 MB at a time; a
# merge reads 2 MB of a 16-bit base and has 1 MB to 3 MB of intermediate results. The factors of
# a merge come on top, those of the tensors that are being written.
WORKER_BYTES = TASK_BYTES + RUN_BYTES + (4 << 20)
STRAIGHT_TASK_BYTES = 2 * TASK_BYTES
"""The size of a task where nearly all of it is read directly into its buffer."""
STRAIGHT_WORKER_BYTES = STRAIGHT_TASK_BYTES + RUN_BYTES
"""Output block and gather scratch, where nothing is computed."""
REMOTE_WORKERS = 8
"""At most so many where they wait for a store and not for a core."""
Put = Callable[[Task, memoryview], bool]


class ExecutionSettings(Struct, frozen=True):
    """How an execution may use the machine."""

    workers: int  # threads that read, check and write
    # How much they may read together, and how much write; None for no limit.
    bytes_per_second: int | None = None
    worker_bytes: int = WORKER_BYTES  # memory that each of them takes
    task_bytes: int = TASK_BYTES  # what each of them does at a time
    check: tuple[NotFinite, ...] = ()  # the kinds of numbers that no tensor may have
    sharing: Sharing = "auto"  # whether blocks of the sources become those of the output
    proof: Proof = "read"  # of these

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

    `wanted`: the user's number, or None: one more than cores, since a worker that waits for the
    disk needs no core, and at most eight. `cores`: cores of this machine that the process may use.
    `budget_bytes`: what buffers may take together. `limit_bytes`: what the whole process may take,
    or None. `used_bytes`: what the process takes already, the plan included. `worker_bytes`: what
    one worker takes. Returns at least 1.
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


class Executor:
    """Executes one plan into one target, all of it or a part."""

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        target: Sink,
        settings: ExecutionSettings,
        listener: Listener,
    ) -> None:
        self.digests = Digests()
        self._plan = plan
        self._inputs = inputs
        self._target = target
        self._settings = settings
        self._listener = listener
        self._lock = threading.Lock()
        self._preparations = Preparations()
        self._checksums = DeferredChecksums(plan.files)
        self._sealed: set[Sealed] = set()
        self._throttle = Throttle(settings.bytes_per_second)

    def run(self) -> Digests:
        """Fills every file of the plan; the output is not yet durable or visible.

        Tasks are taken in the plan's order, and every byte is written once.

        Returns the digests of what was written.
        """
        for _ in self.run_in_parts([range(len(self._plan.files))]):
            pass
        return self.digests

    def run_in_parts(self, parts: Iterable[Sequence[int]]) -> Iterator[None]:
        """Does the same part by part, each some files of the plan; yields after each part."""
        files = tuple((file.path, file.size_bytes) for file in self._plan.files)
        self._listener(Started(self._plan.bytes_written, files))
        self.create_files()
        if self._target.shared_bytes:
            self._listener(BlocksShared(self._target.shared_bytes))
        if self._target.copies_objects:
            make_store_copies(self._plan, self._inputs.origins, self._target, self._listener)
        most_bytes = self._settings.task_bytes
        with self._preparations:
            for part in parts:
                files_of_part = [(number, self._plan.files[number]) for number in part]
                cut = (cut_into_tasks(*numbered, most_bytes) for numbered in files_of_part)
                self._run(chain.from_iterable(cut), self._put_whole)
                yield
        self._refuse_unwritten(self.digests)
        for origin in self._inputs.origins.values():
            origin.checksums.finish()
        for number, file in enumerate(self._plan.files):
            for position, segment in enumerate(file.segments):
                if copied_ranges(segment) and segment.spec is not None:
                    crc = self._checksums.value((number, position))
                    assert crc is not None  # noqa: S101  no worker has failed
                    self.digests.crc32s[str(segment.spec.name)] = crc

    def create_files(self) -> None:
        """Makes every file of the plan, its content undefined."""
        for file in self._plan.files:
            copies = [one for segment in file.segments for one in copied_ranges(segment)]
            if file.shared:
                sources = self._inputs.origins
                shared = [(sources[part.origin].source, part) for part in file.shared]
                self._target.create_shared(file.path, file.size_bytes, shared)
                copy_edges(file, sources, self._target)
            elif copies:
                self._target.create_copied(file.path, file.size_bytes, copies)
            else:
                self._target.create(file.path, file.size_bytes)

    def run_part(self, tasks: Iterator[Task]) -> Outcome:
        """Runs some of the plan's tasks; called once, after `create_files`.

        Trailers that contain checksums of tasks in other parts are left out: `complete` writes
        them. Every other byte of the tasks is written once.

        `tasks`: neighbours in the plan's order, none left out between the first and the last.
        Returns what `complete` needs of all parts together.
        """
        first = next(tasks, None)
        if first is not None:
            begin = first.file, first.start
            put = partial(self._put_what_is_known, begin)
            with self._preparations:
                self._run(chain([first], tasks), put)
        return Outcome(
            digests=self.digests,
            sealed=self._sealed,
            pieces=self._checksums.pieces(),
            open_records={n: o.checksums.still_open() for n, o in self._inputs.origins.items()},
            unverified={n: {*map(str, o.unverified)} for n, o in self._inputs.origins.items()},
        )

    def run_again(self, tasks: Iterator[Task], outcome: Outcome) -> None:
        """Runs tasks once more, as a whole now that all checksums are known.

        `tasks`: those of which other processes wrote parts; the target takes them as a whole.
        `outcome`: what all parts gave together; the digests have to be the same now.
        """
        for slot, pieces in outcome.pieces:
            self._checksums.add(slot, pieces)
        with self._preparations:
            self._run(tasks, self._put_whole)
        name = outcome.digests.first_difference(self.digests)
        if name is not None:
            raise ChecksumError(
                f"other bytes were found in tensor {name!r} than shortly before",
                where="SRC",
                hint="the source changed while it was read; run again",
            )

    def complete(self, outcome: Outcome, *, has_trailers: bool = False) -> Digests:
        """Writes the trailers, and checks what single parts could not, after all are run.

        `outcome`: of all parts together. `has_trailers`: whether all trailers are written already.
        Returns the digests of the whole.
        """
        self._refuse_unwritten(outcome.digests)
        for name, origin in self._inputs.origins.items():
            origin.unverified.update(map(Key, outcome.unverified.get(name, ())))
            origin.adopt(outcome.open_records.get(name, {}))
        for slot, pieces in outcome.pieces:
            self._checksums.add(slot, pieces)
        if not has_trailers:
            self._write_trailers(outcome.sealed)
        for origin in self._inputs.origins.values():
            origin.checksums.finish()
        self.digests = outcome.digests
        return outcome.digests

    def _refuse_unwritten(self, digests: Digests) -> None:
        for _, segment, spec in self._plan.specs():
            leaves = digests.tensors.get(str(spec.name), {})
            if not copied_ranges(segment) and len(leaves) != -(-spec.size_bytes // LEAF_BYTES):
                raise ValueError(f"no part has written all of tensor {str(spec.name)!r}")

    def _run(self, tasks: Iterator[Task], put: Put) -> None:
        def work(shared: Iterator[Task]) -> None:
            try:
                self._work(shared, put)
            except BaseException:
                self._checksums.give_up()
                self._target.give_up()
                raise

        keep_freed_memory()
        self._throttle.stopped.clear()  # which a crew sets at its end
        run_crew(self._settings.workers, tasks, work, self._throttle.stopped)

    def _work(self, tasks: Iterator[Task], put: Put) -> None:
        reader = SegmentReader(self._inputs, self._preparations)
        block = aligned_buffer(self._settings.task_bytes + PAGE_BYTES)
        for task in tasks:
            low = task.start % PAGE_BYTES
            data = block[low : low + task.stop - task.start]
            filled = read_direct(task, data, reader.readers)
            for at, (part, view) in enumerate(task_parts(task, data)):
                if at not in filled:
                    reader.prefetch_parts(task, at, filled)
                if not isinstance(part.segment.body, Trailer):
                    if at not in filled:
                        reader.fill(part, view)
                    if self._settings.check:
                        self._check(part, view)
                    self._digest(task, part, view)
            reader.clear()  # before the task is sent, which takes memory
            if not put(task, data):
                return  # another worker has failed, and raises the error
            self._listener(BytesWritten(len(data), self._plan.files[task.file].path))
            self._throttle.take(max(len(data), reader.take_bytes_read()))

    def _check(self, part: SegmentRange, view: memoryview) -> None:
        """Refuses a tensor with NaN or infinities; the error has their number in all of it."""
        kinds, spec = self._settings.check, part.segment.spec
        if spec is None or spec.dtype.kind not in {"float", "complex"}:
            return
        from ckptkit.engine.values import count_not_finite, describe_not_finite  # few checks run

        dtype = numpy_dtype(spec.dtype)
        if count_not_finite(np.frombuffer(view, dtype), kinds) == (0, 0):
            return
        # With checksums of its own: they show whether the bytes are damaged.
        inputs = self._inputs.with_own_checksums()
        reader = SegmentReader(inputs, self._preparations)
        block = memoryview(bytearray(min(spec.size_bytes, LEAF_BYTES)))
        nan = infinite = 0
        for start in range(0, spec.size_bytes, LEAF_BYTES):
            leaf = replace(part, start=start, stop=min(start + LEAF_BYTES, spec.size_bytes))
            data = block[: leaf.stop - start]
            reader.fill(leaf, data)
            found = count_not_finite(np.frombuffer(data, dtype), kinds)
            nan, infinite = nan + found[0], infinite + found[1]
        for origin in inputs.origins.values():
            origin.checksums.finish()
        raise NotFiniteError(
            f"has {describe_not_finite(nan, infinite, kinds)} among {spec.elements:,} elements,"
            f" which {' '.join(f'--check {kind}' for kind in kinds)} refuses",
            where=f"tensor {spec.name!r}",
        )

    def _put_whole(self, task: Task, data: memoryview) -> bool:
        for part, view in task_parts(task, data):
            is_trailer = isinstance(part.segment.body, Trailer)
            if is_trailer and not self._checksums.fill(task.file, part, view):
                return False
        self._target.write(self._plan.files[task.file].path, task.start, data)
        return True

    def _put_what_is_known(self, begin: tuple[int, int], task: Task, data: memoryview) -> bool:
        """Writes a task but for trailers that name segments which began before this share."""
        path, segments = self._plan.files[task.file].path, self._plan.files[task.file].segments
        start = at = 0
        for part, view in task_parts(task, data):
            body = part.segment.body
            if isinstance(body, Trailer):
                if all((task.file, segments[named].start) >= begin for _, named in body.fields):
                    if not self._checksums.fill(task.file, part, view):
                        return False
                    with self._lock:
                        self._sealed.add((task.file, part.number, part.start))
                else:
                    if start < at:
                        self._target.write(path, task.start + start, data[start:at])
                    start = at + len(view)
            at += len(view)
        if start < at:
            self._target.write(path, task.start + start, data[start:at])
        return True

    def _write_trailers(self, sealed: Container[Sealed]) -> None:
        for task in self._plan.tasks():
            path = self._plan.files[task.file].path
            for part in task.parts:
                is_trailer = isinstance(part.segment.body, Trailer)
                if is_trailer and (task.file, part.number, part.start) not in sealed:
                    view = memoryview(bytearray(part.stop - part.start))
                    if not self._checksums.fill(task.file, part, view):
                        raise ValueError("a trailer was written before its checksums are known")
                    self._target.write(path, part.segment.start + part.start, view)

    def _digest(self, task: Task, part: SegmentRange, view: memoryview) -> None:
        path = self._plan.files[task.file].path
        self._checksums.note((task.file, part.number), part.start, view)
        if copied_ranges(part.segment):
            return
        leaf = part.start // LEAF_BYTES
        book, name = self.digests.files, path
        if part.segment.spec is not None:
            book, name = self.digests.tensors, str(part.segment.spec.name)
        elif len(self._plan.files[task.file].segments) > 1:
            return  # headers and trailers are proven by what they say
        sums = leaf_sums(view)
        with self._lock:
            book[name][leaf] = sums
