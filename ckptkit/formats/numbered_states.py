"""Names for the states of an optimizer that numbers its parameters, where that can be proven.

`optimizer.state_dict()` numbers parameters in the order in which it was given them. They have
their names beside them since torch 2.6 if it was given names. Else an optimizer of one group, made
of `model.parameters()`, has them in the order of the model's state dict.

Source: torch/optim/optimizer.py (`state_dict`), torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.core.index import KeyPath, Shape
from ckptkit.formats.rank_tensors import Spread

_STATE: KeyPath = ("optimizer", "state")
_GROUPS: KeyPath = ("optimizer", "param_groups")
_GROUP_PATH = 4  # optimizer, param_groups, the group's number, what it has
_STATE_PATH = 3


def named_states(
    spread: Mapping[KeyPath, Spread], values: Mapping[KeyPath, Any]
) -> dict[KeyPath, Spread]:
    """Puts names in place of the numbers of parameters, where there is no doubt about them.

    Args:
        spread: The tensors of model and optimizer.
        values: What is no tensor among them.
    """
    numbers = [path[2] for path in spread if path[:2] == _STATE and len(path) > _STATE_PATH - 1]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return dict(spread)
    names = _recorded(values) or _counted(spread, values)
    return {_renamed(path, names): one for path, one in spread.items()}


def _renamed(path: KeyPath, names: Mapping[int, str]) -> KeyPath:
    if path[:2] != _STATE or len(path) < _STATE_PATH or not isinstance(path[2], int):
        return path
    return (*_STATE, names.get(path[2], path[2]), *path[3:])


def _groups(values: Mapping[KeyPath, Any], key: str) -> dict[int | str, list[Any]]:
    return {
        path[2]: list(value)
        for path, value in values.items()
        if len(path) == _GROUP_PATH
        and path[:2] == _GROUPS
        and path[3] == key
        and isinstance(value, (list, tuple))
    }


def _recorded(values: Mapping[KeyPath, Any]) -> dict[int, str]:
    """Returns the names that the optimizer was given."""
    numbers, names = _groups(values, "params"), _groups(values, "param_names")
    found: dict[int, str] = {}
    for group, inside in numbers.items():
        pairs = list(zip(inside, names.get(group, ()), strict=False))
        found |= {number: name for number, name in pairs if isinstance(name, str)}
    return found


def _counted(spread: Mapping[KeyPath, Spread], values: Mapping[KeyPath, Any]) -> dict[int, str]:
    """Returns the names of the model's parameters in order, if one choice of them fits alone.

    An optimizer may lack some, which are frozen. The first and the last choice whose shapes fit
    are the same only if there is no other one.
    """
    groups = list(_groups(values, "params").values())
    if len(groups) != 1 or groups[0] != list(range(len(groups[0]))):
        return {}
    wanted = _state_shapes(spread, len(groups[0]))
    parameters = _parameters(spread)
    shapes = [spread[path].shape for path in parameters]
    first = None if wanted is None else _chosen(wanted, shapes)
    last = None if wanted is None else _chosen(wanted[::-1], shapes[::-1])
    if first is None or last is None or first != [len(shapes) - 1 - at for at in reversed(last)]:
        return {}
    return {n: ".".join(map(str, parameters[at][1:])) for n, at in enumerate(first)}


def _state_shapes(spread: Mapping[KeyPath, Spread], count: int) -> list[Shape | None] | None:
    """Returns the shape of each numbered parameter by its states; None if they contradict."""
    found: list[Shape | None] = [None] * count
    for path, one in spread.items():
        if path[:2] != _STATE or len(path) <= _STATE_PATH or not one.shape:
            continue
        number = path[2]
        if not isinstance(number, int) or not 0 <= number < count:
            return None
        if found[number] not in {None, one.shape}:
            return None
        found[number] = one.shape
    return found


def _chosen(wanted: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """Returns the first positions, in order, of the shapes that are wanted; None fits any."""
    found, at = [], 0
    for shape in wanted:
        while at < len(shapes) and shape not in {None, shapes[at]}:
            at += 1
        if at == len(shapes):
            return None
        found.append(at)
        at += 1
    return found


def _parameters(spread: Mapping[KeyPath, Spread]) -> list[KeyPath]:
    """Returns the paths of what is sharded of the model, tied parameters once."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for path, one in spread.items():
        if path[:1] != ("model",) or one.is_plain:
            continue
        places = tuple((s.chunk.record, s.chunk.byte_offset) for s in one.stored)
        if places not in seen or not places:
            found.append(path)
        seen.add(places)
    return found
