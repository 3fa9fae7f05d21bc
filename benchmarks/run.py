"""All benchmarks in a small setting, in about five minutes: what `make bench` runs."""

from __future__ import annotations

import argparse
import shutil

import commit_scale
import consolidate
import inspect_start
import memory
import merge
import plan_scale
import saving
import zero3
from measuring import WORK


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the setting of RESULTS.md instead")
    full = parser.parse_args().full
    shutil.rmtree(WORK / "out", ignore_errors=True)
    inspect_start.main([])
    plan_scale.main([] if full else ["--sizes", "64x300,256x900"])
    consolidate.main(["--cold"] if full else ["--gigabytes", "0.5", "--repeats", "3"])
    zero3.main([] if full else ["--gigabytes", "0.5", "--repeats", "3"])
    memory.main([] if full else ["--gigabytes", "0.1,0.5"])
    merge.main(["--memory", "2,8"] if full else ["--gigabytes", "0.5", "--repeats", "3"])
    commit_scale.main([] if full else ["--sizes", "64x900"])
    saving.main([] if full else ["--blocks", "7", "--rounds", "2", "--steps", "60"])


if __name__ == "__main__":
    main()
