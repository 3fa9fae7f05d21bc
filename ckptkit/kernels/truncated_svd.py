"""The two thin factors whose product is nearest to a matrix, and how near it is.

Small matrices are decomposed exactly. For the others a subspace that holds the largest singular
vectors is found by random projection and power iterations, which takes seconds where LAPACK
takes minutes. What the factors miss is computed afterwards, from the factors as they are written.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), algorithms 4.4
and 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
EXACT = 512
"""Up to this many rows or columns, whichever are fewer, a matrix is decomposed exactly."""

_SEED = 0x5EED  # the same factors in every run
_MORE = 16  # further directions, which make the last wanted ones exact
_ROUNDS = 12
_SETTLED = 1e-5  # of the energy: what a further round has to add to be worth it
_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Factors:
    """A product `up @ down` of low rank.

    Attributes:
        up: float32, [rows, rank].
        down: float32, [rank, columns].
    """

    up: Matrix
    down: Matrix


def truncated(matrix: Matrix, rank: int) -> Factors:
    """Finds the factors of a rank whose product is nearest to a matrix.

    The singular values are shared evenly between the two, as in mergekit. The same matrix has the
    same factors in every run on one machine; their signs are fixed.

    Args:
        matrix: float32, [rows, columns], finite.
        rank: At most the smaller side of the matrix.
    """
    rows, columns = matrix.shape
    if rows < columns:  # the side that is projected is the longer one
        turned = truncated(matrix.T, rank)
        return Factors(np.ascontiguousarray(turned.down.T), np.ascontiguousarray(turned.up.T))
    wanted = rank + _MORE
    if columns <= EXACT or 2 * wanted >= columns:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _range_of(matrix, wanted, rank)
        inner, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ inner
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    # A decomposition leaves signs open: the largest element of each right vector is positive.
    signs = np.sign(np.take_along_axis(right, np.abs(right).argmax(axis=1)[:, None], axis=1))
    signs[signs == 0] = 1
    root = np.sqrt(values)
    return Factors(left * signs.T * root, right * signs * root[:, None])


def _range_of(matrix: Matrix, wanted: int, rank: int) -> Matrix:
    """Returns an orthonormal basis, [rows, wanted], of what the matrix maps most strongly to."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    start = random.standard_normal((matrix.shape[1], wanted), np.float32)
    basis = np.linalg.qr(matrix @ start)[0]
    total, before = squared_norm(matrix), 0.0
    for _ in range(_ROUNDS):
        back, triangle = np.linalg.qr(matrix.T @ basis)
        energy = float(np.sum(np.linalg.svd(triangle, compute_uv=False)[:rank] ** 2, dtype=float))
        if energy - before <= _SETTLED * total:
            break
        before = energy
        basis = np.linalg.qr(matrix @ back)[0]
    return basis


def squared_norm(matrix: NDArray[Any]) -> float:
    """Returns the sum of the squares of all elements, summed in float64."""
    return sum(float(np.vdot(wide, wide)) for wide in _wide_blocks(matrix))


def squared_distance(matrix: Matrix, factors: Factors) -> float:
    """Returns the sum of the squares of `matrix - up @ down`, block by block."""
    rows = _rows_at_once(matrix)
    total = 0.0
    for start in range(0, matrix.shape[0], rows):
        block = slice(start, start + rows)
        missed = matrix[block] - factors.up[block] @ factors.down
        total += squared_norm(missed)
    return total


def _rows_at_once(matrix: NDArray[Any]) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, matrix[:1].size))


def _wide_blocks(matrix: NDArray[Any]) -> Any:
    rows = _rows_at_once(matrix)
    for start in range(0, len(matrix), rows):
        yield matrix[start : start + rows].astype(np.float64)
