"""Calling something before optimizers step and state dicts are loaded, whoever does it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Hook:
    """Calls a method of an object for as long as the object is there.

    Models carry it along when they are copied or pickled: the copy gets a hook that does nothing,
    made of the standard library, so that the model can be loaded where ckptkit is not installed.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_: Any) -> None:
        method = self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (chain,)


def call_before_changes(
    method: Callable[[], None], models: Iterable[nn.Module]
) -> Callable[[], None]:
    """Has a method called before every step of any optimizer, and every loading into the models.

    Args:
        method: Called without arguments; its object is not kept alive.
        models: Whose `load_state_dict` matters; from torch 2.5 on.

    Returns:
        A function that ends this.
    """
    hook = _Hook(method)
    with ExitStack() as undo:
        undo.callback(register_optimizer_step_pre_hook(hook).remove)
        undo.callback(_call_before_loading(hook, models))
        return undo.pop_all().close


def call_before_loading(
    method: Callable[[], None], models: Iterable[nn.Module]
) -> Callable[[], None]:
    """Has a method called before every loading into the models, as `call_before_changes` does."""
    return _call_before_loading(_Hook(method), models)


def _call_before_loading(hook: _Hook, models: Iterable[nn.Module]) -> Callable[[], None]:
    with ExitStack() as undo:
        for model in models:
            register = getattr(model, "register_load_state_dict_pre_hook", None)  # torch 2.5
            if register is not None:
                undo.callback(register(hook).remove)
        return undo.pop_all().close
