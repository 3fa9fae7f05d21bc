"""Consolidation beside what people use today, and beside the limit, in one run, alternating.

Usage: python benchmarks/consolidate.py [SRC] [--repeats 5] [--tools cp,ckptkit] [--cold]

Every tool runs as a process of its own, start included, on the same disk, after its source was
read into the page cache (or, with --cold, dropped from it), into an output that does not exist,
while the disk is quiet. The order changes from round to round, and ratios are medians of the
ratios within a round. Without SRC a checkpoint of 2 GB is made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    make_checkpoint,
    markdown,
    measure,
    median_ratio,
    script,
    settle,
    size_below,
    warm,
)

_UNASKED = 'cache=$(mktemp -d); XDG_CACHE_HOME=$cache "$@"; s=$?; rm -r "$cache"; exit $s'
COLD_TOOLS = ("cp", "bare", "bare_huge", "ckptkit", "accelerate")
_COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'


@dataclass(frozen=True, slots=True)
class Job:
    """What is consolidated and where to.

    Attributes:
        src: What a user would name: the checkpoint with its config.
        dcp: The folder of shards in it, for tools that want exactly that.
        out: The output, which does not exist when a tool starts.
    """

    src: Path
    dcp: Path
    out: Path


@dataclass(frozen=True, slots=True)
class Tool:
    """A way to do the job."""

    label: str
    command: Callable[[Job], list[str]]


TOOLS: Mapping[str, Tool] = {
    "cp": Tool(
        "`cp`, then `sync` of the copies",
        lambda job: ["sh", "-c", _COPY, "sh", str(job.dcp), str(job.out)],
    ),
    "bare": Tool(
        "bare two-thread copy",
        lambda job: [sys.executable, str(HERE / "bare_copy.py"), str(job.dcp), str(job.out)],
    ),
    "bare_huge": Tool(
        "bare two-thread copy, buffers in huge pages",
        lambda job: [
            *(sys.executable, str(HERE / "bare_copy.py"), str(job.dcp), str(job.out)),
            "--huge-pages",
        ],
    ),
    "ckptkit": Tool(
        "`ckptkit consolidate`", lambda job: ckptkit("consolidate", str(job.src), str(job.out))
    ),
    "unasked": Tool(
        "`ckptkit consolidate`, no answer of transformers kept",
        lambda job: [
            *("sh", "-c", _UNASKED, "sh"),
            *ckptkit("consolidate", str(job.src), str(job.out)),
        ],
    ),
    "live": Tool(
        "`ckptkit consolidate --names live`, nothing compared",
        lambda job: ckptkit("consolidate", str(job.src), str(job.out), "--names", "live"),
    ),
    "bfloat16": Tool(
        "`ckptkit consolidate --dtype bfloat16`",
        lambda job: ckptkit("consolidate", str(job.src), str(job.out), "--dtype", "bfloat16"),
    ),
    "accelerate": Tool(
        "`accelerate merge-weights`",
        lambda job: [*script("accelerate"), "merge-weights", str(job.dcp), str(job.out)],
    ),
    "dcp_to_torch": Tool(
        "`dcp_to_torch_save`",
        lambda job: [
            sys.executable,
            *("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"),
            *(str(job.dcp), str(job.out)),
        ],
    ),
}

Samples = dict[str, list[Sample]]


DEFAULT_TOOLS = tuple(name for name in TOOLS if name not in {"unasked", "live"})


def run_rounds(job: Job, names: Sequence[str], repeats: int, *, cold: bool) -> Samples:
    """Measures every tool once per round."""
    sources = files_below(job.src)
    samples: Samples = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(job.out)
            (cool if cold else warm)(sources)
            sample = measure(TOOLS[name].command(job))
            samples[name].append(sample)
            print(f"  round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(job.out)
    return samples


def table(samples: Samples) -> str:
    """Formats what was measured, one line a tool."""
    times = ("seconds (median)", "min", "max")
    header = ("", *times, "x cp", "x bare", "x ckptkit", "CPU seconds", "peak MB")
    rows = [_row(TOOLS[name].label, name, samples) for name in samples]
    for name in ("bare", "bare_huge"):
        inner = [float(sample.output.split()[-1]) for sample in samples.get(name, ())]
        if inner:
            label = f"{TOOLS[name].label}, without process start"
            rows.append([label, *_times(inner), "", "", "", "", ""])
    return markdown(header, rows)


def _row(label: str, name: str, samples: Samples) -> list[str]:
    mine = [sample.seconds for sample in samples[name]]
    ratios = [
        f"{median_ratio(mine, [sample.seconds for sample in samples[base]]):.2f}"
        if base in samples
        else ""
        for base in ("cp", "bare", "ckptkit")
    ]
    cpu = statistics.median(sample.cpu_seconds for sample in samples[name])
    peak = max(sample.peak_bytes for sample in samples[name])
    return [label, *_times(mine), *ratios, f"{cpu:.2f}", f"{peak / MB:.0f}"]


def _times(seconds: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]


def _job(src: Path | None, out_dir: Path, gigabytes: float) -> Job:
    src = src or make_checkpoint(gigabytes)
    metadata = sorted(src.rglob(".metadata"))
    if len(metadata) != 1:
        raise SystemExit(f"{src}: {len(metadata)} '.metadata' files were found, 1 was expected")
    out_dir.mkdir(parents=True, exist_ok=True)
    return Job(src, metadata[0].parent, out_dir / "consolidated")


def bench(job: Job, names: Sequence[str], repeats: int, *, cold: bool) -> None:
    """Measures, prints the table and keeps the samples."""
    cache = "cold" if cold else "warm"
    size = size_below(job.dcp) / MB
    print(f"consolidate {job.src.name}: {size:,.0f} MB, {cache} page cache, {repeats} rounds")
    samples = run_rounds(job, names, repeats, cold=cold)
    print(f"\n{table(samples)}\n")
    document = {name: [asdict(sample) for sample in taken] for name, taken in samples.items()}
    path = keep(f"consolidate-{job.src.name}-{cache}", document)
    print(f"every sample: {path}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", type=Path, nargs="?")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="what to make without SRC")
    parser.add_argument("--out-dir", type=Path, default=WORK / "out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tools", default=",".join(DEFAULT_TOOLS), help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--cold", action="store_true", help="also with a cold page cache")
    options = parser.parse_args(arguments)
    names = options.tools.split(",")
    if unknown := set(names) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(sorted(unknown))}")
    job = _job(options.src, options.out_dir, options.gigabytes)
    bench(job, names, options.repeats, cold=False)
    if options.cold:
        bench(job, [name for name in names if name in COLD_TOOLS], options.repeats, cold=True)


if __name__ == "__main__":
    main()
