"""Gathers the whole state of a sharded model on the first rank without a collective.

The result is that of `accelerator.get_state_dict`: a dictionary of ordinary tensors on rank 0, an
empty one on all others. Stock accelerate gathers it on every device. Here rank 0 allocates shared
host memory for the whole, and every rank copies its own shards into it, so all ranks have to be on
one machine.

    look at the model -> allocate -> map -> copy -> wait for all ranks
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.core.errors import CkptkitError, NoSpaceError, SaveError
from ckptkit.core.geometry import slices_of
from ckptkit.core.index import Box, Shape
from ckptkit.core.wrapper_names import COMPILED
from ckptkit.training.agree.peers import Peers, identify_machine
from ckptkit.training.save.staging import SharedBuffer
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import select_owned
from ckptkit.training.step_names import TensorPlaces, clean_fqn, parallel_prefixes

_TOPIC = "the whole state of a model"
_ALIGNMENT = 64
_TOKEN_BYTES = 16


class _SharedTensor(Struct, frozen=True):
    """One tensor of the model in the shared memory."""

    names: tuple[str, ...]  # all of its names
    shape: Shape  # of the whole tensor
    dtype: torch.dtype  # its element type
    start: int  # its offset in the shared memory
    # What this rank copies: boxes, each with its elements
    boxes: tuple[tuple[Box, torch.Tensor], ...]

    @property
    def stop(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.start + -(-size // _ALIGNMENT) * _ALIGNMENT

    def within(self, memory: memoryview) -> torch.Tensor:
        """Returns the whole tensor in the shared memory, with a storage of its own."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


def whole_state(
    model: torch.nn.Module, peers: Peers, *, timeout_seconds: float
) -> dict[str, torch.Tensor] | str:
    """Returns the whole state of a sharded model on rank 0; all ranks have to call it.

    The names are those of the unsharded model; other ranks get none. A text says on all ranks why
    stock accelerate has to gather the state.
    """

    def agree(value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return peers.agree(_TOPIC, value, decide, timeout_seconds=timeout_seconds)

    found = _look(model, peers)
    parts, reason = ([], found) if isinstance(found, str) else (found, "")
    size = parts[-1].stop if parts else 0
    rows = [[part.names, part.shape, str(part.dtype), part.start] for part in parts]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    own = {"reason": reason, "machine": identify_machine(), "digest": digest}
    buffer, is_kept = SharedBuffer(), False
    view: memoryview | str | None = None
    tensors: dict[str, torch.Tensor] = {}
    try:
        answer = agree(own, lambda answers: _allocate(answers, buffer, size))
        if "reason" in answer:
            return str(answer["reason"])
        view = buffer.memory if peers.rank == 0 else _map(answer, size)
        own_reason = "" if isinstance(view, memoryview) else f"rank {peers.rank} {view}"
        reason = str(agree(own_reason, lambda reasons: next(filter(None, reasons), "")))
        if reason or not isinstance(view, memoryview):
            return reason
        try:
            tensors = {part.names[0]: part.within(view) for part in parts}
            for part in parts:
                for box, local in part.boxes:
                    tensors[part.names[0]][slices_of(box)].copy_(local)
        except BaseException as error:
            failure = error if isinstance(error, CkptkitError) else SaveError(f"{error!r}")
            with suppress(CkptkitError):
                peers.refuse(_TOPIC, failure, timeout_seconds=timeout_seconds)
            raise
        agree("", lambda _: "")
        if peers.rank:
            return {}
        buffer.close_descriptor()
        is_kept = True  # the memory is freed with the last of the tensors
    finally:
        view = None
        if not is_kept:
            tensors.clear()  # an error that is kept keeps what this function has
            buffer.close()
    # Stock accelerate gathers tied weights once for each name.
    state = tensors | {n: tensors[p.names[0]].clone() for p in parts for n in p.names[1:]}
    # In the order of the modules, which decides the split into files.
    prefixes = parallel_prefixes(model)
    paths = (clean_fqn(raw, prefixes) for raw, _ in model.named_modules(remove_duplicate=False))
    order = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    names = sorted(state, key=lambda name: order.get(name.rpartition(".")[0], len(order)))
    return {name: state[name] for name in names}


def _look(model: torch.nn.Module, peers: Peers) -> list[_SharedTensor] | str:
    """Returns where each tensor will be, the same on all ranks, or why stock has to gather them."""
    if any(COMPILED in name for name, _ in model.named_modules()):
        return "the model was compiled"
    units = [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]
    casts = any(unit.mixed_precision.buffer_dtype is not None for unit in units)
    if casts and any(buffer.is_floating_point() for buffer in model.buffers()):
        return "FSDP1 casts buffers"
    world = Copies(peers.world_size, peers.rank)
    try:
        view = ModelWalk(model, TensorPlaces("", ()), world=world).look()
    except Exception as error:  # noqa: BLE001  the others wait to hear of it
        return f"{type(error).__name__}: {error}"
    if view.objects:
        return "modules keep state besides their tensors"
    if view.values.count < peers.world_size:
        return "the ranks hold different tensors"
    parts: list[_SharedTensor] = []
    for piece, is_mine in zip(view.pieces, select_owned(view.pieces), strict=True):
        local = piece.local
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            return f"{piece.key} is sparse, quantized or without data"
        names = tuple(".".join(map(str, path)) for path in (piece.key_path, *piece.aliases))
        boxes = tuple(piece.boxes()) if is_mine else ()
        start = parts[-1].stop if parts else 0
        parts.append(_SharedTensor(names, piece.shape, local.dtype, start, boxes))
    return parts


def _allocate(
    answers: Sequence[Mapping[str, str]], buffer: SharedBuffer, size: int
) -> dict[str, Any]:
    """Allocates the memory, on rank 0, if all ranks can use it."""
    reason = next(filter(None, (answer["reason"] for answer in answers)), "")
    machines = {answer["machine"] for answer in answers}
    if len(machines) > 1:
        reason = reason or "the ranks are on several machines, or in separate containers"
    if len({answer["digest"] for answer in answers}) > 1:
        reason = reason or "the ranks hold different tensors"
    if reason:
        return {"reason": reason}
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        buffer.reserve(size + _TOKEN_BYTES)
    except NoSpaceError as error:
        return {"reason": error.message}
    buffer.memory[size : size + _TOKEN_BYTES] = token
    return {
        "process": os.getpid(),
        "descriptor": buffer.descriptor,
        "size": buffer.size_bytes,
        "token": token.hex(),
    }


def _map(answer: Mapping[str, Any], start: int) -> memoryview | str:
    """Maps the memory of rank 0; returns why that is not possible if so."""
    try:
        path = f"/proc/{answer['process']}/fd/{answer['descriptor']}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            view = memoryview(mmap.mmap(descriptor, answer["size"]))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return f"cannot map the memory of rank 0: {error}"
    if view[start : start + _TOKEN_BYTES] != bytes.fromhex(answer["token"]):
        return "sees another process with the number of rank 0"
    return view
