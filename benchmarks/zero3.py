"""A ZeRO-3 checkpoint in float32 beside `cp` of the bytes that are taken from it, alternating.

Usage: python benchmarks/zero3.py [--gigabytes 2] [--repeats 5] [--deepspeed PYTHON]

The checkpoint has four ranks, and three times the model's size: the weights, of which every
parameter lies in four pieces, and Adam's moments. `cp` copies files that have the weights alone.
With --deepspeed, the interpreter of an environment that has DeepSpeed, its own `zero_to_fp32` takes
its turn. How it is measured stands in README.md.
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
    Sample,
    ckptkit,
    compare,
    files_below,
    keep,
    make_once,
    markdown,
    measure,
    median_ratio,
    peak_megabytes,
    settle,
    size_below,
    warm,
)

_COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
_MERGE = (
    "import sys; from deepspeed.utils.zero_to_fp32 import"
    " convert_zero_checkpoint_to_fp32_state_dict as convert;"
    " convert(sys.argv[1], sys.argv[2], safe_serialization=True)"
)
_LABELS = {
    "cp": "`cp` of the weights' bytes, then `sync` of the copies",
    "bare": "bare two-thread copy of the same",
    "ckptkit": "`ckptkit consolidate`",
    "bfloat16": "`ckptkit consolidate --dtype bfloat16`",
    "deepspeed": "DeepSpeed's `zero_to_fp32`",
}
_LIMITS = {"x cp": 1.3, "peak MB": 200}

Samples = dict[str, list[Sample]]


def _made(gigabytes: float, ranks: int) -> Path:
    """Returns the folder of a checkpoint of that size, made when it is not there yet."""
    out = WORK / f"zero3-{gigabytes:g}GB-{ranks}ranks"
    maker = [sys.executable, str(HERE / "make_zero3.py"), str(out)]
    words = ["--gigabytes", str(gigabytes), "--ranks", str(ranks)]
    return make_once(out, "checkpoint/latest", [*maker, *words])


def _commands(made: Path, out: Path, deepspeed: str | None) -> Mapping[str, list[str]]:
    alone, checkpoint = str(made / "bytes"), str(made / "checkpoint")
    commands = {
        "cp": ["sh", "-c", _COPY, "sh", alone, str(out)],
        "bare": [sys.executable, str(HERE / "bare_copy.py"), alone, str(out)],
        "ckptkit": ckptkit("consolidate", checkpoint, str(out)),
        "bfloat16": ckptkit("consolidate", checkpoint, str(out), "--dtype", "bfloat16"),
    }
    if deepspeed is not None:
        environment = ["env", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1"]
        commands["deepspeed"] = [*environment, deepspeed, "-c", _MERGE, checkpoint, str(out)]
    return commands


def run_rounds(made: Path, commands: Mapping[str, list[str]], out: Path, repeats: int) -> Samples:
    """Measures every tool once per round."""
    sources = files_below(made)
    names = list(commands)
    samples: Samples = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            warm(sources)
            sample = measure(commands[name])
            samples[name].append(sample)
            print(f"  round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(out)
    return samples


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
    return markdown(("target", "of", "measured", "met"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out-dir", type=Path, default=WORK / "out")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="of an environment with DeepSpeed")
    options = parser.parse_args(arguments)
    made = _made(options.gigabytes, options.ranks)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    out = options.out_dir / "zero3"
    sizes = [size_below(made / name) / MB for name in ("checkpoint", "bytes")]
    print(f"{made.name}: {sizes[0]:,.0f} MB, of which {sizes[1]:,.0f} MB are the weights")
    samples = run_rounds(made, _commands(made, out, options.deepspeed), out, options.repeats)
    print(f"\n{compare(samples, _LABELS, 'cp')}\n\n{_verdict(samples)}\n")
    document = {name: [asdict(sample) for sample in taken] for name, taken in samples.items()}
    print(f"every sample: {keep(made.name, document)}\n")


if __name__ == "__main__":
    main()
