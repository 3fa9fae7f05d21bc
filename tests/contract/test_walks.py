"""The walks of docs/explanation/architecture.md name files that the real runs pass through."""

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
    "consolidate": "How a consolidate works, in six files",
    "save": "How a save works, in seven files",
    "resume": "How a resume works, in six files",
    "adapter merge": "How a merge works, in seven files",
    "push": "Push",
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
