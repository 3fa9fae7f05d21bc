"""Writes an export: the part of each rank, and on rank 0 the commit of all parts.

Blocks go through a few reused buffers: the calling thread casts while others write. Nothing is read
back. Casts from float32 use torch's rounding, which is fastest; the bytes are those of `Caster`.

Rank 0 compares the plan with the model of the configuration, joins the checksums of all ranks, and
makes the folder visible, while the other ranks wait in the background. What is known of the family
answers, or the class of the live model, built without weights. Only where neither is certain, a
process of its own does: it says what does not fit, and may communicate and change torch's settings.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from ckptkit.consumers.table import CONFIG
from ckptkit.conversion.compare_names import Subject, compare_now
from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.checksums import ChecksumShare, compute_share, digest_of, is_whole
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import NoSpaceError, OutputError, SaveError
from ckptkit.core.geometry import row_major_strides, slabs
from ckptkit.core.index import Box, Fqn, Ints, Shape, Span
from ckptkit.core.manifest import CRC32_SCHEME, MANIFEST_NAME, FileRecord, Manifest, TensorRecord
from ckptkit.core.model_configs import parse_model_config
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.hub_names.model_shapes import is_as_described
from ckptkit.options import changed_options
from ckptkit.plan.load_report import EXPORT
from ckptkit.plan.plan import Literal, Plan
from ckptkit.storage.base import Row
from ckptkit.storage.local.disk import PAGE_BYTES
from ckptkit.storage.local.target import MIN_DIRECT_BYTES, PartFile, SharedTarget
from ckptkit.training.agree.peers import name_ranks, poll_until
from ckptkit.training.export.output_plan import (
    ExportRequest,
    LiveModel,
    OutputPlace,
    digest_of_plan,
)
from ckptkit.training.save.staging import is_plain
from ckptkit.training.step_names import ask_live_class
from ckptkit.version import __version__

logger = logging.getLogger(__name__)
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


class BoxWrite(Struct, frozen=True):
    place: OutputPlace  # where the tensor is in the output
    dtype: DType  # of the elements here, before they are cast
    box: Box  # which part of the tensor it is
    local: torch.Tensor  # the elements, in the shape of the box

    @property
    def size_bytes(self) -> int:
        return self.local.numel() * self.place.spec.dtype.itemsize


def write_parts(
    target: SharedTarget | PartFile, plan: Plan, parts: Sequence[BoxWrite]
) -> dict[Fqn, ChecksumShare]:
    """Writes parts of tensors, and returns the checksum share of each tensor."""
    _check_room(target, plan, parts)
    sizes = {file.path: file.size_bytes for file in plan.files}
    for path in dict.fromkeys(part.place.path for part in parts):
        target.create(path, sizes[path])
    # The threads that copy use other streams than the current one of each device.
    for device in {part.local.device for part in parts if part.local.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    caster = _BlockCaster()
    under_way: deque[tuple[Future[None], memoryview]] = deque()
    with ThreadPoolExecutor(WRITERS, "ckptkit-export") as writers:
        for part, block in _jobs(parts):
            if len(under_way) == _BUFFERS:
                written, buffer = under_way.popleft()
                written.result()
            else:
                buffer = aligned_buffer(BLOCK_BYTES + 2 * PAGE_BYTES)
            starts, data = caster.cast(part, block, buffer)
            written = writers.submit(target.write_runs, part.place.path, starts, data)
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


def _jobs(parts: Sequence[BoxWrite]) -> Iterator[tuple[BoxWrite, Block]]:
    # In the order of the files, so that the device writes sequentially. Writes through the page
    # cache wait until nothing else is written to the file, so they come last.
    def order(part: BoxWrite) -> tuple[bool, str, int]:
        return part.size_bytes < MIN_DIRECT_BYTES, part.place.path, part.place.start

    for part in sorted(parts, key=order):
        for block in blocks_of(part.box, part.place):
            yield part, block


class _BlockCaster:
    def __init__(self) -> None:
        self.shares: defaultdict[Fqn, ChecksumShare] = defaultdict(ChecksumShare)
        self._casters: dict[tuple[DType, DType], Caster] = {}

    def cast(
        self, part: BoxWrite, block: Block, buffer: memoryview
    ) -> tuple[Sequence[int], memoryview]:
        """Returns where the runs of a block begin in its file, and their bytes in the buffer."""
        place, itemsize = part.place, part.place.spec.dtype.itemsize
        size = (block.stop - block.first) * itemsize
        # The position of a single run in its memory page is that in its page on disk.
        low = (place.start + int(block.at[0])) % PAGE_BYTES if len(block.at) == 1 else 0
        data = buffer[low : low + size]
        self._fill(part, block, np.frombuffer(data, np.uint8))
        length, name = block.run_bytes, place.spec.name
        runs = (crc32(data[start : start + length]) for start in range(0, size, length))
        sums = np.fromiter(runs, np.uint32, len(block.at))
        share = compute_share(block.at, length, sums, place.spec.size_bytes)
        self.shares[name] = self.shares[name].joined(share)
        return (block.at + place.start).tolist(), data

    def _fill(self, part: BoxWrite, block: Block, data: NDArray[np.uint8]) -> None:
        source, wanted = _elements(part.local, block), part.place.spec.dtype
        if part.dtype == wanted:
            data[:] = source
            return
        caster = self._casters.get((part.dtype, wanted))
        if caster is None:
            caster = self._casters[part.dtype, wanted] = caster_of(part.dtype, wanted)
        overflow = caster.cast(source, data)
        if overflow is not None:
            run, rest = divmod(overflow.first * wanted.itemsize, block.run_bytes)
            position = int(block.at[run] + rest) // wanted.itemsize
            where, start = f"tensor {part.place.spec.name!r}", position - overflow.first
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


def blocks_of(box: Box, place: OutputPlace) -> Iterator[Block]:
    """Yields the parts of a box that are each cast and written at once.

    Long runs are cut at pages of the file, so that all but their edges fill whole pages; short
    ones are taken many at a time.
    """
    itemsize = place.spec.dtype.itemsize
    length, starts = runs_of(box, place.spec.shape)
    size = length * itemsize
    if size < _LONG_BYTES:
        count = max(1, BLOCK_BYTES // max(size, 1))
        for first in range(0, len(starts), count):
            at = starts[first : first + count] * itemsize
            yield Block(first * length, (first + len(at)) * length, at, size)
        return
    for number, start in enumerate(starts.tolist()):
        low, stop = start * itemsize, (start + length) * itemsize
        for high in _cuts(low, stop, place.start):
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


def compare_with_model(plan: Plan, request: ExportRequest, live: LiveModel) -> None:
    """Compares names and shapes with the model of the configuration that is written."""
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
            live.model_class,
            subject.request.config,
            {name: spec.shape for name, spec in live.table.items()},
            {name: live.names.sources(Fqn(name)) for name in tensors},
            is_converted=bool(live.names.versions),
        )
    if is_loaded:
        return
    if not doubt:
        logger.info("%s: %s", request.named, _WAITED)
    for note in compare_now(subject, doubt):
        logger.warning("%s: %s", request.named, note)


def answer_of(
    plan: Plan,
    shares: Mapping[Fqn, ChecksumShare],
    size_bytes: int,
    *,
    out: str,
    rows: Sequence[Row],
) -> dict[str, Any]:
    return {
        "plan": digest_of_plan(plan),
        "shares": [shares.get(spec.name, ChecksumShare()) for _, _, spec in plan.specs()],
        "size_bytes": size_bytes,
        "out": out,
        "rows": rows,
    }


def part_of(rank: int) -> str:
    return f"part-{rank}"


def mark_of(rank: int) -> str:
    return f"rank-{rank}"


def commit(
    target: SharedTarget,
    plan: Plan,
    request: ExportRequest,
    answers: Sequence[Mapping[str, Any]],
    *,
    is_adapter: bool,
    patience_seconds: float,
) -> dict[str, Any]:
    """Makes the parts of all ranks one directory, the manifest last."""
    where = str(request.named)
    digest = digest_of_plan(plan)
    other = [rank for rank, answer in enumerate(answers) if answer["plan"] != digest]
    if other:
        raise SaveError(
            f"{name_ranks(other)} planned other files than rank 0",
            where=where,
            hint="give all ranks the same model, sidecar and options",
        )
    outs = [answer["out"] for answer in answers]
    marks = [mark_of(rank) for rank in range(len(outs))]  # which have to be seen here
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
    parts = {part_of(rank): a["rows"] for rank, a in enumerate(answers) if a["rows"]}
    if parts:
        target.unite({file.path: file.size_bytes for file in plan.files}, parts)
    manifest = _manifest(plan, request, [a["shares"] for a in answers], is_adapter=is_adapter)
    target.commit(MANIFEST_NAME, manifest.to_json())
    return {"size_bytes": plan.bytes_written}


def _manifest(
    plan: Plan, request: ExportRequest, shares: Sequence[Sequence[Any]], *, is_adapter: bool
) -> Manifest:
    tensors: dict[str, TensorRecord] = {}
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
        kind="adapter" if is_adapter else "model",
        source=request.source,
        options=changed_options(request.options),
        versions={"ckptkit": __version__, **request.versions},
        tensors=tensors,
        tied={str(target): str(source) for target, source in plan.dropped.items()},
        files=files,
    )
