"""Writes the final model folder from all ranks at once: no gather, collective or second pass.

Every rank plans the whole folder from what it knows of the model, and writes its own bytes at
their final offsets. When they are durable it reports to rank 0, which makes the folder visible once
all ranks have done so. A late rank delays only that commit, in the background.

Blocks go through a few reused buffers: the calling thread casts while others write. Nothing is read
back. Casts from float32 use torch's rounding, which is fastest; the bytes are those of `Caster`.

Rank 0 compares the plan with the model of the configuration, joins the checksums of all ranks, and
makes the folder visible, while the other ranks wait in the background. What is known of the family
answers, or the class of the live model, built without weights. Only where neither is certain, a
process of its own does: it says what does not fit, and may communicate and change torch's settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict
from typing import Literal as OneOf

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.conversion.source.paths import check_path
from ckptkit.core.arguments import refuse_unknown
from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.checksums import ChecksumShare, compute_share, digest_of, is_whole
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    CkptkitError,
    NoSpaceError,
    OutputError,
    PeerError,
    RefusedError,
    SaveError,
    error_from_json,
)
from ckptkit.core.geometry import row_major_strides, slabs
from ckptkit.core.index import Box, Fqn, Ints, Shape, Span
from ckptkit.core.manifest import CRC32_SCHEME, MANIFEST_NAME, FileRecord, Manifest, TensorRecord
from ckptkit.core.model_configs import parse_model_config
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.hub_names.known_models import is_as_described
from ckptkit.options import (
    DEFAULT_MAX_FILE_BYTES,
    ConsolidateRequest,
    DTypeChoice,
    DTypeLike,
    changed_options,
    parse_size,
)
from ckptkit.plan.load_report import EXPORT
from ckptkit.plan.plan import Literal, Plan, TensorSpec
from ckptkit.storage.base import Row
from ckptkit.storage.local.disk import PAGE_BYTES
from ckptkit.storage.local.target import MIN_DIRECT_BYTES, PartFile, SharedTarget
from ckptkit.storage.locations import current_directory
from ckptkit.storage.manifests import refuse_unnamed_in
from ckptkit.storage.place_identity import find_filesystem_type, why_not_shared
from ckptkit.training.agree.peers import Peers, name_ranks, poll_until
from ckptkit.training.environment import ranks_of_this_machine
from ckptkit.training.export.output_plan import (
    BoxWrite,
    ExportPlan,
    ExportRequest,
    adapter_options,
    digest_of_plan,
    is_adapter,
    plan_export,
)
from ckptkit.training.handle import ExportHandle, ExportReport, SaveHandle
from ckptkit.training.save.saver import OURS, agree_on_commit, find_committed
from ckptkit.training.save.staging import is_plain
from ckptkit.training.state.collect import BoundState
from ckptkit.training.step_names import ask_live_class
from ckptkit.version import __version__

__all__ = ["ExportHandle", "ExportOptions", "Exporter", "make_request"]
logger = logging.getLogger(__name__)
_RANGES = "ranges"
_ONE_WRITER = "one writer: "  # only one machine may write a file, and why
_VISIBLE_SECONDS = 60.0

SaveInstead = Callable[[BoundState, str], SaveHandle]
"""Saves the state sharded, under a name of its own."""


class _Written(Struct, frozen=True):
    """What this rank has written."""

    planned: ExportPlan
    size_bytes: int  # of this rank's part
    shares: Mapping[Fqn, ChecksumShare]
    rows: Sequence[Row]  # of this rank's own file, where only one rank may write to the output


class ExportAttempt:
    """One try to export, numbered alike on all ranks."""

    def __init__(
        self, peers: Peers, number: int, request: ExportRequest, timeout_seconds: float
    ) -> None:
        self._peers = peers
        self._number = number
        self._name = f"{peers.nonce}/{number}"
        self._request = replace(request, source={**request.source, "attempt": self._name})
        self._timeout_seconds = timeout_seconds
        self._topic = f"export {number}"  # not where to, which may differ by mistake
        self._target: SharedTarget | None = None
        self._written: _Written | None = None
        self._saved: SaveHandle | None = None
        self._next: tuple[Sequence[str], Sequence[str]] = (), ()  # a command and its options

    def begin(
        self,
        find_bound: Callable[[], BoundState],
        sidecar: Mapping[str, object],
        save_instead: SaveInstead,
    ) -> None:
        """Writes this rank's part, durably, or begins to save it sharded."""
        try:
            request = self._request
            nonce = hashlib.sha256(self._name.encode()).hexdigest()[:16]
            target = SharedTarget(
                request.out, nonce, overwrite=request.overwrite, named=request.named
            )
            self._target = target
            how = self._agreed_way(target)
            bound = find_bound()
            if how == _RANGES or (how.startswith(_ONE_WRITER) and is_adapter(bound)):
                self._written = self._write(target, bound, sidecar, by_ranges=how == _RANGES)
            else:
                self._saved = self._save(how.removeprefix(_ONE_WRITER), bound, save_instead)
        except BaseException as error:
            first = self._share_failure(error)
            self._give_up()
            if first is None:
                raise
            raise first from error

    def finish(self, handle: ExportHandle, began: float, durable: float) -> None:
        """Waits for the other ranks, and completes the handle; for a thread of its own."""
        try:
            report = self._report(began, durable)
        except CkptkitError as error:
            self._fail(handle, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("exporting to %s", self._request.named)
            self._fail(handle, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self._target is not None:
                self._target.leave()
            if self._peers.rank == 0:
                logger.info("%s", report)
            handle.succeed(report)

    def _agreed_way(self, target: SharedTarget) -> str:
        """Returns how the output can be written: the first rank decides for all."""
        reason = ""
        if self._peers.world_size > 1:
            reason = why_not_shared(
                find_filesystem_type(self._request.out),
                is_one_machine=ranks_of_this_machine() == self._peers.world_size,
            )
        choice = f"{_ONE_WRITER}{reason}" if reason else target.why_no_ranges() or _RANGES
        key = f"exports/{self._number}"
        decided = self._peers.store.compare_set(key, b"", choice.encode()).decode()
        if decided == _RANGES and choice != _RANGES:
            raise RefusedError(choice.removeprefix(_ONE_WRITER), where=str(self._request.named))
        return decided

    def _save(self, reason: str, bound: BoundState, save_instead: SaveInstead) -> SaveHandle:
        """Saves the state sharded, and keeps the command that writes the output from that."""
        options, usual, where = self._request.options, ConsolidateRequest(), self._request.named
        if is_adapter(bound):
            if options.dtype != usual.dtype:
                raise RefusedError(
                    f"{reason}; from shards an adapter is taken with the numbers that it has",
                    where=str(where),
                    hint="leave dtype out, or export the adapter to another place",
                )
            self._next = ("adapter", "extract"), adapter_options(bound)
        else:
            further = {
                "--dtype": (options.dtype, usual.dtype),
                "--names": (options.names, usual.names),
                "--max-shard-size": (str(options.max_file_bytes), str(usual.max_file_bytes)),
            }
            changed = [(name, own) for name, (own, other) in further.items() if own != other]
            self._next = ("consolidate",), [word for pair in changed for word in pair]
        self._give_up()
        if self._peers.rank == 0:
            logger.warning("%s: %s; it is saved sharded instead", where, reason)
        return save_instead(bound, f"export_{self._number}_{self._peers.nonce}")

    def _write(
        self,
        target: SharedTarget,
        bound: BoundState,
        sidecar: Mapping[str, object],
        *,
        by_ranges: bool,
    ) -> _Written:
        """Plans the whole folder, as every rank does, and writes this rank's bytes of it."""
        planned, parts = plan_export(bound, sidecar, self._request, self._agree)
        plan, rank = planned.plan, self._peers.rank
        for note in (*planned.names.notes, *plan.notes) if rank == 0 else ():
            logger.warning("%s: %s", self._request.named, note)
        if rank == 0:
            target.sweep()
            write_literals(target, plan)
        rows: Sequence[Row] = ()
        if by_ranges or rank == 0:
            shares = write_parts(target, plan, parts)
        else:  # a file of its own, from which rank 0 puts the bytes in place
            file = target.part_file(_part_of(rank))
            try:
                shares = write_parts(file, plan, parts)
                file.finish()
            finally:
                file.close()
            rows = file.rows
        target.finish(_mark_of(rank))
        return _Written(planned, sum(part.size_bytes for part in parts), shares, rows)

    def _commit(self, written: _Written) -> Mapping[str, Any]:
        target = self._target
        assert target is not None  # noqa: S101  begin() returned

        def commit_all(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            if not written.planned.is_adapter:
                compare_with_model(written.planned, self._request)
            patience = min(_VISIBLE_SECONDS, self._timeout_seconds / 2)
            return commit(
                target, written.planned, self._request, answers, patience_seconds=patience
            )

        def find() -> Mapping[str, Any] | None:
            places = dict.fromkeys((self._request.out, self._request.named))  # it may be moved
            found = filter(None, (find_committed(place, self._name) for place in places))
            return next(({"size_bytes": manifest.size_bytes} for manifest in found), None)

        plan = written.planned.plan
        answer = {
            "plan": digest_of_plan(plan),
            "shares": [written.shares.get(s.name, ChecksumShare()) for _, _, s in plan.specs()],
            "out": str(self._request.named),
            "rows": written.rows,
        }
        agree = partial(self._agree, answer)
        return agree_on_commit(agree, commit_all, find, f"the export to {self._request.named}")

    def _agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        # Rank 0 waits for all and then commits, so the others have to wait for both.
        patience = self._timeout_seconds * (2 if self._peers.rank else 1)
        return self._peers.agree(self._topic, value, decide, timeout_seconds=patience)

    def _share_failure(self, error: BaseException) -> CkptkitError | None:
        """Fails the export on all ranks with the error of this one.

        Returns the error of another rank that came before, and led to this one.
        """
        shared: CkptkitError = SaveError(f"{type(error).__name__}: {error}", hint=OURS)
        if isinstance(error, CkptkitError):
            shared = error
        elif not isinstance(error, Exception):
            shared = SaveError("was interrupted")
        if self._peers.world_size > 1:
            shared = shared.located(f"rank {self._peers.rank}")
        own = json.dumps(shared.to_json()).encode()
        try:
            first = self._peers.store.compare_set(f"exports/{self._number}/error", b"", own)
            self._peers.refuse(self._topic, shared, timeout_seconds=self._timeout_seconds)
        except CkptkitError as problem:
            logger.warning("the other ranks could not be informed of %s: %s", error, problem)
            return None
        is_first = first == own or not isinstance(error, Exception)
        return None if is_first else error_from_json(json.loads(first))

    def _fail(self, handle: ExportHandle, error: CkptkitError) -> None:
        if self._target is not None and self._peers.rank and isinstance(error, PeerError):
            self._target.leave()  # rank 0 may be about to commit it; if not, it removes it
            self._target = None
        self._give_up()
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("%s was not exported: %s%s", self._request.named, error, hint)
        handle.fail(error)

    def _give_up(self) -> None:
        if self._target is not None:
            self._target.abandon()
            self._target = None

    def _report(self, began: float, durable: float) -> ExportReport:
        if self._saved is None:
            assert self._written is not None  # noqa: S101  begin() returned
            committed = self._commit(self._written)
            return ExportReport(
                path=self._request.named,
                size_bytes=self._written.size_bytes,
                total_bytes=committed["size_bytes"],
                durable_seconds=durable - began,
                committed_seconds=time.perf_counter() - began,
            )
        report = self._saved.report()
        name, options = self._next
        command = [
            *("ckptkit", *name, str(report.path), str(self._request.named)),
            *options,
            *(["--overwrite"] if self._request.overwrite else []),
        ]
        return ExportReport(
            path=report.path,
            size_bytes=report.size_bytes,
            total_bytes=report.total_bytes,
            durable_seconds=report.blocked_seconds,
            committed_seconds=time.perf_counter() - began,
            command=shlex.join(command),
        )


class ExportOptions(TypedDict, total=False):
    """The options of an export; every rank gives the same.

    Attributes:
        dtype: Of floating tensors: "float32", "bfloat16" or "float16", or "keep" (default) for
            the one that they are trained in. Integers are never cast.
        cast_all: Whether tensors are cast too that the class of the model keeps in float32.
        max_shard_size: Size at which a new weight file is begun, in bytes or such as "5GB"; by
            default as `ckptkit consolidate` has it.
        overwrite: Whether an output that holds something is replaced.
        names: "auto" (default) writes the names of `save_pretrained`, and refuses what would not
            load as the model of the configuration; "live" writes those of training, and compares
            nothing.
    """

    dtype: DTypeChoice | DTypeLike
    cast_all: bool
    max_shard_size: int | str
    overwrite: bool
    names: OneOf["auto", "live"]


def make_request(
    out: str | PathLike[str], options: ExportOptions, source: Mapping[str, Any]
) -> ExportRequest:
    path = os.fspath(out)
    check_path(path, "out")
    refuse_unknown(options, ExportOptions.__annotations__, where="export")
    target, overwrite = Path(path).resolve(), options.get("overwrite", False)
    used = filter(None, (current_directory(), Path(source["path"]).resolve()))
    for place in used if overwrite else ():
        if target == place or target in place.parents:
            raise RefusedError(
                f"would replace {str(place)!r}, which is in use",
                where=path,
                hint="name a directory below it",
            )
    if overwrite and target.is_dir():
        refuse_unnamed_in(target, path)
    size = options.get("max_shard_size", DEFAULT_MAX_FILE_BYTES)
    request = ConsolidateRequest(
        dtype=options.get("dtype", "keep"),
        names=options.get("names", "auto"),
        cast_all=options.get("cast_all", False),
        max_file_bytes=parse_size(size, option="max_shard_size"),
    )
    return ExportRequest(Path(path).absolute(), request, overwrite, source)


class Exporter:
    """Runs the exports of a Checkpointer; calls come one at a time, the same on all ranks."""

    def __init__(self, peers: Peers, sidecar: Mapping[str, object], timeout_seconds: float) -> None:
        self._peers = peers
        self._sidecar = sidecar
        self._timeout_seconds = timeout_seconds
        self._count = 0
        self._under_way: list[tuple[threading.Thread, ExportHandle]] = []

    def export(
        self,
        find_bound: Callable[[], BoundState],
        request: ExportRequest,
        save_instead: SaveInstead,
    ) -> ExportHandle:
        """Writes this rank's part, and leaves the rest to the background.

        Where ranks hold different tensors, as stages of a pipeline do, it waits for all of them
        first. `save_instead` saves the state sharded, where the output's storage takes no ranges
        from several machines; it is called on all ranks or on none. Returns once this rank's bytes
        are durable.
        """
        began = time.perf_counter()
        self._under_way = [e for e in self._under_way if not e[1].done() or e[1].unheard_error]
        self._count += 1
        attempt = ExportAttempt(self._peers, self._count, request, self._timeout_seconds)
        attempt.begin(find_bound, self._sidecar, save_instead)
        handle = ExportHandle(request.named)
        durable = time.perf_counter()
        thread = threading.Thread(
            target=lambda: attempt.finish(handle, began, durable),
            name="ckptkit-export",
            daemon=True,
        )
        self._under_way.append((thread, handle))
        thread.start()
        return handle

    def close(self) -> None:
        for thread, _ in self._under_way:
            thread.join()
        errors = [error for _, handle in self._under_way if (error := handle.unheard_error)]
        self._under_way.clear()
        if errors:
            raise errors[0]


_PROOF = "live"
_WAITED = "it is committed once a process of transformers has compared the names with the model"
_FLOAT32 = BY_NAME["float32"]
_TARGETS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchCaster(Caster):
    """Rounds float32 by torch; NaN and overflow are handled as in all casts."""

    _at_once = 1 << 20  # a call of torch costs more than one of numpy

    def __init__(self, target: DType) -> None:
        super().__init__(_FLOAT32, target)
        self._rounded = _TARGETS[target.name]

    def _convert(self, values: NDArray[Any], wanted: NDArray[Any]) -> None:
        rounded = torch.from_numpy(wanted.view(np.int16)).view(self._rounded)
        rounded.copy_(torch.from_numpy(values))


def caster_of(source: DType, target: DType) -> Caster:
    """Returns what casts from one float type to another, for one thread."""
    if source == _FLOAT32 and target.name in _TARGETS:
        return TorchCaster(target)
    return Caster(source, target)


BLOCK_BYTES = 8 << 20
"""The size of the blocks that are cast, checksummed and written."""

_LONG_BYTES = 1 << 20  # runs from here on are written past the page cache, each on its own
WRITERS = 2
"""Threads of a rank that only write: one that casts as well would leave the device idle."""
_BUFFERS = WRITERS + 1


class Block(Struct, frozen=True):
    first: int  # the first one, in the row-major order of the box
    stop: int  # the first one after them
    at: Ints  # int64; where each run of them begins, in bytes from the tensor's first
    run_bytes: int  # how long each run is


def write_parts(
    target: SharedTarget | PartFile, plan: Plan, parts: Sequence[BoxWrite]
) -> dict[Fqn, ChecksumShare]:
    """Writes parts of tensors, and returns the checksum share of each tensor."""
    _check_room(target, plan, parts)
    sizes = {file.path: file.size_bytes for file in plan.files}
    for path in dict.fromkeys(part.path for part in parts):
        target.create(path, sizes[path])
    # The threads that copy use other streams than the current one of each device.
    for device in {part.local.device for part in parts if part.local.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    caster = _BlockCaster()
    under_way: deque[tuple[Future[None], memoryview]] = deque()

    # In the order of the files, so that the device writes sequentially. Writes through the page
    # cache wait until nothing else is written to the file, so they come last.
    def order(part: BoxWrite) -> tuple[bool, str, int]:
        return part.size_bytes < MIN_DIRECT_BYTES, part.path, part.start

    jobs = ((p, b) for p in sorted(parts, key=order) for b in blocks_of(p.box, p.spec, p.start))
    with ThreadPoolExecutor(WRITERS, "ckptkit-export") as writers:
        for part, block in jobs:
            if len(under_way) == _BUFFERS:
                written, buffer = under_way.popleft()
                written.result()
            else:
                buffer = aligned_buffer(BLOCK_BYTES + 2 * PAGE_BYTES)
            starts, data = caster.cast(part, block, buffer)
            written = writers.submit(target.write_runs, part.path, starts, data)
            under_way.append((written, buffer))
        for written, _ in under_way:
            written.result()
    return dict(caster.shares)


def _check_room(target: SharedTarget | PartFile, plan: Plan, parts: Sequence[BoxWrite]) -> None:
    """Refuses an output that does not fit, before this rank writes its part."""
    if isinstance(target, PartFile):
        size, room = sum(part.size_bytes for part in parts), target.free_bytes()
        what = "this rank's part"
    else:
        size = sum(file.size_bytes for file in plan.files)
        room = target.room_bytes(file.path for file in plan.files)
        what = "the output"
    if size > room:
        raise NoSpaceError(
            f"{what} needs {size:,} bytes and {room:,} are free",
            hint="export to another disk, or with a smaller dtype",
        )


def write_literals(target: SharedTarget, plan: Plan) -> None:
    """Creates all files of a plan and writes their literal segments; for one rank."""
    for file in plan.files:
        target.create(file.path, file.size_bytes)
        for segment in file.segments:
            if isinstance(segment.body, Literal):
                target.write(file.path, segment.start, memoryview(segment.body.data))


class _BlockCaster:
    def __init__(self) -> None:
        self.shares: defaultdict[Fqn, ChecksumShare] = defaultdict(ChecksumShare)
        self._casters: dict[tuple[DType, DType], Caster] = {}

    def cast(
        self, part: BoxWrite, block: Block, buffer: memoryview
    ) -> tuple[Sequence[int], memoryview]:
        """Returns where the runs of a block begin in its file, and their bytes in the buffer."""
        spec = part.spec
        size = (block.stop - block.first) * spec.dtype.itemsize
        # The position of a single run in its memory page is that in its page on disk.
        low = (part.start + int(block.at[0])) % PAGE_BYTES if len(block.at) == 1 else 0
        data = buffer[low : low + size]
        self._fill(part, block, np.frombuffer(data, np.uint8))
        length = block.run_bytes
        runs = (crc32(data[start : start + length]) for start in range(0, size, length))
        sums = np.fromiter(runs, np.uint32, len(block.at))
        share = compute_share(block.at, length, sums, spec.size_bytes)
        self.shares[spec.name] = self.shares[spec.name].joined(share)
        return (block.at + part.start).tolist(), data

    def _fill(self, part: BoxWrite, block: Block, data: NDArray[np.uint8]) -> None:
        source, wanted = _elements(part.local, block), part.spec.dtype
        if part.dtype == wanted:
            data[:] = source
            return
        if (part.dtype, wanted) not in self._casters:
            self._casters[part.dtype, wanted] = caster_of(part.dtype, wanted)
        overflow = self._casters[part.dtype, wanted].cast(source, data)
        if overflow is not None:
            run, rest = divmod(overflow.first * wanted.itemsize, block.run_bytes)
            position = int(block.at[run] + rest) // wanted.itemsize
            where, start = f"tensor {part.spec.name!r}", position - overflow.first
            raise overflow_error(overflow, wanted, where=where, block_start=start)


def _elements(local: torch.Tensor, block: Block) -> NDArray[Any]:
    """Returns the bytes of the elements of a block, gathered first where they are scattered."""
    if local.device.type == "cpu" and is_plain(local):
        return local.reshape(-1)[block.first : block.stop].view(torch.uint8).numpy()
    gathered = torch.empty(block.stop - block.first, dtype=local.dtype)
    at = 0
    for slab in slabs(Span(block.first, block.stop), tuple(local.shape)):
        part = local
        for axis, (offset, size) in enumerate(zip(slab.offsets, slab.sizes, strict=True)):
            part = part.narrow(axis, offset, size)
        gathered[at : at + part.numel()].view(part.shape).copy_(part)
        at += part.numel()
    return gathered.view(torch.uint8).numpy()


def blocks_of(box: Box, spec: TensorSpec, file_start: int) -> Iterator[Block]:
    """Yields the parts of a box that are each cast and written at once.

    Long runs are cut at pages of the file, so that all but their edges fill whole pages; short
    ones are taken many at a time.
    """
    itemsize = spec.dtype.itemsize
    length, starts = runs_of(box, spec.shape)
    size = length * itemsize
    if size < _LONG_BYTES:
        count = max(1, BLOCK_BYTES // max(size, 1))
        for first in range(0, len(starts), count):
            at = starts[first : first + count] * itemsize
            yield Block(first * length, (first + len(at)) * length, at, size)
        return
    for number, start in enumerate(starts.tolist()):
        low, stop = start * itemsize, (start + length) * itemsize
        for high in _cuts(low, stop, file_start):
            first = number * length + low // itemsize - start
            at = np.array([low], np.int64)
            yield Block(first, first + (high - low) // itemsize, at, high - low)
            low = high


def _cuts(low: int, stop: int, start: int) -> Iterator[int]:
    """Yields where the blocks of a run end: about alike in size, and at whole pages of the file.

    They are less than a page longer than `BLOCK_BYTES`.
    """
    count, page = -(-(stop - low) // BLOCK_BYTES), min(PAGE_BYTES, BLOCK_BYTES)
    for number in range(1, count):
        at = start + low + (stop - low) * number // count
        yield max(at - at % page - start, low)
    yield stop


def runs_of(box: Box, shape: Shape) -> tuple[int, Ints]:
    """Returns the runs of row-major elements that a box consists of.

    Their length, and int64 of where each begins, in elements and ascending.
    """
    axis = len(shape)
    while axis > 0 and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # which may be cut, while all after it are whole
    strides = row_major_strides(shape)
    starts = np.array([0], np.int64)
    for outer in range(len(shape)):
        count = box.sizes[outer] if outer < axis else 1
        steps = (np.arange(count, dtype=np.int64) + box.offsets[outer]) * strides[outer]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return math.prod(box.sizes[axis:]), starts


def compare_with_model(planned: ExportPlan, request: ExportRequest) -> None:
    """Compares names and shapes with the model of the configuration that is planned."""
    plan = planned.plan
    bodies = (file.segments[0].body for file in plan.files if file.path == CONFIG and file.segments)
    data = next((body.data for body in bodies if isinstance(body, Literal)), None)
    if data is None or request.options.names == "live":
        return
    config = parse_model_config(data, where=CONFIG)
    tensors = {str(spec.name): (spec.dtype, spec.shape) for _, _, spec in plan.specs()}
    subject = Subject(config, tensors, frozenset(), str(request.named), advice=EXPORT)
    is_loaded, doubt = is_as_described(subject.request), ""
    if not is_loaded:
        is_loaded, doubt = ask_live_class(
            planned.model_class,
            subject.request.config,
            {name: spec.shape for name, spec in planned.table.items()},
            {name: planned.names.sources(Fqn(name)) for name in tensors},
            is_converted=bool(planned.names.versions),
        )
    if is_loaded:
        return
    if not doubt:
        logger.info("%s: %s", request.named, _WAITED)
    for note in compare_now(subject, doubt):
        logger.warning("%s: %s", request.named, note)


def _part_of(rank: int) -> str:
    return f"part-{rank}"


def _mark_of(rank: int) -> str:
    return f"rank-{rank}"


def commit(
    target: SharedTarget,
    planned: ExportPlan,
    request: ExportRequest,
    answers: Sequence[Mapping[str, Any]],
    *,
    patience_seconds: float,
) -> dict[str, Any]:
    """Makes the parts of all ranks one directory, the manifest last."""
    where, plan = str(request.named), planned.plan
    digest = digest_of_plan(plan)
    other = [rank for rank, answer in enumerate(answers) if answer["plan"] != digest]
    if other:
        raise SaveError(
            f"{name_ranks(other)} planned other files than rank 0",
            where=where,
            hint="give all ranks the same model, sidecar and options",
        )
    outs = [answer["out"] for answer in answers]
    marks = [_mark_of(rank) for rank in range(len(outs))]  # which have to be seen here
    patience = patience_seconds if set(outs) == {where} else 0
    poll_until(lambda: None if target.absent(marks) else True, patience)
    absent = [marks.index(mark) for mark in target.absent(marks)]
    if absent:
        elsewhere = next((outs[rank] for rank in absent if outs[rank] != where), "")
        raise OutputError(
            f"rank 0 does not see what {name_ranks(absent)} wrote"
            + (f", to {elsewhere!r}" if elsewhere else ""),
            where=where,
            hint="name the same directory on all ranks, on storage that they share",
        )
    parts = {_part_of(rank): a["rows"] for rank, a in enumerate(answers) if a["rows"]}
    if parts:
        target.unite({file.path: file.size_bytes for file in plan.files}, parts)
    shares = [answer["shares"] for answer in answers]
    manifest = _manifest(planned, request, shares)
    target.commit(MANIFEST_NAME, manifest.to_json())
    return {"size_bytes": plan.bytes_written}


def _manifest(
    planned: ExportPlan, request: ExportRequest, shares: Sequence[Sequence[Any]]
) -> Manifest:
    plan, tensors = planned.plan, dict[str, TensorRecord]()
    for (file, segment, spec), *of_ranks in zip(plan.specs(), *shares, strict=True):
        whole = ChecksumShare()
        for share in of_ranks:
            whole = whole.joined(ChecksumShare(*share))
        if not is_whole(whole, segment.stop - segment.start):
            raise SaveError(
                "not every byte was written once",
                where=f"tensor {spec.name!r}",
                hint="the ranks hold other parts of it than their sharding says, or several stages"
                " of a pipeline have a tensor of that name",
            )
        digest = f"{CRC32_SCHEME}:{whole.crc32:08x}"
        record = TensorRecord(
            spec.dtype.name, spec.shape, file.path, digest, _PROOF, crc32=whole.crc32
        )
        tensors[str(spec.name)] = record
    files: dict[str, FileRecord] = {}
    for file in plan.files:  # those without tensors have a digest
        body = file.segments[0].body if len(file.segments) == 1 else None
        digest = digest_of(memoryview(body.data)) if isinstance(body, Literal) else ""
        files[file.path] = FileRecord(file.size_bytes, digest)
    return Manifest(
        kind="adapter" if planned.is_adapter else "model",
        source=request.source,
        options=changed_options(request.options),
        versions={"ckptkit": __version__, **planned.names.versions},
        tensors=tensors,
        tied={str(target): str(source) for target, source in plan.dropped.items()},
        files=files,
    )
