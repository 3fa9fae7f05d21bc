"""Recognises tensors that were replaced or changed, and calls hooks before changes.

Saves copy tensors while training goes on, and link files of frozen ones that did not change. Steps
of optimizers and `load_state_dict` have hooks that saves use. A CUDA graph may hold such a step,
and its replays call no hook, so they are given one. What ckptkit itself writes into the memory of a
model passes all of them by, so it calls the hooks by `announce_changes` before, and
`count_changes` afterwards.

Nothing here keeps a tensor of training alive. Weak references are held to the local tensors of
DTensors, because `Module.to` swaps the contents of a DTensor, and torch refuses to swap a tensor
that has weak references.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptkit.training.state.dtensors import memory_layout, unwrap_dtensor
from ckptkit.training.state.pieces import Watched, WatchedTensor


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


@dataclass(frozen=True, slots=True)
class Stamp:
    """Some tensors, which are not kept alive, and the memory of their elements.

    Attributes:
        alive: References that call back when a tensor is gone.
        identities: Of the tensors.
        places: Address, shape, strides and type of this rank's elements.
    """

    alive: tuple[weakref.ref[torch.Tensor], ...]
    identities: tuple[int, ...]
    places: tuple[tuple[Any, ...] | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, forget: Callable[[], object]) -> Stamp:
        """Returns the stamp of tensors as they are now.

        Args:
            tensors: Those of training.
            forget: A method, itself not kept alive, that is called once any of them is gone: it
                has to drop the pieces of them, which keep their memory alive.
        """
        method = weakref.WeakMethod(forget)

        def gone(_: weakref.ref[torch.Tensor]) -> None:
            living = method()
            if living is not None:
                living()

        return cls(
            tuple(weakref.ref(unwrap_dtensor(tensor), gone) for tensor in tensors),
            tuple(map(id, tensors)),
            tuple(map(memory_layout, tensors)),
        )

    def still_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors in the same memory."""
        return (
            self.identities == tuple(map(id, tensors))
            and all(map(operator.is_, map(unwrap_dtensor, tensors), [ref() for ref in self.alive]))
            and all(map(operator.eq, map(memory_layout, tensors), self.places))
        )


def watched_by(
    parameter: torch.Tensor, *further: torch.Tensor, tied: Sequence[torch.Tensor] = ()
) -> Watched:
    """Returns the tensors that show changes of a frozen parameter; none if it is trained.

    Args:
        parameter: The parameter, or any other tensor of a model.
        further: Others through which its elements may be changed, or that are frozen if it is, such
            as the scales of a packed weight.
        tied: Others of the model that are the same tensor: where one is trained, all are.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        return ()
    if any(tensor.requires_grad for tensor in (parameter, *tied)):
        return ()
    others = [tensor for tensor in (*tied, *further) if tensor is not parameter]
    return tuple(
        WatchedTensor(tensor.detach(), weakref.ref(unwrap_dtensor(tensor)), id(tensor))
        for tensor in (parameter, *others)
    )
