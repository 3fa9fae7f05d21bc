"""Shards of Megatron-Core to a folder, beside `cp` of the same bytes and Megatron's own way.

Usage: python benchmarks/megatron_consolidate.py [--gigabytes 2] [--repeats 5] [--megatron DIR]

The checkpoint is written by Megatron-Core with tensor and pipeline parallel sizes of 2, in
bfloat16: layers stacked, each in pieces of four ranks, queries, keys and values in one matrix.
Megatron-Core has to be installed, or to be unpacked in DIR. Its own way builds the model in one
process, loads it, and exports it; both folders are compared bit by bit at the end. How it is
measured is in README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import (
    HERE,
    MB,
    WORK,
    Sample,
    ckptkit,
    keep,
    make_once,
    markdown,
    measure,
    median_ratio,
    settle,
    size_below,
)
from zero3 import Samples, run_rounds

_COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
_LABELS = {
    "cp": "`cp` of the checkpoint, then `sync` of the copies",
    "bare": "bare two-thread copy of the same",
    "ckptkit": "`ckptkit consolidate` with the map",
    "megatron": "Megatron-Core: load into the model, export, `save_file`",
}
_LIMITS = {"x cp": 1.2, "peak MB": 150}


def _made(gigabytes: float) -> Path:
    """Returns the folder of a checkpoint of that size, made when it is not there yet."""
    out = WORK / f"megatron-{gigabytes:g}GB-tp2-pp2"
    maker = [sys.executable, str(HERE / "make_megatron.py"), str(out)]
    return make_once(out, "config.json", [*maker, "--gigabytes", str(gigabytes)])


def _commands(made: Path, out: Path) -> Mapping[str, list[str]]:
    step = str(next((made / "checkpoint").glob("iter_*")))
    own = [sys.executable, str(HERE / "megatron_own_way.py"), step, str(made), str(out)]
    return {
        "cp": ["sh", "-c", _COPY, "sh", step, str(out)],
        "bare": [sys.executable, str(HERE / "bare_copy.py"), step, str(out)],
        "ckptkit": ckptkit("consolidate", step, str(out), "--base", str(made)),
        "megatron": own,
    }


def table(samples: Samples) -> str:
    """Formats what was measured, one line a tool."""
    header = ("", "seconds (median)", "min", "max", "x cp", "CPU seconds", "peak MB")
    baseline = [sample.seconds for sample in samples["cp"]]
    rows = []
    for name, found in samples.items():
        seconds = [sample.seconds for sample in found]
        times = (statistics.median(seconds), min(seconds), max(seconds))
        cpu = statistics.median(sample.cpu_seconds for sample in found)
        ratio = median_ratio(seconds, baseline)
        cells = (*(f"{value:.2f}" for value in times), f"{ratio:.2f}", f"{cpu:.2f}")
        rows.append([_LABELS[name], *cells, f"{_peak(found):.0f}"])
    return markdown(header, rows)


def _peak(samples: Sequence[Sample]) -> float:
    return max(sample.peak_bytes for sample in samples) / MB


def _verdict(samples: Samples) -> str:
    seconds = {name: [sample.seconds for sample in found] for name, found in samples.items()}
    found = {
        "x cp": median_ratio(seconds["ckptkit"], seconds["cp"]),
        "peak MB": _peak(samples["ckptkit"]),
    }
    rows = [
        [f"at most {limit:g}", what, f"{found[what]:.2f}", "yes" if found[what] <= limit else "NO"]
        for what, limit in _LIMITS.items()
    ]
    return markdown(("target", "of", "measured", "met"), rows)


def _compare(commands: Mapping[str, list[str]], out: Path) -> str:
    """Returns what `ckptkit diff` says of both folders; it fails where they differ."""
    other = out.with_name(f"{out.name}-own")
    for folder, name in ((other, "megatron"), (out, "ckptkit")):
        settle(folder)
        measure([word if word != str(out) else str(folder) for word in commands[name]])
    said = measure(ckptkit("diff", str(out), str(other))).output
    for folder in (out, other):
        settle(folder)
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out-dir", type=Path, default=WORK / "out")
    parser.add_argument("--megatron", metavar="DIR", help="where megatron-core is unpacked")
    options = parser.parse_args(arguments)
    if options.megatron is not None:
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [options.megatron, inherited]))
    made = _made(options.gigabytes)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    out = options.out_dir / "megatron"
    commands = _commands(made, out)
    print(f"{made.name}: {size_below(made) / MB:,.0f} MB")
    for command in (commands["ckptkit"], commands["megatron"]):  # Transformers' answer is cached
        settle(out)
        measure(command)
    samples = run_rounds(made, commands, out, options.repeats)
    print(f"\n{table(samples)}\n\n{_verdict(samples)}\n")
    print(_compare(commands, out))
    document = {name: [asdict(sample) for sample in taken] for name, taken in samples.items()}
    print(f"\nevery sample: {keep(made.name, document)}\n")


if __name__ == "__main__":
    main()
