"""How long a sharded model of 2 GB takes to be filled, and what is read and held for that."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import HERE, MB, WORK, ckptkit, environment, files_below, make_checkpoint, measure

FIRST = "dcp.load, shards of another mesh"


def run_ranks(ranks: int, *options: str) -> list[list[dict[str, dict[str, float]]]]:
    """Runs the rank script, and returns what every rank found in every round.

    Raises:
        RuntimeError: If it fails; the message ends with what it printed last.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(HERE / "loading_ranks.py"), *options]
    settings = environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    rows = [row for row in done.stdout.splitlines() if row.startswith("FOUND ")]
    if not rows:
        raise RuntimeError(f"the ranks ended with {done.returncode}: {done.stderr[-3000:]}")
    found: list[list[dict[str, dict[str, float]]]] = json.loads(rows[0].removeprefix("FOUND "))
    return found


def make_folder(shards: Path) -> Path:
    """Returns the model folder of some shards, made when it is not there yet."""
    out = shards.with_name(f"{shards.name}-folder")
    if not (out / "ckptkit.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        measure(ckptkit("consolidate", str(shards), str(out), "--max-shard-size", "1GB"))
    return out


def warm(folder: Path) -> None:
    for path in files_below(folder):
        with path.open("rb") as file:
            while file.read(8 << 20):
                pass


def print_table(ranks: list[list[dict[str, dict[str, float]]]]) -> None:
    """Prints the slowest rank of each round, medians over the rounds."""
    rounds = list(zip(*ranks, strict=True))
    names = list(dict.fromkeys(name for found in rounds for name in found[0]))
    print(
        "| | seconds | min | max | x dcp.load | read / needed | beyond the model MB | bit-equal |"
        " rounds |"
    )
    print("|:--|--:|--:|--:|--:|--:|--:|:--|--:|")
    for name in sorted(names):
        of_name = [found for found in rounds if name in found[0]]
        seconds = [max(rank[name]["seconds"] for rank in found) for found in of_name]
        firsts = [max(rank[FIRST]["seconds"] for rank in found) for found in of_name]
        ratio = statistics.median(own / first for own, first in zip(seconds, firsts, strict=True))
        beyond = statistics.median(max(rank[name]["beyond"] for rank in found) for found in of_name)
        print(
            f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} |"
            f" {max(seconds):.2f} | {ratio:.2f} | {describe_reads(name, of_name)} |"
            f" {beyond / MB:.0f} | {describe_bits(name, of_name)} | {len(seconds)} |"
        )
    print()


def describe_reads(name: str, rounds: Sequence[Sequence[dict[str, dict[str, float]]]]) -> str:
    """Returns the bytes read per byte needed, where the tool reads and does not map the files."""
    if "tp_plan" in name or "accelerate" in name:
        return "mapped"
    shares = [
        max(
            rank[name].get("read", rank[name]["taken"])
            / rank[name].get("needed", rank[name]["own"])
            for rank in found
        )
        for found in rounds
    ]
    return f"{statistics.median(shares):.3f}"


def describe_bits(name: str, rounds: Sequence[Sequence[dict[str, dict[str, float]]]]) -> str:
    """Says whether all ranks have the same bytes as after `dcp.load`."""
    if "same mesh" in name or "tp_plan" in name:
        return "not comparable"  # another checkpoint, or cut otherwise
    same = all(rank[name]["crc"] == rank[FIRST]["crc"] for found in rounds for rank in found)
    return "yes" if same else "no"


def main() -> None:
    """Prints a Markdown table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=int, default=1)
    arguments: Any = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    by_ranks = {count: make_checkpoint(arguments.gigabytes, ranks=count) for count in (2, 4)}
    for ranks in arguments.ranks:
        shards = by_ranks[2 if ranks == 4 else 4]  # noqa: PLR2004
        folder = make_folder(shards)
        for place in (folder, *by_ranks.values()):
            warm(place)
        print(f"{ranks} ranks\n", flush=True)
        options = (f"--rounds={arguments.rounds}", f"--others={arguments.others}")
        places = map(str, (folder, shards, by_ranks[ranks]))
        print_table(run_ranks(ranks, *places, *options))


if __name__ == "__main__":
    main()
