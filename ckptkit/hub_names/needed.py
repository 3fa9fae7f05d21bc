"""Whether a model's tensors are called otherwise on disk, told without transformers.

The table knows model types. What it does not know is left as it is: Transformers loads tensors
under their live names too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.core.dtypes import DType
from ckptkit.hub_names.needed_table import CONVERTED, PREFIXED, UNCONVERTED

_NESTING = 4  # real configurations nest twice


@dataclass(frozen=True, slots=True)
class Need:
    """Whether names on disk have to be asked for.

    Attributes:
        kind: `ask` where they may differ, `none` where they do not, `unknown` where the table
            cannot tell.
        reason: Why it cannot, as a clause; empty otherwise.
    """

    kind: Literal["ask", "none", "unknown"]
    reason: str = ""


def naming_need(config: Mapping[str, Any] | None, *, has_base: bool) -> Need:
    """Tells whether a model's names on disk have to be asked for.

    Args:
        config: A parsed `config.json`, or None.
        has_base: Whether the disk names of the model that training began from are known; only
            they can tell that a prefix is to be added or dropped.
    """
    if config is None:
        return Need("unknown", "there is no config.json")
    types = set(_model_types(config, _NESTING))
    if types & CONVERTED or (has_base and types & PREFIXED):
        return Need("ask")
    root = config.get("model_type")
    if root in UNCONVERTED or root in PREFIXED:
        return Need("none")
    if root is None:
        return Need("unknown", "config.json names no model type")
    return Need("unknown", f"the model type {root!r} of config.json is not known")


def why_unsure(config: Mapping[str, Any], dtypes: Iterable[DType]) -> str:
    """Says why conversions would have to know of a quantization; empty where they need not."""
    kinds = {dtype.kind for dtype in dtypes if dtype.itemsize == 1}
    is_packed = "float" in kinds or ("int" in kinds and bool(config.get("quantization_config")))
    return "the weights are packed in 8 bits or fewer" if is_packed else ""


def _model_types(config: Mapping[str, Any], depth: int) -> Iterator[str]:
    found = config.get("model_type")
    if isinstance(found, str):
        yield found
    for value in config.values() if depth else ():
        if isinstance(value, Mapping):
            yield from _model_types(value, depth - 1)
