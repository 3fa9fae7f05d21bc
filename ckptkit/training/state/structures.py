"""The structure of nested values, where their leaves in a DCP directory do not show it.

DCP stores the leaves of mappings and lists under keys that are texts: the key 1 becomes "1", an
empty mapping has no leaf, a `Counter` becomes a plain mapping. Where the value does not follow
from the leaves alone, a step has its structure as well, in `ckptkit/values_rank_R.bin`: a table of
nodes, the value itself first, each naming its children by their positions in the table:

    ("dict" | "OrderedDict" | "Counter", ((key, child), ...))
    ("defaultdict", ((key, child), ...), name of the factory)
    ("list", (child, ...))
    ("leaf", path)                  # the rest of the leaf's key path
    ("parameter", path, trained)    # a tensor that is an `nn.Parameter`

The keys that stock tools read are the same with and without it.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptkit.core.errors import FormatError, UnsupportedError, UsageError
from ckptkit.core.index import KeyPath
from ckptkit.core.text import a_kind
from ckptkit.training.save.file_layout import check_storable
from ckptkit.training.state.dtensors import DTensor, local_part
from ckptkit.training.state.objects import (
    FACTORIES,
    check_nesting,
    flatten,
    holds_more,
    is_sound,
    make_object,
    serialise_or_refuse,
    step_of,
)
from ckptkit.training.state.pieces import ObjectValue, Piece, ShardLayout

Nodes = Sequence[tuple[Any, ...]]
VERSION = 1
"""Of the tables; steps of older versions have none."""

_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}  # and defaultdict
_TENSORS = frozenset((torch.Tensor, nn.Parameter, DTensor))
_SIMPLE = frozenset((torch.Tensor, DTensor, bool, int, float, str, type(None)))
_KEYS = frozenset((bool, int, float, type(None)))


Structure = tuple[str, KeyPath, Nodes]
"""The DCP directory of a value, what the key paths of its leaves begin with, and the table."""
Leaf = tuple[KeyPath, Any, str]
"""The rest of a leaf's key path, the leaf, and its path in the user's state, for messages."""


def take_apart(
    value: object, where: str, *, any_tensor: bool = False, taken: Collection[str] = ()
) -> tuple[list[Leaf], Nodes | None]:
    """Returns the leaves of a value, and its structure where it does not follow from them.

    With `any_tensor`, tensors may be of classes of their own. `taken` has names on the first level
    that belong to something else.
    """
    if (  # a mapping as most optimizers have it, whose leaves show all of it
        any_tensor
        and type(value) is dict
        and value
        and all(type(key) is str and key.isascii() for key in value)
        and all(type(item) in _SIMPLE for item in value.values())
    ):
        return [((k,), v, where + step_of(k)) for k, v in value.items()], None
    check_nesting(value, where)
    table = _TableBuilder(any_tensor=any_tensor)
    table.add(value, (), where, frozenset(taken))
    return table.leaves, None if table.is_implied else tuple(table.nodes)


class Collected:
    """What a walk over a part of the state has collected on this rank."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.objects: list[ObjectValue] = []  # that this rank has to write
        self.structures: list[Structure] = []  # where these do not follow from their leaves

    def add(self, other: Collected) -> None:
        self.pieces += other.pieces
        self.objects += other.objects
        self.structures += other.structures

    def take(
        self,
        unit: str,
        path: KeyPath,
        value: object,
        where: str,
        layout_of: Callable[[str, torch.Tensor], ShardLayout],
        *,
        writes: bool,
        taken: Collection[str] = (),
    ) -> None:
        """Adds a nested value, its tensors as `layout_of` says where they belong.

        With `writes`, this rank is the one that writes what is no tensor.
        """
        leaves, nodes = take_apart(value, where, taken=taken)
        if nodes is not None and writes:
            self.structures.append((unit, path, nodes))
        for rest, leaf, inner in leaves:
            key_path = (*path, *rest)
            if isinstance(leaf, torch.Tensor):
                layout = layout_of(".".join(map(str, key_path)), leaf)
                self.pieces += layout.pieces(unit, key_path, local_part(leaf))
            elif writes:
                self.objects.append(make_object(unit, key_path, leaf, inner))


class _TableBuilder:
    """Collects the leaves of a value and the table of its nodes."""

    def __init__(self, *, any_tensor: bool) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self.leaves: list[Leaf] = []
        self.is_implied = True  # by the leaves alone
        self._any_tensor = any_tensor
        self._keys: set[str] = set()

    def add(self, value: Any, path: KeyPath, where: str, taken: frozenset[str]) -> int:
        number = len(self.nodes)
        self.nodes.append(())
        if path and isinstance(path[-1], int) and _leaves_nothing(value):
            # Stock readers fail at a list where a member has no key.
            self.nodes[number] = self._leaf(value, path, where)
        elif isinstance(value, Mapping):
            self.nodes[number] = self._mapping(value, path, where, taken)
        elif isinstance(value, list) and holds_more(value):
            self.nodes[number] = self._list(value, path, where)
        else:
            self.nodes[number] = self._leaf(value, path, where)
        return number

    def _mapping(
        self, value: Mapping[Any, Any], path: KeyPath, where: str, taken: frozenset[str]
    ) -> tuple[Any, ...]:
        kind = type(value).__name__
        if type(value) is not _MAPPINGS.get(kind, defaultdict):
            raise UsageError(
                f"{a_kind(value)} was found, which a resume cannot make",
                where=where,
                hint="save dict(…) of it",
            )
        self.is_implied = self.is_implied and kind == "dict" and bool(value)
        used, items = set(taken), []
        for key, item in value.items():
            inner = where + step_of(key)
            if not (type(key) in _KEYS or type(key) is str) or not is_sound(key):
                serialise_or_refuse(key, inner)  # refuses what would not come back equal
            name, number = str(key), 1  # a text that no other key of the mapping has
            while name in used:
                number += 1
                name = f"{key}~{number}"
            used.add(name)
            self.is_implied = self.is_implied and type(key) is str and name == key
            items.append((key, self.add(item, (*path, name), inner, frozenset())))
        if not isinstance(value, defaultdict):
            return kind, tuple(items)
        return kind, tuple(items), _name_of_factory(value.default_factory, where)

    def _list(self, value: list[Any], path: KeyPath, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise UsageError(
                f"{a_kind(value)} was found, which a resume cannot make",
                where=where,
                hint="save list(…) of it",
            )
        children = [
            self.add(item, (*path, number), f"{where}[{number}]", frozenset())
            for number, item in enumerate(value)
        ]
        return "list", tuple(children)

    def _leaf(self, value: Any, path: KeyPath, where: str) -> tuple[Any, ...]:
        free, number = path, 1
        while (key := ".".join(map(str, free))) in self._keys:  # another end is spelled alike
            number += 1
            free = (*path[:-1], f"{path[-1]}~{number}")
        self._keys.add(key)
        self.is_implied = self.is_implied and free == path
        self.leaves.append((free, value, where))
        if isinstance(value, torch.Tensor):
            if not self._any_tensor and type(value) not in _TENSORS:
                raise UsageError(
                    f"{a_kind(value)} was found where a plain tensor was expected",
                    where=where,
                    hint="save the plain tensors that it contains",
                )
            if type(value) in {torch.Tensor, nn.Parameter}:
                try:
                    check_storable(value, where)
                except UnsupportedError as error:
                    raise UsageError(error.message, where=error.where, hint=error.hint) from error
            if type(value) is nn.Parameter:
                self.is_implied = False
                return "parameter", free, value.requires_grad
        return "leaf", free


def _name_of_factory(factory: Callable[[], Any] | None, where: str) -> str | None:
    if factory is None:
        return None
    for name, candidate in FACTORIES.items():
        if candidate is factory:
            return name
    raise UsageError(
        "a defaultdict was found of a factory that a resume cannot make",
        where=f"{where}.default_factory",
        hint=f"use one of {', '.join(FACTORIES)}, or save dict(…) of it",
    )


def tables_of(structures: Iterable[Structure]) -> dict[str, Any]:
    return {"version": VERSION, "structures": list(structures)}


def parse_structures(document: Any, *, where: str) -> list[Structure]:
    try:
        version = document["version"]
        structures: list[Structure] = [
            (str(unit), tuple(path), tuple(map(tuple, nodes)))
            for unit, path, nodes in document["structures"]
        ]
    except (TypeError, ValueError, LookupError) as error:
        message = f"holds no structures of values: {type(error).__name__}: {error}"
        raise FormatError(message, where=where) from error
    if version != VERSION:
        raise FormatError(
            f"structures of version {version!r:.20} were found where {VERSION} was expected",
            where=where,
            hint="resume with the version of ckptkit that saved the step, or a newer one",
        )
    return structures


def leaves_by_key(nodes: Nodes, where: str) -> dict[Any, KeyPath]:
    """Returns the paths of those values of a mapping that are leaves, by their keys."""
    try:
        kind, items = nodes[0][:2]
        if kind in {"list", "leaf", "parameter"}:
            return {}
        return {
            key: _checked_path(nodes[child][1])
            for key, child in items
            if nodes[child][0] in {"leaf", "parameter"}
        }
    except (TypeError, ValueError, LookupError) as error:
        raise FormatError(f"the structure of a value is damaged: {error}", where=where) from error


def leaf_paths(nodes: Nodes, where: str) -> list[KeyPath]:
    try:
        return [_checked_path(node[1]) for node in nodes if node[0] in {"leaf", "parameter"}]
    except (TypeError, ValueError, LookupError) as error:
        raise FormatError(f"the structure of a value is damaged: {error}", where=where) from error


def _checked_path(path: Iterable[Any]) -> KeyPath:
    checked = tuple(path)
    if not all(isinstance(key, str | int) for key in checked):
        raise ValueError(f"{checked!r:.100} is no path of keys")
    return checked


def assemble(nodes: Nodes | None, leaves: Mapping[KeyPath, Any], where: str) -> Any:
    """Returns the value that was taken apart.

    `nodes` is None where the structure follows from the leaves alone.
    """
    if nodes is None:
        return _nest(leaves)
    try:
        return _made(0, dict(enumerate(nodes)), leaves)
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        message = f"the structure of a value is damaged: {type(error).__name__}: {error}"
        raise FormatError(message, where=where) from error


def _made(number: int, left: dict[int, tuple[Any, ...]], leaves: Mapping[KeyPath, Any]) -> Any:
    """Returns the value of a node; each is used once, since a table may be damaged."""
    match left.pop(number):
        case ("defaultdict", items, factory):
            value: Any = defaultdict(None if factory is None else FACTORIES[factory])
        case ("dict" | "OrderedDict" | "Counter" as kind, items):
            value = _MAPPINGS[kind]()
        case ("list", children):
            return [_made(child, left, leaves) for child in children]
        case ("parameter", path, trained):
            return nn.Parameter(leaves[tuple(path)], requires_grad=bool(trained))
        case ("leaf", path):
            return leaves[tuple(path)]
        case node:
            raise ValueError(f"no node of a structure: {node!r:.100}")
    for key, child in items:
        value[key] = _made(child, left, leaves)
    return value


def _nest(leaves: Mapping[KeyPath, Any]) -> Any:
    """Returns the mappings and lists that the paths of leaves imply: numbers are positions."""
    if () in leaves:
        return leaves[()]
    parts: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in leaves.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    values = {name: _nest(inner) for name, inner in parts.items()}
    if not values or any(isinstance(name, str) for name in values):
        return values
    most = max(int(name) for name in values)
    # Other tools store nothing of an empty mapping in a list.
    return [values.get(number) for number in range(most + 1)] if most < _MOST_ITEMS else values


_MOST_ITEMS = 1 << 24


def adapt(value: Any, live: Any) -> Any:
    """Returns a value that was saved without its structure, with the types of a live value.

    Keys get the types of the live keys, mappings their classes. Values without a leaf, such as
    empty mappings, are taken from the live value. `live` does not contain itself.
    """
    if isinstance(live, Mapping) and isinstance(value, dict):
        return _adapt_mapping(value, live)
    if isinstance(live, list) and isinstance(value, list):
        items = [adapt(*pair) for pair in zip(value, live, strict=False)]
        rest = live[len(value) :]
        items += value[len(live) :]
        if all(_leaves_nothing(item) for item in rest):
            items += copy.deepcopy(rest)
        return items
    return copy.deepcopy(live) if value is None and _leaves_nothing(live) else value


def _adapt_mapping(value: dict[Any, Any], live: Mapping[Any, Any]) -> dict[Any, Any]:
    own = {str(key): key for key in live}
    kinds = {type(key) for key in live}
    adapted: Any = {}
    if isinstance(live, defaultdict):
        adapted = defaultdict(live.default_factory)
    elif type(live) in _MAPPINGS.values():
        adapted = type(live)()
    for name, item in value.items():
        key = own[name] if name in own else _typed(name, kinds)
        adapted[key] = adapt(item, live.get(key))
    for key, item in live.items():
        if key not in adapted and _leaves_nothing(item):
            adapted[key] = copy.deepcopy(item)
    return adapted  # type: ignore[no-any-return]


def _typed(name: Any, kinds: set[type]) -> Any:
    """Returns a text as the number that it spells, where all live keys are such numbers."""
    if not isinstance(name, str) or len(kinds) != 1:
        return name
    (kind,) = kinds
    if kind in {int, float}:
        try:
            number = kind(name)
        except ValueError:
            return name
        return number if str(number) == name else name
    words = {"True": True, "False": False} if kind is bool else {}
    return words.get(name, name)


def _leaves_nothing(value: Any) -> bool:
    return isinstance(value, Mapping | list) and next(flatten(value), None) is None
