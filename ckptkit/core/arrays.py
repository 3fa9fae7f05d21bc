"""numpy's view of the element types."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ckptkit.core.dtypes import DType


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Finds the numpy type of an element type."""
    try:
        return np.dtype(dtype.numpy)
    except TypeError:
        # Imported only for types that numpy lacks: commands that read no data start faster.
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return extension
