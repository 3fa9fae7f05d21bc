"""How weights of four bits were packed: what bitsandbytes writes beside each of them.

Source: bitsandbytes 0.50, `functional.py` (`QuantState.as_dict`), `utils.py`
(`pack_dict_to_tensor`): a JSON object as a tensor of bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape

FourBitType = Literal["nf4", "fp4"]
QUANT_TYPES: Mapping[str, FourBitType] = {"nf4": "nf4", "fp4": "fp4"}
DTYPES = ("bfloat16", "float16", "float32")
"""What bitsandbytes packs."""
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE_BYTES = 1 << 16
_HINT = "the file is damaged; take another copy of it"


@dataclass(frozen=True, slots=True)
class FourBitSettings:
    """How weights were packed, as far as it is known.

    Attributes:
        quant_type: What the codes stand for, or None.
        nested: Whether the scales were quantized too ("double quantization"), or None.
        blocksize: How many elements share a scale, or None.
        dtype: What the weights were before, or None.
    """

    quant_type: FourBitType | None = None
    nested: bool | None = None
    blocksize: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class FourBitState:
    """How one weight was packed.

    Attributes:
        quant_type: What the codes stand for.
        blocksize: How many elements share a scale.
        dtype: What the weight was before.
        shape: Its shape.
        nested_blocksize: How many scales share a scale; 0 where scales were not quantized.
        nested_offset: What was taken off the scales before.
    """

    quant_type: FourBitType
    blocksize: int
    dtype: str
    shape: Shape
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> FourBitState:
        """Reads the bytes of a `quant_state` tensor.

        Raises:
            FormatError: If they do not say all that unpacking needs.
        """
        document = _object(data, where)
        nested = "nested_blocksize" in document
        return cls(
            quant_type=QUANT_TYPES[_among(document, "quant_type", tuple(QUANT_TYPES), where)],
            blocksize=_among(document, "blocksize", BLOCKSIZES, where),
            dtype=_among(document, "dtype", DTYPES, where),
            shape=_shape(document, where),
            nested_blocksize=_positive(document, "nested_blocksize", where) if nested else 0,
            nested_offset=_number(document, "nested_offset", where) if nested else 0.0,
        )

    @property
    def elements(self) -> int:
        """How many elements the weight has."""
        return math.prod(self.shape)


def _object(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise FormatError(f"is not JSON: {error}", where=where, hint=_HINT) from error
    if not isinstance(document, dict):
        raise FormatError("is no JSON object", where=where, hint=_HINT)
    return document


def _among(document: Mapping[str, Any], key: str, known: tuple[Any, ...], where: str) -> Any:
    value = document.get(key)
    if value not in known:
        raise FormatError(f"has {value!r} for {key!r} against one of {known}", where=where)
    return value


def _positive(document: Mapping[str, Any], key: str, where: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or value <= 0:
        raise FormatError(f"has {value!r} for {key!r}, where a count was expected", where=where)
    return value


def _number(document: Mapping[str, Any], key: str, where: str) -> float:
    value = document.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(f"has {value!r} for {key!r}, where a number was expected", where=where)
    return float(value)


def _shape(document: Mapping[str, Any], where: str) -> Shape:
    value = document.get("shape")
    whole = isinstance(value, list) and all(isinstance(size, int) and size > 0 for size in value)
    if not whole or not value:
        raise FormatError(f"has {value!r} for 'shape', where sizes were expected", where=where)
    return tuple(value)
