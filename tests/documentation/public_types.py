"""The types that users meet: those in the annotations of public functions and of their results."""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any


def find_public_types(
    roots: Sequence[Any], members: Mapping[str, Sequence[str]]
) -> dict[type, str]:
    """Returns the classes of ckptkit that annotations lead to, each with where it was found.

    The annotations are those of parameters and results of functions, of fields, and of public
    methods and properties.

    Args:
        roots: Functions and classes.
        members: By the name of a class, the methods and properties that the pages show; all of
            them are shown of other classes.
    """
    found: dict[type, str] = {}
    waiting: list[type] = []

    def add(annotation: Any, where: str) -> None:
        for one in _classes_in(annotation):
            if one not in found and not issubclass(one, BaseException):
                found[one] = where
                waiting.append(one)

    for root in roots:
        if isinstance(root, type):
            add(root, root.__qualname__)
        else:
            for name, annotation in _annotations_of(root).items():
                add(annotation, f"{root.__qualname__}({name})")
    while waiting:
        owner = waiting.pop()
        if issubclass(owner, enum.Enum):
            continue
        for name, annotation in _members_of(owner, members.get(name_of(owner))):
            add(annotation, f"{owner.__qualname__}.{name}")
    return found


def name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _members_of(owner: type, shown: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yields the annotations of fields, and of parameters and results of methods."""
    for name, annotation in _annotations_of(owner).items():
        if not name.startswith("_"):
            yield name, annotation
    for base in owner.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("ckptkit") else ():
            if name.startswith("_") or (shown is not None and name not in shown):
                continue
            for annotation in _annotations_of_member(value).values():
                yield name, annotation


def _annotations_of_member(value: Any) -> dict[str, Any]:
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    inner = inner.func if isinstance(inner, functools.cached_property) else inner
    return _annotations_of(inner) if inspect.isfunction(inner) else {}


def _annotations_of(value: Any) -> dict[str, Any]:
    module = sys.modules[inspect.unwrap(value).__module__]
    if isinstance(value, type) and not module.__name__.startswith("ckptkit"):
        return {}
    names = dict(_names_of(module))
    for annotation in value.__annotations__.values() if typing.is_typeddict(value) else ():
        origin = getattr(annotation, "__forward_module__", None)  # of another TypedDict
        names |= _names_of(sys.modules[origin]) if origin else {}
    return typing.get_type_hints(value, {**vars(typing), **names, **vars(module)}, names)


@functools.cache
def _names_of(module: ModuleType) -> dict[str, Any]:
    """Returns what a module imports anywhere, also for the checker of types only."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.name.partition(".")[0]] = _import(name.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for name in node.names:
                value = getattr(_import(str(node.module)), name.name, None)
                if value is not None:
                    found[name.asname or name.name] = value
    return found


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # of an extra
        return None


def _classes_in(annotation: Any) -> Iterator[type]:
    """Yields the classes of ckptkit in an annotation, such as `X` in `Mapping[str, X] | None`."""
    for one in (annotation, typing.get_origin(annotation)):
        if isinstance(one, type) and one.__module__.startswith("ckptkit"):
            yield one
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    for part in parts:
        yield from _classes_in(part)
