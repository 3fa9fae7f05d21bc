"""A sample of `make fuzz`: what was found stays mended, and seeded inputs of each parser.

The inputs of a campaign that are of use, and each that showed a defect, are kept beside the targets
and parsed here again, without atheris.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.fuzz.judge import Finding, Target, judge, mutated
from tests.campaigns.fuzz.mutation import mutate_bytes
from tests.campaigns.fuzz.seeds import CORPUS, FINDINGS, stored_inputs
from tests.campaigns.fuzz.targets import NAMES, target_named

ROOT = Path(__file__).resolve().parents[2]
_INPUTS = 60
_MOST_CORPUS_BYTES = 150 << 10


@pytest.mark.parametrize("most", [15, pytest.param(_INPUTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_parser_gives_values_or_our_errors(name: str, most: int) -> None:
    target, rng = target_named(name), random.Random(f"{name} 1")
    seeds = target.seeds()
    assert seeds, "nothing to begin with"
    inputs = [*seeds, *stored_inputs(CORPUS, name)]
    drawn = (mutated(target, rng.choice(inputs), rng) for _ in range(most))
    found = [judge(target, data) for data in (*inputs[:most], *drawn)]
    assert [one for one in found if one is not None] == []


@pytest.mark.parametrize("name", sorted(path.name for path in FINDINGS.glob("*")))
def test_what_was_found_before_stays_mended(name: str) -> None:
    target = target_named(name)
    found = [judge(target, data, with_memory=True) for data in stored_inputs(FINDINGS, name)]
    assert [one for one in found if one is not None] == []


def _misbehaving(data: bytes) -> None:
    if data == b"crash":
        raise IndexError("of the parser")
    if data == b"hang":
        sum(number * number for number in range(4_000_000))
    if data == b"memory":
        bytearray(64 << 20)
    if data == b"action":
        subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.parametrize("kind", ["crash", "hang", "memory", "action"])
def test_the_judge_sees_what_it_looks_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "hang":
        monkeypatch.setattr("tests.campaigns.fuzz.judge.LONGEST_SECONDS", 0.05)
    target = Target("made up", _misbehaving, list, mutate_bytes)
    assert judge(target, b"nothing", with_memory=True) is None
    finding = judge(target, kind.encode(), with_memory=kind == "memory")
    assert isinstance(finding, Finding)
    assert finding.kind == kind


def test_what_is_kept_is_small_and_belongs_to_a_target() -> None:
    kept = [path for folder in (CORPUS, FINDINGS) for path in folder.rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} <= set(NAMES)
    assert sum(path.stat().st_size for path in kept) <= _MOST_CORPUS_BYTES


def test_a_campaign_reports_what_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaigns.fuzz.worker", "zip-directory", str(tmp_path)]
    options = ["--runs=300", "--seed=3", "--blind"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "number_of_executed_units: 300" in done.stderr
    assert not list(tmp_path.glob("findings/*"))
