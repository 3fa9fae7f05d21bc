"""What has to be done when the elements of a model change.

Saves copy tensors while training goes on, and link files of frozen ones that did not change. Steps
of optimizers and `load_state_dict` have hooks that saves use. A CUDA graph may hold such a step,
and its replays call no hook, so they are given one. What ckptkit itself writes into the memory of a
model passes all of them by, so it calls the hooks by `announce_changes` before, and
`count_changes` afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Hook:
    """Calls a method of an object while the object exists.

    Copies and pickles of a model include its hooks. They get one of the standard library that does
    nothing, so that the model can be loaded without ckptkit.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_: Any) -> None:
        method = self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (chain,)


_BEFORE_REPLAYS: list[_Hook] = []


def _call_before_replays(hook: _Hook) -> Callable[[], None]:
    """Has a hook called before each replay of a CUDA graph; returns what removes it."""
    graph, name = torch.cuda.CUDAGraph, "replay"
    stock = getattr(graph, name)
    if not hasattr(stock, "__wrapped__"):

        @wraps(stock)
        def replay(self: torch.cuda.CUDAGraph) -> None:
            for before in tuple(_BEFORE_REPLAYS):
                before()
            stock(self)

        setattr(graph, name, replay)
    _BEFORE_REPLAYS.append(hook)
    return partial(_BEFORE_REPLAYS.remove, hook)


_HOOKS: weakref.WeakKeyDictionary[nn.Module, list[_Hook]] = weakref.WeakKeyDictionary()


def call_before_changes(
    method: Callable[[], None], models: Iterable[nn.Module], *, steps: bool = True
) -> Callable[[], None]:
    """Has a method called before each step of any optimizer and each load into the models.

    Steps that were captured in a CUDA graph count when the graph is replayed.

    Args:
        method: Called without arguments; its object is not kept alive.
        models: Whose `load_state_dict` calls it, from torch 2.5 on.
        steps: Whether steps of optimizers call it as well as loads.

    Returns:
        A function that removes the hooks.
    """
    hook = _Hook(method)
    with ExitStack() as undo:
        if steps:
            undo.callback(register_optimizer_step_pre_hook(hook).remove)
            undo.callback(_call_before_replays(hook))
        for model in models:
            hooks = _HOOKS.setdefault(model, [])
            hooks.append(hook)
            undo.callback(hooks.remove, hook)
            register = getattr(model, "register_load_state_dict_pre_hook", None)  # torch 2.5
            if register is not None:
                undo.callback(register(hook).remove)
        return undo.pop_all().close


def announce_changes(model: nn.Module) -> None:
    """Calls what is to be called before a load into a model, or into a module of it."""
    for module in model.modules():
        for hook in tuple(_HOOKS.get(module, ())):
            hook()


def count_changes(tensors: Iterable[torch.Tensor]) -> None:
    """Raises the version counters of tensors, as torch does when it writes to one itself."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
