"""The walks of docs/explanation/architecture.md name files that the real runs pass through.

A run's figures are what a person has to know to follow it. They are limits: a change that raises
one makes the next change harder, a change that lowers one lowers its limit here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each run is traced, and asks Transformers anew
ROOT = Path(__file__).resolve().parents[2]
WALKS = {
    "consolidate": "Consolidate",
    "save": "Save",
    "adapter merge": "Merge an adapter",
    "push": "Push",
}
# Files, functions and types of the process that the user started.
LIMITS = {
    "consolidate": (95, 758, 136),
    "adapter merge": (113, 936, 186),
    "save": (36, 222, 49),
    "push": (46, 260, 40),
}
_FILE = re.compile(r"`((?:ckptkit|cli)/[\w/]+\.py)`")


@cache
def lines(job: str, folder: Path) -> tuple[tuple[str, ...], ...]:
    """Runs a job in processes of its own; returns process, kind, home and name of all it used."""
    path = folder / job.replace(" ", "-")
    command = [sys.executable, "-m", "tests.traced_runs", job, str(path)]
    # No answer of transformers is kept from an earlier test, or fewer functions would run.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache" / path.name)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(tuple(line.split("\t")) for line in path.read_text().splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def walk(job: str) -> list[str]:
    """Returns the files that the numbered paragraphs of a walk name, in their order."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {WALKS[job]}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE)
    return [name for step in steps for name in _FILE.findall(step)]


@pytest.mark.parametrize("job", WALKS)
def test_a_walk_names_files_that_the_run_passes_through(job: str, folder: Path) -> None:
    passed = {home for _, kind, home, _ in lines(job, folder) if kind == "function"}
    named = walk(job)
    assert len(named) >= 4
    assert [name for name in named if str(ROOT / name) not in passed] == []


@pytest.mark.parametrize("job", WALKS)
def test_a_run_asks_for_no_more_than_its_limits(job: str, folder: Path) -> None:
    traced = lines(job, folder)
    ours = [line[1:] for line in traced if line[0] == traced[0][0]]
    functions = {line for line in ours if line[0] == "function"}
    figures = (
        len({home for _, home, _ in functions}),
        len(functions),
        len({line for line in ours if line[0] == "type"}),
    )
    limits = LIMITS[job]
    over = [figure > limit for figure, limit in zip(figures, limits, strict=True)]
    assert not any(over), f"{figures} is more than {limits}"
    slack = [limit > 1.05 * figure for figure, limit in zip(figures, limits, strict=True)]
    assert not any(slack), f"lower the limits to what was reached: {figures}"
