"""The values of a PEFT configuration by type: JSON in, what was meant out, or an error.

Source: peft 0.21, `LoraConfig`, and the files that versions from 0.2 on have written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ckptkit.core.errors import FormatError, UnsupportedError

# Every option of `LoraConfig` whose values are read here or mean nothing once trained.
_KNOWN = frozenset(
    (
        *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "auto_mapping"),
        *("base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "kasa_config", "layer_replication", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout"),
        *("lora_ga_config", "megatron_config", "megatron_core", "modules_to_save"),
        *("monteclora_config", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters"),
        *("task_type", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
        *("use_rslora", "velora_config"),
    )
)
_INPUT_EMBEDDING = ""


class _Facts(TypedDict):
    """What an error is made from."""

    message: str
    where: str
    hint: str


def known_or_neutral(document: Mapping[str, Any], *, where: str) -> None:
    """Refuses options of which nothing is known but that they are in use.

    Raises:
        UnsupportedError: If an unknown option holds something other than null, false or nothing.
    """
    for key, value in document.items():
        if key not in _KNOWN and value not in (None, False, 0, "", [], {}):
            raise UnsupportedError(
                f"the option {key!r} of the adapter's configuration is not known, and is in use",
                where=where,
                hint="pass the run's adapter_config.json with --adapter-config; if this is it and"
                " the option changes no numbers, pass a copy without it",
            )


def whole(document: Mapping[str, Any], key: str, *, default: int, where: str) -> int:
    """Returns a positive whole number.

    Raises:
        FormatError: If the value is none.
    """
    found = document.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise FormatError(**_wrong(key, found, "a positive whole number", where))
    return found


def number(document: Mapping[str, Any], key: str, *, default: float, where: str) -> float:
    """Returns a finite number; whole ones stay whole.

    Raises:
        FormatError: If the value is none.
    """
    found = document.get(key, default)
    if not _is_finite(found):
        raise FormatError(**_wrong(key, found, "a number", where))
    return found  # type: ignore[no-any-return]  # checked above


def switch(document: Mapping[str, Any], key: str, *, where: str) -> bool:
    """Returns a flag; null is off.

    Raises:
        FormatError: If the value is none.
    """
    found = document.get(key)
    if found is not None and not isinstance(found, bool):
        raise FormatError(**_wrong(key, found, "true or false", where))
    return bool(found)


def optional_text(document: Mapping[str, Any], key: str, *, where: str) -> str | None:
    """Returns a text, or None where there is none.

    Raises:
        FormatError: If the value is something else.
    """
    found = document.get(key)
    if found is not None and not isinstance(found, str):
        raise FormatError(**_wrong(key, found, "a text", where))
    return found or None


def patterns(document: Mapping[str, Any], key: str, *, where: str) -> str | tuple[str, ...] | None:
    """Returns a regular expression, or a list of names; None where there is none.

    Raises:
        FormatError: If the value is something else, or no regular expression.
    """
    found = document.get(key)
    if isinstance(found, str):
        check_pattern(found, f"{key!r}", where)
        return found
    return None if found is None else _texts(found, key, where)


def texts(document: Mapping[str, Any], key: str, *, where: str) -> tuple[str, ...]:
    """Returns a list of names; nothing where there is none.

    Raises:
        FormatError: If the value is something else.
    """
    found = document.get(key)
    return () if found is None else _texts(found, key, where)


def numbers_by_pattern(document: Mapping[str, Any], key: str, *, where: str) -> dict[str, float]:
    """Returns numbers by regular expression; nothing where there are none.

    Raises:
        FormatError: If the value is something else.
    """
    found = document.get(key) or {}
    if not isinstance(found, Mapping):
        raise FormatError(**_wrong(key, found, "an object", where))
    for pattern, value in found.items():
        check_pattern(pattern, f"{key!r}", where, is_embedded=True)
        if not _is_finite(value):
            raise FormatError(**_wrong(f"{key}[{pattern}]", value, "a number", where))
    return dict(found)


def ranks_by_pattern(document: Mapping[str, Any], key: str, *, where: str) -> dict[str, int]:
    """Returns positive whole numbers by regular expression; nothing where there are none.

    Raises:
        FormatError: If the value is something else.
    """
    found = numbers_by_pattern(document, key, where=where)
    for pattern, value in found.items():
        if not isinstance(value, int) or value < 1:
            name = f"{key}[{pattern}]"
            raise FormatError(**_wrong(name, value, "a positive whole number", where))
    return {pattern: int(value) for pattern, value in found.items()}


def indices(document: Mapping[str, Any], key: str, *, where: str) -> tuple[int, ...] | None:
    """Returns whole numbers, of which there may be a single one; None where there are none.

    Raises:
        FormatError: If the value is something else.
    """
    found = document.get(key)
    if found is None or found == []:
        return None
    return _numbers(found if isinstance(found, list) else [found], key, where)


def token_rows(document: Mapping[str, Any], *, where: str) -> dict[str, tuple[int, ...]]:
    """Returns the rows of embeddings that were trained, by the name of the embedding.

    Raises:
        FormatError: If the value is something else.
    """
    key = "trainable_token_indices"
    found = document.get(key)
    if not found:
        return {}
    if isinstance(found, Mapping):
        return {str(name): _numbers(rows, key, where) for name, rows in found.items()}
    return {_INPUT_EMBEDDING: _numbers(found, key, where)}


def check_pattern(pattern: str, what: str, where: str, *, is_embedded: bool = False) -> None:
    """Refuses what is no regular expression.

    Args:
        pattern: The expression.
        what: What to call its place in errors.
        where: What to call its file in errors.
        is_embedded: Whether PEFT puts others around it, which flags must not stand behind.

    Raises:
        FormatError: If it is none.
    """
    try:
        re.compile(pattern)
        re.compile(rf"(.*\.)?({pattern})$" if is_embedded else pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(
            f"{what} has {pattern[:80]!r}, which is no regular expression: {error}", where=where
        ) from error


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # JSON has whole numbers of any size


def _texts(found: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise FormatError(**_wrong(key, found, "a list of texts", where))
    return tuple(found)


def _numbers(found: Any, key: str, where: str) -> tuple[int, ...]:
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(type(item) is int and item >= 0 for item in found):
        raise FormatError(**_wrong(key, found, "whole numbers", where))
    return tuple(found)


def _wrong(key: str, found: Any, expected: str, where: str) -> _Facts:
    return {
        "message": f"{key!r} is {str(found)[:80]!r} against {expected}",
        "where": where,
        "hint": "compare it with the adapter_config.json that PEFT writes",
    }
