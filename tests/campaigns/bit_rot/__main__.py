"""Damages bytes of every format, and counts the faults that are found, harmless, or not found.

    python -m tests.campaigns.bit_rot --seed 1 --flips 400

A fault is **found** if a use ends with an error of ckptkit and writes nothing, **harmless** if all
uses have the result that they have without the fault, and **not found** if one of them has another
result without an error. `verify` counts too: what it alone finds is in a column of its own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.campaigns.bit_rot.cases import CASES, Case
from tests.campaigns.bit_rot.damage import Fault, draw_faults
from tests.campaigns.report import Table, write_report

FOUND, BY_VERIFY, HARMLESS, MISSED = "found", "by verify alone", "harmless", "not found"
OUTCOMES = (FOUND, BY_VERIFY, HARMLESS, MISSED)


@dataclass
class Count:
    """What became of the faults of one case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    # By class of bytes and outcome.
    classes: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)  # the faults that were not found
    # What must not happen at all: other exceptions, or an output beside an error.
    wrong: list[str] = field(default_factory=list)


class Trial:
    """A case in a folder, whose files are damaged one at a time."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.count = Count()
        self._out = folder / "out"
        (folder / "case").mkdir(parents=True)
        self._made = folder / "case"
        case.make(self._made)
        damaged = self._made / case.damaged
        self.files = {
            str(path.relative_to(damaged)): path.read_bytes()
            for path in sorted(damaged.rglob("*"))
            if path.is_file() and path.name not in case.spared
        }
        self._truth = {name: self._use(name) for name in case.uses}
        again = {name: self._use(name) for name in case.uses}
        if self._truth != again or any(kind != "value" for kind, _ in again.values()):
            raise RuntimeError(f"a use of the undamaged case differs: {self._truth} {again}")

    def run(self, fault: Fault) -> str:
        """Counts what becomes of a fault, and mends it."""
        path = self._made / self.case.damaged / fault.path
        path.write_bytes(fault.data)
        try:
            outcome = self._judge(fault)
        finally:
            path.write_bytes(self.files[fault.path])
        self.count.outcomes[outcome] += 1
        self.count.classes[fault.byte_class, outcome] += 1
        return outcome

    def _judge(self, fault: Fault) -> str:
        results = {name: self._use(name) for name in self.case.uses}
        for name, (kind, value) in results.items():
            if kind == "wrong":
                self.count.wrong.append(f"{fault}: {name}: {value}")
        others = [
            name
            for name, (kind, value) in results.items()
            if kind == "value" and value != self._truth[name][1]
        ]
        if others:
            self.count.missed.append(f"{fault}: another result of {', '.join(others)}")
            return MISSED
        if any(kind != "value" for kind, _ in results.values()):
            return FOUND
        return HARMLESS if self._is_verified(fault) else BY_VERIFY

    def _is_verified(self, fault: Fault) -> bool:
        try:
            return ckptkit.verify(self._made / self.case.damaged).ok
        except CkptkitError:
            return False
        except Exception as error:  # noqa: BLE001
            self.count.wrong.append(f"{fault}: verify: {type(error).__name__}: {error}")
            return False

    def _use(self, name: str) -> tuple[str, str]:
        shutil.rmtree(self._out, ignore_errors=True)
        try:
            return "value", self.case.uses[name](self._made, self._out)
        except CkptkitError as error:
            if self._out.exists():
                return "wrong", f"an output was written, and the error is {error}"
            return "error", error.code
        except Exception as error:  # noqa: BLE001
            return "wrong", f"{type(error).__name__}: {error}"


def run_case(name: str, folder: Path, *, seed: int, flips: int) -> Count:
    trial = Trial(CASES[name], folder)
    for fault in draw_faults(trial.files, flips, f"{seed} {name}"):
        trial.run(fault)
    return trial.count


def make_tables(counts: dict[str, Count]) -> list[Table]:
    """Returns the tables of the report: by format, and what was not found by class of bytes."""
    rows = [
        (
            name,
            count.outcomes.total(),
            *(count.outcomes[outcome] for outcome in OUTCOMES),
            CASES[name].reason if count.missed else "",
        )
        for name, count in counts.items()
    ]
    missed = [
        (name, byte_class, found)
        for name, count in counts.items()
        for (byte_class, outcome), found in sorted(count.classes.items())
        if outcome == MISSED
    ]
    return [
        Table("Faults by format", ("format", "faults", *OUTCOMES, "what cannot be found"), rows),
        Table("Not found, by class of bytes", ("format", "class", "faults"), missed),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flips", type=int, default=400, help="of each format")
    parser.add_argument("--only", default="", help="formats with this in their names")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: dict[str, Count] = {}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="bit-rot-", dir=memory) as folder:
        for number, name in enumerate(n for n in CASES if options.only in n):
            place = Path(folder, str(number))
            counts[name] = count = run_case(name, place, seed=options.seed, flips=options.flips)
            print(f"{name}: {dict(count.outcomes)}", file=sys.stderr, flush=True)
            for line in (*count.wrong, *(count.missed if CASES[name].is_ours else ())):
                print(f"  {line}", file=sys.stderr, flush=True)
    command = f"python -m tests.campaigns.bit_rot --seed {options.seed} --flips {options.flips}"
    write_report("bit_rot", command, make_tables(counts))
    ours = [name for name, count in counts.items() if CASES[name].is_ours and count.missed]
    return int(bool(ours) or any(count.wrong for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
