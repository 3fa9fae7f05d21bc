"""Recognises tensors that were replaced or changed, and calls hooks before changes.

Saves copy tensors while training goes on, and link files of frozen ones that did not change. Steps
of optimizers and `load_state_dict` have hooks that saves use. A CUDA graph may hold such a step,
and its replays call no hook, so they are given one. What ckptkit itself writes into the memory of a
model passes all of them by, so it calls the hooks by `announce_changes` before, and
`count_changes` afterwards.

Between two calls nothing here holds memory of training, nor a weak reference to a tensor: torch
refuses to swap the contents of tensors that have some, as `Module.to` and `load_state_dict` may do.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptkit.training.state.dtensors import DTensor, memory_layout, unwrap_dtensor
from ckptkit.training.state.pieces import Piece, Watched


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

    Steps that were captured in a CUDA graph count when the graph is replayed. The object of the
    method is not kept alive. Returns a function that removes the hooks.
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


_Cut = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and first element of a piece of a tensor."""
_Source = tuple[int, _Cut | None, tuple[tuple[int, bool], ...]]
"""Where a piece gets its elements and the tensors that it watches from, among tensors.

The number of the tensor with the elements; the cut, None if it is the whole tensor; the numbers of
the watched ones, each with whether the local tensor of a DTensor is meant.
"""


class KeptPieces(Struct, frozen=True):
    """Pieces without tensors, to be made again of the live ones as long as these have one form."""

    identities: tuple[int, ...]  # of the tensors
    forms: tuple[object, ...]  # address, shape, strides, type and placements of those with elements
    pieces: tuple[Piece, ...]
    sources: tuple[_Source, ...]  # where each gets them from

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        tensors: Sequence[torch.Tensor],
        further: Sequence[torch.Tensor] = (),
    ) -> KeptPieces | None:
        """Returns pieces without their tensors; None if they are of others than these."""
        reached = (*tensors, *further)
        numbers = {id(unwrap_dtensor(t)): (n, True) for n, t in enumerate(reached)}
        numbers |= {id(t): (n, False) for n, t in enumerate(reached)}
        forms = tuple(map(_form, tensors, map(unwrap_dtensor, tensors)))
        whole = {_elements(tensor): number for number, tensor in enumerate(tensors)}
        whole.pop(None, None)
        parts: dict[tuple[Any, ...], int] = {}
        sources: list[_Source] = []
        for piece in pieces:
            elements = _elements(piece.local)
            number, cut = whole.get(elements), None
            if number is None and elements is not None:
                parts = parts or {_memory(tensor): n for n, tensor in enumerate(tensors)}
                number = parts.get(_memory(piece.local))
            if number is None or any(id(tensor) not in numbers for tensor in piece.watched):
                return None
            if elements not in whole:
                whole_first = int(unwrap_dtensor(tensors[number]).storage_offset())
                first = int(piece.local.storage_offset()) - whole_first
                cut = tuple(piece.local.shape), piece.local.stride(), first
            watched = tuple(numbers[id(tensor)] for tensor in piece.watched)
            sources.append((number, cut, watched))
        bare = tuple(piece.holding(_NOTHING) for piece in pieces)
        return cls(tuple(map(id, reached)), forms, bare, tuple(sources))

    def again(
        self, tensors: Sequence[torch.Tensor], further: Sequence[torch.Tensor] = ()
    ) -> list[Piece] | None:
        """Returns the pieces as they are now; None if the tensors are others, or moved."""
        reached = (*tensors, *further)
        if self.identities != tuple(map(id, reached)):
            return None
        locals_ = [t if type(t) in _PLAIN else unwrap_dtensor(t) for t in tensors]
        if not all(map(operator.eq, map(_form, tensors, locals_), self.forms)):
            return None
        pieces = []
        for piece, (number, cut, watched) in zip(self.pieces, self.sources, strict=True):
            local = locals_[number]
            if local.requires_grad or cut is not None:
                local = local.detach()
            if cut is not None:
                shape, strides, first = cut
                local = local.as_strided(shape, strides, local.storage_offset() + first)
            seen: Watched = ()
            if watched:
                both = ((reached[n], inner) for n, inner in watched)
                seen = tuple(unwrap_dtensor(tensor) if inner else tensor for tensor, inner in both)
            pieces.append(piece.holding(local, seen))
        return pieces


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOTHING = torch.empty(0, device="cpu")


def _form(tensor: torch.Tensor, local: torch.Tensor) -> object:
    """Returns address, shape, strides and type of this rank's elements, and their placements."""
    if type(local) not in _PLAIN:
        return type(local), memory_layout(local)
    try:
        layout = local.data_ptr(), local.shape, local.stride(), local.dtype
    except RuntimeError:  # a sparse tensor, which is refused later by its name
        return None
    if tensor is local or not isinstance(tensor, DTensor):
        return layout
    return layout, tensor._spec  # noqa: SLF001 - its parts take four times as long


def _elements(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns what tensors have in common that are the same elements; None without memory."""
    local, layout = unwrap_dtensor(tensor), memory_layout(tensor)
    return None if layout is None else (*layout, local.device, local.is_conj(), local.is_neg())


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what tensors have in common that are views of one another."""
    local = unwrap_dtensor(tensor)
    try:
        start = local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory, such as a sparse one
        return (id(tensor),)
    return start, local.dtype, local.device, local.is_conj(), local.is_neg()


def watched_by(
    parameter: torch.Tensor, *further: torch.Tensor, tied: Sequence[torch.Tensor] = ()
) -> Watched:
    """Returns the tensors that show changes of a frozen parameter; none if it is trained.

    `further` are others through which its elements may be changed, or that are frozen if it is,
    such as the scales of a packed weight; `tied` others of the model that are the same tensor:
    where one is trained, all are.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        return ()
    if any(tensor.requires_grad for tensor in (parameter, *tied)):
        return ()
    return (parameter, *(tensor for tensor in (*tied, *further) if tensor is not parameter))
