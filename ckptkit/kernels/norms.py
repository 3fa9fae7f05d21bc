"""Euclidean norms of rows and columns, summed in the order in which torch sums them.

A float32 sum depends on its order in the last bits. These are the orders of torch's processor
kernels, so that what is divided by a norm is what PEFT makes of it.

Source: torch `aten/src/ATen/native/cpu/ReduceOpsKernel.cpp`, `norm_kernel_tensor_iterator_impl`:
along rows eight sums side by side, then their sum, then what is left over, of which the
compiler multiplies four at a time before it adds them and fuses the rest; down columns one sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckptkit.kernels.workspace import workspace

Floats = NDArray[np.float32]
_LANES = 8
_QUAD = 4


def row_norms(matrix: Floats) -> Floats:
    """Returns the norm of every row of a float32 matrix."""
    rows, columns = matrix.shape
    whole = columns - columns % _LANES
    squares = workspace("squares", matrix.size).reshape(matrix.shape)
    np.square(matrix, out=squares)
    # numpy adds along the first axis one step after the other, and fast.
    steps = workspace("steps", rows * whole).reshape(-1, rows, _LANES)
    steps[...] = squares[:, :whole].reshape(rows, -1, _LANES).transpose(1, 0, 2)
    lanes: Floats = np.add.reduce(steps, axis=0)
    total: Floats = lanes[:, 0].copy()
    for lane in range(1, _LANES):
        total += lanes[:, lane]
    fused = whole + (columns - whole) // _QUAD * _QUAD
    for column in range(whole, fused):
        total += squares[:, column]
    for column in range(fused, columns):
        total = _fused(matrix[:, column], total)
    norms: Floats = np.sqrt(total)
    return norms


def _fused(values: Floats, total: Floats) -> Floats:
    """Adds squares with one rounding; float64 holds the square of a float32 exactly."""
    return (np.square(values, dtype=np.float64) + total).astype(np.float32)


class ColumnSums:
    """Adds up the squares of the columns of a matrix that comes in blocks of rows.

    Attributes:
        sums: What there is so far.
    """

    def __init__(self, columns: int) -> None:
        self.sums = np.zeros(columns, np.float32)

    def add(self, rows: Floats) -> None:
        """Adds the next rows."""
        shape = len(rows) + 1, rows.shape[1]
        terms = workspace("squares", shape[0] * shape[1]).reshape(shape)
        terms[0] = self.sums
        np.square(rows, out=terms[1:])
        np.add.reduce(terms, axis=0, out=self.sums)

    def norms(self) -> Floats:
        """Returns the norm of every column."""
        return np.sqrt(self.sums)
