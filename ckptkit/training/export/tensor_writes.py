"""Writes this rank's part of an export: collects its tensors, casts, checksums and writes them.

Blocks go through a few reused buffers: the calling thread casts while others write. Nothing is read
back. Casts from float32 use torch's rounding, which is fastest; the bytes are those of `Caster`.
"""

from __future__ import annotations

import base64
import json
import operator
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.checksums import ChecksumShare, compute_share
from ckptkit.core.crc import crc32
from ckptkit.core.dtypes import BY_NAME, DType, dtype_named
from ckptkit.core.errors import NoSpaceError, UnsupportedError, UsageError
from ckptkit.core.geometry import slabs
from ckptkit.core.index import Box, Fqn, Span
from ckptkit.core.manifest import SIDE_FOLDER
from ckptkit.engine.casts import Caster, overflow_error
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.lora.dialects import AdapterNames
from ckptkit.plan.plan import Literal, Plan, TensorSpec
from ckptkit.storage.local.disk import PAGE_BYTES
from ckptkit.storage.local.shared_target import PartFile, SharedTarget
from ckptkit.storage.local.target import MIN_DIRECT_BYTES
from ckptkit.training.export.output_plan import (
    ADAPTER_CONFIG,
    BLOCK_BYTES,
    Block,
    OutputPlace,
    Table,
    blocks_of,
)
from ckptkit.training.save.staging import is_plain
from ckptkit.training.sidecar import collect_sidecar
from ckptkit.training.state.collect import BoundState
from ckptkit.training.state.dtensors import Copies, has_data
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Piece, select_owned
from ckptkit.training.step_names import TensorPlaces, adapter_names, innermost

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


WRITERS = 2
"""Threads of a rank that only write: one that casts as well would leave the device idle."""
_BUFFERS = WRITERS + 1


@dataclass(frozen=True, slots=True)
class BoxWrite:
    """A box of a tensor that this rank writes.

    Attributes:
        place: Where the tensor is in the output.
        dtype: Of the elements here, before they are cast.
        box: Which part of the tensor it is.
        local: The elements, in the shape of the box.
    """

    place: OutputPlace
    dtype: DType
    box: Box
    local: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes in the output."""
        return self.local.numel() * self.place.spec.dtype.itemsize


def write_parts(
    target: SharedTarget | PartFile, plan: Plan, parts: Sequence[BoxWrite]
) -> dict[Fqn, ChecksumShare]:
    """Writes parts of tensors, and returns the checksum share of each tensor."""
    _check_room(target, plan, parts)
    sizes = {file.path: file.size_bytes for file in plan.files}
    for path in dict.fromkeys(part.place.path for part in parts):
        target.create(path, sizes[path])
    _settle(part.local.device for part in parts)
    caster = _BlockCaster()
    under_way: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(WRITERS, "ckptkit-export") as writers:
        for part, block in _jobs(parts):
            full = len(under_way) == _BUFFERS
            buffer = under_way.popleft().result() if full else _buffer()
            starts, data = caster.cast(part, block, buffer)
            under_way.append(writers.submit(_write, target, part.place.path, starts, data, buffer))
        for written in under_way:
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


def _buffer() -> memoryview:
    return aligned_buffer(BLOCK_BYTES + 2 * PAGE_BYTES)


def _write(
    target: SharedTarget | PartFile,
    path: str,
    starts: Sequence[int],
    data: memoryview,
    buffer: memoryview,
) -> memoryview:
    target.write_runs(path, starts, data)
    return buffer


def _settle(devices: Iterable[torch.device]) -> None:
    """Waits for the current stream of each device: the threads that copy use other streams."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


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
    """Casts blocks into buffers, and computes their checksums."""

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
            where = f"tensor {part.place.spec.name!r}"
            first = _position(block, overflow.first, wanted.itemsize) - overflow.first
            raise overflow_error(overflow, wanted, where=where, block_start=first)


def _position(block: Block, element: int, itemsize: int) -> int:
    run, rest = divmod(element * itemsize, block.run_bytes)
    return int(block.at[run] + rest) // itemsize


def _elements(local: torch.Tensor, block: Block) -> NDArray[Any]:
    """Returns the bytes of the elements of a block, gathered first where they are scattered."""
    if not (local.device.type == "cpu" and is_plain(local)):
        gathered = torch.empty(block.stop - block.first, dtype=local.dtype)
        at = 0
        for slab in slabs(Span(block.first, block.stop), tuple(local.shape)):
            part = local
            for axis, (offset, size) in enumerate(zip(slab.offsets, slab.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            gathered[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        return _bytes_of(gathered)
    return _bytes_of(local.reshape(-1)[block.first : block.stop])


def _bytes_of(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.view(torch.uint8).numpy()


_ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class ExportView:
    """What this rank holds of the exported model.

    Attributes:
        table: The tensors that are on this rank, whole or in part.
        pieces: This rank's parts of them, by each of their names.
        owned: The identities of the pieces that this rank writes.
        is_everywhere: Whether all ranks hold the same tensors.
        is_adapter: Whether it is the adapter of a PEFT model, and not a model.
    """

    table: Table
    pieces: Mapping[Fqn, tuple[Piece, ...]]
    owned: frozenset[int]
    is_everywhere: bool
    is_adapter: bool

    def parts(self, name: Fqn) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields what this rank writes of a tensor: boxes, and their elements in that shape."""
        for piece in self.pieces.get(name, ()):
            if id(piece) in self.owned:
                yield from piece.boxes()

    def same(self, name: Fqn, other: Fqn) -> bool | None:
        """Whether two tensors are equal as far as this rank sees; None if they are one."""
        first, second = self.pieces.get(name, ()), self.pieces.get(other, ())
        if first and len(first) == len(second) and all(map(operator.is_, first, second)):
            return None
        if [piece.places for piece in first] != [piece.places for piece in second]:
            return False  # then both are written, which loads as well
        pairs = zip(first, second, strict=True)
        return all(_same_bytes(a.local, b.local) for a, b in pairs if a.places)


def parts_of_model(bound: BoundState) -> list[nn.Module]:
    """Returns the one model of a state; several modules where they are stages of a pipeline."""
    if len({model.saved_as for model in bound.models}) != 1:
        raise UsageError(
            f"{len(bound.models)} models were found where one was expected",
            where="state",
            hint='give the one to export: export(out, state={"model": model})',
        )
    return [model.module for model in bound.models]


def is_adapter(bound: BoundState) -> bool:
    """Whether the model is a PEFT model, of which only the adapter is exported."""
    return adapter_names(parts_of_model(bound)[0]) is not None


def adapter_options(bound: BoundState) -> tuple[str, ...]:
    """Returns the options of a command that name the adapter to be exported, among several."""
    model: Any = innermost(parts_of_model(bound)[0])
    names = adapter_names(model)
    if names is None or len(model.peft_config) == 1:
        return ()
    return "--adapter", names.adapter


def view_model(bound: BoundState) -> ExportView:
    """Returns what of the model is on this rank, without any communication."""
    modules, world = parts_of_model(bound), Copies(bound.world_size, bound.rank)
    walks = [ModelWalk(module, TensorPlaces("", ()), world=world) for module in modules]
    views = [walk.look(keep=True) for walk in walks]  # all that a save holds
    adapter = adapter_names(modules[0])
    named = list(_named([piece for view in views for piece in view.pieces], adapter))
    pieces: dict[Fqn, tuple[Piece, ...]] = {}
    for name, piece in named:
        pieces[name] = (*pieces.get(name, ()), piece)
    taken = list({id(piece): piece for _, piece in named}.values())
    mine = zip(taken, select_owned(taken), strict=True)
    return ExportView(
        table={name: _spec(name, parts[0]) for name, parts in pieces.items()},
        pieces=pieces,
        owned=frozenset(id(piece) for piece, is_mine in mine if is_mine),
        is_everywhere=all(view.values.count >= bound.world_size for view in views),
        is_adapter=adapter is not None,
    )


def side_files(bound: BoundState, sidecar: Mapping[str, object]) -> dict[str, bytes]:
    """Returns the files besides the weights, by name: all of them on rank 0.

    The other ranks need only those that the plan depends on: configurations, not tokenizers.
    """
    modules = parts_of_model(bound)
    if bound.rank:
        sidecar = {key: value for key, value in sidecar.items() if _may_configure(value)}
    files = collect_sidecar(modules, sidecar)
    contents = {file.path.removeprefix(f"{SIDE_FOLDER}/"): file.data for file in files}
    adapter = adapter_names(modules[0])
    own = contents.get(f"{_ADAPTERS}/{adapter.adapter}/{ADAPTER_CONFIG}") if adapter else None
    return contents if own is None else {**contents, ADAPTER_CONFIG: own}


def _may_configure(value: object) -> bool:
    return isinstance(value, (str, bytes, os.PathLike)) or hasattr(value, "to_json_string")


def pack_table(table: Table) -> str:
    rows = [[spec.name, spec.dtype.name, spec.shape] for spec in table.values()]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpack_table(text: str) -> dict[Fqn, TensorSpec]:
    """Returns the table that was packed."""
    rows: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return {
        Fqn(name): TensorSpec(Fqn(name), dtype_named(dtype), tuple(shape))
        for name, dtype, shape in rows
    }


def _named(pieces: Sequence[Piece], adapter: AdapterNames | None) -> Iterator[tuple[Fqn, Piece]]:
    """Yields each piece under the names that it has in the output."""
    for piece in pieces:
        for path in (piece.key_path, *piece.aliases):
            name = Fqn(".".join(map(str, path)))
            in_file = name if adapter is None else adapter.file_name(name)
            if in_file is not None and EXTRA_STATE not in name.split("."):
                yield Fqn(in_file), piece


def _spec(name: Fqn, piece: Piece) -> TensorSpec:
    local = piece.local
    if local.layout is not torch.strided or local.is_quantized or not has_data(local):
        raise UnsupportedError(
            "a tensor that is sparse, quantized or without data was found where a dense one was"
            " expected",
            where=name,
            hint="hold it in the model as a dense tensor",
        )
    return TensorSpec(name, dtype_named(str(local.dtype), where=name), piece.shape)


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(*(side.contiguous().view(-1).view(torch.uint8) for side in (tensor, other)))
