"""The process that fuzzes one target: guided by coverage with atheris, blindly without it.

libFuzzer ends its process at the first crash. Here a finding is written down, and the work goes
on; only an input that never returns ends the process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.campaigns.fuzz.judge import Finding, Target, judge, mutated
from tests.campaigns.fuzz.seeds import CORPUS, FINDINGS, stored_inputs

MEMORY_EVERY = 64
"""Of so many inputs, the memory of one is measured: it makes a parser several times slower."""
_ROOM_BYTES = 3 << 30
_LONGEST_WALL_SECONDS = 60  # on a machine that is busy; CPU time is measured more narrowly


class Notes:
    """Counts inputs, and writes each new finding to a folder with the input that shows it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.inputs = self.measured = 0
        self._target = target
        self._folder = folder
        for old in folder.glob("*"):  # of a run of other code; its inputs are in the corpus
            old.unlink()
        self._seen: dict[tuple[str, str], int] = {}

    def run(self, data: bytes) -> None:
        self.inputs += 1
        with_memory = self.inputs % MEMORY_EVERY == 0
        self.measured += with_memory
        finding = judge(self._target, data, with_memory=with_memory)
        if finding is not None and finding.kind == "hang":  # unless the machine was at fault
            finding = judge(self._target, data)
        if finding is not None:
            self._note(finding, data)

    def _note(self, finding: Finding, data: bytes) -> None:
        key = finding.kind, finding.place
        if len(data) >= self._seen.get(key, sys.maxsize):
            return
        self._seen[key] = len(data)
        slug = hashlib.sha256("".join(key).encode()).hexdigest()[:10]
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / slug).write_bytes(data)
        (self._folder / f"{slug}.json").write_text(json.dumps(finding.__dict__, indent=1))


def begin_corpus(target: Target, folder: Path) -> list[bytes]:
    """Writes the seeds, the stored corpus and the stored findings to a folder, and returns them."""
    inputs = [*target.seeds(), *stored_inputs(CORPUS, target.name)]
    inputs += stored_inputs(FINDINGS, target.name)
    inputs += [path.read_bytes() for path in (folder.parent / "findings").glob("*[!n]")]
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        if len(data) <= target.most_bytes:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return inputs


def _limit_memory() -> None:
    used = Path("/proc/self/statm")
    room = int(used.read_text().split()[0]) * resource.getpagesize() if used.exists() else 0
    if room:
        resource.setrlimit(resource.RLIMIT_AS, (room + _ROOM_BYTES, resource.RLIM_INFINITY))


def _fuzz_blindly(target: Target, notes: Notes, options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    inputs = begin_corpus(target, options.folder / "corpus")
    for data in inputs:
        notes.run(data)
    stop = time.monotonic() + options.seconds if options.seconds else float("inf")
    while notes.inputs < options.runs and time.monotonic() < stop:
        data = mutated(target, rng.choice(inputs), rng)
        if rng.random() < 0.3:
            data = mutated(target, data, rng)
        notes.run(data)


def _fuzz_guided(atheris: Any, name: str, options: argparse.Namespace) -> None:
    with atheris.instrument_imports(
        include=["ckptkit", "ckptkit_cli"], enable_loader_override=False
    ):
        from tests.campaigns.fuzz.targets import target_named

        target = target_named(name)
        inputs = begin_corpus(target, options.folder / "corpus")
        notes = Notes(target, options.folder / "findings")
        for data in inputs:  # imports what is imported late
            notes.run(data)
    _limit_memory()

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.35:
            return bytes(atheris.Mutate(data, most))
        return mutated(target, data, rng)[:most]

    arguments = [
        *(sys.argv[0], f"-seed={options.seed or 1}", "-print_final_stats=1"),
        *(f"-runs={options.runs}", f"-max_total_time={options.seconds}"),
        *(
            f"-max_len={target.most_bytes}",
            f"-timeout={_LONGEST_WALL_SECONDS}",
            "-rss_limit_mb=4096",
        ),
        *("-len_control=0", f"-artifact_prefix={options.folder}/", "-verbosity=1"),
        str(options.folder / "corpus"),
    ]
    atheris.Setup(arguments, notes.run, custom_mutator=mutate)
    atheris.Fuzz()


def main(arguments: Sequence[str]) -> None:
    """Fuzzes a target; what it counts is on the error stream, as libFuzzer writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.blind and find_spec("atheris") is not None:
        _fuzz_guided(import_module("atheris"), options.target, options)
        return
    from tests.campaigns.fuzz.targets import target_named

    target = target_named(options.target)
    options.runs = options.runs if options.runs > 0 else sys.maxsize
    notes = Notes(target, options.folder / "findings")
    _fuzz_blindly(target, notes, options)
    sys.stderr.write(f"stat::number_of_executed_units: {notes.inputs}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
