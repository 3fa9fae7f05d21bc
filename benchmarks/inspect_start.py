"""How soon `ckptkit inspect` answers, and what it imports on the way.

Usage: python benchmarks/inspect_start.py [SRC] [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import ROOT, ckptkit, keep, markdown, measure

FIXTURE = ROOT / "fixtures" / "accelerate_fsdp2_tied_with_config"
HEAVY = (
    *("torch", "transformers", "safetensors", "huggingface_hub", "fsspec", "numpy", "ml_dtypes"),
    *("xxhash", "zstandard", "rich", "tqdm", "pickle", "asyncio", "multiprocessing"),
)
_PROBE = """
import sys
from ckptkit_cli.main import main
status = main(["inspect", sys.argv[1]])
print("\\n" + " ".join(sys.modules))
sys.exit(status)
"""


def imported(src: Path) -> list[str]:
    """Lists the heavy modules that an inspection imports."""
    last_line = measure([sys.executable, "-c", _PROBE, str(src)]).output.splitlines()[-1]
    loaded = set(last_line.split())
    return [name for name in HEAVY if name in loaded]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", type=Path, nargs="?", default=FIXTURE)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    command = ckptkit("inspect", str(options.src))
    samples = [measure(command) for _ in range(options.repeats)]
    seconds = [sample.seconds for sample in samples]
    cpu = statistics.median(sample.cpu_seconds for sample in samples)
    times = [statistics.median(seconds), min(seconds), max(seconds), cpu]
    modules = imported(options.src)
    header = ("", "seconds (median)", "min", "max", "CPU seconds", "heavy modules")
    row = ["`ckptkit inspect`", *(f"{value:.3f}" for value in times), ", ".join(modules) or "none"]
    print(f"{markdown(header, [row])}\n")
    keep("inspect_start", {"modules": modules, "samples": [asdict(sample) for sample in samples]})


if __name__ == "__main__":
    main()
