"""What an export of 2 GB costs on two ranks, beside the bare writing of as many bytes."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

from measuring import HERE, MB, WORK, environment

FOLDER = WORK / "export"


def run_ranks(*options: str) -> list[list[dict[str, Any]]]:
    """Runs the rank script, and returns what every rank found in every round.

    Raises:
        RuntimeError: If it fails; the message ends with what it printed last.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(HERE / "export_ranks.py"), str(FOLDER), *options]
    settings = environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    shutil.rmtree(FOLDER, ignore_errors=True)
    rows = [row for row in done.stdout.splitlines() if row.startswith("FOUND ")]
    if not rows:
        raise RuntimeError(f"the ranks ended with {done.returncode}: {done.stderr[-3000:]}")
    found: list[list[dict[str, Any]]] = json.loads(rows[0].removeprefix("FOUND "))
    return found


def main() -> None:
    """Prints a Markdown table, of the slower rank in each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=52, help="of 16.8 million parameters each")
    arguments = parser.parse_args()
    ranks = run_ranks(f"--rounds={arguments.rounds}", f"--layers={arguments.layers}")
    rounds = list(zip(*ranks, strict=True))
    slower = [{key: max(rank[key] for rank in found) for key in found[0]} for found in rounds]
    total = slower[0]["total_bytes"]
    print(f"{total / 1e9:.2f} GB of bfloat16 from {total / 5e8:.2f} GB of float32 on 2 ranks\n")
    print(
        "| round | bare s | cached s | durable s | x bare | committed s | memory MB | read back |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    ratios = [found["durable"] / found["bare"] for found in slower]
    for number, (found, ratio) in enumerate(zip(slower, ratios, strict=True), 1):
        print(
            f"| {number} | {found['bare']:.2f} | {found['bare_cached']:.2f} |"
            f" {found['durable']:.2f} | {ratio:.2f} | {found['committed']:.2f} |"
            f" {found['memory'] / MB:.0f} | {found['read_back']} |"
        )
    cached = [found["durable"] / found["bare_cached"] for found in slower]
    print(f"\nmedian of the ratios: {statistics.median(ratios):.2f}", end="")
    print(f", to the one block that stays cached {statistics.median(cached):.2f}", end="")
    print(f"; collectives: {sum(found['collectives'] for found in slower)}")


if __name__ == "__main__":
    main()
