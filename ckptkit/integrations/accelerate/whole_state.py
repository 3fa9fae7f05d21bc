"""Gathers the whole state of a sharded model on the first rank without a collective.

The result is that of `accelerator.get_state_dict`: a dictionary of ordinary tensors on rank 0, an
empty one on all others. Stock accelerate gathers it on every device. Here rank 0 allocates shared
host memory for the whole, and every rank copies its own shards into it, so all ranks have to be on
one machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.core.errors import CkptkitError, NoSpaceError, SaveError
from ckptkit.core.geometry import slices_of
from ckptkit.core.index import Box, Shape
from ckptkit.core.wrapper_names import COMPILED
from ckptkit.training.agree.peers import Peers
from ckptkit.training.save.staging import SharedBuffer
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Piece, select_owned
from ckptkit.training.step_names import TensorPlaces, clean_fqn, parallel_prefixes

_TOPIC = "the whole state of a model"
_ALIGNMENT = 64
_TOKEN_BYTES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies the machine and its last boot


class _SharedTensor(Struct, frozen=True):
    """One tensor of the model in the shared memory."""

    names: tuple[str, ...]  # all of its names
    shape: Shape  # of the whole tensor
    dtype: torch.dtype  # its element type
    start: int  # its offset in the shared memory
    # What this rank copies: boxes, each with its elements
    boxes: tuple[tuple[Box, torch.Tensor], ...]

    def within(self, memory: memoryview) -> torch.Tensor:
        """Returns the whole tensor in the shared memory, with a storage of its own."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


class _GatherPlan(Struct, frozen=True):
    """The part of a rank in the gathering."""

    parts: tuple[_SharedTensor, ...] = ()  # the tensors, in the same order on all ranks
    size_bytes: int = 0  # the memory for all of them
    reason: str = ""  # why stock accelerate has to gather the state; empty if it does not
    # The modules of the model, in the order in which a state dict goes through them
    modules: Mapping[str, int] = field(default_factory=dict)

    def order(self, name: str) -> int:
        """Returns the position of a tensor's module, which decides the split into files."""
        return self.modules.get(name.rpartition(".")[0], len(self.modules))


def whole_state(
    model: torch.nn.Module, peers: Peers, *, timeout_seconds: float
) -> dict[str, torch.Tensor] | str:
    """Returns the whole state of a sharded model on rank 0; all ranks have to call it.

    The names are those of the unsharded model; other ranks get none. A text says on all ranks why
    stock accelerate has to gather the state.
    """
    plan = _plan(model, peers)
    with _Memory(peers, plan, timeout_seconds) as memory:
        reason = memory.share()
        if reason:
            return reason
        tensors = memory.fill()
        return memory.keep(tensors) if peers.rank == 0 else {}


class _Memory:
    """The shared memory of one dictionary while the ranks write to it."""

    def __init__(self, peers: Peers, held: _GatherPlan, timeout_seconds: float) -> None:
        self._peers = peers
        self._held = held
        self._timeout_seconds = timeout_seconds
        self._buffer = SharedBuffer()
        self._view = memoryview(b"")
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._view = memoryview(b"")
        if not self._is_kept:
            self._buffer.close()

    def share(self) -> str:
        """Gives all ranks the memory; returns the same reason on all ranks where that fails."""
        rows = [[part.names, part.shape, str(part.dtype), part.start] for part in self._held.parts]
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        own = {"reason": self._held.reason, "machine": _machine(), "digest": digest}
        answer = self._agree(own, self._allocate)
        if "reason" in answer:
            return str(answer["reason"])
        reason: str = self._agree(self._map(answer), lambda r: next(filter(None, r), ""))
        return reason

    def fill(self) -> dict[str, torch.Tensor]:
        """Copies this rank's part, waits for all ranks, and returns the tensors."""
        try:
            tensors = {part.names[0]: part.within(self._view) for part in self._held.parts}
            for part in self._held.parts:
                whole = tensors[part.names[0]]
                for box, local in part.boxes:
                    whole[slices_of(box)].copy_(local)
        except BaseException as error:
            failure = error if isinstance(error, CkptkitError) else SaveError(f"{error!r}")
            with suppress(CkptkitError):
                self._peers.refuse(_TOPIC, failure, timeout_seconds=self._timeout_seconds)
            raise
        self._agree("", lambda _: "")
        return tensors

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors by all names; the memory is freed with the last of them."""
        self._buffer.close_descriptor()
        self._is_kept = True
        state = dict(tensors)
        for part in self._held.parts:
            # Stock accelerate gathers tied weights once for each name.
            state |= {name: tensors[part.names[0]].clone() for name in part.names[1:]}
        return {name: state[name] for name in sorted(state, key=self._held.order)}

    def _agree(self, value: Any, decide: Any) -> Any:
        return self._peers.agree(_TOPIC, value, decide, timeout_seconds=self._timeout_seconds)

    def _allocate(self, answers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Allocates the memory, on rank 0, if all ranks can use it."""
        reason = next(filter(None, (answer["reason"] for answer in answers)), "")
        machines = {answer["machine"] for answer in answers}
        if len(machines) > 1 or "" in machines:
            reason = reason or "the ranks are on several machines, or in separate containers"
        if len({answer["digest"] for answer in answers}) > 1:
            reason = reason or "the ranks hold different tensors"
        if reason:
            return {"reason": reason}
        size = self._held.size_bytes
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            self._buffer.reserve(size + _TOKEN_BYTES)
        except NoSpaceError as error:
            return {"reason": error.message}
        self._view = self._buffer.memory
        self._view[size : size + _TOKEN_BYTES] = token
        return {
            "process": os.getpid(),
            "descriptor": self._buffer.descriptor,
            "size": self._buffer.size_bytes,
            "token": token.hex(),
        }

    def _map(self, answer: Mapping[str, Any]) -> str:
        """Maps the memory of rank 0; returns why that is not possible, else an empty text."""
        if self._peers.rank == 0:
            return ""
        path = f"/proc/{answer['process']}/fd/{answer['descriptor']}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                view = memoryview(mmap.mmap(descriptor, answer["size"]))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            return f"rank {self._peers.rank} cannot map the memory of rank 0: {error}"
        start = self._held.size_bytes
        if view[start : start + _TOKEN_BYTES] != bytes.fromhex(answer["token"]):
            return f"rank {self._peers.rank} sees another process with the number of rank 0"
        self._view = view
        return ""


def _plan(model: torch.nn.Module, peers: Peers) -> _GatherPlan:
    if any(COMPILED in name for name, _ in model.named_modules()):
        return _GatherPlan(reason="the model was compiled")
    units = [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]
    casts = any(unit.mixed_precision.buffer_dtype is not None for unit in units)
    if casts and any(buffer.is_floating_point() for buffer in model.buffers()):
        return _GatherPlan(reason="FSDP1 casts buffers")
    world = Copies(peers.world_size, peers.rank)
    try:
        view = ModelWalk(model, TensorPlaces("", ()), world=world).look()
    except Exception as error:  # noqa: BLE001  the others wait to hear of it
        return _GatherPlan(reason=f"{type(error).__name__}: {error}")
    if view.objects:
        return _GatherPlan(reason="modules keep state besides their tensors")
    if view.values.count < peers.world_size:
        return _GatherPlan(reason="the ranks hold different tensors")
    prefixes = parallel_prefixes(model)
    names = (clean_fqn(raw, prefixes) for raw, _ in model.named_modules(remove_duplicate=False))
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return replace(_lay_out(view.pieces), modules=order)


def _lay_out(pieces: Sequence[Piece]) -> _GatherPlan:
    parts, at = [], 0
    for piece, is_mine in zip(pieces, select_owned(pieces), strict=True):
        local = piece.local
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            return _GatherPlan(reason=f"{piece.key} is sparse, quantized or without data")
        names = tuple(".".join(map(str, path)) for path in (piece.key_path, *piece.aliases))
        boxes = tuple(piece.boxes()) if is_mine else ()
        parts.append(_SharedTensor(names, piece.shape, local.dtype, at, boxes))
        size = math.prod(piece.shape) * local.element_size()
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _GatherPlan(tuple(parts), at)


def _machine() -> str:
    """Identifies this machine; empty outside Linux, where ranks cannot share memory."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
