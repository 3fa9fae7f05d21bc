"""Fixtures of the tests of saving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.training import builders


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with builders.one_rank():
        yield
