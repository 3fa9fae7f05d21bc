"""What the values of the user's mapping are, and which of them are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ckptkit.core.errors import UsageError
from ckptkit.training.names import RNG

Layout = Literal["accelerate", "dcp", "trainer"]
Kind = Literal["model", "optimizer", "scheduler", "scaler", "dataloader", "stateful", "plain"]
_RESERVED = frozenset({RNG})
_LOADER_HINT = "use torchdata's StatefulDataLoader, or leave the dataloader out"
_PLAIN_HINT = "put values such as counters into a dict, which is saved and restored in place"


def entries_of(
    state: Mapping[str, object], layout: Layout
) -> Iterator[tuple[str, int | None, object]]:
    """Yields the values of the mapping, those of lists one by one with their positions.

    Raises:
        UsageError: If a key is no name, or a value is there twice.
    """
    seen: dict[int, str] = {}
    for key, value in state.items():
        _check_key(key, layout)
        for position, entry in _members(value):
            name = key if position is None else f"{key}[{position}]"
            if id(entry) in seen:
                raise UsageError(
                    f"the same object was found under {seen[id(entry)]!r}",
                    where=name,
                    hint="name each model, optimizer and other object once",
                )
            seen[id(entry)] = name
            yield key, position, entry


def leaves(
    state: Mapping[str, object], layout: Layout
) -> tuple[tuple[str, int | None, object], ...]:
    """Returns what `entries_of` yields: two states with the same objects are the same state.

    Whoever compares them by identity has to hold on to them, since identities are used again.

    Raises:
        UsageError: If a key is no name, or a value is there twice.
    """
    return tuple(entries_of(state, layout))


def kind_of(key: str, value: object) -> Kind:
    """Returns what a value of the mapping is.

    Wrappers are known by what they can do, because accelerate's scheduler, for one, is no
    `LRScheduler`. What is iterated over and has a state is a dataloader: each rank has its own.

    Raises:
        UsageError: If it is nothing that can be saved.
    """
    if isinstance(value, nn.Module):
        return "model"
    # By its name, as importing its module takes long and warns.
    if "ZeroRedundancyOptimizer" in {base.__name__ for base in type(value).__mro__}:
        raise UsageError(
            "a ZeroRedundancyOptimizer was found, whose ranks hold parts that cannot be placed",
            where=key,
            hint="use fully_shard, which shards the optimizer's state as well",
        )
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, dict | list):
        return "plain"
    if not _has(value, "state_dict", "load_state_dict"):
        raise UsageError(
            f"a {type(value).__name__} has no state_dict() and load_state_dict()",
            where=key,
            hint=_LOADER_HINT if isinstance(value, DataLoader) else _PLAIN_HINT,
        )
    return _kind_by_methods(value)


def taken_from(value: object) -> Literal["model", "optimizer"] | None:
    """Tells of which kind of object a plain value is the state dict, or a list of such.

    What `Module.state_dict` returns has a mark of torch's own; other mappings of nothing but
    tensors are taken for the same.
    """
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            continue
        if set(entry) == {"state", "param_groups"}:
            return "optimizer"
        tensors = [isinstance(leaf, Tensor) for leaf in entry.values()]
        if any(tensors) and (hasattr(entry, "_metadata") or all(tensors)):
            return "model"
    return None


def _kind_by_methods(value: object) -> Kind:
    if isinstance(value, LRScheduler) or _has(value, "get_last_lr"):
        return "scheduler"
    if _has(value, "get_scale", "unscale_"):
        return "scaler"
    return "dataloader" if _has(value, "__iter__") else "stateful"


def _check_key(key: object, layout: Layout) -> None:
    if not isinstance(key, str) or not key or "/" in key or key.startswith("."):
        raise UsageError(
            f"the state has the key {key!r} where a name was expected",
            hint="use keys such as 'model' and 'optimizer'",
        )
    if layout == "dcp" and key in _RESERVED:
        raise UsageError(
            "this key is taken by the random number generators, which are always saved",
            where=key,
            hint="use another key",
        )


def _members(value: object) -> Iterator[tuple[int | None, Any]]:
    """Yields the members of a list of objects with state; other values are one entry."""
    if isinstance(value, list | tuple) and value and all(_is_stateful(entry) for entry in value):
        yield from enumerate(value)
    else:
        yield None, value


def _is_stateful(value: object) -> bool:
    return _has(value, "state_dict", "load_state_dict")


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
