"""Reads configuration files in bounded time and memory. JSON is read as YAML, tabs as spaces.

Source: PyYAML 6.0, `constructor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckptkit.core.errors import FormatError, InputError

_MOST_BYTES = 1 << 20
_MOST_MERGED = 10_000
_MOST_DIGITS = 1_000  # of a number; Python turns no integer of more than 4,300 into text
_MERGE = "tag:yaml.org,2002:merge"
# What PyYAML raises for text that a tag such as !!int does not fit, and for what is out of range.
_MISFITS = (ArithmeticError, AttributeError, LookupError, ValueError)


class _TooManyMergedError(yaml.YAMLError):  # type: ignore[misc]  # an untyped library
    pass


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # an untyped library
    """Limits how many settings merge keys copy. Numbers of over 1,000 characters stay text."""

    _merged = 0

    def flatten_mapping(self, node: Any) -> None:
        for key, value in list(node.value):
            if key.tag == _MERGE:
                self._merge(value.value if isinstance(value, yaml.SequenceNode) else [value])
        super().flatten_mapping(node)

    def _merge(self, nodes: list[Any]) -> None:
        """Resolves the merge keys of some mappings, and counts the settings before the copy."""
        for node in nodes:
            if isinstance(node, yaml.MappingNode):
                self.flatten_mapping(node)
                self._merged += 1 + len(node.value)
            if self._merged > _MOST_MERGED:
                raise _TooManyMergedError

    def construct_number(self, node: Any) -> Any:
        text = self.construct_scalar(node)
        if len(text) > _MOST_DIGITS:
            return text
        is_whole = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def load_config(path: Path) -> Mapping[str, Any]:
    """Reads a configuration file.

    Raises:
        InputError: If it cannot be read.
        FormatError: If it is neither JSON nor YAML.
    """
    data = _read(path)
    try:
        document = yaml.load(data.replace(b"\t", b" "), _Loader)  # noqa: S506  a safe loader
    except _TooManyMergedError as error:
        raise FormatError(
            f"merges more than {_MOST_MERGED:,} settings with '<<'",
            where=str(path),
            hint="write the settings without '<<'",
        ) from error
    except (yaml.YAMLError, RecursionError, *_MISFITS) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f" at line {line + 1}"
        raise FormatError(
            f"is neither YAML nor JSON{at}",
            where=str(path),
            hint="see whether it is the file that the launcher takes",
        ) from error
    if not isinstance(document, dict):
        raise FormatError("has no names at its top", where=str(path))
    return document


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot be read: {reason}", where=str(path)) from error
    except ValueError as error:  # a NUL in the path
        raise InputError(f"cannot be read: {error}", where=str(path)) from error
    if len(data) > _MOST_BYTES:
        raise FormatError(f"has more than {_MOST_BYTES:,} bytes", where=str(path))
    return data
