"""Nested dictionaries and lists as key paths, by the rules of DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ckptkit.core.index import KeyPath


def flatten(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yields the leaves of nested values, each with its path.

    Mappings are always entered, lists only where a tensor or a mapping lies somewhere inside,
    tuples never. Empty mappings leave nothing behind.

    Source: `torch.distributed.checkpoint._traverse.traverse_state_dict` of torch 2.4 and later.

    >>> list(flatten({"a": [1, 2], "b": [{"c": 3}]}))
    [(('a',), [1, 2]), (('b', 0, 'c'), 3)]
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flatten(entry, (*path, str(key)))
    elif isinstance(value, list) and _holds_more(value):
        for index, entry in enumerate(value):
            yield from flatten(entry, (*path, index))
    else:
        yield path, value


def _holds_more(values: list[object]) -> bool:
    return any(
        isinstance(value, Mapping | torch.Tensor)
        or (isinstance(value, list) and _holds_more(value))
        for value in values
    )
