"""Time and memory of planning for the `.metadata` of large runs, from the bytes on disk.

Usage: python benchmarks/plan_scale.py [--sizes 64x300,256x900,1024x2000]

Data files are holes of the right sizes: planning looks at their sizes and reads none of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import HERE, MB, WORK, Sample, ckptkit, keep, markdown, measure, settle, warm


def _made(ranks: int, tensors: int) -> Path:
    out = WORK / f"metadata-{ranks}x{tensors}"
    if not (out / ".metadata").exists():
        shutil.rmtree(out, ignore_errors=True)
        print(f"making {out.name} (once)", flush=True)
        maker = [sys.executable, str(HERE / "make_metadata.py"), str(out)]
        measure([*maker, "--ranks", str(ranks), "--tensors", str(tensors)])
    return out


def _measured(src: Path) -> tuple[Sample, Sample]:
    settle(WORK / "out" / "plan", seconds=0)
    warm([src / ".metadata"])
    plan = measure(ckptkit("consolidate", str(src), str(WORK / "out" / "plan"), "--dry-run"))
    pickle = [sys.executable, str(HERE / "unpickle_metadata.py"), str(src / ".metadata")]
    return plan, measure(pickle)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64x300,256x900,1024x2000")
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    options = parser.parse_args(arguments)
    rows, document = [], {}
    for size in options.sizes.split(","):
        ranks, tensors = map(int, size.split("x"))
        src = _made(ranks, tensors)
        plan, pickle = _measured(src)
        document[size] = {"dry_run": asdict(plan), "unpickle": asdict(pickle)}
        rows.append(
            [
                f"{ranks:,} x {tensors:,}",
                f"{(src / '.metadata').stat().st_size / MB:,.1f}",
                f"{plan.seconds:.2f}",
                f"{plan.peak_bytes / MB:,.0f}",
                pickle.output.split()[-1],
                f"{pickle.peak_bytes / MB:,.0f}",
            ]
        )
        if not options.keep:
            shutil.rmtree(src)
    header = (
        *("ranks x tensors", "`.metadata` MB", "`--dry-run` seconds", "peak MB"),
        *("C unpickler seconds", "peak MB"),
    )
    print(f"{markdown(header, rows)}\n")
    keep("plan_scale", document)


if __name__ == "__main__":
    main()
