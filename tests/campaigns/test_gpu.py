"""A sample of `make gpu`: on the CPU, so that the campaign cannot rot, and on a device if any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.campaigns.gpu import __main__ as campaign

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--width", "32", "--gigabytes", "0.005", "--rounds", "1")


def run(words: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_campaign_runs_without_a_device_where_it_is_asked_to() -> None:
    checks = ("plain", "fsdp2", "offload", "fsdp1", "graph", "types", "load", "continue", "torch")
    report = run(["--device", "cpu", *SMALL, "--only", *checks, "costs"])
    assert report.count("| right |") == len(checks) - 1
    assert report.count("| skipped |") == 1  # CUDA graphs
    assert "| blocked until staged, of a bare pinned copy |" in report


@pytest.mark.slow
def test_the_checks_that_import_much_run_as_well() -> None:
    checks = ("fused", "random", "export", "packed", "merge")
    report = run(["--device", "cpu", *SMALL, "--only", *checks])
    assert report.count("| right |") == len(checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device is here: nothing was run\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_check_is_right_on_a_device() -> None:
    report = run(["--width", "1024", "--only", "plain", "fsdp2", "offload", "graph", "load"])
    assert report.count("| right |") == 5
