"""What a save costs training on two ranks: ckptkit beside torch, in turns, in the same run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from measuring import HERE, WORK, environment

FOLDER = WORK / "saving"
MS = 1e3


def run_ranks(what: str, *options: str) -> list[dict[str, Any]]:
    """Runs the rank script, and returns what every rank found.

    Raises:
        RuntimeError: If it fails; the message ends with what it printed last.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(HERE / "saving_ranks.py"), what, str(FOLDER), *options]
    settings = environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    shutil.rmtree(FOLDER, ignore_errors=True)
    rows = [row for row in done.stdout.splitlines() if row.startswith("FOUND ")]
    if not rows:
        raise RuntimeError(f"{what} ended with {done.returncode}: {done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(rows[0].removeprefix("FOUND "))
    return found


def over(ranks: Sequence[dict[str, Any]], name: str, value: Callable[[Any], float]) -> list[float]:
    """Returns a value of one saver in every round, of the slower rank."""
    rounds = zip(*(rank["rounds"] for rank in ranks), strict=True)
    return [max(value(rank[name]) for rank in found) for found in rounds]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "|".join([":--", *["--:"] * (len(header) - 1)]) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


GROUPS = (
    "ckptkit;dcp.save;dcp.async_save, thread",
    # Its daemons stay and disturb whoever saves after them, so it comes in a run of its own.
    "ckptkit;dcp.save;dcp.async_save, process",
)


def compare(savers: str, rounds: int, blocks: int) -> None:
    """Prints the table of a group of savers."""
    ranks = run_ranks("compare", f"--rounds={rounds}", f"--blocks={blocks}", f"--savers={savers}")
    names = list(ranks[0]["first"])
    median = statistics.median
    synchronous = median(over(ranks, "dcp.save", lambda v: v["durable"]))
    rows = []
    for name in names:
        first = max(r["first"][name]["blocked"] / r["first"][name]["warm"] for r in ranks)
        blocked = over(ranks, name, lambda v: v["blocked"])
        ratio = over(ranks, name, lambda v: v["blocked"] / v["warm"])
        durable = over(ranks, name, lambda v: v["durable"])
        slower = [s / median(v["quiet"]) for r in ranks for f in r["rounds"]
                  for v in [f[name]] for s in v["during"]]  # fmt: skip
        rows.append(
            [
                name,
                f"{median(blocked):.3f}",
                f"{median(ratio):.2f}",
                f"{first:.2f}",
                f"{median(durable):.2f}",
                f"{median(durable) / synchronous:.2f}",
                f"{median(slower):.2f} / {max(slower):.2f}" if slower else "",
            ]
        )
    warm = median(over(ranks, "ckptkit", lambda v: v["warm"]))
    quiet = median(s for r in ranks for f in r["rounds"] for s in f["ckptkit"]["quiet"])
    size = ranks[0]["reports"][0]["size_bytes"] / (1 << 20)
    print(f"{size:.0f} MiB on each of 2 ranks; warm copy {warm:.3f} s, step {quiet:.2f} s\n")
    header = (
        "saver|blocked s|x warm copy|first x|durable s|x dcp.save|steps meanwhile, median / max"
    )
    table(header.split("|"), rows)
    cpu = median(report["cpu"] for rank in ranks for report in rank["reports"])
    private = max(rank["memory"]["writer_private_bytes"] for rank in ranks) / 1e6
    buffer = max(rank["memory"]["buffer_bytes"] for rank in ranks) / (1 << 20)
    files = median(report["durable"] for rank in ranks for report in rank["reports"])
    print(
        f"ckptkit's files are durable after {files:.2f} s; the table counts until the step is"
        " committed.\n"
        f"The writer takes {cpu:.2f} s of processor time a save and {private:.0f} MB of private"
        f" memory; the buffer has {buffer:.0f} MiB.\n"
    )


def long_run(steps: int, blocks: int) -> None:
    """Prints what a save costs in a run with a save every 30 steps."""
    ranks = run_ranks("long", f"--steps={steps}", f"--blocks={blocks}")
    for number, rank in enumerate(ranks):
        times, busy = rank["steps"], rank["in_flight"]
        quiet = [t for t, b in zip(times[5:], busy[5:], strict=True) if not b]
        during = [t for t, b in zip(times, busy, strict=True) if b]
        usual = statistics.median(quiet)
        blocked = list(rank["blocked"].values())
        lost = (sum(during) - usual * len(during) + sum(blocked)) / len(blocked)
        ordered = sorted(during)
        late = ordered[int(0.99 * (len(ordered) - 1))]
        print(
            f"rank {number}: {steps} steps of {usual:.3f} s, {len(blocked)} saves blocked"
            f" {statistics.median(blocked) * MS:.0f} ms"
            f" ({statistics.median(blocked) / rank['warm']:.2f} x the warm copy);"
            f" {len(during)} steps meanwhile took {statistics.median(during) / usual:.2f} x"
            f" (99th percentile {late / usual:.2f}, of the others"
            f" {sorted(quiet)[int(0.99 * (len(quiet) - 1))] / usual:.2f}); lost per save"
            f" {lost * MS:.0f} ms = {lost / rank['warm']:.2f} x the warm copy"
        )
    print(flush=True)


def resume(rounds: int, blocks: int) -> None:
    """Prints how long it takes to read the same state back."""
    ranks = run_ranks("resume", f"--rounds={rounds}", f"--blocks={blocks}")
    ours, theirs = (
        [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ("ckptkit", "dcp.load")
    )
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    table(
        ["reading back, s", "median", "x dcp.load"],
        [
            ["ckptkit resume", f"{statistics.median(ours):.2f}", f"{ratio:.2f}"],
            ["dcp.load", f"{statistics.median(theirs):.2f}", "1.00"],
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["compare", "long", "resume"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=28, help="of 8 parameters of 1.5 MiB")
    options = parser.parse_args(arguments)
    os.chdir(Path(HERE).parent)
    if "compare" in options.what:
        for savers in GROUPS:
            compare(savers, options.rounds, options.blocks)
    if "long" in options.what:
        long_run(options.steps, options.blocks)
    if "resume" in options.what:
        resume(options.rounds, options.blocks)


if __name__ == "__main__":
    main()
