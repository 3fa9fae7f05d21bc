"""Packing and unpacking weights, beside a copy and beside the libraries that own the formats.

Usage: python benchmarks/packing.py [--gigabytes 2] [--repeats 5] [--forms fp8-block,gptq,...]

The unpacked side is a bfloat16 Llama of that size with random weights; the forms that ckptkit does
not write are made of random numbers. Every tool runs as a process of its own, start included, with
its source in the page cache, and ends with its output on the disk. The order changes from round to
round, and ratios are medians of the ratios within a round. Libraries are called in virtual
environments that have their names, below `benchmarks/work/environments`; without one, a library is
skipped with a word.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    peak_megabytes,
    settle,
    size_below,
    warm,
)

# The library that owns each form.
FORMS = {
    "fp8-block": "transformers",
    **dict.fromkeys(
        ("fp8-channel", "int8-channel", "int4-group", "nvfp4", "mxfp4"), "compressed-tensors"
    ),
    "gpt-oss": "transformers",
    "gptq": "gptqmodel",
    "awq": "autoawq",
}
_MADE = ("gpt-oss", "gptq", "awq")  # forms that ckptkit unpacks only
ENVIRONMENTS = WORK / "environments"
_SYNC = 'find "$1" -type f -exec sync {} +'
_COPY = 'cp -r --reflink=never "$2" "$1" && ' + _SYNC
_RUN = '"$2" "$3" "$4" "$5" "$6" "$1" && ' + _SYNC
_MOST_COPIES, _LEAST_FASTER, _MOST_MB = 1.6, 5.0, 200.0  # the targets
Samples = dict[str, list[Sample]]


def python_of(form: str) -> Path | None:
    """Returns the interpreter that has the library of a form; None, after a word, without one."""
    folder = ENVIRONMENTS / FORMS[form]
    python = folder / "bin" / "python"
    if python.exists():
        return python
    print(f"{form}: its library is skipped, as {folder} is no environment", flush=True)
    return None


def make_base(gigabytes: float) -> Path:
    """Returns the bfloat16 Llama, made when it is not there yet; merges are measured with it."""
    out = WORK / f"merge-{gigabytes:g}GB"
    maker = [sys.executable, str(HERE / "make_base_and_adapter.py"), str(out)]
    return make_once(out, "done", [*maker, "--gigabytes", f"{gigabytes:g}"]) / "base"


def _consolidate(source: Path, out: Path, dtype: str) -> list[str]:
    return ckptkit("consolidate", str(source), str(out), "--dtype", dtype)


def make_sides(form: str, base: Path) -> tuple[Path, Path]:
    """Returns a folder in a form, and the same unpacked; makes what is not there yet."""
    packed = WORK / f"packed-{form}-{base.parent.name}"
    if form not in _MADE:
        return make_once(packed, "config.json", _consolidate(base, packed, form)), base
    maker = [sys.executable, str(HERE / "make_packed.py"), form, str(base), str(packed)]
    make_once(packed, "config.json", maker)
    plain = packed.with_name(f"{packed.name}-unpacked")
    return packed, make_once(plain, "config.json", _consolidate(packed, plain, "bfloat16"))


def make_commands(
    form: str, packed: Path, plain: Path, out: Path, python: Path | None
) -> Mapping[str, list[str]]:
    """Returns what each tool is started with; the baseline is a copy of the larger side."""
    found = {"cp": ["sh", "-c", _COPY, "sh", str(out), str(plain)]}
    for task, source, dtype in (("unpack", packed, "bfloat16"), ("pack", plain, form)):
        if task == "pack" and form in _MADE:
            continue
        found[task] = _consolidate(source, out, dtype)
        if python is not None:
            words = [str(python), str(HERE / "packing_own_way.py"), form, task, str(source)]
            found[f"{task}, library"] = ["sh", "-c", _RUN, "sh", str(out), *words]
    return found


def run_rounds(form: str, tools: Mapping[str, list[str]], out: Path, repeats: int) -> Samples:
    """Measures every tool once per round, each with its source warm."""
    samples: Samples = {name: [] for name in tools}
    names = list(tools)
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            folders = [Path(word) for word in tools[name] if WORK in Path(word).parents]
            warm(file for folder in folders for file in files_below(folder))
            sample = measure(tools[name])
            samples[name].append(sample)
            print(f"  {form}, round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(out)
    return samples


def rows_of(form: str, samples: Samples) -> Iterator[list[str]]:
    """Formats what was measured of a form: a line for packing, and one for unpacking."""
    copied = samples["cp"]
    for task in ("unpack", "pack"):
        own, theirs = samples.get(task, []), samples.get(f"{task}, library", [])
        if not own:
            continue
        seconds = [one.seconds for one in own]
        ratio = median_ratio(seconds, [one.seconds for one in copied])
        cpu = statistics.median(one.cpu_seconds for one in own)
        peak = peak_megabytes(own)
        figures = [f"{statistics.median(seconds):.2f}", f"{ratio:.2f}", f"{cpu:.2f}", f"{peak:.0f}"]
        more, faster = ["", "", ""], None
        if theirs:
            taken = [one.seconds for one in theirs]
            faster = median_ratio(taken, seconds)
            more = [f"{statistics.median(taken):.2f}", f"{faster:.1f}"]
            more.append(f"{peak_megabytes(theirs):,.0f}")
        missed = [
            what
            for what, is_missed in (
                ("time", ratio > _MOST_COPIES),
                ("memory", peak > _MOST_MB),
                ("library", faster is not None and faster < _LEAST_FASTER),
            )
            if is_missed
        ]
        yield [f"{form}, {task}", *figures, *more, ", ".join(missed)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--no-libraries", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the packed folders")
    options = parser.parse_args(arguments)
    base, rows, document, path = make_base(options.gigabytes), [], {}, WORK
    out = WORK / "out" / "converted"
    out.parent.mkdir(parents=True, exist_ok=True)
    for form in options.forms.split(","):
        python = None if options.no_libraries else python_of(form)
        packed, plain = make_sides(form, base)
        tools = make_commands(form, packed, plain, out, python)
        samples = run_rounds(form, tools, out, options.repeats)
        rows += rows_of(form, samples)
        sizes = {"packed MB": size_below(packed) / MB, "unpacked MB": size_below(plain) / MB}
        taken = {name: [asdict(one) for one in found] for name, found in samples.items()}
        document[form] = {**sizes, "samples": taken}
        path = keep(f"packing-{options.gigabytes:g}GB", document)  # each form takes minutes
        if not options.keep:
            for folder in {packed, plain} - {base}:
                shutil.rmtree(folder)
    header = ("", "seconds (median)", "x cp", "CPU seconds", "peak MB", "library, seconds")
    header = (*header, "x faster", "its peak MB", "target missed")
    print(f"\n{markdown(header, rows)}\n")
    print(f"every sample: {path}\n")


if __name__ == "__main__":
    main()
