"""The whole state of a sharded model in the memory of the first rank, without a collective.

That is what `accelerator.get_state_dict` gives: a plain dictionary on rank 0, an empty one on all
others. Stock gathers for it on every device. Here rank 0 takes host memory for the whole, as it
does there, and every rank copies its own shards to where they belong in it; what is left is the
same dictionary of ordinary tensors, of which anything may be made at any time. The ranks have to
see that memory, so they have to be on one machine.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.core.errors import CkptkitError, NoSpaceError, SaveError
from ckptkit.core.index import Box, Shape
from ckptkit.training.agree.peers import Peers
from ckptkit.training.export.tensor_writes import boxes_of
from ckptkit.training.save.shared_memory import SharedBuffer
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Piece, select_owned
from ckptkit.training.step_names import TensorPlaces, clean_fqn, parallel_prefixes

_TOPIC = "the whole state of a model"
_ALIGNMENT = 64
_TOKEN_BYTES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # names this start of this machine
_COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of the model.

    Attributes:
        names: All of its names.
        shape: Of the whole.
        dtype: Its element type.
        start: Where it lies in the shared memory.
        boxes: What this rank has to put there: boxes, and their elements in that shape.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    start: int
    boxes: tuple[tuple[Box, torch.Tensor], ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def within(self, memory: memoryview) -> torch.Tensor:
        """Returns the whole tensor, on the shared memory and with a storage of its own."""
        if not self.elements:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(
            memory, dtype=self.dtype, count=self.elements, offset=self.start
        ).view(self.shape)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank has to do for the whole.

    Attributes:
        parts: The tensors, in an order that is the same on all ranks.
        size_bytes: How much memory all of them take.
        reason: Why only stock can gather this; empty where that is not so.
        modules: The modules of the model, in the order in which a state dict goes through them.
    """

    parts: tuple[_Part, ...] = ()
    size_bytes: int = 0
    reason: str = ""
    modules: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        rows = [[part.names, part.shape, str(part.dtype), part.start] for part in self.parts]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def order(self, name: str) -> int:
        """Tells where a tensor comes in a state dict: what is split into files follows it."""
        return self.modules.get(name.rpartition(".")[0], len(self.modules))


def whole_state(
    model: torch.nn.Module, peers: Peers, *, timeout_seconds: float
) -> dict[str, torch.Tensor] | str:
    """Returns the whole state of a sharded model on rank 0; to be called on all ranks.

    Args:
        model: What was prepared.
        peers: The ranks.
        timeout_seconds: How long to wait for the others.

    Returns:
        The tensors by name, as `state_dict` of the model before it was sharded; empty on the
        other ranks. Or, on all ranks alike, why only stock can gather it.
    """
    held = _held(model, peers)
    with _Memory(peers, held, timeout_seconds) as memory:
        reason = memory.shared()
        if reason:
            return reason
        tensors = memory.filled()
        return memory.kept(tensors) if peers.rank == 0 else {}


class _Memory:
    """The memory of one dictionary, while the ranks write to it."""

    def __init__(self, peers: Peers, held: _Held, timeout_seconds: float) -> None:
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

    def shared(self) -> str:
        """Has all ranks see the memory; tells why that cannot be, the same on all of them."""
        own = {
            "reason": self._held.reason,
            "machine": _machine(),
            "digest": self._held.digest,
        }
        answer = self._agree(own, self._taken)
        if "reason" in answer:
            return str(answer["reason"])
        misfit = self._seen(answer)
        found: str = self._agree(misfit, lambda reasons: next(filter(None, reasons), ""))
        return found

    def filled(self) -> dict[str, torch.Tensor]:
        """Copies this rank's part, and waits until all have; returns the tensors."""
        try:
            tensors = {part.names[0]: part.within(self._view) for part in self._held.parts}
            for part in self._held.parts:
                whole = tensors[part.names[0]]
                for box, local in part.boxes:
                    whole[_slices(box)].copy_(local)
        except BaseException as error:
            told = error if isinstance(error, CkptkitError) else SaveError(f"{error!r}")
            with suppress(CkptkitError):
                self._peers.refuse(_TOPIC, told, timeout_seconds=self._timeout_seconds)
            raise
        self._agree("", lambda _: "")
        return tensors

    def kept(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors under all names; the memory goes with the last of them."""
        self._buffer.leave()
        self._is_kept = True
        found = dict(tensors)
        for part in self._held.parts:
            # Stock gathers tied weights once for each name; saving takes them for one or for two.
            found |= {name: tensors[part.names[0]].clone() for name in part.names[1:]}
        return {name: found[name] for name in sorted(found, key=self._held.order)}

    def _agree(self, value: Any, decide: Any) -> Any:
        patience = self._timeout_seconds
        return self._peers.agree(_TOPIC, value, decide, timeout_seconds=patience)

    def _taken(self, answers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Takes memory, on rank 0, if all ranks can use it."""
        reason = next(filter(None, (answer["reason"] for answer in answers)), "")
        machines = {answer["machine"] for answer in answers}
        if len(machines) > 1 or "" in machines:
            reason = reason or "the ranks are on several machines, or hide from each other"
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

    def _seen(self, answer: Mapping[str, Any]) -> str:
        """Maps the memory of rank 0; tells why that cannot be done."""
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
            return f"rank {self._peers.rank} cannot see the memory of rank 0: {error}"
        start = self._held.size_bytes
        if view[start : start + _TOKEN_BYTES] != bytes.fromhex(answer["token"]):
            return f"rank {self._peers.rank} sees another process in the place of rank 0"
        self._view = view
        return ""


def _held(model: torch.nn.Module, peers: Peers) -> _Held:
    reason = _obstacle(model)
    if reason:
        return _Held(reason=reason)
    world = Copies(peers.world_size, peers.rank)
    try:
        view = ModelWalk(model, TensorPlaces("", ()), world=world).look()
    except Exception as error:  # noqa: BLE001  the others wait to hear of it
        return _Held(reason=f"{type(error).__name__}: {error}")
    if view.objects:
        return _Held(reason="modules keep state beside their tensors")
    if view.values.count < peers.world_size:
        return _Held(reason="the ranks hold different tensors")
    return replace(_laid_out(view.pieces), modules=_modules_in_order(model))


def _obstacle(model: torch.nn.Module) -> str:
    """Returns why stock's dictionary may be another than the tensors that a model holds."""
    if any(_COMPILED in name for name, _ in model.named_modules()):
        return "the model was compiled"
    units = [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]
    casts = any(unit.mixed_precision.buffer_dtype is not None for unit in units)
    floats = any(buffer.is_floating_point() for buffer in model.buffers())
    return "FSDP1 casts buffers" if casts and floats else ""


def _laid_out(pieces: Sequence[Piece]) -> _Held:
    parts, at = [], 0
    for piece, is_mine in zip(pieces, select_owned(pieces), strict=True):
        local = piece.local
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            return _Held(reason=f"{piece.key} is sparse, quantized or without data")
        names = tuple(".".join(map(str, path)) for path in (piece.key_path, *piece.aliases))
        boxes = tuple(boxes_of(piece)) if is_mine else ()
        parts.append(_Part(names, piece.shape, local.dtype, at, boxes))
        size = math.prod(piece.shape) * local.element_size()
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _Held(tuple(parts), at)


def _modules_in_order(model: torch.nn.Module) -> dict[str, int]:
    prefixes = parallel_prefixes(model)
    names = (clean_fqn(raw, prefixes) for raw, _ in model.named_modules(remove_duplicate=False))
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def _machine() -> str:
    """Names this machine; empty where it is not Linux, and no rank sees another's memory."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
