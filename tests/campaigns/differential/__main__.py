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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.campaigns.differential.campaign import Campaign, Comparison
from tests.campaigns.differential.draws import Draw, make_draw
from tests.campaigns.differential.grids import compare_grids, save_grids
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


def make_tables(draws: Sequence[Draw], found: Sequence[Comparison]) -> list[Table]:
    compared = [one for one in found if one.reader not in ("save", "live state")]
    equal = [one for one in compared if not one.error]
    values, size = sum(o.tensors for o in equal), sum(o.size_bytes for o in equal)
    unequal = sum(1 for one in found if one.error)
    total = Table(
        "In all",
        ("draws", "saves", "comparisons", "tensors and values equal", "bytes equal", "unequal"),
        [
            [
                len(draws),
                sum(o.reader == "save" for o in found),
                len(compared),
                values,
                size,
                unequal,
            ]
        ],
    )
    pairs = Table(
        "What was read, and by what",
        (
            "saved by",
            "read by",
            "comparisons",
            "tensors and values equal",
            "bytes equal",
            "unequal",
        ),
        [*_pairs(found)],
    )
    return [total, pairs, *(_drawn(draws, name, key) for name, key in DRAWN.items())]


def _pairs(found: Sequence[Comparison]) -> Iterable[Sequence[object]]:
    rows: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in found:
        if one.reader not in ("save", "live state") or one.error:
            rows[one.saver, one.reader].append(one)
    for (saver, reader), of_pair in sorted(rows.items()):
        equal = [one for one in of_pair if not one.error]
        values, size = sum(o.tensors for o in equal), sum(o.size_bytes for o in equal)
        yield saver, reader, len(of_pair), values, size, len(of_pair) - len(equal)


def _dtypes(draw: Draw) -> Iterable[str]:
    return {spec.dtype for unit in draw.units for spec in unit.tensors}


DRAWN: dict[str, Callable[[Draw], Iterable[str]]] = {
    "Saved under": lambda draw: [str(draw.first)],
    "Read under": lambda draw: [str(draw.second)],
    "Ranks that saved, and that read": lambda d: [f"{d.first.world} → {d.second.world}"],
    "Optimizer": lambda draw: [draw.optimizer],
    "Scheduler": lambda draw: [draw.scheduler or "none"],
    "Element types": _dtypes,
    "Layout of the Checkpointer": lambda draw: [draw.own_options["layout"]],
    "Others": lambda draw: [name for name, has in OTHERS.items() if has(draw)],
}
OTHERS: dict[str, Callable[[Draw], bool]] = {
    "tied weights": lambda draw: any(unit.tied for unit in draw.units),
    "frozen units": lambda draw: any(unit.frozen for unit in draw.units),
    "units that FSDP ignores": lambda draw: any(unit.ignored for unit in draw.units),
    "extra states": lambda draw: any(unit.extra for unit in draw.units),
    "nested units": lambda draw: any("." in unit.path for unit in draw.units),
    "two parameter groups": lambda d: len({u.group for u in d.units if not u.frozen}) > 1,
    "empty tensors": lambda draw: any(0 in s.shape for u in draw.units for s in u.tensors),
    "scalars": lambda draw: any(not s.shape for u in draw.units for s in u.tensors),
    "forward and backward passes, if possible": lambda draw: draw.real,
    "two tiers": lambda draw: draw.own_options["local"],
    "staging limited to 1 MiB": lambda draw: draw.own_options["staging_limit"] is not None,
    "several files a rank": lambda draw: not draw.stock_options.get("single_file_per_rank", True),
    "zstd": lambda draw: draw.stock_options.get("form") == "zstd",
    "safetensors in .distcp": lambda draw: draw.stock_options.get("form") == "safetensors",
}


def _drawn(draws: Sequence[Draw], name: str, key: Callable[[Draw], Iterable[str]]) -> Table:
    counts = Counter(value for draw in draws for value in key(draw))
    return Table(name, (name.lower(), "draws"), sorted(counts.items()))


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
