"""Merging a LoRA into a base, beside a copy of the base and beside what people use today.

Usage: python benchmarks/merge.py [--gigabytes 2] [--repeats 5] [--tools cp,ckptkit,peft]
                                  [--axolotl PYTHON] [--memory 2,8]

The base is a bfloat16 Llama, and the adapter has rank 16 on all its linear layers. Every tool
runs as a process of its own, start included, into an output that does not exist, with the base in
the page cache; all end with their output on the disk. The order changes from round to round, and
ratios are medians of the ratios within a round. `--axolotl` names the interpreter of an
environment with axolotl. `--memory` adds the peak memory of single merges into bases of those
sizes.
"""

from __future__ import annotations

import argparse
import shutil
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
    files_below,
    keep,
    make_once,
    markdown,
    measure,
    median_ratio,
    settle,
    size_below,
    warm,
)

_SYNC = 'find "$1" -type f -exec sync {} +'
_COPY = 'cp -r "$2" "$1" && ' + _SYNC
_RUN = '"$2" -c "$3" "$4" "$5" "$1" && ' + _SYNC
_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""
_AXOLOTL = """
import sys
from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient
merge_lora_sharded_efficient(*sys.argv[1:])
"""
LABELS = {
    "cp": "`cp` of the base, then `sync`",
    "ckptkit": "`ckptkit adapter merge`",
    "peft": "PEFT: load, `merge_and_unload`, `save_pretrained`",
    "axolotl": "axolotl's memory-efficient merge",
}
Samples = dict[str, list[Sample]]


def make_inputs(gigabytes: float) -> Path:
    """Returns a folder with `base` and `adapter`, made when it is not there yet."""
    out = WORK / f"merge-{gigabytes:g}GB"
    maker = [sys.executable, str(HERE / "make_base_and_adapter.py"), str(out)]
    return make_once(out, "done", [*maker, "--gigabytes", str(gigabytes)])


def commands(inputs: Path, out: Path, axolotl: Path | None) -> Mapping[str, list[str]]:
    """Returns what each tool is started with."""
    base, adapter = str(inputs / "base"), str(inputs / "adapter")
    shell = ["sh", "-c"]
    found = {
        "cp": [*shell, _COPY, "sh", str(out), base],
        "ckptkit": ckptkit("adapter", "merge", adapter, str(out), "--base", base),
        "peft": [*shell, _RUN, "sh", str(out), sys.executable, _PEFT, base, adapter],
    }
    if axolotl is not None:
        found["axolotl"] = [*shell, _RUN, "sh", str(out), str(axolotl), _AXOLOTL, base, adapter]
    return found


def run_rounds(tools: Mapping[str, list[str]], inputs: Path, out: Path, repeats: int) -> Samples:
    """Measures every tool once per round."""
    samples: Samples = {name: [] for name in tools}
    names = list(tools)
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            warm(files_below(inputs))
            sample = measure(tools[name])
            samples[name].append(sample)
            print(f"  round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(out)
    return samples


def table(samples: Samples) -> str:
    """Formats what was measured, one line a tool."""
    header = ("", "seconds (median)", "min", "max", "x cp", "CPU seconds", "peak MB")
    rows = []
    for name, taken in samples.items():
        seconds = [sample.seconds for sample in taken]
        times = [f"{value:.2f}" for value in (statistics.median(seconds), min(seconds))]
        ratio = ""
        if "cp" in samples:
            ratio = f"{median_ratio(seconds, [sample.seconds for sample in samples['cp']]):.2f}"
        cpu = statistics.median(sample.cpu_seconds for sample in taken)
        peak = max(sample.peak_bytes for sample in taken) / MB
        rows.append(
            [LABELS[name], *times, f"{max(seconds):.2f}", ratio, f"{cpu:.2f}", f"{peak:.0f}"]
        )
    return markdown(header, rows)


def measure_peaks(sizes: Sequence[float], out: Path, *, keep_inputs: bool) -> str:
    """Merges once into a base of each size, and formats what memory that took."""
    rows, document = [], {}
    for gigabytes in sizes:
        inputs = make_inputs(gigabytes)
        settle(out)
        sample = measure(commands(inputs, out, None)["ckptkit"])
        document[inputs.name] = asdict(sample)
        size = f"{size_below(inputs / 'base') / MB:,.0f} MB"
        adapter = f"{size_below(inputs / 'adapter') / MB:,.0f} MB"
        rows.append([size, adapter, f"{sample.seconds:.2f}", f"{sample.peak_bytes / MB:.0f}"])
        settle(out)
        if not keep_inputs:
            shutil.rmtree(inputs)
    keep("merge-memory", document)
    return markdown(("base", "adapter", "seconds", "peak MB"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tools", default="cp,ckptkit,peft,axolotl")
    parser.add_argument("--axolotl", type=Path, help="an interpreter that can import axolotl")
    parser.add_argument("--memory", default="", help="sizes of bases in gigabytes, such as 2,8")
    parser.add_argument("--out-dir", type=Path, default=WORK / "out")
    parser.add_argument("--keep", action="store_true", help="keep the bases of --memory")
    options = parser.parse_args(arguments)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    out = options.out_dir / "merged"
    inputs = make_inputs(options.gigabytes)
    wanted = options.tools.split(",")
    found = commands(inputs, out, options.axolotl)
    tools = {name: command for name, command in found.items() if name in wanted}
    size = size_below(inputs / "base") / MB
    print(f"merge into {inputs.name}: {size:,.0f} MB, warm page cache, {options.repeats} rounds")
    samples = run_rounds(tools, inputs, out, options.repeats)
    print(f"\n{table(samples)}\n")
    keep(f"merge-{options.gigabytes:g}GB", {k: [asdict(s) for s in v] for k, v in samples.items()})
    if options.memory:
        sizes = [float(size) for size in options.memory.split(",")]
        print(f"{measure_peaks(sizes, out, keep_inputs=options.keep)}\n")


if __name__ == "__main__":
    main()
