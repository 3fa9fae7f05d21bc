"""Names of the parameters in an optimizer's states, where they can be proven.

`Optimizer.state_dict` numbers parameters in the order in which they were passed to the optimizer.
Since torch 2.6 the groups have `param_names`, if the optimizer was given names. Otherwise the order
of the model's state dict gives the names, if all parameters are in one group and every state has
the shape of its parameter, in only one possible way. Torch can also flatten states into keys such
as `state.layer.weight.exp_avg`.

Source: torch/optim/optimizer.py (`state_dict`), torch/nn/modules/module.py (`state_dict`),
torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`), torch 2.1 to 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Fqn, KeyPath, Shape, TensorEntry, TensorIndex
from ckptkit.formats.parsing import is_count
from ckptkit.formats.ranks.rank_tensors import AssembledTensor
from ckptkit.formats.trees import classify, join_path

_STATE, _GROUPS, _MEMBERS, _NAMES = "state", "param_groups", "params", "param_names"
# Buffers of torch.nn, which a state dict has among its parameters.
_BUFFERS = (".running_mean", ".running_var", ".num_batches_tracked")
_MAX_OPTIMIZERS = 64  # each takes a walk over all tensors
NUMBERED = "numbers its parameters; they are named in the order of the model, whose shapes agree"


def name_states(index: TensorIndex, *, in_order: bool) -> TensorIndex:
    """Replaces numbers of parameters in the states of optimizers by the parameters' names.

    Args:
        index: All state dicts of a checkpoint.
        in_order: Whether the tensors of models are in the order of the models' state dicts.

    Returns:
        The index; optimizers whose parameters cannot be identified are unchanged.
    """
    index = _unflatten(index)
    numbered: dict[KeyPath, list[TensorEntry]] = defaultdict(list)
    for entry in index.of_part("optimizer"):
        container = _container(entry.key_path)
        if container is not None:
            numbered[container].append(entry)
    if len(numbered) > _MAX_OPTIMIZERS:
        return index
    models = _models(index) if in_order else []
    for container, states in numbered.items():
        groups = _find_groups(index.values, container)
        notes = index.run.notes
        names = _read_names(groups)
        if not names:
            fitting = [fit for model in models if (fit := _names_by_order(groups, states, model))]
            if len(fitting) != 1:
                continue
            names = fitting[0]
            notes = (*notes, f"{join_path(container) or 'the optimizer'} {NUMBERED}")
        index = replace(
            index,
            tensors={key: _rename(entry, container, names) for key, entry in index.tensors.items()},
            values=rename_values(index.values, container, names),
            run=replace(index.run, notes=notes),
        )
    return index


def _unflatten(index: TensorIndex) -> TensorIndex:
    """Restores the paths of flattened states; their names are not changed."""
    flat = {}
    for entry in index.of_part("optimizer"):
        *above, key = entry.key_path
        if isinstance(key, str) and key.startswith(f"{_STATE}."):
            name, _, kind = key.removeprefix(f"{_STATE}.").rpartition(".")
            if name and kind:
                flat[entry.key] = replace(entry, key_path=(*above, _STATE, name, kind))
    return replace(index, tensors={**index.tensors, **flat}) if flat else index


def _container(path: KeyPath) -> KeyPath | None:
    """Returns the keys above `state` if parameters are numbered below it, else None."""
    for depth in range(len(path) - 2):
        if path[depth] == _STATE and isinstance(path[depth + 1], int):
            return path[:depth]
    return None


def _models(index: TensorIndex) -> list[list[TensorEntry]]:
    """Returns the parameters of each model in order, tied ones once, as optimizers have them."""
    order = {key: place for place, key in enumerate(index.tensors)}
    first = {min(keys, key=order.__getitem__) for keys in index.aliases}
    later = {key for keys in index.aliases for key in keys} - first
    models: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in index.of_part("model"):
        if entry.key not in later and not entry.name.endswith(_BUFFERS):
            models[entry.tree].append(entry)
    return list(models.values())


def _find_groups(values: Mapping[KeyPath, Any], container: KeyPath) -> dict[int, dict[str, Any]]:
    """Returns the members of each group: their numbers, and possibly their names.

    Args:
        values: The values that are not tensors, by path.
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


def _read_names(groups: Mapping[int, Mapping[str, Any]]) -> dict[int, Fqn]:
    """Returns the names in the groups; empty if one has none."""
    numbers: list[int] = []
    names: list[str] = []
    for group in groups.values():
        numbers += _list_of(int, group.get(_MEMBERS))
        names += _list_of(str, group.get(_NAMES))
    if not names or len(numbers) != len(names) or len(set(numbers)) != len(numbers):
        return {}
    return dict(zip(numbers, _without_wrappers(names), strict=False))


def _without_wrappers(names: Sequence[str]) -> list[Fqn]:
    """Returns names without wrapper segments; empty if they are then not distinct."""
    try:
        return [m.name for m in classify([("model", name) for name in names], where="")]
    except FormatError:
        return []


def _list_of(kind: type, value: object) -> list[Any]:
    is_list = isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)
    return list(value) if is_list and isinstance(value, (list, tuple)) else []


def _names_by_order(
    groups: Mapping[int, Mapping[str, Any]],
    states: Sequence[TensorEntry],
    model: Sequence[TensorEntry],
) -> dict[int, Fqn]:
    """Returns the names of a model's parameters, if the states fit all of them in order."""
    members = [_list_of(int, group.get(_MEMBERS)) for group in groups.values()]
    if members != [list(range(len(model)))]:
        return {}
    shapes: dict[int, set[Shape]] = defaultdict(set)
    for entry in states:
        number = entry.key_path[-2]
        if not is_count(number, len(model) - 1):
            return {}
        if entry.shape:  # counters such as `step` have none
            shapes[number].add(entry.shape)
    if any(of_states != {model[number].shape} for number, of_states in shapes.items()):
        return {}
    return {number: entry.name for number, entry in enumerate(model)} if shapes else {}


def _rename(entry: TensorEntry, container: KeyPath, names: Mapping[int, Fqn]) -> TensorEntry:
    path = rename_path(entry.key_path, container, names)
    if entry.part != "optimizer" or path == entry.key_path:
        return entry
    return replace(entry, key_path=path, name=Fqn(join_path(path[len(container) :])))


def rename_path(path: KeyPath, container: KeyPath, names: Mapping[int, Fqn]) -> KeyPath:
    """Returns a path with the number of a parameter replaced by its name."""
    at = len(container) + 1
    if path[:at] != (*container, _STATE) or len(path) == at:
        return path
    number = path[at]
    name = names.get(number) if isinstance(number, int) else None
    return path if name is None else (*path[:at], name, *path[at + 1 :])


def rename_values(
    values: Mapping[KeyPath, Any], container: KeyPath, names: Mapping[int, Fqn]
) -> dict[KeyPath, Any]:
    """Returns values with the numbers of parameters replaced by their names, in groups too."""
    if not names:
        return dict(values)
    start = (*container, _GROUPS)
    renamed: dict[KeyPath, Any] = {}
    for path, value in values.items():
        is_group = path[: len(start)] == start and len(path) == len(start) + 2
        if is_group and path[-1] == _NAMES:
            continue
        if is_group and path[-1] == _MEMBERS:
            renamed[path] = [names.get(number, number) for number in _list_of(int, value)]
        else:
            renamed[rename_path(path, container, names)] = value
    return renamed


OPTIMIZER: KeyPath = ("optimizer",)
_NUMBERED_STATE: KeyPath = (*OPTIMIZER, "state")
_STATE_PATH = len(_NUMBERED_STATE) + 1


def find_state_names(
    tensors: Mapping[KeyPath, AssembledTensor], values: Mapping[KeyPath, Any]
) -> tuple[dict[int, Fqn], bool]:
    """Returns the names of numbered parameters, if they can be proven.

    Args:
        tensors: The tensors of model and optimizer.
        values: Their values that are not tensors.

    Returns:
        The names by number, empty if there is doubt, and whether they follow from the order.
    """
    numbers = [
        path[2] for path in tensors if path[:2] == _NUMBERED_STATE and len(path) >= _STATE_PATH
    ]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return {}, False
    groups = _find_groups(values, OPTIMIZER)
    names = _read_names(groups)
    if names:
        return names, False
    names = _match_shapes(tensors, [group.get("params") for group in groups.values()])
    return names, bool(names)


def _match_shapes(
    tensors: Mapping[KeyPath, AssembledTensor], groups: Sequence[object]
) -> dict[int, Fqn]:
    """Returns the names of the model's parameters in order, if only one choice of them fits.

    An optimizer may lack frozen parameters. The first and the last choice of parameters with
    fitting shapes are equal only if there is no other one.
    """
    members = groups[0] if len(groups) == 1 else None
    if not isinstance(members, list) or members != list(range(len(members))):
        return {}
    expected: list[Shape | None] = [None] * len(members)  # by states of more than one element
    for path, tensor in tensors.items():
        if path[:2] != _NUMBERED_STATE or len(path) <= _STATE_PATH or not tensor.shape:
            continue
        number = path[2]
        if not is_count(number, len(members) - 1) or expected[number] not in {None, tensor.shape}:
            return {}
        expected[number] = tensor.shape
    parameters = _parameters(tensors)
    shapes = [tensors[path].shape for path in parameters]
    first = _choose_first(expected, shapes)
    last = _choose_first(expected[::-1], shapes[::-1])
    if first is None or last is None or first != [len(shapes) - 1 - at for at in reversed(last)]:
        return {}
    return dict(enumerate(_without_wrappers([join_path(parameters[at][1:]) for at in first])))


def _choose_first(expected: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """Returns the first positions, in order, of the expected shapes; None stands for any shape."""
    positions, at = [], 0
    for shape in expected:
        while at < len(shapes) and shape not in {None, shapes[at]}:
            at += 1
        if at == len(shapes):
            return None
        positions.append(at)
        at += 1
    return positions


def _parameters(tensors: Mapping[KeyPath, AssembledTensor]) -> list[KeyPath]:
    """Returns the paths of the model's distributed tensors, tied parameters once."""
    seen: set[tuple[object, ...]] = set()
    paths = []
    for path, tensor in tensors.items():
        if path[:1] != ("model",) or tensor.is_plain:
            continue
        chunks = tuple((s.chunk.record, s.chunk.byte_offset) for s in tensor.stored)
        if chunks not in seen or not chunks:
            paths.append(path)
        seen.add(chunks)
    return paths
