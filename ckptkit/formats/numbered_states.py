"""Names for the states of an optimizer that numbers its parameters, where that can be proven.

`optimizer.state_dict()` numbers parameters in the order in which it was given them. They have
their names beside them since torch 2.6 if it was given names. Else an optimizer of one group, made
of `model.parameters()`, has them in the order of the model's state dict.

Source: torch/optim/optimizer.py (`state_dict`), torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.core.index import Fqn, KeyPath, Shape
from ckptkit.formats.optimizer_names import members_of, plain_names, told_names
from ckptkit.formats.rank_tensors import Spread

OPTIMIZER: KeyPath = ("optimizer",)
_STATE: KeyPath = (*OPTIMIZER, "state")
_STATE_PATH = len(_STATE) + 1


def names_of_states(
    spread: Mapping[KeyPath, Spread], values: Mapping[KeyPath, Any]
) -> tuple[dict[int, Fqn], bool]:
    """Returns the names of numbered parameters, where there is no doubt about them.

    Args:
        spread: The tensors of model and optimizer.
        values: What is no tensor among them.

    Returns:
        The names by number, none where there is doubt, and whether the order tells them.
    """
    numbers = [path[2] for path in spread if path[:2] == _STATE and len(path) >= _STATE_PATH]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return {}, False
    groups = members_of(values, OPTIMIZER)
    names = told_names(groups)
    if names:
        return names, False
    counted = _counted(spread, [group.get("params") for group in groups.values()])
    return counted, bool(counted)


def _counted(spread: Mapping[KeyPath, Spread], groups: Sequence[object]) -> dict[int, Fqn]:
    """Returns the names of the model's parameters in order, if one choice of them fits alone.

    An optimizer may lack some, which are frozen. The first and the last choice whose shapes fit
    are the same only if there is no other one.
    """
    members = groups[0] if len(groups) == 1 else None
    if not isinstance(members, list) or members != list(range(len(members))):
        return {}
    wanted = _state_shapes(spread, len(members))
    parameters = _parameters(spread)
    shapes = [spread[path].shape for path in parameters]
    first = None if wanted is None else _chosen(wanted, shapes)
    last = None if wanted is None else _chosen(wanted[::-1], shapes[::-1])
    if first is None or last is None or first != [len(shapes) - 1 - at for at in reversed(last)]:
        return {}
    names = plain_names([".".join(map(str, parameters[at][1:])) for at in first])
    return dict(enumerate(names))


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
