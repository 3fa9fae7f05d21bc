"""AutoTP and experts of DeepSpeed to a folder, beside `cp` of the weights and DeepSpeed's own way.

Usage: python benchmarks/deepspeed_parallel.py autotp|experts [--gigabytes 0.3] [--repeats 5]
    [--deepspeed PYTHON]

Two ranks saved the checkpoint, with ZeRO-1 and Adam's states. `cp` copies the files of weights
alone. DeepSpeed's own way is `ds_to_universal.py`, the only one of its tools that puts slices of
tensor parallelism together; it takes the optimizer's states along. None of 0.19.8 puts the experts
of two ranks together. PYTHON is an interpreter of an environment with DeepSpeed. How it is measured
stands in README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from measuring import (
    HERE,
    MB,
    WORK,
    ckptkit,
    compare,
    keep,
    make_once,
    markdown,
    median_ratio,
    peak_megabytes,
    size_below,
)
from zero3 import Samples, run_rounds

_TAG = "global_step1"
_COPY = 'mkdir "$2" && cp "$1"/*model_states.pt "$2" && find "$2" -type f -exec sync {} +'
_LABELS = {
    "cp": "`cp` of the files of weights, then `sync` of the copies",
    "ckptkit": "`ckptkit consolidate`",
    "deepspeed": "DeepSpeed's `ds_to_universal.py`",
}
_LIMITS = {"x cp": 1.2, "peak MB": 150}


def _made(kind: str, gigabytes: float, python: str) -> Path:
    """Returns the folder of a checkpoint of that size, made when it is not there yet."""
    out = WORK / f"deepspeed-{kind}-{gigabytes:g}GB"
    ranks = [python, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    maker = [*ranks, str(HERE / "make_deepspeed.py"), kind, str(out)]
    return make_once(out, "latest", [*maker, "--gigabytes", str(gigabytes)])


def _commands(kind: str, made: Path, out: Path, python: str) -> Mapping[str, list[str]]:
    commands = {
        "cp": ["sh", "-c", _COPY, "sh", str(made / _TAG), str(out)],
        "ckptkit": ckptkit("consolidate", str(made), str(out)),
    }
    if kind == "autotp":
        words = ["--input_folder", str(made / _TAG), "--output_folder", str(out)]
        own = ["env", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", python, "-m"]
        commands["deepspeed"] = [
            *(*own, "deepspeed.checkpoint.ds_to_universal", *words),
            *("--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"),
        ]
    return commands


def _verdict(samples: Samples) -> str:
    seconds = {name: [sample.seconds for sample in found] for name, found in samples.items()}
    found = {
        "x cp": median_ratio(seconds["ckptkit"], seconds["cp"]),
        "peak MB": peak_megabytes(samples["ckptkit"]),
    }
    rows = [
        [f"at most {limit:g}", what, f"{found[what]:.2f}", "yes" if found[what] <= limit else "NO"]
        for what, limit in _LIMITS.items()
    ]
    if "deepspeed" in samples:
        ratio = median_ratio(seconds["deepspeed"], seconds["ckptkit"])
        met = "yes" if ratio >= 5 else "NO"  # noqa: PLR2004
        rows.append(["at least 5", "x faster than DeepSpeed", f"{ratio:.1f}", met])
    return markdown(("target", "of", "measured", "met"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("autotp", "experts"))
    parser.add_argument("--gigabytes", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out-dir", type=Path, default=WORK / "out")
    parser.add_argument("--deepspeed", metavar="PYTHON", default=sys.executable)
    options = parser.parse_args(arguments)
    made = _made(options.kind, options.gigabytes, options.deepspeed)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    out = options.out_dir / "universal"
    print(f"{made.name}: {size_below(made) / MB:,.0f} MB")
    samples = run_rounds(
        made, _commands(options.kind, made, out, options.deepspeed), out, options.repeats
    )
    print(f"\n{compare(samples, _LABELS, 'cp')}\n\n{_verdict(samples)}\n")
    document = {name: [asdict(sample) for sample in taken] for name, taken in samples.items()}
    print(f"every sample: {keep(made.name, document)}\n")


if __name__ == "__main__":
    main()
