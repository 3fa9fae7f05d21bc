"""Runs draws in batches of ranks, repeats a failure alone, and makes it smaller."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.campaigns.differential.draws import Draw, simpler
from tests.ranks import RankHost, RunRanks

SCRIPT = Path(__file__).with_name("phase_run.py")
PHASES = ("save", "load", "read")
BATCH = 20
SECONDS_PER_DRAW = 120.0
SMALLER_TRIES = 40


@dataclass(frozen=True)
class Comparison:
    """One thing that was read and compared."""

    draw: Draw  # what was drawn
    saver: str  # what wrote it
    reader: str  # what read it
    tensors: int  # how many tensors and values were equal
    size_bytes: int  # how many bytes of them
    seconds: float
    error: str  # why they were not; empty where they were


class Campaign:
    """Draws in folders of their own, and a process that ranks are forks of."""

    def __init__(self, folder: Path, run_ranks: RunRanks | None = None) -> None:
        """Runs ranks with `run_ranks`, which must accept any status, or from a host of its own."""
        self._folder = folder
        self._host = RankHost()
        self._run_ranks = self._host.run if run_ranks is None else run_ranks
        self._made = 0

    def close(self) -> None:
        self._host.close()

    def run(self, draws: Sequence[Draw]) -> list[Comparison]:
        """Runs all phases of draws; a draw that failed in one has no later ones."""
        places = {self._place(draw): draw for draw in draws}
        for phase in PHASES:
            left = [place for place in places if phase == "save" or self._ended(place, phase)]
            sizes = {place: _world(places[place], phase) for place in left}
            for world, batch in _batches(sizes):
                self._run_batch(phase, world, batch)
        found = [one for place, draw in places.items() for one in self._results(place, draw)]
        for place in places:
            shutil.rmtree(self._folder / place)
        return found

    def _place(self, draw: Draw) -> str:
        self._made += 1
        place = self._folder / str(self._made)
        place.mkdir(parents=True)
        (place / "draw.json").write_text(draw.to_json())
        return place.name

    def _ended(self, place: str, phase: str) -> bool:
        before = PHASES[PHASES.index(phase) - 1]
        # What is read by commands needs the saves, not the loads.
        return (self._folder / place / f"{before if phase == 'load' else 'save'}.done").exists()

    def _run_batch(self, phase: str, world: int, places: Sequence[str]) -> None:
        """Runs a phase; ranks are started anew after a draw that failed."""
        left = list(places)
        while left:
            done = self._run_ranks(
                SCRIPT,
                world,
                phase,
                self._folder,
                *left,
                limit_seconds=60 + SECONDS_PER_DRAW * len(left),
            )
            at = 0
            while at < len(left) and (self._folder / left[at] / f"{phase}.done").exists():
                at += 1
            if at < len(left):
                self._note(left[at], phase, done.stderr)
                at += 1
            left = left[at:]

    def _note(self, place: str, phase: str, text: str) -> None:
        """Has an error for a draw whose ranks ended without one."""
        path = self._folder / place / f"{phase}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if not any(json.loads(line)[-1] for line in lines):
            words = f"the ranks ended: {text[-3_000:]}"
            with path.open("a") as file:
                file.write(json.dumps(["", phase, 0, 0, 0.0, words]) + "\n")

    def _results(self, place: str, draw: Draw) -> Iterable[Comparison]:
        for phase in PHASES:
            path = self._folder / place / f"{phase}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                yield Comparison(draw, *json.loads(line))

    def shrink(self, failed: Comparison) -> Comparison:
        """Returns the same failure of the smallest draw that still has it."""
        tries = SMALLER_TRIES
        found = self._same_failure(failed.draw, failed)
        if found is None:  # alone, it does not fail
            return failed
        while tries:
            for smaller in simpler(found.draw):
                tries -= 1
                again = self._same_failure(smaller, failed)
                if again or not tries:
                    found = again or found
                    break
            else:
                break
        return found

    def _same_failure(self, draw: Draw, failed: Comparison) -> Comparison | None:
        for one in self.run([draw]):
            if one.error and (one.saver, one.reader) == (failed.saver, failed.reader):
                return one
        return None


def _world(draw: Draw, phase: str) -> int:
    return {"save": draw.first.world, "load": draw.second.world, "read": 1}[phase]


def _batches(sizes: Mapping[str, int]) -> Iterable[tuple[int, list[str]]]:
    for size, same in groupby(sorted(sizes, key=sizes.__getitem__), sizes.__getitem__):
        listed = list(same)
        for start in range(0, len(listed), BATCH):
            yield size, listed[start : start + BATCH]
