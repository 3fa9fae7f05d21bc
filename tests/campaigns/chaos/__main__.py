"""Kills and faults at each file event of trainers, and at each system call of all other processes.

Usage: python -m tests.campaigns.chaos [--parts PART,...] [--seed N] [--most N]. Its parts:

examples   ckpt-chaos over the examples, two ranks each
disks      the processes of a save on disks, asked as a trainer asks them
training   the same in training on two ranks: all of the job is killed, started and compared
commands   commands that write folders
stores     uploads of steps, and commands that write to S3 and the Hub
tests      the kill tests, and what they count
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree as ET

from tests.campaigns.chaos import commands, stores, training, writers
from tests.campaigns.chaos.examples import EXAMPLES, VERDICTS, example_host, run_example
from tests.campaigns.chaos.scenes import ACTS, Choice, Played, Scene, every_call, play, some_calls
from tests.campaigns.chaos.system_calls import KILL_JOB, TERM_JOB, is_possible
from tests.campaigns.report import Table, write_report
from tests.hub_server import HubServer
from tests.object_store import running_object_store

ROOT = Path(__file__).resolve().parents[3]
MODES = ("before", "torn", "term")
KILL_TESTS = tuple(
    f"tests/crash/test_{name}.py"
    for name in (
        *("writer_kills", "training_kills", "commit", "upload_kills", "prune_kills"),
        *("watch_kills", "hub_push_crash", "deleting"),
    )
)
T = TypeVar("T")


class Campaign:
    """What a run of the campaign is asked for, and what it has found."""

    def __init__(self, seed: int, most: int, only: str) -> None:
        self.tables: list[Table] = []
        self.losses: list[str] = []
        self._seed = seed
        self._most = most
        self._only = only

    def _choice(self, name: str) -> Choice:
        return some_calls(f"{self._seed}-{name}", self._most) if self._most else every_call

    def examples(self) -> None:
        rows = []
        points = 3 * self._most or 10_000
        with example_host() as host, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for example in self._chosen(EXAMPLES, "name"):
                for rank in (0, 1):
                    work = Path(folder) / f"{example.name}-{rank}"
                    found = run_example(example, host, work, modes=MODES, points=points, rank=rank)
                    for mode, one in found.items():
                        counts = [one.found[verdict] for verdict in VERDICTS]
                        row = [example.name, rank, mode, one.events, one.kills]
                        rows.append([*row, one.resumed, *counts, one.restarted])
                        self.losses += [f"{example.name}: {wrong}" for wrong in one.wrong.values()]
                        print(*rows[-1], flush=True)
        columns = ["example", "rank killed", "mode", "file events", "kills"]
        columns += ["resumed from a step", *VERDICTS, "as a restart after the end"]
        self.tables.append(Table("Kills of trainers, by ckpt-chaos", columns, rows))

    def disks(self) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model, nodes = Path(folder) / "model", Path(folder) / "nodes"
            scenes = (
                writers.Saving(model),
                writers.Keeping(nodes),
                writers.Draining(nodes),
                writers.Discarding(model),
            )
            self._play("Faults in the processes of a save", scenes, Path(folder))

    def training(self) -> None:
        rows = []
        first = random.Random(self._seed).randrange(1, 4)
        stride = max(1, 40 // self._most) if self._most else 1
        module = "tests.campaigns.chaos.training"
        for actor in training.ACTORS if not self._only else [self._only]:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                words = [f"{folder}/run", str(stride), str(first if stride > 1 else 1), actor]
                done = subprocess.run(
                    [sys.executable, "-m", module, *words],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode:
                self.losses.append(f"{actor}: {done.stderr[-2000:]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])[actor]
            counts = [found[act] for act in (KILL_JOB, TERM_JOB)]
            rows.append([actor, found["calls"], *counts, found["resumes"], len(found["losses"])])
            self.losses += [f"{actor}: {loss}" for loss in found["losses"]]
            print(*rows[-1], flush=True)
            if found["losses"]:
                print(done.stderr[-3000:])
        columns = ["process whose calls count", "system calls", KILL_JOB, TERM_JOB]
        columns += ["states compared by ranks that resumed", "lost"]
        self.tables.append(Table("Kills of a whole job of two ranks", columns, rows))

    def commands(self) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            host = stack.enter_context(commands.command_host())
            self._play("Faults in commands", commands.commands(host), folder)

    def stores(self) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            bucket = stack.enter_context(running_object_store()).bucket("chaos")
            hub = stack.enter_context(HubServer(xet=False))
            settings = stores.settings_for(hub)
            host = stack.enter_context(commands.command_host(**settings))
            scenes = (
                stores.Uploading(host, bucket, folder / "nodes"),
                stores.WritingToStore(host, bucket, folder),
                stores.Pushing(host, hub, folder),
                stores.Pulling(host, hub, folder),
                stores.Watching(host, hub),
            )
            self._play("Faults in what writes to stores and the Hub", scenes, folder)

    def tests(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "junit.xml"
            # Only this family has the properties in which tests count their kills.
            family = "junit_family=xunit1"
            command = [sys.executable, "-m", "pytest", "-q", "-o", family]
            command += [f"--junitxml={report}", *KILL_TESTS]
            done = subprocess.run(command, cwd=ROOT, check=False)
            rows = sorted(_counted(report))
        if done.returncode:
            self.losses.append("a kill test fails")
        self.tables.append(Table("Kill tests", ("test", "kills", "failures"), rows))

    def _chosen(self, items: Iterable[T], attribute: str) -> list[T]:
        return [item for item in items if self._only in getattr(item, attribute)]

    def _play(self, title: str, scenes: Iterable[Scene], folder: Path) -> None:
        rows = []
        for scene in self._chosen(scenes, "work"):
            stage = folder / "stage"
            stage.mkdir(exist_ok=True)
            played = play(scene, stage, self._choice(scene.work))
            rows.append(_row(played))
            self.losses += [f"{played.work}: {loss}" for loss in played.losses]
            print(*rows[-1], *played.losses[:5], sep="\n    ", flush=True)
        columns = ("process", "work", "system calls", *ACTS, "compared bit by bit", "lost")
        self.tables.append(Table(title, columns, rows))


def _row(played: Played) -> list[object]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(played.calls.items()))
    calls = f"{sum(played.calls.values())}: {kinds}"
    faults = [played.faults[act] for act in ACTS]
    return [played.process, played.work, calls, *faults, played.verified, len(played.losses)]


def _counted(report: Path) -> Iterator[list[object]]:
    """Yields a row for each file of tests: what its tests have counted, and how many failed."""
    kills, failures = Counter[str](), Counter[str]()
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314  pytest has written it
        module = case.get("classname", "").rpartition(".")[2]
        failures[module] += case.find("failure") is not None or case.find("error") is not None
        for item in case.iter("property"):
            if item.get("name") == "kills":
                kills[module] += int(item.get("value", "0"))
    yield from ([module, kills[module], failures[module]] for module in failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("examples", "disks", "training", "commands", "stores", "tests")
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=0, help="calls for each fault; 0: all of them")
    parser.add_argument("--only", default="", help="a part of the name of what is played")
    given = parser.parse_args()
    if not is_possible():
        print("needs Linux 5.14 or newer on x86-64: nothing was tried")
        return 0
    campaign = Campaign(given.seed, given.most, given.only)
    for part in given.parts.split(","):
        getattr(campaign, part)()
    command = f"make chaos PARTS={given.parts} SEED={given.seed} MOST={given.most}"
    write_report("chaos", command, campaign.tables)
    print(*(f"LOST {loss}" for loss in campaign.losses), sep="\n")
    return int(bool(campaign.losses))


if __name__ == "__main__":
    sys.exit(main())
