"""Whether the optimizer that a checkpoint was saved with is the one that resumes from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.optim import Optimizer

from ckptkit.core.errors import ResumeError
from ckptkit.training.resume.tensors import first_few

logger = logging.getLogger(__name__)

Unfit = Literal["error", "reset"]

RESET_HINT = (
    "resume with the ranks, the sharding and the optimizer that it was saved with, or start the"
    " optimizer anew with Checkpointer(..., unfit_optimizer='reset')"
)
LOST_HINT = (
    "resume from an older step, or start the optimizer anew with"
    " Checkpointer(..., unfit_optimizer='reset')"
)
_HINT = "resume with the class of optimizer that was saved, or without the optimizer"
# Ways to compute the same, and what schedulers and newer versions of torch add to every group.
_NEUTRAL = frozenset(
    (
        "params",
        "param_names",
        "initial_lr",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
        "decoupled_weight_decay",
    )
)
_FLAGS = (bool, type(None))
_DECOUPLED = "decoupled_weight_decay"  # the flag by which AdamW differs from Adam since torch 2.7


def unwrapped(optimizer: Optimizer) -> Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def class_of(optimizer: Optimizer) -> str:
    return type(unwrapped(optimizer)).__name__


def check_optimizer(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, made_by: str, where: str
) -> None:
    """Compares an optimizer's class and the names of its hyperparameters with the stored ones.

    Args:
        optimizer: The live one; it may never have stepped.
        groups: The stored groups.
        made_by: The class that was saved; empty where that is not known.
        where: The entry of the state, for messages.
    """
    own = class_of(optimizer)
    if made_by == own or not groups:
        return
    stored = {name for group in groups for name in group}
    # Wrappers may have none. Newer versions of torch add flags, which an older one's steps lack.
    defaults: Mapping[str, Any] = getattr(unwrapped(optimizer), "defaults", {})
    needed = {name for name, value in defaults.items() if type(value) not in _FLAGS}
    lacking = sorted(needed - stored - _NEUTRAL)
    if made_by:
        live = {name for group in optimizer.param_groups for name in group}
        lacking += sorted(stored - live - _NEUTRAL)
    if not lacking and _DECOUPLED in defaults:
        decoupled = {group.get(_DECOUPLED) for group in groups} - {None}
        lacking = [_DECOUPLED] * (decoupled == {not defaults[_DECOUPLED]})
    if lacking:
        raise ResumeError(
            f"the state of another optimizer{made_by and f', {made_by},'} was found against {own};"
            f" they differ in {first_few(lacking)}",
            where=where,
            hint=_HINT,
        )
    if made_by:
        logger.warning("%s: it was saved as %s and is resumed as %s", where, made_by, own)
