"""Which PEFT wrote an adapter, where that decides what its numbers mean."""

from __future__ import annotations

import re

from ckptkit.adapters.config import PEFT_PREFIX, LoraSettings

EXPERTS_BY_CLASS = (0, 19)
"""Since this version PEFT asks a model's class whether experts are stored as [in, out]."""
NORM_OF_UNMERGED = (0, 21)
"""Since this version PEFT takes DoRA's norms of weights without the adapters merged before."""
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")


def version_of(text: str | None) -> tuple[int, int]:
    """Returns the major and minor number; the lowest where nothing says, as before PEFT 0.18.

    >>> version_of("0.21.2")
    (0, 21)
    """
    match = _VERSION.match(text or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def alpha_of_one_key(settings: LoraSettings, module: str, rank: int) -> float | None:
    """Returns the alpha of a module by the rule of PEFT before 0.14; None if it is not that old.

    The first pattern of either option that fits was then the key for both of them.

    Args:
        settings: The configuration.
        module: The path of the module in the base.
        rank: That of its factors, which proves the rule wrong where that has another.

    Source: peft 0.13, `LoraModel._create_and_replace`.
    """
    path = module.removeprefix(PEFT_PREFIX)
    patterns = (*settings.rank_pattern, *settings.alpha_pattern)
    key = next((one for one in patterns if re.match(rf".*\.{one}$", path)), path)
    if settings.rank_pattern.get(key, settings.r) != rank:
        return None
    return settings.alpha_pattern.get(key, settings.lora_alpha)
