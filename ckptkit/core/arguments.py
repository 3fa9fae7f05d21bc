"""Checks of the arguments of public functions: names that exist, and values of the right type.

Annotations are read as text, so that nothing that they name has to be imported.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from ckptkit.core.errors import ArgumentError
from ckptkit.core.text import a_kind

P = ParamSpec("P")
R = TypeVar("R")

STOCK = "ckptkit_stock"
"""The attribute of what replaces a function of a library, with that function."""

_ALIKE = 0.5  # from which two names are taken for one


def _is_path(value: Any) -> bool:
    return isinstance(value, str) or (_has_path(value) and isinstance(value.__fspath__(), str))


def _has_path(value: Any) -> bool:
    return hasattr(type(value), "__fspath__")


def _is_switch(value: object) -> bool:
    """Says whether a value is a bool, of numpy too, or one of the numbers 0 and 1."""
    if type(value).__name__ in {"bool", "bool_"}:
        return True
    return isinstance(value, numbers.Integral) and value in {0, 1}


def _is_whole(value: object) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "None": (lambda value: value is None, "None"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "PathLike": (_is_path, "a path"),
    "bool": (_is_switch, "True or False"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "Mapping": (lambda value: isinstance(value, Mapping), "a dict"),
    "Sequence": (_is_list, "a list"),
    "tuple": (lambda value: isinstance(value, tuple), "a tuple"),
    "Callable": (callable, "a function"),
    "Listener": (callable, "a function"),
}


class _Signature(Struct, frozen=True):
    """What a function takes."""

    where: str
    positional: tuple[str, ...]  # the names that may be given by position, in order
    annotations: Mapping[str, str]  # all names, and the annotation of each as text
    takes_any: bool  # whether it passes on names that are not among them


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function refuse unknown option names, and values that its annotations do not allow.

    Options that a function takes as `**options: Unpack[SomeTypedDict]` are checked likewise.
    """
    return _checked(function, has_values_checked=True)


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function refuse unknown option names.

    For functions that all ranks call: an error of a value has to reach the other ranks, too.
    """
    return _checked(function, has_values_checked=False)


def _checked(function: Callable[P, R], *, has_values_checked: bool) -> Callable[P, R]:
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        signature = _read_signature(function)
        if not signature.takes_any:
            refuse_unknown(kwargs, signature.annotations, where=signature.where)
        given = (*zip(signature.positional, args, strict=False), *kwargs.items())
        for name, value in given if has_values_checked else ():
            _check_kind(name, value, signature.annotations.get(name, ""), signature.where)
        return function(*args, **kwargs)

    return _show_options(checked, function)


class _Shown(str):
    """A text that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _show_options(checked: Callable[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """Gives a function the signature that `help` and notebooks show: each option by its name."""
    stated = inspect.signature(function)
    known = _read_signature(function)
    given = list(stated.parameters.values())
    if not known.takes_any:
        given = [one for one in given if one.kind is not one.VAR_KEYWORD]
    given += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_Shown("..."), annotation=text
        )
        for name, text in known.annotations.items()
        if name not in stated.parameters
    ]
    shown = [
        one.replace(annotation=_Shown(one.annotation)) if isinstance(one.annotation, str) else one
        for one in given
    ]
    returned = stated.return_annotation
    if isinstance(returned, str):
        returned = _Shown(returned)
    signature = inspect.Signature(shown, return_annotation=returned)
    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


@functools.cache
def _read_signature(function: Callable[..., Any]) -> _Signature:
    code, stated = function.__code__, function.__annotations__
    count = code.co_argcount + code.co_kwonlyargcount
    names = {name: stated.get(name, "") for name in code.co_varnames[:count]}
    takes_any = False
    if code.co_flags & inspect.CO_VARKEYWORDS:
        at = count + bool(code.co_flags & inspect.CO_VARARGS)
        rest = stated.get(code.co_varnames[at], "")
        options = rest.removeprefix("Unpack[").removesuffix("]")
        takes_any = options == rest
        if not takes_any:
            names |= {
                name: getattr(annotation, "__forward_arg__", "")
                for name, annotation in function.__globals__[options].__annotations__.items()
            }
    where = function.__qualname__.removesuffix(".__init__")
    return _Signature(where, code.co_varnames[: code.co_argcount], names, takes_any)


def refuse_unknown(given: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Refuses names that are not among those known, proposing the nearest one."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return
    names = [name for name in known if name != "self"]
    near = get_close_matches(unknown, names, 1, _ALIKE)
    raise ArgumentError(
        f"unknown option {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        where=where,
        hint="" if near else f"known are {', '.join(names)}",
    )


def ambiguous_truth(value: object, ask: str) -> ArgumentError:
    """Returns the error of a result whose truth could mean several things.

    `ask`: what to write instead.
    """
    return ArgumentError(f"the truth value of {a_kind(value)} is ambiguous", hint=f"use {ask}")


def _check_kind(name: str, value: object, annotation: str, where: str) -> None:
    """Refuses a value that no alternative of an annotation allows; messages show no value."""
    if not annotation or _fits(value, annotation):
        return
    expected = " or ".join(
        dict.fromkeys(_describe(alternative) for alternative in _split_union(annotation))
    )
    wants_list, element = "Sequence[" in annotation, ""
    if wants_list and isinstance(value, Iterable) and _is_list(value):
        wanted = _element_annotation(annotation)
        wrong = [element for element in value if not _fits(element, wanted)]
        element = f" with {a_kind(wrong[0])} in it" if wrong else ""
    lone = wants_list and (isinstance(value, str) or _has_path(value))
    raise ArgumentError(
        f"is {a_kind(value)}{element}, where {expected} was expected",
        where=f"{where}: {name}",
        hint=f"pass {name}=[…]" if lone else "",
    )


def _fits(value: object, annotation: str) -> bool:
    for alternative in _split_union(annotation):
        head = alternative.partition("[")[0]
        if head not in _KINDS:
            return True
        if _KINDS[head][0](value):
            if head != "Sequence" or not isinstance(value, Sequence | set | frozenset):
                return True
            if all(_fits(element, _element_annotation(alternative)) for element in value):
                return True
    return False


def _element_annotation(annotation: str) -> str:
    """Returns the text in the brackets after `Sequence`."""
    start = annotation.index("Sequence[") + len("Sequence[")
    depth, at = 1, start
    while depth:
        depth += {"[": 1, "]": -1}.get(annotation[at], 0)
        at += 1
    return annotation[start : at - 1]


def _describe(annotation: str) -> str:
    head = annotation.partition("[")[0]
    named = _KINDS[head][1]
    if head != "Sequence":
        return named
    inner = " or ".join(
        _KINDS[alternative.partition("[")[0]][1].removeprefix("a ")
        for alternative in _split_union(_element_annotation(annotation))
        if alternative.partition("[")[0] in _KINDS
    )
    return f"{named} of {inner}s" if inner and " or " not in inner else named


def _split_union(annotation: str) -> list[str]:
    """Splits a union at the bars outside of brackets.

    >>> _split_union("Sequence[str | int] | None")
    ['Sequence[str | int]', 'None']
    """
    alternatives, depth, start = [], 0, 0
    for at, character in enumerate(annotation):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and depth == 0:
            alternatives.append(annotation[start:at].strip())
            start = at + 1
    return [*alternatives, annotation[start:].strip()]
