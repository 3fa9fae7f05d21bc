"""Random models, meshes, optimizers and savers: is what is read what was alive?

    python -m tests.campaigns.differential --runs 200 --seed 1
    python -m tests.campaigns.differential --families --runs 100 --seed 1

Each draw is trained, saved by a stock tool and by a Checkpointer, and read by the stock tools and
by ckptkit, under other meshes and without any. All is compared bit by bit with the live state.
With `--families`, models of Transformers are drawn, with random configurations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.differential.campaign import Campaign, Comparison
from tests.campaigns.differential.draws import Draw, make_draw
from tests.campaigns.differential.grids import compare_grids, save_grids
from tests.campaigns.differential.tables import make_tables
from tests.campaigns.report import Table, write_report
from tests.property.random_meshes_run import checkpoints

TOGETHER = 20
DRAWS_PER_GRID = 20  # of the tensors that are split at random, one seed for so many draws


def main() -> int:
    options = parse_options()
    began = time.monotonic()
    if options.families:
        from tests.campaigns.differential.families import run_families

        return run_families(options.runs, options.seed)
    draws = draws_of(options)
    until = began + 60 * options.minutes if options.minutes else None
    with tempfile.TemporaryDirectory(prefix="differential-") as folder:
        campaign = Campaign(Path(folder))
        try:
            found: list[Comparison] = []
            for start in range(0, len(draws), TOGETHER):
                if until is not None and time.monotonic() > until:
                    draws = draws[:start]
                    break
                found += campaign.run(draws[start : start + TOGETHER])
            failures = [one for one in found if one.error]
            for one in failures:
                show(one if options.no_shrink or options.draw else campaign.shrink(one), one)
        finally:
            campaign.close()
        grids = run_grids(len(draws) // DRAWS_PER_GRID, options.seed, Path(folder))
    command = f"python -m tests.campaigns.differential --runs {len(draws)} --seed {options.seed}"
    write_report("differential", command, [*make_tables(draws, found), grids])
    print(f"{len(draws)} draws in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    return int(bool(failures))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="how many draws")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="draws no more after so many minutes")
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--draw", help="one draw as JSON, or @FILE, as a failure prints it")
    parser.add_argument("--no-shrink", action="store_true", help="leaves failures as they are")
    parser.add_argument("--families", action="store_true", help="models of Transformers")
    return parser.parse_args()


def draws_of(options: argparse.Namespace) -> list[Draw]:
    text = options.draw
    if text:
        return [Draw.from_json(Path(text[1:]).read_text() if text[0] == "@" else text)]
    first = options.first
    return [make_draw(options.seed, number) for number in range(first, first + options.runs)]


def run_grids(seeds: int, seed: int, folder: Path) -> Table:
    """Compares tensors that are split at random; an unequal one ends the campaign."""
    tensors, size = 0, 0
    for number in range(seeds):
        of_grid = 1_000 * (seed * 1_000 + number)
        home = folder / f"grids_{number}"
        save_grids(home, of_grid)
        for name, cases in checkpoints(of_grid).items():
            counted = compare_grids(home / name, cases, home / f"{name}_out")
            tensors, size = tensors + counted[0], size + counted[1]
    columns = ("seeds", "tensors equal", "bytes equal")
    return Table(
        "Tensors split at random over meshes of 1 to 8 ranks", columns, [[seeds, tensors, size]]
    )


def show(smallest: Comparison, failed: Comparison) -> None:
    """Prints a failure, and how to repeat it."""
    draw = failed.draw
    print(f"FAILED: {failed.saver}, {failed.reader}: draw {draw.number} of seed {draw.seed}")
    print(smallest.error)
    print(
        "repeat: python -m tests.campaigns.differential"
        f" --seed {draw.seed} --first {draw.number} --runs 1"
    )
    print(f"smallest: --draw '{smallest.draw.to_json()}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
