"""The tables of the campaign: what was drawn, and what was equal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from tests.campaigns.differential.campaign import Comparison
from tests.campaigns.differential.draws import Draw
from tests.campaigns.report import Table


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
