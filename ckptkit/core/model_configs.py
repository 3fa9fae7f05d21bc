"""Reading and writing a model's `config.json`, whose numbers may be infinite.

JSON has no infinity. Transformers 5 writes `{"__float__": "Infinity"}` and reads it back as the
number; older versions write the word `Infinity` bare and know no other form.

Source: transformers 5.23, `PreTrainedConfig._decode_special_floats`, `_encode_special_floats`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import FormatError

_TAG = "__float__"
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_VERSION = "transformers_version"
_FIRST_TO_TAG = 5  # major version of Transformers
_DEEPEST = 100  # real configurations nest five deep; ones that writing could not follow are refused
_MAJOR = re.compile(r"\d{1,4}(?=\.)")
_NESTING = 4  # of parts whose model types count; real configurations nest twice


def parse_json_object(data: bytes, *, where: str) -> dict[str, Any]:
    """Parses a JSON file that holds an object."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not JSON: {error}", where=where) from error
    if not isinstance(document, dict):
        raise FormatError(f"is a JSON {type(document).__name__} against an object", where=where)
    return document


def parse_model_config(data: bytes, *, where: str) -> dict[str, Any]:
    """Parses a model's `config.json` as Transformers does, tagged numbers included."""
    decoded = _decode(parse_json_object(data, where=where), where, 0)
    if not isinstance(decoded, dict):
        raise FormatError(f"is the number {decoded} against an object", where=where)
    return decoded


def list_model_types(config: Mapping[str, Any], depth: int = _NESTING) -> list[str]:
    """Returns the model types of a configuration and of those nested in it."""
    own = config.get("model_type")
    types = [own] if isinstance(own, str) else []
    for inner in config.values() if depth else ():
        if isinstance(inner, Mapping):
            types += list_model_types(inner, depth - 1)
    return types


def architecture_of(config: Mapping[str, Any]) -> str:
    """Returns the class that a configuration names first; empty where it names none."""
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else ""
    return first.removeprefix("FSDP") if isinstance(first, str) else ""


CLASS_NAME = "_class_name"
"""Where diffusers records the class."""


def class_of(config: Mapping[str, Any]) -> str:
    """Returns the class of diffusers that a configuration names; empty where it names none.

    `fully_shard` puts `FSDP` before the name of a module's class, and diffusers records that.
    """
    name = config.get(CLASS_NAME)
    return name.removeprefix("FSDP") if isinstance(name, str) else ""


def model_config_to_json(config: Mapping[str, Any]) -> bytes:
    """Returns a model's configuration as the Transformers that it names would write it."""
    version = config.get(_VERSION)
    major = _MAJOR.match(version) if isinstance(version, str) else None
    is_old = major is not None and int(major[0]) < _FIRST_TO_TAG
    return to_json(config if is_old else _encode(config))


def to_json(document: Any) -> bytes:
    """Returns a JSON document as Transformers writes it: indented, keys as they come."""
    try:
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 not hold
        return (json.dumps(document, indent=2) + "\n").encode()


def _decode(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise FormatError(f"is nested more than {_DEEPEST} deep", where=where)
    if isinstance(value, dict):
        tag = value.get(_TAG) if len(value) == 1 else None
        if isinstance(tag, str):
            return _NUMBERS.get(tag, value)
        return {key: _decode(inner, where, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decode(inner, where, depth + 1) for inner in value]
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: _encode(inner) for key, inner in value.items()}
    return [_encode(inner) for inner in value] if isinstance(value, (list, tuple)) else value
