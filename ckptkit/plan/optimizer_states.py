"""Which optimizer of a checkpoint is written, and which of its states and groups.

Source: torch/distributed/checkpoint/state_dict.py (`_flatten_optim_state_dict`), which flattens the
settings of a group to `param_groups.<parameter>.<setting>`, once for each of its parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Key, KeyPath, TensorEntry, TensorIndex
from ckptkit.plan.plan import SOURCE, Copy, Product, StackedPart, TensorSpec
from ckptkit.plan.selection import find_number

OPTIMIZER = "optimizer"  # its name in an output
STATE = "state"
GROUPS = "param_groups"
MEMBERS = "params"
STEP = "step"  # what an optimizer counts for each parameter, or group
# The only optimizer beside several state dicts is of the one that is trained.
_PLAIN_OPTIMIZER = re.compile(r"(.*[./])?(optim(izer)?(_?states?|_state_dict)?|opt)(_0)?")
_PLAIN_MODEL = re.compile(
    r"(.*[./])?(model|module|net|network|policy|student|actor)?(_?state_dict)?(_0)?"
)


class OptimizerStates(Struct, frozen=True):
    """An optimizer as it is written."""

    # Each with the path of its keys within the optimizer's state dict.
    tensors: tuple[tuple[KeyPath, Product], ...]
    values: Mapping[KeyPath, Any]  # its other values, by path; they may be no plain values
    # The names in the output of parameters whose names in training had wrapper segments, by those
    # names.
    unwrapped: Mapping[str, str]
    # Where tensors are in stacked ones, as for the weights; by their names.
    parts: Mapping[Fqn, StackedPart] = field(default_factory=dict)


def select_optimizer_states(
    index: TensorIndex, model: str, wants: Callable[[str], bool], *, location: str
) -> tuple[OptimizerStates, list[TensorEntry]]:
    """Selects the states of the optimizer of a model.

    `index`: the index of the checkpoint. `model`: the state dict of the model, as `--select` names
    it. `wants`: whether a parameter is wanted. Returns the states, and the entries of the tensors
    in them.
    """
    found = [(entry, _find_path(entry)) for entry in index.of_part("optimizer")]
    own_paths = {entry.key: path for entry, path in found if path is not None}
    entries = [entry for entry, path in found if path is not None]
    reasons = [note for note in index.run.notes if "optimizer states" in note]
    models = {entry.tree: None for entry in index.of_part("model")}
    trees = {entry.tree: None for entry in entries}
    tree = _choose_tree(trees, model, models, location, reasons)
    entries = [entry for entry in entries if entry.tree == tree]
    _refuse_numbers(entries, own_paths, location)
    first = entries[0].key_path
    container = first[: len(first) - len(own_paths[entries[0].key])]
    unwrapped = _find_unwrapped(index, model)
    paths = {entry.key: _rename(own_paths[entry.key], unwrapped) for entry in entries}
    if len(set(paths.values())) < len(paths):
        twice, _ = Counter(paths.values()).most_common(1)[0]
        raise RefusedError(
            f"two states are both named {'.'.join(map(str, twice))!r}",
            where=f"optimizer of {location}",
            hint="names must stay distinct when wrapper segments are cut out; leave --optimizer"
            " out",
        )
    wanted = [entry for entry in entries if _is_wanted(paths[entry.key], wants)]
    values = {
        _rename(path[len(container) :], unwrapped): value
        for path, value in index.values.items()
        if path[: len(container)] == container and len(path) > len(container)
    }
    values = _join_members(values)
    values = {path: value for path, value in values.items() if _is_wanted(path, wants)}
    tensors = []
    for entry in wanted:
        path = paths[entry.key]
        spec = TensorSpec(_name_of(path), entry.dtype, entry.shape)
        tensors.append((path, Product(spec, Copy(SOURCE, entry.key))))
    return OptimizerStates(tuple(tensors), values, unwrapped), wanted


def _find_unwrapped(index: TensorIndex, model: str) -> dict[str, str]:
    """Finds parameters whose names in training had wrapper segments, as in FSDP1's optimizers.

    Source: torch/distributed/fsdp/_optim_utils.py (`clean_tensor_name` leaves `_orig_mod`).
    """
    unwrapped: dict[str, str] = {}
    for entry in index.of_part("model"):
        # A map's name may look so too: `mlp.router.gate` becomes `mlp.gate`.
        saved, name = str(entry.key_path[-1]), str((*entry.stored_names, entry.name)[0])
        segments = iter(saved.split("."))
        is_within = all(segment in segments for segment in name.split("."))  # in that order
        if entry.tree == model and saved != name and is_within:
            unwrapped[saved] = name
    return unwrapped


def _rename(path: KeyPath, unwrapped: Mapping[str, str]) -> KeyPath:
    if path[0] != STATE or len(path) == 1:
        return path
    return (path[0], unwrapped.get(str(path[1]), path[1]), *path[2:])


def _refuse_numbers(
    entries: Sequence[TensorEntry], own_paths: Mapping[Key, KeyPath], location: str
) -> None:
    """Refuses an optimizer whose states have numbers instead of the names of parameters."""
    paths = ((entry, own_paths[entry.key]) for entry in entries)
    numbered = next(
        (e for e, p in paths if p[0] == STATE and len(p) > 1 and isinstance(p[1], int)), None
    )
    if numbered is not None:
        raise RefusedError(
            f"state {numbered.name!r} is of a parameter that has a number and no name, and nothing"
            " proves which parameter of the model that is",
            where=f"optimizer of {location}",
            hint="leave --optimizer out; runs that make their optimizer from"
            " `model.named_parameters()`, or save with `get_optimizer_state_dict`, keep the names",
        )


def _choose_tree(
    trees: Mapping[str, None],
    model: str,
    models: Collection[str],
    location: str,
    reasons: Sequence[str],
) -> str:
    if not trees:
        raise RefusedError(
            ": ".join(["holds no states of an optimizer", *reasons[:1]]),
            where=f"optimizer of {location}",
            hint="leave --optimizer out, or name the step that has them",
        )
    above = model.rpartition(".")[0]
    beside = [tree for tree in trees if above and tree.rpartition(".")[0] == above]
    if len(beside) == 1:  # `student.optimizer` beside `student.model`
        return beside[0]
    if len(trees) == 1:
        (tree,) = trees
        if len(models) <= 1 or (_PLAIN_OPTIMIZER.fullmatch(tree) and _PLAIN_MODEL.fullmatch(model)):
            return tree
        raise RefusedError(
            f"nothing says that optimizer {tree!r} is of model {model!r}, beside"
            f" {', '.join(repr(other) for other in models if other != model)}",
            where=f"optimizer of {location}",
            hint="leave --optimizer out, or name the model that it is of with --select",
        )
    fitting = [tree for tree in trees if find_number(tree) == find_number(model)]
    if len(fitting) == 1 and len(models) > 1:
        return fitting[0]
    raise RefusedError(
        f"holds several optimizers: {', '.join(map(repr, trees))}",
        where=f"optimizer of {location}",
        hint="name the model with --select, or give the folder of one model and its optimizer; the"
        " states of several optimizers of one model are not joined",
    )


def _find_path(entry: TensorEntry) -> KeyPath | None:
    """Returns the path within the optimizer's state dict, or None where the keys hide it."""
    path = entry.key_path
    for first in range(1, len(path)):
        if ".".join(map(str, path[first:])) == entry.name:
            return path[first:]
    return None


def _is_wanted(path: KeyPath, wants: Callable[[str], bool]) -> bool:
    return path[0] != STATE or len(path) == 1 or wants(str(path[1]))


def _join_members(values: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Joins the members of groups to lists where they are stored one by one."""
    joined: dict[KeyPath, Any] = {}
    single: dict[KeyPath, dict[int, Any]] = {}
    for path, value in values.items():
        *above, last = path
        if path[0] == GROUPS and above[-1:] == [MEMBERS] and isinstance(last, int):
            single.setdefault(tuple(above), {})[last] = value
        else:
            joined[path] = value
    for path, members in single.items():
        joined[path] = [members[position] for position in sorted(members)]
    return joined


def keep_states(states: OptimizerStates, names: Collection[str]) -> OptimizerStates:
    """Leaves out the states of all parameters but some, and the others of their groups."""

    def is_kept(path: KeyPath) -> bool:
        return path[0] != STATE or len(path) == 1 or str(path[1]) in names

    values = {path: value for path, value in states.values.items() if is_kept(path)}
    for path, value in values.items():
        if path[0] == GROUPS and path[-1] == MEMBERS:
            values[path] = [name for name in value if name in names]
    tensors = tuple(item for item in states.tensors if is_kept(item[0]))
    return replace(states, tensors=tensors, values=values)


def give_to_twins(states: OptimizerStates, twins: Mapping[str, str]) -> OptimizerStates:
    """Gives the states of parameters to the tied weights that are written in their places.

    `twins`: from the parameters to these, of which none has a state.
    """

    def renamed(path: KeyPath) -> KeyPath:
        return _rename(path, twins)

    tensors = tuple(
        (path, product)
        if renamed(path) == path
        else (
            renamed(path),
            replace(product, spec=replace(product.spec, name=_name_of(renamed(path)))),
        )
        for path, product in states.tensors
    )
    values = {renamed(path): value for path, value in states.values.items()}
    for path, value in values.items():
        if path[0] == GROUPS and path[-1] == MEMBERS and isinstance(value, (list, tuple)):
            values[path] = [twins.get(m, m) if isinstance(m, str) else m for m in value]
    return replace(states, tensors=tensors, values=values)


def _name_of(path: KeyPath) -> Fqn:
    return Fqn(".".join(map(str, (OPTIMIZER, *path))))


def drop_unwanted_members(
    values: Mapping[KeyPath, Any], unwrapped: Mapping[str, str], wants: Callable[[str], bool]
) -> dict[KeyPath, Any]:
    """Removes from their groups the parameters whose states are left out.

    `values`: plain values of an optimizer, by path. `wants`: whether a parameter is wanted.
    """
    kept = dict(values)
    for path, value in values.items():
        if path[0] == GROUPS and path[-1] == MEMBERS and isinstance(value, (list, tuple)):
            names = [unwrapped.get(m, m) if isinstance(m, str) else m for m in value]
            kept[path] = [m for m in names if not isinstance(m, str) or wants(m)]
    return kept


Settings = dict[KeyPath, Any]


def restore_groups(
    values: Mapping[KeyPath, Any], wants: Callable[[str], bool]
) -> dict[KeyPath, Any]:
    """Restores flattened groups: parameters with the same settings are one group.

    `values`: plain values of an optimizer's state dict, by path. `wants`: whether a parameter is
    wanted. Returns the values; those of flattened groups under `param_groups`, number and setting,
    with the names of the members under `params`.
    """
    kept: dict[KeyPath, Any] = {}
    settings: dict[str, Settings] = {}
    for path, value in values.items():
        # A flattened key is `param_groups.<parameter>.<setting>`.
        start, _, rest = str(path[0]).partition(".")
        name, _, kind = rest.rpartition(".")
        if start != GROUPS or not name:
            kept[path] = value
        elif wants(name):
            settings.setdefault(name, {})[kind, *path[1:]] = value
    groups: dict[str, tuple[Settings, list[str]]] = {}
    for name, own in settings.items():
        groups.setdefault(repr(sorted(own.items(), key=repr)), (own, []))[1].append(name)
    for number, (shared, members) in enumerate(groups.values()):
        kept |= {(GROUPS, number, *path): value for path, value in shared.items()}
        kept[GROUPS, number, MEMBERS] = members
    return kept


def list_groups(states: OptimizerStates) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer, each with its members and settings."""
    groups: dict[Any, dict[str, Any]] = {}
    for path, value in states.values.items():
        if path[0] == GROUPS and path[2:]:
            groups.setdefault(path[1], {})[str(path[2])] = value
    return [groups[number] for number in sorted(groups)]
