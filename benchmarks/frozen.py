"""What a save costs when most of the model is frozen: ckptkit beside dcp.save, on two ranks."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from measuring import HERE, MB, ROOT, WORK, environment
from saving import table

FOLDER = WORK / "frozen"


def run_ranks(rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Runs the rank script, and returns what every rank found.

    Raises:
        RuntimeError: If it fails; the message ends with what it printed last.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(HERE / "frozen_ranks.py"), str(FOLDER), str(rounds), str(blocks)]
    settings = environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=settings, cwd=ROOT, capture_output=True, text=True, check=False
    )
    shutil.rmtree(FOLDER, ignore_errors=True)
    rows = [row for row in done.stdout.splitlines() if row.startswith("FOUND ")]
    if not rows:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(rows[0].removeprefix("FOUND "))
    return found


def over(
    parts: Sequence[Sequence[dict[str, float]]], what: str, join: Callable[..., float]
) -> float:
    """Returns the median over rounds of a value, joined over the ranks."""
    return statistics.median(join(one[what] for one in ranks) for ranks in zip(*parts, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="saves after the first one")
    parser.add_argument("--blocks", type=int, default=64, help="of 16.8 MB frozen weights")
    options = parser.parse_args(arguments)
    ranks = run_ranks(options.rounds, options.blocks)
    total = {name: sum(rank[name] for rank in ranks) for name in ("trained", "frozen")}
    rows = []
    for saver in ("ckptkit", "dcp.save"):
        for name, part in (("first", slice(0, 1)), ("later", slice(1, None))):
            parts = [rank[saver][part] for rank in ranks]
            written = over(parts, "written", sum)
            rows.append(
                [
                    f"{saver}, {name}",
                    f"{written / MB:.1f}",
                    f"{written / total['trained']:.2f}",
                    f"{over(parts, 'linked', sum) / MB:.0f}",
                    f"{over(parts, 'blocked', max):.3f}",
                    f"{over(parts, 'durable', max):.2f}",
                ]
            )
    print(
        f"{total['frozen'] / MB:,.0f} MB frozen, {total['trained'] / MB:.1f} MB trained with the"
        f" optimizer's state; the last step alone holds the live model for dcp.load:"
        f" {all(rank['whole'] for rank in ranks)}\n"
    )
    header = "save|MB written|x trained state|MB linked|blocked s|durable s"
    table(header.split("|"), rows)


if __name__ == "__main__":
    main()
