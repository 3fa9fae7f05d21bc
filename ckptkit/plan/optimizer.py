"""Which of a checkpoint's optimizers is written, and which of its states.

The groups of an optimizer whose settings torch wrote down parameter by parameter.

Source: torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`): the settings of
a group stand under `param_groups.<parameter>.<setting>`, once for each of its parameters.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, KeyPath, TensorEntry, TensorIndex
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.plan import SOURCE, Copy, Product, TensorSpec

OPTIMIZER = "optimizer"  # what an output calls it
_STATE = "state"
_GROUPS = "param_groups"
_MEMBERS = "params"
_NUMBER = re.compile(r".*_(\d{1,7})")


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of an optimizer.

    Attributes:
        path: Of keys within the optimizer's state dict.
        product: How it is written.
    """

    path: KeyPath
    product: Product


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """An optimizer as it is written.

    Attributes:
        tensors: Its tensors.
        values: What else it has, by path; not yet known to be plain.
        unwrapped: The names that the model has in the output, by those that it had in training
            where wrapper segments were in them.
    """

    tensors: tuple[StateTensor, ...]
    values: Mapping[KeyPath, Any]
    unwrapped: Mapping[str, str]


def optimizer_states(
    index: TensorIndex, model: str, request: ConsolidateRequest, *, location: str
) -> tuple[OptimizerStates, list[TensorEntry]]:
    """Selects the states of the optimizer of a model.

    Args:
        index: What the checkpoint holds.
        model: The state dict of the model, as `--select` names it.
        request: Says which parameters are wanted.
        location: The checkpoint, for messages.

    Returns:
        The states, and the entries of the tensors in them.
    """
    entries = [entry for entry in index.of_part("optimizer") if _held(entry) is not None]
    tree = _chosen({entry.tree: None for entry in entries}, model, location)
    entries = [entry for entry in entries if entry.tree == tree]
    _refuse_numbers(entries, location)
    container = _container(entries[0])
    unwrapped = _unwrapped(index, model)
    placed = {entry.key: _renamed(_inner(entry), unwrapped) for entry in entries}
    _refuse_collisions(placed.values(), location)
    wanted = [entry for entry in entries if _is_wanted(placed[entry.key], request)]
    values = {
        _renamed(path[len(container) :], unwrapped): value
        for path, value in index.values.items()
        if path[: len(container)] == container and len(path) > len(container)
    }
    values = _with_whole_members(values)
    kept = {path: value for path, value in values.items() if _is_wanted(path, request)}
    tensors = tuple(_tensor(entry, placed[entry.key]) for entry in wanted)
    return OptimizerStates(tensors, kept, unwrapped), wanted


def _unwrapped(index: TensorIndex, model: str) -> dict[str, str]:
    """Finds the parameters that training knew under longer names, as FSDP1's optimizers do.

    Source: torch/distributed/fsdp/_optim_utils.py (`clean_tensor_name` leaves `_orig_mod`).
    """
    found = {}
    for entry in index.of_part("model"):
        saved, name = str(entry.key_path[-1]), str(entry.name)
        if entry.tree == model and saved != name and _is_within(name, saved):
            found[saved] = name
    return found


def _is_within(name: str, saved: str) -> bool:
    """Tells whether a name is another one without some of its segments."""
    segments = iter(saved.split("."))
    return all(segment in segments for segment in name.split("."))


def _renamed(path: KeyPath, unwrapped: Mapping[str, str]) -> KeyPath:
    if path[0] != _STATE or len(path) == 1:
        return path
    return (path[0], unwrapped.get(str(path[1]), path[1]), *path[2:])


def _refuse_collisions(paths: Collection[KeyPath], location: str) -> None:
    """Refuses states of two parameters whose names differ by wrapper segments alone."""
    if len(set(paths)) == len(paths):
        return
    twice, _ = Counter(paths).most_common(1)[0]
    raise RefusedError(
        f"two states are both named {'.'.join(map(str, twice))!r}",
        where=f"--optimizer {location}",
        hint="names must stay distinct when wrapper segments are cut out; leave --optimizer out",
    )


def _refuse_numbers(entries: Sequence[TensorEntry], location: str) -> None:
    """Refuses an optimizer that numbers its parameters where nothing tells which they are."""
    numbered = next((e for e in entries if _is_numbered(_inner(e))), None)
    if numbered is not None:
        raise RefusedError(
            f"state {numbered.name!r} is of a parameter that has a number and no name, and nothing"
            " proves which parameter of the model that is",
            where=f"--optimizer {location}",
            hint="leave --optimizer out; runs that make their optimizer from"
            " `model.named_parameters()`, or save with `get_optimizer_state_dict`, keep the names",
        )


def _is_numbered(path: KeyPath) -> bool:
    return path[0] == _STATE and len(path) > 1 and isinstance(path[1], int)


def _chosen(trees: Mapping[str, None], model: str, location: str) -> str:
    if not trees:
        raise RefusedError(
            "holds no states of an optimizer",
            where=f"--optimizer {location}",
            hint="leave --optimizer out, or name the step that has them",
        )
    if len(trees) == 1:
        return next(iter(trees))
    fitting = [tree for tree in trees if _number(tree) == _number(model)]
    if len(fitting) == 1:
        return fitting[0]
    raise RefusedError(
        f"holds several optimizers: {', '.join(map(repr, trees))}",
        where=f"--optimizer {location}",
        hint="name the model with --select, or give the folder of one model and its optimizer",
    )


def _number(tree: str) -> int:
    """Returns the number of a model or an optimizer among those of a save; the first is 0."""
    match = _NUMBER.fullmatch(posixpath.basename(tree).partition(".")[0])
    return int(match[1]) if match else 0


def _held(entry: TensorEntry) -> KeyPath | None:
    """Returns the path within the optimizer's state dict, or None where the keys hide it."""
    path = entry.key_path
    for first in range(1, len(path)):
        if ".".join(map(str, path[first:])) == entry.name:
            return path[first:]
    return None


def _inner(entry: TensorEntry) -> KeyPath:
    return _held(entry) or ()


def _container(entry: TensorEntry) -> KeyPath:
    return entry.key_path[: len(entry.key_path) - len(_inner(entry))]


def _is_wanted(path: KeyPath, request: ConsolidateRequest) -> bool:
    return path[0] != _STATE or len(path) == 1 or request.wants(str(path[1]))


def _tensor(entry: TensorEntry, inner: KeyPath) -> StateTensor:
    name = Fqn(".".join(map(str, (OPTIMIZER, *inner))))
    spec = TensorSpec(name, entry.dtype, entry.shape)
    return StateTensor(inner, Product(spec, Copy(SOURCE, entry.key)))


def _with_whole_members(values: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Puts the members of groups into lists again where they are kept one by one."""
    made: dict[KeyPath, Any] = {}
    single: dict[KeyPath, dict[int, Any]] = {}
    for path, value in values.items():
        *above, last = path
        if path[0] == _GROUPS and above[-1:] == [_MEMBERS] and isinstance(last, int):
            single.setdefault(tuple(above), {})[last] = value
        else:
            made[path] = value
    return made | {path: [one[at] for at in sorted(one)] for path, one in single.items()}


def only_wanted_members(
    values: Mapping[KeyPath, Any], unwrapped: Mapping[str, str], request: ConsolidateRequest
) -> dict[KeyPath, Any]:
    """Leaves parameters out of their groups whose states are left out.

    Args:
        values: Plain values of an optimizer, by path.
        unwrapped: The names of parameters in the output, where training had others.
        request: Says which parameters are wanted.
    """
    return {
        path: _wanted_names(value, unwrapped, request)
        if path[0] == _GROUPS and path[-1] == _MEMBERS and isinstance(value, (list, tuple))
        else value
        for path, value in values.items()
    }


def _wanted_names(
    members: Sequence[Any], unwrapped: Mapping[str, str], request: ConsolidateRequest
) -> list[Any]:
    named = [unwrapped.get(m, m) if isinstance(m, str) else m for m in members]
    return [m for m in named if not isinstance(m, str) or request.wants(m)]


_FLAT_GROUPS, _FLAT_MEMBERS = "param_groups", "params"
Settings = dict[KeyPath, Any]


def with_groups(values: Mapping[KeyPath, Any], wants: Callable[[str], bool]) -> dict[KeyPath, Any]:
    """Puts parameters whose settings are the same into one group, as they were.

    Args:
        values: Plain values of an optimizer's state dict, by path.
        wants: Tells which parameters are wanted.

    Returns:
        The values; those of flattened groups under `param_groups`, number and setting, with the
        names of the members under `params`.
    """
    kept: dict[KeyPath, Any] = {}
    settings: dict[str, Settings] = {}
    for path, value in values.items():
        name, kind = _parts(path[0])
        if not name:
            kept[path] = value
        elif wants(name):
            settings.setdefault(name, {})[kind, *path[1:]] = value
    groups: dict[str, tuple[Settings, list[str]]] = {}
    for name, found in settings.items():
        groups.setdefault(repr(sorted(found.items(), key=repr)), (found, []))[1].append(name)
    for number, (found, members) in enumerate(groups.values()):
        kept |= {(_FLAT_GROUPS, number, *path): value for path, value in found.items()}
        kept[_FLAT_GROUPS, number, _FLAT_MEMBERS] = members
    return kept


def _parts(key: str | int) -> tuple[str, str]:
    """Returns the parameter and the setting that a flattened key names, or two empty texts."""
    start = f"{_FLAT_GROUPS}."
    if not isinstance(key, str) or not key.startswith(start):
        return "", ""
    name, _, kind = key.removeprefix(start).rpartition(".")
    return name, kind
