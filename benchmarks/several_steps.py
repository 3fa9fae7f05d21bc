"""`ckptkit average` of several steps and `ckptkit stats` of one, beside reading their bytes.

Usage: python benchmarks/several_steps.py [--gigabytes 2] [--steps 5] [--repeats 5] [--cold]
       [--work DIR]

Steps are Hugging Face folders in bfloat16 with other values each, in two files. Every tool runs as
a process of its own, start included, in turns. The bare tools read the same bytes with two threads
(`bare_read.py`), and copy those of one step past the page cache (`bare_copy.py`). torch adds one
tensor at a time in float32 and saves the result; it is neither durable nor proven.
"""

from __future__ import annotations

import argparse
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
    cool,
    files_below,
    keep,
    markdown,
    measure,
    median_ratio,
    settle,
    size_below,
    warm,
)

_MAKE = """
import sys, ml_dtypes, numpy as np, safetensors.numpy as files
from pathlib import Path
folder, step, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True)
drawn = np.random.default_rng(step).standard_normal((4096, 4096), np.float32)
for file in (1, 2):
    tensors = {
        f"layers.{file}.{n}.weight": np.roll(drawn, n * 977).astype(ml_dtypes.bfloat16)
        for n in range(count // 2)
    }
    files.save_file(tensors, folder / f"model-{file:05d}-of-00002.safetensors", {"format": "pt"})
"""
_INDEX = """
import json, sys
from pathlib import Path
from safetensors import safe_open
folder = Path(sys.argv[1])
names = {}
for path in sorted(folder.glob("*.safetensors")):
    with safe_open(path, "numpy") as stored:
        names |= dict.fromkeys(stored.keys(), path.name)
index = {"metadata": {}, "weight_map": names}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
"""
_TORCH = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
*steps, out = map(Path, sys.argv[1:])
out.mkdir()
for path in sorted(steps[0].glob("*.safetensors")):
    opened = [safe_open(step / path.name, "pt") for step in steps]
    averaged = {}
    for name in opened[0].keys():
        total = opened[0].get_tensor(name).float()
        for other in opened[1:]:
            total += other.get_tensor(name).float()
        averaged[name] = (total / len(steps)).to(opened[0].get_tensor(name).dtype)
    save_file(averaged, out / path.name, {"format": "pt"})
"""
_BYTES_EACH = 2 * 4096 * 4096


def make_steps(work: Path, gigabytes: float, count: int) -> list[Path]:
    """Returns the steps, made where they are not there yet."""
    run = work / f"steps-{gigabytes:g}GB"
    folders = [run / f"checkpoint-{100 * number}" for number in range(1, count + 1)]
    tensors = max(2, int(gigabytes * 1e9 / _BYTES_EACH) // 2 * 2)
    for number, folder in enumerate(folders):
        if not (folder / "model.safetensors.index.json").exists():
            print(f"making {folder}", flush=True)
            measure([sys.executable, "-c", _MAKE, str(folder), str(number), str(tensors)])
            measure([sys.executable, "-c", _INDEX, str(folder)])
    return folders


def commands(steps: Sequence[Path], out: Path) -> Mapping[str, list[str]]:
    """Returns the command of each tool."""
    named = [str(step) for step in steps]
    read, copy = (f"{sys.executable} {HERE / name}" for name in ("bare_read.py", "bare_copy.py"))
    both = f"{read} {' '.join(named[:-1])} && {copy} {named[-1]} {out}"
    return {
        "bare": ["sh", "-c", both],
        "average": ckptkit("average", *named, str(out)),
        "ema": ckptkit("average", *named, str(out), "--ema", "0.9"),
        "torch": [sys.executable, "-c", _TORCH, *named, str(out)],
        "bare read": [sys.executable, str(HERE / "bare_read.py"), named[0]],
        "stats": ckptkit("stats", named[0], "--quiet"),
        "verify": ckptkit("verify", named[0], "--quiet"),
    }


_LABELS = {
    "bare": "bare: read all, copy one",
    "average": "`ckptkit average`",
    "ema": "`ckptkit average --ema 0.9`",
    "torch": "torch, tensor by tensor",
    "bare read": "bare: read one",
    "stats": "`ckptkit stats` of one",
    "verify": "`ckptkit verify` of one",
}
_LIMITS = {"stats": "bare read", "verify": "bare read"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tools", default=",".join(_LABELS))
    parser.add_argument("--cold", action="store_true", help="drop the steps from the page cache")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args(arguments)
    steps = make_steps(options.work, options.gigabytes, options.steps)
    out = options.work / "averaged"
    names = options.tools.split(",")
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(options.repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            used = steps[:1] if name in {"bare read", "stats", "verify"} else steps
            for step in used:
                (cool if options.cold else warm)(files_below(step))
            sample = measure(commands(steps, out)[name])
            samples[name].append(sample)
            print(f"  round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(out)
    rows = []
    for name in names:
        taken = [sample.seconds for sample in samples[name]]
        limit = samples.get(_LIMITS.get(name, "bare read" if name == "bare read" else "bare"), [])
        ratio = median_ratio(taken, [sample.seconds for sample in limit]) if limit else 0.0
        cpu = statistics.median(sample.cpu_seconds for sample in samples[name])
        peak = max(sample.peak_bytes for sample in samples[name])
        times = [statistics.median(taken), min(taken), max(taken)]
        figures = [*(f"{value:.2f}" for value in times), f"{ratio:.2f}", f"{cpu:.2f}"]
        rows.append([_LABELS[name], *figures, f"{peak / MB:.0f}"])
    header = ("", "seconds (median)", "min", "max", "x bare", "CPU seconds", "peak MB")
    print(f"\n{len(steps)} steps of {size_below(steps[0]) / MB:,.0f} MB\n")
    print(markdown(header, rows))
    document = {name: [asdict(sample) for sample in taken] for name, taken in samples.items()}
    print(f"every sample: {keep('several-steps', document)}")


if __name__ == "__main__":
    main()
