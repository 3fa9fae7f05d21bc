"""The summary of docs/explanation/reliability.md says what its tables add up to."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.pages import DOCS, ROOT

PAGE = DOCS / "explanation" / "reliability.md"
FAULTS = ("kills", "SIGKILL", "SIGTERM", "ENOSPC", "EIO")


def tables_of(section: str) -> list[list[dict[str, str]]]:
    """Returns the tables of a section, each row by the names of its columns."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [
            [cell.strip() for cell in row.strip("|\n").split("|")] for row in block.splitlines()
        ]
        tables.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return tables


def number(text: str) -> int:
    return int(text.replace(",", "")) if text.replace(",", "").isdigit() else 0


def summary(campaign: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^\| \[{campaign}\]\(.*$", page, re.MULTILINE)
    assert found is not None
    return found.group()


def test_kills_and_faults_are_those_of_the_tables() -> None:
    rows = [row for table in tables_of("Chaos") for row in table]
    faults = sum(number(row.get(name, "")) for row in rows for name in FAULTS)
    assert f" {faults:,} kills and faults " in summary("chaos")


def test_fuzzed_inputs_are_those_of_the_table() -> None:
    *rows, last = tables_of("Fuzzing")[0]
    inputs, parsers = (sum(number(row[column]) for row in rows) for column in ("inputs", "parsers"))
    assert (inputs, parsers) == (number(last["inputs"]), number(last["parsers"]))
    assert f"{inputs / 1e6:.1f} million inputs to {parsers} parsers" in summary("fuzzing")


@pytest.mark.slow
def test_attacks_are_those_that_are_tried() -> None:
    (rows,) = tables_of("Attacks")
    listed = sum(number(row["tests"]) for row in rows)
    assert f"{len(rows)} kinds of attacks in {listed} tests" in summary("attacks")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/attacks", "--collect-only", "-q", "-p", "no:xdist"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed == sum("::" in line for line in done.stdout.splitlines())
