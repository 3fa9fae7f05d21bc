"""A save compares samples of what training keeps equal on several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("replicas_run.py")
SAVED = ("ddp 0", "ddp 1", "hsdp 0")


@pytest.fixture(scope="module")
def logged(
    run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    done = run_ranks(SCRIPT, 4, tmp_path_factory.mktemp("replicas"))
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("saved", SAVED)
def test_equal_replicas_are_nothing_to_mention(logged: dict[str, str], saved: str) -> None:
    assert logged[f"{saved} equal"] == ""


@pytest.mark.parametrize("saved", SAVED)
def test_ranks_that_hold_other_weights_are_named(logged: dict[str, str], saved: str) -> None:
    text = logged[f"{saved} model"]
    found = re.search(
        r"step 3: ranks 0 and (\d) hold different values of ([\w.]+) \(\d+ of (\d+)", text
    )
    assert found is not None, text
    assert found[1] == "2"
    assert "0.weight" in found[2]
    assert 2 <= int(found[3]) <= 32
    assert "save right after an averaging" in text


@pytest.mark.parametrize("saved", SAVED)
def test_moments_of_ranks_that_are_not_averaged_are_found(
    logged: dict[str, str], saved: str
) -> None:
    text = logged[f"{saved} optimizer"]
    assert "ranks 0 and 2 hold different values of optimizer." in text
    assert "exp_avg" in text
