"""What users know of an adapter that its tensors do not tell: options into configuration."""

from __future__ import annotations

import math
from typing import Any

from ckptkit.core.errors import UsageError


def known_of_adapter(
    lora_alpha: str | None,
    use_rslora: bool | None,
    fan_in_fan_out: bool | None,
    token_indices: str | None,
) -> dict[str, Any]:
    """Returns what was given, by the keys of `adapter_config.json`.

    Raises:
        UsageError: If a number is none, or cannot be what it is given for.
    """
    known = {
        "lora_alpha": None if lora_alpha is None else _alpha(lora_alpha),
        "use_rslora": use_rslora,
        "fan_in_fan_out": fan_in_fan_out,
        "trainable_token_indices": None if token_indices is None else _indices(token_indices),
    }
    return {key: value for key, value in known.items() if value is not None}


def _alpha(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is no number", where="--lora-alpha", hint="pass 16")
    if value <= 0:
        raise UsageError(
            f"{text!r} would turn what was trained around, or into nothing",
            where="--lora-alpha",
            hint="pass the alpha of the run, such as 16",
        )
    return int(value) if value == int(value) else value


def _indices(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and word.isascii() for word in words):
        raise UsageError(
            f"{text!r} is no list of tokens", where="--token-indices", hint="pass 5,17,1024"
        )
    return [int(word) for word in words]
