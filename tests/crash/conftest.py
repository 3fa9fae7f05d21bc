"""Waiting, a tiny disk, and the fixtures of damaged checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ckptkit.storage.remote.errors import call_with_retries
from tests.crash.forked_commands import ForkedCommands, running_forks
from tests.damaged_checkpoints import blobs, change_metadata, copied, out, refusal
from tests.files import mounted, tmpfs
from tests.sharded import write_sharded

__all__ = ["blobs", "change_metadata", "copied", "out", "refusal"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits before requests to a store are made again are asked for, and not waited."""
    waits: list[float] = []
    hurried = partial(call_with_retries, sleep=waits.append)
    monkeypatch.setattr("ckptkit.storage.remote.store.call_with_retries", hurried)
    return waits


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, whose pieces of the large tensors are just as large as the smallest part of S3."""
    torch.manual_seed(7)
    large = {f"layers.{i}.weight": torch.randn(2560, 1024) for i in range(2)}
    small = {f"layers.{i}.norm": torch.randn(1024) for i in range(2)}
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    write_sharded(folder, large | small, ranks=2)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkedCommands]:
    with running_forks() as forks:
        yield forks


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    with mounted(tmp_path / "disk", *tmpfs("2m")) as place:
        yield place
