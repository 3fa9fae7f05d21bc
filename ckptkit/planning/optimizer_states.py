"""Which of a checkpoint's optimizers is written, and which of its states."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, KeyPath, TensorEntry, TensorIndex
from ckptkit.planning.plan import SOURCE, Copy, Product, TensorSpec
from ckptkit.planning.requests import ConsolidateRequest

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
    """

    tensors: tuple[StateTensor, ...]
    values: Mapping[KeyPath, Any]


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

    Raises:
        RefusedError: If there is no optimizer, or several that could be meant.
    """
    entries = [entry for entry in index.of_part("optimizer") if _held(entry) is not None]
    tree = _chosen({entry.tree: None for entry in entries}, model, location)
    entries = [entry for entry in entries if entry.tree == tree]
    _refuse_numbers(entries, location)
    container = _container(entries[0])
    wanted = [entry for entry in entries if _is_wanted(_inner(entry), request)]
    values = {
        path[len(container) :]: value
        for path, value in index.values.items()
        if path[: len(container)] == container and len(path) > len(container)
    }
    kept = {path: value for path, value in values.items() if _is_wanted(path, request)}
    tensors = tuple(_tensor(entry) for entry in wanted)
    return OptimizerStates(tensors, _only_wanted_members(kept, request)), wanted


def _refuse_numbers(entries: Sequence[TensorEntry], location: str) -> None:
    """Refuses an optimizer that numbers its parameters where nothing tells which they are.

    Raises:
        RefusedError: If it does.
    """
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


def _tensor(entry: TensorEntry) -> StateTensor:
    inner = _inner(entry)
    name = Fqn(".".join(map(str, (OPTIMIZER, *inner))))
    spec = TensorSpec(name, entry.dtype, entry.shape)
    return StateTensor(inner, Product(spec, Copy(SOURCE, entry.key)))


def _only_wanted_members(
    values: Mapping[KeyPath, Any], request: ConsolidateRequest
) -> dict[KeyPath, Any]:
    """Leaves parameters out of their groups whose states are left out."""
    return {
        path: _wanted_names(value, request)
        if path[0] == _GROUPS and path[-1] == _MEMBERS and isinstance(value, (list, tuple))
        else value
        for path, value in values.items()
    }


def _wanted_names(members: Sequence[Any], request: ConsolidateRequest) -> list[Any]:
    return [m for m in members if not isinstance(m, str) or request.wants(m)]
