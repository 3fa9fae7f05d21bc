"""`make gpu`: what needs CUDA, on one device and in one process; a table of costs and of checks.

Without a device it says so, and ends with status 0. `--device cpu` runs all that goes there, so
that the campaign itself is tested: its figures say nothing.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from tests.campaigns.gpu.checks import CHECKS, Place, SkippedError
from tests.campaigns.gpu.costs import Costs, measure, rows_of
from tests.campaigns.report import Table, write_report

MOST_BLOCKED, MOST_STEPS, MOST_FIRST = 1.15, 1.02, 2.0
GROWTH_BYTES = 1 << 20  # counts of steps and the like


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of one save that is measured")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each saver")
    parser.add_argument("--only", nargs="*", choices=[*CHECKS, "costs"], help="leave out others")
    parser.add_argument("--width", type=int, default=4096, help="of matrices in the checks")
    parser.add_argument("--folder", type=Path, help="on the disk to save to")
    return parser.parse_args(words)


def run_check(name: str, place: Place) -> tuple[str, str]:
    """Runs one check; returns its outcome and what it says."""
    place.folder.mkdir()
    torch.manual_seed(0)
    try:
        return "right", CHECKS[name][1](place)
    except SkippedError as skip:
        return "skipped", str(skip)
    except Exception as error:  # noqa: BLE001  reported, and the exit status says it
        traceback.print_exc()
        return "WRONG", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def judge(costs: Costs) -> list[tuple[object, ...]]:
    """Returns each goal with what was found, and whether it was reached."""
    rows = {row[0]: row for row in rows_of(costs)}["ckptkit"]
    blocked = float(str(rows[3]))
    steps = float(str(rows[5]).split()[0]) if rows[5] != "none" else 0.0
    first = max(costs.first) / median(costs.bare)
    found = [
        ("blocked until staged, of a bare pinned copy", blocked, MOST_BLOCKED),
        ("median step until durable, of quiet steps", steps, MOST_STEPS),
        ("first save after prepare, of a bare pinned copy", first, MOST_FIRST),
    ]
    grown = ("growth of the device's memory", costs.grown_bytes, GROWTH_BYTES)
    return [(name, value, most, value <= most) for name, value, most in [*found, grown]]


def cost_tables(costs: Costs) -> list[Table]:
    bare, quiet = median(costs.bare), median(costs.quiet)
    size = costs.size_bytes / 1e9
    columns = [
        "saver",
        "call s",
        "staged s",
        "x bare copy",
        "durable s",
        "x step (steps)",
    ]
    title = f"A save of {size:.2f} GB: bare copy {bare:.4f} s ({size / bare:.1f} GB/s)"
    goals = [
        (name, f"{value:.3f}" if isinstance(value, float) else value, most, "yes" if ok else "NO")
        for name, value, most, ok in judge(costs)
    ]
    return [
        Table(f"{title}, step {quiet:.4f} s", columns, list(rows_of(costs))),
        Table("Goals", ["figure", "found", "at most", "reached"], goals),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns the exit status."""
    options = parse(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is here: nothing was run")
        return 0
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    wanted = options.only or [*CHECKS, "costs"]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ckptkit-gpu-") as name:
        folder = Path(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=0,
            world_size=1,
        )
        try:
            tables, failed = run(device, folder, wanted, options)
        finally:
            dist.destroy_process_group()
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    command = shlex.join(["python", "-m", "tests.campaigns.gpu", *(words or sys.argv[1:])])
    write_report("gpu", f"{command}` on {shown}, torch `{torch.__version__}", tables)
    return int(failed)


def run(
    device: torch.device, folder: Path, wanted: Sequence[str], options: argparse.Namespace
) -> tuple[list[Table], bool]:
    """Returns the tables, and whether anything was wrong."""
    rows, tables, failed = [], [], False
    for name in [name for name in CHECKS if name in wanted]:
        began = time.perf_counter()
        outcome, detail = run_check(name, Place(device, folder / name, options.width))
        seconds = time.perf_counter() - began
        rows.append((name, CHECKS[name][0], outcome, detail, f"{seconds:.1f}"))
        failed |= outcome == "WRONG"
    if rows:
        tables.append(Table("Checks", ["check", "what", "outcome", "of what", "s"], rows))
    if "costs" in wanted:
        costs = measure(device, folder, options.gigabytes, options.rounds)
        tables += cost_tables(costs)
        failed |= device.type == "cuda" and not all(ok for *_, ok in judge(costs))
    return tables, failed


if __name__ == "__main__":
    sys.exit(main())
