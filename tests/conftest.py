"""What every test shares: where the real checkpoints lie, and settings for generated input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Machines that run tests are shared and slow by turns: a deadline would fail for no fault of
# ours. A failing example is printed so that it can be replayed anywhere.
settings.register_profile("ckptkit", deadline=None, print_blob=True)
settings.load_profile("ckptkit")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def real_checkpoints() -> Path:
    """The folder of small checkpoints that real frameworks wrote, one subfolder per case."""
    return ROOT / "fixtures"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach a network by accident."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
