"""Truncated decompositions, against LAPACK's in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptkit.adapters import from_diff
from ckptkit.adapters.from_diff import (
    compute_squared_distance,
    compute_squared_norm,
    truncate_svd,
)

Array = NDArray[Any]


def noise(rows: int, columns: int) -> Array:
    return np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32)


def decaying(rows: int, columns: int) -> Array:
    left, values, right = np.linalg.svd(noise(rows, columns), full_matrices=False)
    matrix: Array = ((left * (1 / np.arange(1, len(values) + 1))) @ right).astype(np.float32)
    return matrix * np.float32(1e-6)


@pytest.mark.parametrize("exact", [512, 16])
@pytest.mark.parametrize("make", [noise, decaying])
@pytest.mark.parametrize("shape", [(90, 130), (130, 90), (7, 200), (64, 64), (3, 1)])
def test_no_product_of_that_rank_is_nearer(
    shape: tuple[int, int], make: Any, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_diff, "EXACT", exact)
    matrix = make(*shape)
    rank = min(5, *shape)
    up, down = truncate_svd(matrix, rank)
    assert up.shape == (shape[0], rank)
    assert down.shape == (rank, shape[1])
    assert up.dtype == down.dtype == np.float32
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    best, whole = float(np.sum(values[rank:] ** 2)), float(np.sum(values**2))
    missed = compute_squared_distance(matrix, up, down)
    assert missed <= best * 1.002 + 1e-12 * whole
    truth = matrix.astype(np.float64) - up.astype(np.float64) @ down
    assert missed == pytest.approx(float(np.sum(truth**2)), rel=1e-5, abs=1e-12 * whole)


def test_a_product_of_low_rank_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for exact in (512, 16):
        monkeypatch.setattr(from_diff, "EXACT", exact)
        matrix = noise(300, 4) @ noise(4, 200)
        up, down = truncate_svd(matrix, 4)
        error = math.sqrt(compute_squared_distance(matrix, up, down) / compute_squared_norm(matrix))
        assert error < 1e-6
        np.testing.assert_allclose(up @ down, matrix, atol=1e-4)


def test_the_same_matrix_has_the_same_factors_and_each_sign_is_settled() -> None:
    matrix = noise(700, 600)
    first, second = truncate_svd(matrix, 3), truncate_svd(matrix.copy(), 3)
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1].tobytes() == second[1].tobytes()
    opposite = truncate_svd(-matrix, 3)
    np.testing.assert_allclose(opposite[1], first[1], atol=1e-3)
    np.testing.assert_allclose(opposite[0], -first[0], atol=1e-3)
    turned = truncate_svd(np.ascontiguousarray(matrix.T), 3)
    np.testing.assert_allclose(turned[0] @ turned[1], (first[0] @ first[1]).T, atol=1e-3)


def test_a_matrix_without_directions_has_empty_ones() -> None:
    up, down = truncate_svd(np.zeros((6, 5), np.float32), 2)
    assert not (up @ down).any()
    assert compute_squared_distance(np.zeros((6, 5), np.float32), up, down) == 0


def test_norms_are_summed_in_double_precision() -> None:
    assert compute_squared_norm(np.full(1 << 21, 1e-30, np.float32)) == pytest.approx(
        (1 << 21) * 1e-60
    )
    wide = np.ones((3, 1 << 21), np.float32)
    up, down = np.ones((3, 1), np.float32), np.zeros((1, 1 << 21), np.float32)
    assert compute_squared_distance(wide, up, down) == 3 * (1 << 21)
