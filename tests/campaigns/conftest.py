"""Campaigns turn off messages; tests that the same process runs later expect them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _messages() -> Iterator[None]:
    hub = logging.getLogger("ckptkit.hub")
    level, disabled = hub.level, logging.root.manager.disable
    yield
    hub.setLevel(level)
    logging.disable(disabled)
