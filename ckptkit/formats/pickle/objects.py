"""Objects beside the weights: which values are some, which hold tensors, and the note on them.

Users keep configurations, loss functions, enums and whole modules in checkpoints. The parser keeps
their parts, and nothing reads them; a tensor that is wanted and is only in one is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

from ckptkit.core.errors import UnsafePickleError
from ckptkit.core.frameworks import WRAPPERS
from ckptkit.core.index import KeyPath
from ckptkit.core.text import counted, join_first, make_printable, quote
from ckptkit.formats.pickle.machine import Global, InertDict, InertKey, InertObject, class_of
from ckptkit.formats.pickle.torch_values import (
    VALUE_CLASSES,
    StorageRef,
    TensorRef,
    UnreadTensor,
    tensor_of_class,
)

_SHOWN = 8
_SHOWN_CHARACTERS = 100
# Packages whose classes and functions are plain settings where they are only named.
_LIBRARIES = frozenset({"builtins", "__builtin__", "collections", "numpy", "torch", "typing"})
# The state of every pickled `torch.nn.Module` has these keys.
_MODULE_MARKS = frozenset({"_parameters", "_buffers", "_modules", "training"})

_TENSORS = (TensorRef, UnreadTensor)
_MADE_OF = (*_TENSORS, StorageRef)
_MOST_ARGUMENTS = 16  # of what makes a tensor
_CONTAINERS = (InertObject, InertKey, dict, list, tuple)


def is_object(value: object) -> TypeGuard[InertObject | Global]:
    """Returns whether a value is an object, a class or a function of other code."""
    if isinstance(value, InertObject):
        return (value.cls.module, value.cls.name) not in VALUE_CLASSES
    return isinstance(value, Global) and value.module.partition(".")[0] not in _LIBRARIES


def is_array(value: InertObject) -> bool:
    is_of_numpy = value.cls.module.partition(".")[0] == "numpy"
    return is_of_numpy and value.cls.name in {"_reconstruct", "_frombuffer"}


def find_unread(value: object) -> UnreadTensor | None:
    """Returns the tensor that a value is, of a class or in a form that is not modelled."""
    if isinstance(value, UnreadTensor):
        return value
    if isinstance(value, InertObject) and any(
        isinstance(arg, _MADE_OF) for arg in value.args[:_MOST_ARGUMENTS]
    ):
        return tensor_of_class(class_of(value))
    return None


def is_holder(value: object, kinds: tuple[type, ...] = _TENSORS) -> TypeGuard[InertObject]:
    """Returns whether a value is an object, such as a set, that holds tensors."""
    return isinstance(value, InertObject) and id(value) in find_holders([value], kinds)


def find_holders(values: Iterable[object], kinds: tuple[type, ...] = _TENSORS) -> set[int]:
    """Returns which values hold tensors, by their `id`, in time linear in all that they hold."""
    parents: dict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    waiting, holders = list(values), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for part in _parts(value):
            if isinstance(part, kinds):
                holders.append(id(value))
            elif isinstance(part, _CONTAINERS):
                parents[id(part)].append(id(value))
                waiting.append(part)
    found: set[int] = set()
    while holders:
        holder = holders.pop()
        if holder not in found:
            found.add(holder)
            holders += parents.get(holder, ())
    return found


def _count_tensors(value: object) -> int:
    seen: set[int] = set()
    waiting, count = [value], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, _TENSORS + _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            count += isinstance(value, _TENSORS)
            waiting += _parts(value)
    return count


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, InertObject):
        yield from (value.args, value.state, value.items)
    elif isinstance(value, InertKey):
        yield value.value
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
        if isinstance(value, InertDict):
            yield value.attributes
    elif isinstance(value, list | tuple):
        yield from value


def describe_objects(
    objects: Mapping[KeyPath, InertObject | UnreadTensor | Global],
) -> tuple[str, ...]:
    """Returns a note on objects, by the path of keys to each; none if there are none."""
    if not objects:
        return ()
    lines = (
        f"{_printable('.'.join(map(str, path)))} ({_describe(value)})"
        for path, value in objects.items()
    )
    listed = join_first(lines, len(objects), _SHOWN)
    return (f"left out, since they are objects of other code: {listed}",)


def _describe(value: InertObject | UnreadTensor | Global) -> str:
    if isinstance(value, UnreadTensor):
        return _printable(f"tensor that is {value.kind}")
    cls = class_of(value)
    count = _count_tensors(value)
    verb = "is" if count == 1 else "are"
    held = f", holds {counted(count, 'tensor')}, which {verb} not read" if count else ""
    return f"{_printable(cls.name)} of {_printable(cls.module)}{held}"


def _printable(text: str) -> str:
    return make_printable(text[:_SHOWN_CHARACTERS])


def unwrap(value: object) -> object:
    """Returns the state dict in an object of a framework that does nothing but hold one."""
    if isinstance(value, InertObject) and isinstance(value.state, dict):
        cls = class_of(value)
        return value.state.get(WRAPPERS.get(f"{cls.module}.{cls.name}"), value)
    return value


def whole_object_error(value: InertObject, where: str) -> UnsafePickleError:
    cls = quote(str(class_of(value)))
    is_module = isinstance(value.state, dict) and value.state.keys() >= _MODULE_MARKS
    what = "a whole module" if is_module else "an object in place of a state dict"
    saved = "the module's `state_dict()`" if is_module else "the tensors in it, as a dictionary,"
    return UnsafePickleError(
        f"file holds {what}, which needs the code of its class {cls}",
        where=where,
        hint="if you trust the file, load it where that code is, with `torch.load(path,"
        f" weights_only=False)`, and save {saved} instead",
    )
