"""What the user says of a storage: `key=value` on the command line, nested values in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptkit.core.errors import UsageError

_SECRETS = ("key", "secret", "token", "password", "sas", "credential", "credentials")
_SHORTEST_SECRET = 4
_HIDDEN = "***"


def parse_options(pairs: Sequence[str], *, option: str) -> dict[str, Any]:
    """Reads `K=V` pairs; dots in a name make nested options, and values may be JSON.

    What is named like a secret stays the text that it is, even if it looks like a number.

    Args:
        pairs: As they were given.
        option: Where they were given, for messages, which never show a value.

    Raises:
        UsageError: If one is no pair, or a name is given twice.

    >>> parse_options(["anon=true", "client_kwargs.region_name=eu-1"], option="--src-option")
    {'anon': True, 'client_kwargs': {'region_name': 'eu-1'}}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        path = name.strip().split(".")
        if not equals or not all(path):
            raise UsageError(
                "no pair of a name and a value was found",
                where=option,
                hint=f"pass {option} NAME=VALUE, such as {option}"
                " client_kwargs.endpoint_url=http://localhost:9000",
            )
        _put(options, path, _value(path[-1], text), option)
    return options


def _put(options: dict[str, Any], path: Sequence[str], value: Any, option: str) -> None:
    inner: Any = options
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            break
    if not isinstance(inner, dict) or path[-1] in inner:
        raise UsageError(f"{'.'.join(path)!r} is given twice", where=option)
    inner[path[-1]] = value


def _value(name: str, text: str) -> Any:
    if name.lower().rpartition("_")[2] in _SECRETS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def without_values(text: str, options: Mapping[str, Any]) -> str:
    """Returns a text in which the values of options are no longer found."""
    for value in sorted(_texts(options), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET:
        yield value
