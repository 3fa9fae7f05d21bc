"""The names of the parameters whose states an optimizer keeps, where they are not plain to see.

Torch can flatten the states into keys such as `state.layer.weight.exp_avg`.

`Optimizer.state_dict` numbers parameters in the order in which it was given them. Who they are is
told by `param_names`, which optimizers have that were given names (torch 2.6 and later), or else
by the order of the model's state dict: where all parameters are in one group, where there are as
many as the model has, and where every state has the shape of its parameter.

Source: torch/optim/optimizer.py (`state_dict`), torch/nn/modules/module.py (`state_dict`),
torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`).

Names for the states of an optimizer that numbers its parameters, where that can be proven.

`optimizer.state_dict()` numbers parameters in the order in which it was given them. They have
their names beside them since torch 2.6 if it was given names. Else an optimizer of one group, made
of `model.parameters()`, has them in the order of the model's state dict.

Source: torch/optim/optimizer.py (`state_dict`), torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Fqn, KeyPath, Shape, TensorEntry, TensorIndex
from ckptkit.formats.ranks.tensors import Spread
from ckptkit.formats.trees import classify

_STATE, _GROUPS, _MEMBERS, _NAMES = "state", "param_groups", "params", "param_names"
# Buffers of torch.nn, which stand among the parameters of a state dict.
_BUFFERS = (".running_mean", ".running_var", ".num_batches_tracked")
_MAX_OPTIMIZERS = 64  # each takes a walk over all tensors
NUMBERED = "numbers its parameters; they are named in the order of the model, whose shapes agree"


def with_named_states(index: TensorIndex, *, in_order: bool) -> TensorIndex:
    """Gives the states of optimizers that number parameters the parameters' names.

    Args:
        index: Everything that lies at a path.
        in_order: Whether its models list their tensors in the order in which they have them.

    Returns:
        The index, in which optimizers whose parameters are not known for certain are as before.
    """
    index = _unflattened(index)
    numbered: dict[KeyPath, list[TensorEntry]] = defaultdict(list)
    for entry in index.of_part("optimizer"):
        container = _container(entry.key_path)
        if container is not None:
            numbered[container].append(entry)
    if len(numbered) > _MAX_OPTIMIZERS:
        return index
    models = _models(index) if in_order else []
    for container, states in numbered.items():
        index = _named(index, container, states, models)
    return index


def _unflattened(index: TensorIndex) -> TensorIndex:
    """Gives flattened states the paths that they had before; their names stay what they are."""
    flat = {
        entry.key: replace(entry, key_path=(*entry.key_path[:-1], *whole))
        for entry in index.of_part("optimizer")
        if (whole := _whole_path(entry.key_path[-1])) is not None
    }
    return replace(index, tensors={**index.tensors, **flat}) if flat else index


def _whole_path(key: str | int) -> KeyPath | None:
    if not isinstance(key, str) or not key.startswith(f"{_STATE}."):
        return None
    name, _, kind = key.removeprefix(f"{_STATE}.").rpartition(".")
    return (_STATE, name, kind) if name and kind else None


def _container(path: KeyPath) -> KeyPath | None:
    """Returns the keys above `state` where parameters are numbered below it, or None."""
    for depth in range(len(path) - 2):
        if path[depth] == _STATE and isinstance(path[depth + 1], int):
            return path[:depth]
    return None


def _models(index: TensorIndex) -> list[list[TensorEntry]]:
    """Returns the parameters of each model, in order; tied ones once, as optimizers have them."""
    order = {key: place for place, key in enumerate(index.tensors)}
    first = {min(keys, key=order.__getitem__) for keys in index.aliases}
    later = {key for keys in index.aliases for key in keys} - first
    models: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in index.of_part("model"):
        if entry.key not in later and not entry.name.endswith(_BUFFERS):
            models[entry.tree].append(entry)
    return list(models.values())


def _named(
    index: TensorIndex,
    container: KeyPath,
    states: Sequence[TensorEntry],
    models: Sequence[Sequence[TensorEntry]],
) -> TensorIndex:
    groups = members_of(index.values, container)
    notes = index.run.notes
    names = told_names(groups)
    if not names:
        fitting = [names for model in models if (names := _names_by_order(groups, states, model))]
        if len(fitting) != 1:
            return index
        names = fitting[0]
        notes = (*notes, f"{'.'.join(map(str, container)) or 'the optimizer'} {NUMBERED}")
    tensors = {key: _renamed(entry, container, names) for key, entry in index.tensors.items()}
    return replace(
        index,
        tensors=tensors,
        values=renamed_values(index.values, container, names),
        run=replace(index.run, notes=notes),
    )


def members_of(values: Mapping[KeyPath, Any], container: KeyPath) -> dict[int, dict[str, Any]]:
    """Returns what is kept of each group's members: their numbers, and maybe their names.

    Args:
        values: What is no tensor, by path.
        container: The keys above `param_groups`.
    """
    start = (*container, _GROUPS)
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for path, value in values.items():
        if path[: len(start)] != start or len(path) != len(start) + 2:
            continue
        number, kind = path[-2:]
        if isinstance(number, int) and kind in {_MEMBERS, _NAMES}:
            groups[number][str(kind)] = value
    return groups


def told_names(groups: Mapping[int, Mapping[str, Any]]) -> dict[int, Fqn]:
    """Returns the names that the groups tell; nothing where one does not."""
    numbers: list[int] = []
    names: list[str] = []
    for group in groups.values():
        numbers += _list_of(int, group.get(_MEMBERS))
        names += _list_of(str, group.get(_NAMES))
    if not names or len(numbers) != len(names) or len(set(numbers)) != len(numbers):
        return {}
    return dict(zip(numbers, plain_names(names), strict=False))


def plain_names(names: Sequence[str]) -> list[Fqn]:
    """Returns the names of parameters without what wraps them; none where they cannot be told."""
    try:
        return [place.name for place in classify([("model", name) for name in names], where="")]
    except FormatError:
        return []


def _list_of(kind: type, value: object) -> list[Any]:
    whole = isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)
    return list(value) if whole and isinstance(value, (list, tuple)) else []


def _names_by_order(
    groups: Mapping[int, Mapping[str, Any]],
    states: Sequence[TensorEntry],
    model: Sequence[TensorEntry],
) -> dict[int, Fqn]:
    """Returns the names of the parameters of a model, if the states can be of no others."""
    members = [_list_of(int, group.get(_MEMBERS)) for group in groups.values()]
    if members != [list(range(len(model)))]:
        return {}
    shapes: dict[int, set[Shape]] = defaultdict(set)
    for entry in states:
        number = entry.key_path[-2]
        if not isinstance(number, int) or not 0 <= number < len(model):
            return {}
        if entry.shape:  # what is counted, such as `step`, has none
            shapes[number].add(entry.shape)
    if any(found != {model[number].shape} for number, found in shapes.items()):
        return {}
    return {number: entry.name for number, entry in enumerate(model)} if shapes else {}


def _renamed(entry: TensorEntry, container: KeyPath, names: Mapping[int, Fqn]) -> TensorEntry:
    path = renamed_path(entry.key_path, container, names)
    if entry.part != "optimizer" or path == entry.key_path:
        return entry
    return replace(entry, key_path=path, name=Fqn(".".join(map(str, path[len(container) :]))))


def renamed_path(path: KeyPath, container: KeyPath, names: Mapping[int, Fqn]) -> KeyPath:
    """Returns a path with the name of the parameter in place of its number."""
    at = len(container) + 1
    if path[:at] != (*container, _STATE) or len(path) == at:
        return path
    number = path[at]
    name = names.get(number) if isinstance(number, int) else None
    return path if name is None else (*path[:at], name, *path[at + 1 :])


def renamed_values(
    values: Mapping[KeyPath, Any], container: KeyPath, names: Mapping[int, Fqn]
) -> dict[KeyPath, Any]:
    """Returns values with the names of parameters in place of their numbers, also in groups."""
    if not names:
        return dict(values)
    start = (*container, _GROUPS)
    made: dict[KeyPath, Any] = {}
    for path, value in values.items():
        is_group = path[: len(start)] == start and len(path) == len(start) + 2
        if is_group and path[-1] == _NAMES:
            continue
        if is_group and path[-1] == _MEMBERS:
            made[path] = [names.get(number, number) for number in _list_of(int, value)]
        else:
            made[renamed_path(path, container, names)] = value
    return made


OPTIMIZER: KeyPath = ("optimizer",)
_NUMBERED_STATE: KeyPath = (*OPTIMIZER, "state")
_STATE_PATH = len(_NUMBERED_STATE) + 1


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
    numbers = [
        path[2] for path in spread if path[:2] == _NUMBERED_STATE and len(path) >= _STATE_PATH
    ]
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
        if path[:2] != _NUMBERED_STATE or len(path) <= _STATE_PATH or not one.shape:
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
