"""Campaigns of many cases: a fixed sample is in `make test`, and the others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sampled(
    cases: Iterable[Any], quick: Collection[object], key: Callable[[Any], object] = lambda one: one
) -> list[ParameterSet]:
    """Returns all cases as parameters of a test, those whose key is not in `quick` marked slow."""
    every = list(cases)
    keys = [key(one) for one in every]
    assert [one for one in quick if one not in keys] == []
    return [
        pytest.param(one, marks=() if known in quick else pytest.mark.slow)
        for one, known in zip(every, keys, strict=True)
    ]
