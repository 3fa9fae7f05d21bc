"""How large an optimizer's state will be before its first step, so that memory is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptkit.training.pieces import Piece

_PROBE_SHAPE = (2, 2)
_BLOB_BYTES = 2_048  # headers and padding around one stored tensor, rounded up


def state_bytes_per_parameter_byte(optimizer: torch.optim.Optimizer) -> float:
    """Tells how many bytes of state an optimizer will keep for each byte of a parameter.

    A twin of the optimizer takes one step on a parameter of four elements; the optimizer itself
    is not touched. Optimizers that cannot be made that way are taken for Adam.

    Returns:
        2.0 for Adam in the parameters' own type, 0.0 for plain SGD, and so on.
    """
    adam = 2.0
    kind = type(optimizer)
    dtype = next((p.dtype for group in optimizer.param_groups for p in group["params"]), None)
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        twin = kind([probe], **optimizer.defaults)
        twin.step()
    except Exception:  # noqa: BLE001  the user's class, which may want anything
        return adam
    held = [
        value.nbytes
        for value in twin.state[probe].values()
        if isinstance(value, torch.Tensor) and value.shape == probe.shape
    ]
    return sum(held) / probe.nbytes


def expected_state_bytes(
    optimizers: Sequence[torch.optim.Optimizer], weights: Sequence[Piece]
) -> int:
    """Estimates the bytes that optimizers without state will add to this rank's part of a save.

    Args:
        optimizers: Those that have never stepped.
        weights: The pieces of the models that this rank writes.

    Returns:
        Bytes, with the headers around every tensor.
    """
    trained = sum(p.size_bytes for p in weights if p.local.is_floating_point())
    ratios = [state_bytes_per_parameter_byte(optimizer) for optimizer in optimizers]
    kinds = 3  # Adam's two moments, and its count of steps
    return sum(int(trained * ratio) + kinds * len(weights) * _BLOB_BYTES for ratio in ratios)
