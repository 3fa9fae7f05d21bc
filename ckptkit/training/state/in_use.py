"""Moments at which a model cannot be read: backward passes, forward passes, whole parameters.

FSDP has no public way to ask which pass is running, so this reads its private attributes. An
exception leaves them unchanged, so they count only where the pass is still running.
"""

# ruff: noqa: SLF001 - the private attributes named above

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.core.errors import UnsupportedError, UsageError

_HINT = "make the call between two steps: after optimizer.step(), and outside of hooks"


def check_unused(modules: Sequence[nn.Module]) -> None:
    """Refuses a sharded model while a forward or backward pass is using it.

    Args:
        modules: All of its modules.
    """
    flat = [m for m in modules if isinstance(m, FullyShardedDataParallel)]
    states = list(fsdp2_states(modules))
    if any(_name(m._handle, "_training_state") == "SUMMON_FULL_PARAMS" for m in flat):
        raise UsageError(
            "FSDP's parameters are whole, and what is changed in them is not in the shards yet",
            where="summon_full_params",
            hint="make the call after the `with` block",
        )
    if (flat or states) and torch._C._current_graph_task_id() != -1:
        raise UsageError(
            "the call came from a hook, while gradients are computed and reduced",
            where="backward pass of FSDP",
            hint=_HINT,
        )
    running = {
        id(module) for module, state in states if _name(state, "_training_state") == "FORWARD"
    }
    if running and _is_called(running):
        raise UsageError(
            "the call came from a hook, while parameters are gathered and in use",
            where="forward pass of FSDP",
            hint=_HINT,
        )


def check_registered(modules: Sequence[nn.Module]) -> None:
    """Refuses parameters that a module was given after FSDP2 began to work, which it never uses."""
    for _, state in fsdp2_states(modules):
        if state._is_root is None:  # its first forward pass registers the parameters then
            continue
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for sharded in group.fsdp_params if group is not None else ():
                info = sharded._module_info
                if info.module._parameters.get(info.param_name) is not sharded.sharded_param:
                    raise UnsupportedError(
                        "the module has another parameter than fully_shard works on, which goes"
                        " on with the old one",
                        where=str(getattr(sharded, "_param_fqn", None) or info.param_name),
                        hint="copy the values in place, or give the model new ones by"
                        " load_state_dict(…, assign=True)",
                    )


def fsdp2_states(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules that fully_shard was applied to, each with its FSDP2 state."""
    for module in modules:
        find = getattr(module, "_get_fsdp_state", None)
        if callable(find):
            yield module, find()


def _name(holder: object, attribute: str) -> str:
    return str(getattr(getattr(holder, attribute, None), "name", ""))


def _is_called(modules: set[int]) -> bool:
    """Whether any thread is inside a call of one of the modules."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _CALL and id(at.f_locals.get("self")) in modules:
                return True
            at = at.f_back
    return False


_CALL = nn.Module._call_impl.__code__
