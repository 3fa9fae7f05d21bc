"""Parameters on the meta device that notice what would have changed their values.

A script may edit weights right after `from_pretrained`: fill rows for new tokens, merge an adapter,
cast. On the meta device all of that succeeds and is lost, so it is noticed and refused later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ckptkit.core.errors import UnsupportedError

_KEEPS_VALUES = frozenset({"requires_grad_", "retain_grad"})
_SETS_ITEM = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_OWNER = "_ckptkit_owner"
_CHANGE = "_ckptkit_change"
_MAKES_NEW = ("empty", "zeros", "ones", "full", "rand", "new_")
_CALL_PLAIN: Any = torch.Tensor.__torch_function__  # its results are plain tensors
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def watch(parameters: Iterable[nn.Parameter]) -> None:
    """Makes parameters notice changes; those that have values are left as they are."""
    for parameter in parameters:
        if parameter.is_meta and type(parameter) is nn.Parameter:
            parameter.__class__ = _Watched


def is_watched(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, _Watched)


def find_changed(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """Yields the parameters without values that are not as `watch` has found them, and why."""
    for name, parameter in named:
        if type(parameter) is _Watched:
            change = getattr(parameter, _CHANGE, "")
            if change:
                yield name, change
        elif parameter.is_meta:
            yield name, "another parameter"


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Makes parameters plain again."""
    for parameter in parameters:
        if type(parameter) is _Watched:
            setattr(parameter, "__class__", nn.Parameter)  # noqa: B010  mypy refuses the other way


def _call(func: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Calls a function of torch; notes in parameters that it writes to."""
    name = getattr(func, "__name__", "")
    is_write = name in _SETS_ITEM or (
        name.endswith("_") and not name.endswith("__") and name not in _KEEPS_VALUES
    )
    first = arguments[0] if arguments else options.get("tensor")  # of functions of `nn.init`
    if func is torch.empty_like and isinstance(first, _Watched):
        _refuse_memory(options.get("device"))
    written = [*(first if isinstance(first, list | tuple) else [first])] if is_write else []
    if "out" in options:
        written.append(options["out"])
    if func == _SET_DATA:
        written, name = [first], "an assignment to its data"
    for value in written:
        owner = getattr(value, _OWNER, value) if isinstance(value, _Watched | _Alias) else None
        if owner is not None:
            setattr(owner, _CHANGE, name)
    found = _CALL_PLAIN(func, (), arguments, options)
    owner = getattr(first, _OWNER, first)
    # On the meta device it does not matter what shares memory and what is a copy without values.
    if isinstance(owner, _Watched) and not name.startswith(_MAKES_NEW):
        return tree_map(partial(_alias, owner), found)
    return found


def _refuse_memory(device: Any) -> None:
    """Refuses memory for a parameter that nothing would fill, as `to_empty` and FSDP1 give it."""
    if device is not None and torch.device(device).type != "meta":
        raise UnsupportedError(
            "the model gets memory, and its weights were deferred: nothing would fill it",
            where=f"memory on {device}",
            hint="load a model that the Trainer, or an accelerator with install, does not prepare"
            " outside of the block with defer_weights, such as a reference model; or fill it by"
            " ckptkit.training.load_into",
        )


class _Watching(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


class _Watched(_Watching, nn.Parameter):
    pass


class _Alias(_Watching):
    """What was made from a parameter that is watched, and may share its memory."""


def _alias(owner: nn.Parameter, found: object) -> object:
    if type(found) is not torch.Tensor:
        return found
    alias = found.as_subclass(_Alias)
    setattr(alias, _OWNER, owner)
    return alias
