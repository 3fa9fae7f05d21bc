"""A process group of one rank, as FSDP needs one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist


@contextmanager
def _one_rank() -> Iterator[None]:
    stores: Any = dist  # its stubs name no store
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    with _one_rank():
        yield


@pytest.fixture(scope="module")
def all_alone() -> Iterator[None]:
    """The same for all tests of a module."""
    with _one_rank():
        yield
