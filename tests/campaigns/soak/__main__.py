"""Runs a soak: `python -m tests.campaigns.soak --minutes 10 --seed 1`.

`--plan N` prints the plan of the first N chapters and ends; `--chapter N` runs that chapter alone.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.campaigns.report import Table, write_report
from tests.campaigns.soak.chapters import ChapterRun
from tests.campaigns.soak.plan import Chapter, Scope, draw_chapter
from tests.campaigns.soak.services import Count, Services, can_mount, services

SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn if it is left out")
    parser.add_argument("--chapter", type=int, default=None, help="run this chapter alone")
    parser.add_argument("--plan", type=int, default=0, help="print the plan of so many chapters")
    parser.add_argument("--models", default=",".join(Scope.models))
    parser.add_argument("--places", default=",".join(Scope.places))
    parser.add_argument("--keep", type=Path, help="where to write the problems as they come")
    return parser.parse_args(arguments)


def soak(
    seed: int, seconds: float, scope: Scope, *, only: int | None = None, keep: Path | None = None
) -> tuple[Count, float]:
    """Runs chapters until the time is over; returns what was counted, and the seconds it took."""
    torch.set_num_threads(1)
    began = time.monotonic()

    def is_over() -> bool:
        return time.monotonic() - began >= seconds

    with services() as shared:
        number = 0 if only is None else only
        while True:
            _run_chapter(shared, draw_chapter(seed, number, scope), is_over, keep)
            number += 1
            if only is not None or is_over():
                break
        count = shared.count
    return count, time.monotonic() - began


def _run_chapter(
    shared: Services, chapter: Chapter, is_over: Callable[[], bool], keep: Path | None
) -> None:
    known = len(shared.count.problems)
    shared.count.actions["runs"] += 1
    try:
        ChapterRun(shared, chapter).run(is_over)
    except Exception:  # noqa: BLE001  the other chapters are run all the same
        shared.count.problems.append(f"chapter {chapter.number}: {traceback.format_exc()}")
    new = shared.count.problems[known:]
    for problem in new:
        sys.stderr.write(f"{problem}\n")
    if new and keep is not None:
        keep.mkdir(exist_ok=True)
        (keep / f"{chapter.seed}-{chapter.number}.txt").write_text("\n".join(new))


def tables(count: Count, seconds: float) -> list[Table]:
    total = [
        ("seconds", round(seconds)),
        ("runs", count.actions["runs"]),
        ("starts of a job", count.lives),
        ("faults injected", sum(count.faults.values())),
        ("resumes compared with the shadow, on every rank", count.actions["resumes compared"]),
        ("steps compared with the shadow", count.steps),
        ("bytes compared", count.size_bytes),
        ("lost or wrong", len(count.problems)),
    ]
    resumes = [(f"{old} to {new}", n) for (old, new), n in sorted(count.resumes.items())]
    found = [
        Table("Totals", ("what", "count"), total),
        _counted("Actions", "action", count.actions),
        _counted("Faults injected and survived", "fault", count.faults),
        _counted("Errors that saves and ranks reported meanwhile", "kind", count.failed),
        Table("Resumes", ("from and to", "count"), resumes),
    ]
    if count.problems:
        found.append(Table("Losses", ("what",), [(p.splitlines()[0],) for p in count.problems]))
    return found


def _counted(title: str, column: str, counted: Counter[str]) -> Table:
    return Table(title, (column, "count"), sorted((k, n) for k, n in counted.items() if n))


def _command(options: argparse.Namespace, seed: int) -> str:
    words = ["python -m tests.campaigns.soak", f"--minutes {options.minutes:g} --seed {seed}"]
    if options.models != ",".join(Scope.models):
        words.append(f"--models {options.models}")
    if options.places != ",".join(Scope.places):
        words.append(f"--places {options.places}")
    if options.chapter is not None:
        words.append(f"--chapter {options.chapter}")
    return " ".join(words)


def main() -> int:
    os.environ.update(SETTINGS)
    warnings.simplefilter("ignore")  # those of torch and PEFT on odd models
    options = parse(sys.argv[1:])
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    scope = Scope(
        models=tuple(options.models.split(",")),
        places=tuple(options.places.split(",")),
        mounts=can_mount(),
    )
    if options.plan:
        for number in range(options.plan):
            sys.stdout.write("\n".join(draw_chapter(seed, number, scope).lines()) + "\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing stays mounted
    count, seconds = soak(
        seed, 60 * options.minutes, scope, only=options.chapter, keep=options.keep
    )
    write_report("soak", _command(options, seed), tables(count, seconds))
    return 1 if count.problems else 0


if __name__ == "__main__":
    sys.exit(main())
