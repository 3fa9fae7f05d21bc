"""How large an optimizer's state will be before its first step, so that memory is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from ckptkit.training.state.collect import BoundState
from ckptkit.training.state.pieces import Piece, select_owned

_PROBE_SHAPE = (2, 2)
_BLOB_BYTES = 2_048  # headers and padding around one stored tensor, rounded up


def state_types(optimizer: Optimizer) -> tuple[torch.dtype, ...]:
    """Returns which tensors of a parameter's shape an optimizer will keep for it.

    A twin of torch's own optimizers takes one step on a parameter of four elements, without the
    hooks that the user may have put into all optimizers; the optimizer itself is not touched.
    Optimizers of other origin, which may do anything in a step, are taken for Adam.

    Returns:
        The types of the tensors: two for Adam, none for plain SGD.
    """
    kind = type(optimizer)
    dtype = next((p.dtype for group in optimizer.param_groups for p in group["params"]), None)
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype))
    adam = (probe.dtype, probe.dtype)
    if not kind.__module__.startswith("torch.optim."):
        return adam
    probe.grad = torch.zeros_like(probe)
    try:
        with torch.random.fork_rng(devices=()):
            twin = kind([probe], **optimizer.defaults)
            step = type(twin).step
            getattr(step, "__wrapped__", step)(twin)  # what is around it calls the hooks
    except Exception:  # noqa: BLE001  such as that it wants a closure
        return adam
    return tuple(
        value.dtype
        for value in twin.state[probe].values()
        if isinstance(value, torch.Tensor) and value.shape == probe.shape
    )


def expected_state_bytes(bound: BoundState, pieces: Sequence[Piece], owners: Sequence[bool]) -> int:
    """Estimates what optimizers that have never stepped will add to this rank's part of a save.

    Args:
        bound: The state.
        pieces: All of it that is on this rank.
        owners: For each piece whether this rank writes it.

    Returns:
        Bytes, with the headers around every tensor; 0 where no optimizer is without state.
    """
    further: list[Piece] = []
    counts = 0  # of steps, one number per parameter
    for optimizer in bound.optimizers:
        if _is_without_state(optimizer.optimizer):
            keys = bound.trained_by(optimizer)
            trained = [piece for piece in pieces if (piece.unit, piece.key_path) in keys]
            like = [torch.empty(0, dtype=kind) for kind in state_types(optimizer.optimizer)]
            further += [replace(piece, local=local) for piece in trained for local in like]
            counts += len(trained) if like else 0
    # State is dealt out together with the weights, which may thereby go to other ranks.
    later = [*pieces, *further]
    return (
        max(0, _bytes(later, select_owned(later)) - _bytes(pieces, owners)) + counts * _BLOB_BYTES
    )


def _is_without_state(optimizer: Optimizer) -> bool:
    try:
        return not optimizer.state
    except Exception:  # noqa: BLE001  the save reports a state that cannot be read
        return False


def _bytes(pieces: Sequence[Piece], owners: Sequence[bool]) -> int:
    return sum(
        piece.size_bytes + _BLOB_BYTES for piece, own in zip(pieces, owners, strict=True) if own
    )
