"""`--slice` and `--engine`, as srun and people see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Result, run_command

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "fixtures" / "fsdp2_plain" / "checkpoint"


def run(out: Path, *arguments: str) -> Result:
    return run_command("consolidate", SOURCE, out, *arguments)


def test_slices_say_what_is_missing_and_the_last_one_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(out, "--slice", "2/3", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == {"out": str(out), "slice": "2/3", "missing": [0, 1]}
    second = run(out, "--slice", "0/3")
    assert second.stdout.splitlines() == [
        f"slice 0/3 of {out} is written",
        "the output appears when these are written too: 1",
    ]
    assert not out.exists()
    last = run(out, "--slice", "1/3", "--json")
    assert json.loads(last.stdout)["manifest"] == str(out / "ckptkit.json")
    assert (out / "ckptkit.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slice", "0/3", "--engine", "ray"), "leave one of the two out"),
        (("--bandwidth", "fast"), "pass --bandwidth 5GB"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_pass(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    refused = run(tmp_path / "out", *arguments)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert not list(tmp_path.iterdir())
