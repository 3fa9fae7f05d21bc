"""Nested dictionaries and lists as key paths, by the rules of DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ckptkit.core.index import KeyPath

_DEEPEST = 64  # what a save refuses, and only a live value may be


def flatten(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yields the leaves of nested values, each with its path.

    Mappings are always entered, lists only where a tensor or a mapping lies somewhere inside,
    tuples never. Empty mappings leave nothing behind, nor does a value inside itself.

    Source: `torch.distributed.checkpoint._traverse.traverse_state_dict` of torch 2.4 and later.

    >>> list(flatten({"a": [1, 2], "b": [{"c": 3}]}))
    [(('a',), [1, 2]), (('b', 0, 'c'), 3)]
    """
    yield from _flatten(value, path, frozenset())


def _flatten(
    value: object, path: KeyPath, around: frozenset[int]
) -> Iterator[tuple[KeyPath, object]]:
    if id(value) in around or len(around) > _DEEPEST:
        return
    if isinstance(value, Mapping):
        inside = around | {id(value)}
        for key, entry in value.items():
            yield from _flatten(entry, (*path, str(key)), inside)
    elif isinstance(value, list) and holds_more(value):
        inside = around | {id(value)}
        for index, entry in enumerate(value):
            yield from _flatten(entry, (*path, index), inside)
    else:
        yield path, value


def holds_more(values: list[object], around: frozenset[int] = frozenset()) -> bool:
    """Tells whether a tensor or a mapping lies somewhere inside a list."""
    inside = around | {id(values)}
    return len(around) < _DEEPEST and any(
        isinstance(value, Mapping | torch.Tensor)
        or (isinstance(value, list) and id(value) not in inside and holds_more(value, inside))
        for value in values
    )
