"""Tensors handed to frameworks; torch is imported only when a torch.Tensor is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UsageError
from ckptkit.core.index import Shape
from ckptkit.kernels.arrays import numpy_dtype

if TYPE_CHECKING:
    import torch


def as_numpy(data: bytearray, dtype: DType, shape: Shape) -> NDArray[Any]:
    """Returns row-major bytes as an array; types that numpy lacks are those of ml_dtypes."""
    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)


def as_torch(data: bytearray, dtype: DType, shape: Shape) -> torch.Tensor:
    """Returns row-major bytes as a tensor that shares their memory.

    Raises:
        UsageError: If torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            "torch is not installed",
            where="framework='torch'",
            hint="pip install 'ckptkit-toolkit[torch]', or read with framework='numpy'",
        ) from error
    kind = getattr(torch, dtype.name)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)
