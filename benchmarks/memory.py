"""Peak memory of `ckptkit consolidate` for inputs of different sizes: it should not grow.

Usage: python benchmarks/memory.py [--gigabytes 0.2,2,6]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import (
    MB,
    WORK,
    Sample,
    ckptkit,
    keep,
    make_checkpoint,
    markdown,
    measure,
    settle,
    size_below,
)


def peak_of(src: Path, *options: str) -> Sample:
    """Consolidates once and deletes what was written."""
    out = WORK / "out" / "memory"
    out.parent.mkdir(parents=True, exist_ok=True)
    settle(out)
    try:
        return measure(ckptkit("consolidate", str(src), str(out), *options))
    finally:
        settle(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", default="0.2,2,6")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints that were made")
    options = parser.parse_args(arguments)
    rows, document = [], {}
    for gigabytes in map(float, options.gigabytes.split(",")):
        src = make_checkpoint(gigabytes)
        same, cast = peak_of(src), peak_of(src, "--dtype", "bfloat16")
        document[src.name] = {"keep": asdict(same), "bfloat16": asdict(cast)}
        peaks = (f"{sample.peak_bytes / MB:.0f}" for sample in (same, cast))
        rows.append([f"{size_below(src) / MB:,.0f} MB", *peaks])
        if not options.keep:
            shutil.rmtree(src)
    print(f"{markdown(('input', 'peak MB', 'peak MB, --dtype bfloat16'), rows)}\n")
    keep("memory", document)


if __name__ == "__main__":
    main()
