"""Campaigns of many cases: a fixed sample is in `make test`, and the others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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


def leave_slow(cases: Sequence[pytest.Function]) -> None:
    """Marks cases of a test slow but for those of its mark `quick`, if it has one.

    The mark names them by what stands between the brackets; a number means that many of each
    parameter, from the first on.
    """
    mark = cases[0].get_closest_marker("quick") if cases else None
    if mark is None:
        return
    unknown = {one for one in mark.args if isinstance(one, str)}
    for case in cases:
        name = case.name.partition("[")[2].removesuffix("]")
        last = max(case.callspec.indices.values())
        if name not in mark.args and not any(
            last < one for one in mark.args if isinstance(one, int)
        ):
            case.add_marker("slow")
        unknown.discard(name)
    assert not unknown, f"{cases[0].originalname} has no case called {unknown}"
