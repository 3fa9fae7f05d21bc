"""A save compares samples of what training keeps equal on several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_command
from tests.sampled import sampled

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("replicas_run.py")
QUICK, SLOW = "hsdp 0", ("ddp 0", "ddp 1")
SAVED = sampled([QUICK, *SLOW], [QUICK])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def log_of(run_ranks: Callable[..., Any], runs: Path) -> Callable[..., dict[str, str]]:
    """Runs some saves once, when they are first asked for."""

    @cache
    def run(*saved: str) -> dict[str, str]:
        done = run_ranks(SCRIPT, 4, runs, *saved)
        return dict(line.split(": ", 1) for line in done.stdout.splitlines())

    return run


@pytest.mark.parametrize("saved", SAVED)
def test_ranks_that_hold_other_values_are_named_by_the_save_and_by_a_resume(
    log_of: Callable[..., dict[str, str]], saved: str
) -> None:
    logged = log_of(saved) if saved == QUICK else log_of(*SLOW)
    assert logged[f"{saved} equal"] == ""
    text = logged[f"{saved} model"]
    found = re.search(
        r"step 3: ranks 0 and (\d) held different values of ([\w.]+) \(\d+ of (\d+)", text
    )
    assert found is not None, text
    assert found[1] == "2"
    assert "0.weight" in found[2]
    assert 2 <= int(found[3]) <= 32
    assert "save right after an averaging" in text
    text = logged[f"{saved} optimizer"]  # whose moments are not averaged
    assert "ranks 0 and 2 held different values of optimizer." in text
    assert "exp_avg" in text
    text = logged[f"{saved} resumed"]
    assert text.startswith("the step that is resumed: ranks 0 and 2 held different values of model")


@pytest.mark.slow
def test_buffers_of_ranks_that_nothing_keeps_equal_are_named(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_ranks(SCRIPT, 4, tmp_path, "buffers 0")
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["buffers equal"] == ""  # though batch norm has statistics of each rank's rows
    text = "ranks 0 and 2 held different values of model.0.parametrizations.weight.0._u (2 of 2"
    assert f"step 2: {text}" in said["buffers differ"]
    assert "the step has those of rank 0" in said["buffers differ"]
    assert said["buffers resumed"].startswith(f"the step that is resumed: {text}")
    assert "ranks 0 and 1 held different values of model.weight (1 of 2" in said["buffers plain"]


@pytest.mark.slow
@pytest.mark.parametrize("saved", [QUICK, *SLOW])
def test_every_command_says_so_again(
    log_of: Callable[..., dict[str, str]], runs: Path, tmp_path: Path, saved: str
) -> None:
    assert log_of(saved) if saved == QUICK else log_of(*SLOW)
    run = runs / saved.replace(" ", "/")
    for step in ("checkpoint-1", "checkpoint-3"):
        for words in (
            ["inspect", run / step],
            ["consolidate", run / step, tmp_path / step],
            ["stats", run / step],
        ):
            done = run_command(*words)
            assert done.returncode == 0, done.stderr
            found = "ranks 0 and 2 held different values of model." in done.stdout + done.stderr
            assert found == (step == "checkpoint-3"), (words, done)
