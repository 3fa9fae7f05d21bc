"""Names of the parameters in an optimizer's states, where they can be proven.

`Optimizer.state_dict` numbers parameters in the order in which they were passed to the optimizer.
Since torch 2.6 the groups have `param_names`, if the optimizer was given names. Otherwise the order
of the model's state dict gives the names, if the shapes of the states fit it in one way only: each
group has its parameters in the order of the model, and may lack frozen ones. Torch can also flatten
states into keys such as `state.layer.weight.exp_avg`.

Source: torch/optim/optimizer.py (`state_dict`), torch/nn/modules/module.py (`state_dict`),
torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`), torch 2.1 to 2.13;
torch/distributed/checkpoint/_traverse.py, which makes the numbers texts on the way into a DCP
checkpoint, and default_planner.py, whose `planner_data` has the order of the state dict.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, FormatError
from ckptkit.core.index import Fqn, KeyPath, Shape, TensorEntry, TensorIndex
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.parsing import is_count
from ckptkit.formats.pickle.torch_values import parse_values
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.trees import classify, join_path
from ckptkit.storage.base import Source

_STATE, _GROUPS, _MEMBERS, _NAMES = "state", "param_groups", "params", "param_names"
# Buffers of torch.nn, which a state dict has among its parameters.
_BUFFERS = (".running_mean", ".running_var", ".num_batches_tracked")
_IN_ORDER = frozenset(
    {"torch", "rank-files", "dcp"}
)  # their tensors are as the state dict has them
_MAX_OPTIMIZERS = 64  # each takes a walk over all tensors
_MAX_GROUPS = 64  # of which members are read from a DCP checkpoint
_MAX_MEMBERS_BYTES = 16 << 20
NUMBERED = "numbers its parameters; they are named in the order of the model, whose shapes agree"
_MAY_DIFFER = (
    "; if it was given some of one shape in another order, leave its states out, and save with"
    " `model.named_parameters()` from now on"
)


def name_states(index: TensorIndex, source: Source) -> TensorIndex:
    """Replaces numbers of parameters in the states of optimizers by the parameters' names.

    Parameters that cannot be identified keep numbers, as integers.
    """
    index = _unflatten(index)
    numbered: dict[KeyPath, list[TensorEntry]] = defaultdict(list)
    for entry in index.of_part("optimizer"):
        container = _container(entry.key_path)
        if container is not None:
            numbered[container].append(entry)
    if len(numbered) > _MAX_OPTIMIZERS:
        return index
    models = _models(index) if index.format in _IN_ORDER else []
    for container, states in numbered.items():
        values = _read_members(index.values, container, source)
        groups = _find_groups(values, container)
        notes = index.run.notes
        names = _read_names(groups)
        if not names and _has_names(groups, states, index):
            continue
        if not names:
            fits = ((_names_by_order(groups, states, model), model) for model in models)
            fitting = [(fit, model) for fit, model in fits if fit]
            if fitting and all(fit == fitting[0][0] for fit, _ in fitting):
                names = fitting[0][0]
                text = f"{join_path(container) or 'the optimizer'} {NUMBERED}"
                is_proven = all(_is_proven(names, states, model) for _, model in fitting)
                notes = (*notes, text if is_proven else f"{text}{_MAY_DIFFER}")
        index = replace(
            index,
            tensors={key: _rename(entry, container, names) for key, entry in index.tensors.items()},
            values=_rename_values(values, container, names),
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


def _number(key: object) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key:
        return int(key)
    return key if isinstance(key, int) else None


def _container(path: KeyPath) -> KeyPath | None:
    """Returns the keys above `state` if parameters are numbered below it, else None."""
    for depth in range(len(path) - 2):
        if path[depth] == _STATE and _number(path[depth + 1]) is not None:
            return path[:depth]
    return None


def _has_names(
    groups: Mapping[int, Mapping[str, Any]], states: Sequence[TensorEntry], index: TensorIndex
) -> bool:
    """Returns whether the numbers are names, such as those of an `nn.ParameterList`."""
    members = [group[_MEMBERS] for group in groups.values() if group.get(_MEMBERS)]
    if members:
        return not any(_list_of(int, own) for own in members)
    names = {str(entry.name) for entry in index.of_part("model")}
    texts = {key for entry in states for key in entry.key_path if isinstance(key, str)}
    return any(key in names for key in texts if _number(key) is not None)


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


def _read_members(
    values: Mapping[KeyPath, Any], container: KeyPath, source: Source
) -> dict[KeyPath, Any]:
    """Reads which parameters the groups of an optimizer have, where these are objects of DCP."""
    read = dict(values)
    objects = {
        path: value
        for path, value in values.items()
        if isinstance(value, BlobRef) and _group_setting(path, container) in {_MEMBERS, _NAMES}
    }
    if len(objects) > 2 * _MAX_GROUPS:
        return read
    for path, blob in objects.items():
        where = f"{blob.path}, object {join_path(path)!r}"
        if blob.stop - blob.start <= _MAX_MEMBERS_BYTES:
            with suppress(CkptkitError):  # whoever needs it, and `verify`, report it
                archive = open_archive(*open_blob(source, blob, where=where), where=where)
                read[path] = parse_values(archive.pickle(), where=where)
    return read


def _group_setting(path: KeyPath, container: KeyPath) -> str | None:
    start = (*container, _GROUPS)
    is_setting = path[: len(start)] == start and len(path) == len(start) + 2
    return str(path[-1]) if is_setting and isinstance(path[-2], int) else None


def _find_groups(values: Mapping[KeyPath, Any], container: KeyPath) -> dict[int, dict[str, Any]]:
    """Returns the members of each group: their numbers, and possibly their names."""
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for path, value in values.items():
        kind = _group_setting(path, container)
        if kind in {_MEMBERS, _NAMES}:
            groups[int(path[-2])][str(kind)] = value
    return dict(sorted(groups.items()))


def _read_names(groups: Mapping[int, Mapping[str, Any]]) -> dict[int, Fqn]:
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
    """Returns the names of an optimizer's parameters, if only one choice of a model's fits.

    The first and the last choice with fitting shapes are equal only if there is no other one.
    Groups choose apart from each other, which is a proof where no two have a shape in common.
    """
    members = [_list_of(int, group.get(_MEMBERS)) for group in groups.values()]
    members = [own for own in members if own]
    count = sum(map(len, members))
    if [number for own in members for number in own] != list(range(count)):
        return {}
    expected: dict[int, Shape] = {}  # by states of more than one element
    for entry in states:
        number = _number(entry.key_path[-2])
        if not is_count(number, count - 1):
            return {}
        if entry.shape and expected.setdefault(number, entry.shape) != entry.shape:
            return {}
    seen: set[Shape | None] = set()
    names: dict[int, Fqn] = {}
    shapes = [entry.shape for entry in model]
    for own in members:
        wanted = [expected.get(number) for number in own]
        if len(members) > 1 and (None in wanted or not seen.isdisjoint(wanted)):
            return {}
        seen.update(wanted)
        first = _choose_first(wanted, shapes)
        last = _choose_first(wanted[::-1], shapes[::-1])
        if first is None or last is None or first != [len(model) - 1 - at for at in last[::-1]]:
            return {}
        names.update(zip(own, (model[at].name for at in first), strict=True))
    return names if expected else {}


def _is_proven(
    names: Mapping[int, Fqn], states: Sequence[TensorEntry], model: Sequence[TensorEntry]
) -> bool:
    """Returns whether shapes alone say which parameter each state is of, in any order."""
    counts = Counter(entry.shape for entry in model)
    shaped = {_number(entry.key_path[-2]) for entry in states if entry.shape}
    of_names = {entry.name: entry.shape for entry in model}
    return all(n in shaped and counts[of_names[name]] == 1 for n, name in names.items())


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


def _rename(entry: TensorEntry, container: KeyPath, names: Mapping[int, Fqn]) -> TensorEntry:
    path = _rename_path(entry.key_path, container, names)
    if entry.part != "optimizer" or path == entry.key_path:
        return entry
    return replace(entry, key_path=path, name=Fqn(join_path(path[len(container) :])))


def _rename_path(path: KeyPath, container: KeyPath, names: Mapping[int, Fqn]) -> KeyPath:
    at = len(container) + 1
    if path[:at] != (*container, _STATE) or len(path) == at:
        return path
    number = _number(path[at])
    return path if number is None else (*path[:at], names.get(number, number), *path[at + 1 :])


def _rename_values(
    values: Mapping[KeyPath, Any], container: KeyPath, names: Mapping[int, Fqn]
) -> dict[KeyPath, Any]:
    """Returns values with the numbers of parameters replaced by their names, in groups too."""
    renamed: dict[KeyPath, Any] = {}
    for path, value in values.items():
        kind = _group_setting(path, container) if names else None
        if kind == _MEMBERS:
            renamed[path] = [names.get(number, number) for number in _list_of(int, value)]
        elif kind != _NAMES:
            renamed[_rename_path(path, container, names)] = value
    return renamed
