"""Casts with torch's rounding, which is the fastest at hand; the bytes are those of `Caster`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.kernels.casts import Caster

_FLOAT32 = BY_NAME["float32"]
_TARGETS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchCaster(Caster):
    """Rounds float32 by torch; what of NaN and overflow is settled as for all casts."""

    _at_once = 1 << 20  # a call of torch takes longer to begin than one of numpy

    def __init__(self, target: DType) -> None:
        """Takes the element type to cast to, `bfloat16` or `float16`."""
        super().__init__(_FLOAT32, target)
        self._rounded = _TARGETS[target.name]

    def _convert(self, given: NDArray[Any], wanted: NDArray[Any]) -> None:
        rounded = torch.from_numpy(wanted.view(np.int16)).view(self._rounded)
        rounded.copy_(torch.from_numpy(given))


def caster_of(source: DType, target: DType) -> Caster:
    """Returns what casts from one float type to another, for one thread."""
    if source == _FLOAT32 and target.name in _TARGETS:
        return TorchCaster(target)
    return Caster(source, target)
