"""Every command and every line of Python of docs/reference/deltas.md does what the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command_line import run_command
from tests.sharded import write_sharded
from tests.small_deltas import model_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deltas.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the run of the page, in which commands run."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.rand(8, 6, generator=generator) for i in range(3)}
    for step in (100, 101, 102):
        write_sharded(tmp_path / "runs" / "rl" / f"checkpoint-{step}", tensors, 2)
        tensors = {name: tensor + (tensor > 0.9) for name, tensor in tensors.items()}
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_every_command_of_the_page_succeeds(here: Path) -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert len(lines) > 5
    for line in lines:
        prompt, program, *words = shlex.split(line)
        assert (prompt, program) == ("$", "ckptkit")
        done = run_command(*words)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    run_command("consolidate", "runs/rl/checkpoint-102", "expected")
    assert model_bytes(here / "models" / "new") == model_bytes(here / "expected")
    assert len(list((here / "shared" / "weights").glob("weight_v*"))) == 3


def test_the_python_of_the_page_runs(here: Path) -> None:
    (program,) = blocks("python")
    root = str(PAGE.parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{program}"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 1
    run_command("consolidate", "runs/rl/checkpoint-102", "expected", "--dtype", "bfloat16")
    assert model_bytes(here / "models" / "b") == model_bytes(here / "expected")


@pytest.mark.usefixtures("here")
def test_the_version_is_taken_from_names_like_the_one_of_the_page_alone() -> None:
    (name,) = re.findall(r"name of OUT such as `(\w+)`", PAGE.read_text(encoding="utf-8"))
    versions = {}
    for out in (name, "000002", "step-2"):
        steps = ("runs/rl/checkpoint-100", "runs/rl/checkpoint-101")
        made = run_command("delta", "create", *steps, out, "--json")
        versions[out] = json.loads(made.stdout)["source"]["delta"]["version"]
    assert versions == {name: 2, "000002": 1, "step-2": 1}
