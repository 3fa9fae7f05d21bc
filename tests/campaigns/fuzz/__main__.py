"""Fuzzes the parsers of ckptkit, guided by coverage: `python -m tests.campaigns.fuzz all`.

Without atheris, whose wheels are for Linux and some versions of Python, inputs are drawn without
the help of coverage. The inputs that were of use stay in `tests/campaigns/work/fuzz/`, so that the
next run begins where this one ended.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.fuzz.targets import NAMES, target_named
from tests.campaigns.report import WORK, Table, write_report

FOLDER = WORK / "fuzz"
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")
_EXECUTED = re.compile(r"number_of_executed_units:\s*(\d+)")
_PROGRESS = re.compile(r"^#(\d+)", re.MULTILINE)
_PEAK = re.compile(r"peak_rss_mb:\s*(\d+)")


@dataclass(frozen=True)
class Outcome:
    """What came of fuzzing a target; edges are 0 where they were not counted."""

    target: str
    inputs: int
    seconds: float
    edges: int
    corpus: int
    peak_mb: int
    findings: list[str]


def fuzz(name: str, runs: int, seconds: int, seed: int, *, blind: bool) -> Outcome:
    folder = FOLDER / name
    command = [sys.executable, "-m", "tests.campaigns.fuzz.worker", name, str(folder)]
    command += [f"--runs={runs or -1}", f"--seconds={seconds}", f"--seed={seed}"]
    began = time.monotonic()
    done = subprocess.run(  # noqa: PLW1510  libFuzzer's status says that it stopped, too
        [*command, *(["--blind"] if blind else [])],
        capture_output=True,
        text=True,
        errors="replace",
    )
    text = done.stderr
    executed = [int(n) for n in _EXECUTED.findall(text) or _PROGRESS.findall(text)] or [0]
    coverage = _COVERAGE.findall(text)
    edges, _, corpus = map(int, coverage[-1]) if coverage else (0, 0, 0)
    peak = _PEAK.search(text)
    findings = [_describe(path) for path in sorted((folder / "findings").glob("*.json"))]
    if done.returncode:
        findings.append(f"the process ended with {done.returncode}: {text[-1500:]}")
    return Outcome(
        name, executed[-1], time.monotonic() - began, edges, corpus,
        int(peak[1]) if peak else 0, findings,
    )  # fmt: skip


def _describe(path: Path) -> str:
    finding = json.loads(path.read_text())
    return f"{finding['kind']} at {finding['place']}: {finding['what'][:200]} ({path.stem})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("target", nargs="+", choices=[*NAMES, "all"])
    parser.add_argument("--runs", type=int, default=0, help="inputs of all targets together")
    parser.add_argument("--minutes", type=float, default=0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="without atheris")
    options = parser.parse_args()
    names = NAMES if "all" in options.target else tuple(options.target)
    runs = options.runs if options.runs or options.minutes else 100_000
    shares = {name: target_named(name).share for name in names}
    whole = sum(shares.values())
    outcomes = []
    for name in names:
        inputs = max(runs * shares[name] // whole, 1) if runs else 0
        seconds = max(int(60 * options.minutes / len(names)), 1) if options.minutes else 0
        outcomes.append(fuzz(name, inputs, seconds, options.seed, blind=options.blind))
        with (FOLDER / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(outcomes[-1].__dict__) + "\n")
    _report(outcomes, options)
    return int(any(outcome.findings for outcome in outcomes))


def _report(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    rows: list[list[object]] = [
        [o.target, o.inputs, round(o.inputs / max(o.seconds, 0.1)), o.edges, o.corpus, o.peak_mb,
         len(o.findings)]
        for o in outcomes
    ]  # fmt: skip
    rows.append(
        [
            "all",
            sum(o.inputs for o in outcomes),
            "",
            "",
            "",
            "",
            sum(len(o.findings) for o in outcomes),
        ]
    )
    columns = ["target", "inputs", "a second", "edges", "corpus", "peak RSS, MB", "findings"]
    tables = [Table("Inputs by parser", columns, rows)]
    found = [
        [o.target, finding.replace("|", "\\|").replace("\n", " ")]
        for o in outcomes
        for finding in o.findings
    ]
    if found:
        tables.append(Table("Findings", ["target", "what"], found))
    asked = f"--runs {options.runs}" if options.runs else f"--minutes {options.minutes:g}"
    command = (
        f"python -m tests.campaigns.fuzz {' '.join(options.target)} {asked} --seed {options.seed}"
    )
    write_report("fuzz", command, tables)


if __name__ == "__main__":
    raise SystemExit(main())
