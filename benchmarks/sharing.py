"""Consolidating where the file system shares blocks, beside the build before that could be done.

Usage: python benchmarks/sharing.py [--gigabytes 2] [--large 8] [--repeats 5] [--disks xfs,ext4]

Each disk is an image that this script makes, mounts by loop, and removes, for which it has to be
root; without that, or without the program that makes a file system, a disk is skipped with a word.
On it lies a step that a Checkpointer saved on four ranks, and on ext4 also one of stock torch. The
build before is the commit 0659fc7, taken out of git. All commands are processes of their own, start
included, with their source in the page cache, and end with their output on the disk. The order
changes from round to round, and ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from measuring import (
    HERE,
    MB,
    ROOT,
    WORK,
    Sample,
    compare,
    files_below,
    keep,
    markdown,
    measure,
    median_ratio,
    peak_megabytes,
    settle,
    size_below,
    warm,
)

BEFORE = "0659fc7"
_MAKERS = {
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
    "btrfs": ("mkfs.btrfs", "-q"),
    "ext4": ("mkfs.ext4", "-q"),
}
_COPY = 'cp -r --reflink=never "$1" "$2" && find "$2" -type f -exec sync {} +'
_LEAST_IMAGE_BYTES = 1 << 30
_RANKS = 4
LABELS = {
    "cp": "`cp --reflink=never`, then `sync`",
    "bare": "bare two-thread copy with huge pages",
    "before": f"the build before ({BEFORE})",
    "now": "this build",
    "stored": "this build, `--proof stored`",
    "large": "the same, of the large step",
}
Samples = dict[str, list[Sample]]


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared on one disk.

    Attributes:
        name: What the table is called.
        sources: Folders that are read, for the page cache.
        commands: By name; each writes the output.
        limits: Two names and a number: at most how often the second's time the first takes.
    """

    name: str
    sources: tuple[Path, ...]
    commands: Mapping[str, list[str]]
    limits: tuple[tuple[str, str, float], ...]


def build(root: Path, *words: str) -> list[str]:
    """Returns a command of ckptkit that runs the code below a folder."""
    paths = f"PYTHONPATH={root}:{root / 'cli'}"
    # Else `-m` would first look into the current directory.
    return ["env", "PYTHONSAFEPATH=1", paths, sys.executable, "-m", "ckptkit_cli", *words]


def build_before() -> Path:
    """Returns the folder of the build before, taken out of git once."""
    out = WORK / f"build-{BEFORE}"
    if not (out / "ckptkit").is_dir():
        out.mkdir(parents=True, exist_ok=True)
        archive = ["git", "-C", str(ROOT), "archive", BEFORE, "ckptkit", "cli"]
        data = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(out)], input=data, check=True)
    return out


@contextmanager
def mounted(kind: str, size_bytes: int) -> Iterator[Path | None]:
    """Mounts a new file system; yields None, after a word, where that is not possible."""
    maker = shutil.which(_MAKERS[kind][0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    image, place = WORK / f"{kind}.img", WORK / f"{kind}-disk"
    missing = ""
    if os.geteuid() != 0:
        missing = "only root mounts file systems"
    elif maker is None:
        missing = f"there is no {_MAKERS[kind][0]}"
    elif shutil.disk_usage(WORK).free < size_bytes:
        missing = f"it may take {size_bytes / MB:,.0f} MB, and fewer are free"
    if missing or maker is None:
        print(f"{kind}: skipped, {missing}\n")
        yield None
        return
    place.mkdir(exist_ok=True)
    image.unlink(missing_ok=True)
    with image.open("xb") as file:
        file.truncate(size_bytes)
    try:
        subprocess.run([maker, *_MAKERS[kind][1:], str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    finally:
        image.unlink()
        place.rmdir()


def save(out: Path, gigabytes: float, saver: str) -> Path:
    """Has a step saved on a disk, and returns where."""
    print(f"saving {gigabytes:g} GB by {saver}", flush=True)
    words = ["--gigabytes", f"{gigabytes:g}", "--ranks", str(_RANKS), "--saver", saver]
    measure([sys.executable, str(HERE / "make_checkpoint.py"), str(out), *words])
    return out


def cases_on(kind: str, disk: Path, gigabytes: float, large: float) -> Iterator[Case]:
    """Makes the sources of one disk, and yields what is compared on it."""
    out, older = disk / "out", build_before()
    run = save(disk / "run", gigabytes, "ckptkit")

    def consolidate(root: Path, source: Path, *options: str) -> list[str]:
        return build(root, "consolidate", str(source), str(out), *options)

    pair = {"before": consolidate(older, run), "now": consolidate(ROOT, run)}
    copy = {"cp": ["sh", "-c", _COPY, "sh", str(run), str(out)]}
    if kind == "ext4":
        weights = run / "checkpoint-1" / "pytorch_model_fsdp_0"
        bare = [sys.executable, str(HERE / "bare_copy.py"), str(weights), str(out), "--huge-pages"]
        limits = (("now", "before", 0.7), ("now", "bare", 1.3))
        yield Case("ext4, proven", (run,), {**copy, "bare": bare, **pair}, limits)
        shutil.rmtree(run)
        stock = save(disk / "stock", gigabytes, "torch")
        pair = {"before": consolidate(older, stock), "now": consolidate(ROOT, stock)}
        yield Case("ext4, a step of stock torch", (stock,), pair, (("now", "before", 1.0),))
        return
    yield Case(f"{kind}, proven", (run,), {**copy, **pair}, (("now", "before", 0.5),))
    if large:
        big = save(disk / "large", large, "ckptkit")
        words = {
            "before": pair["before"],
            "stored": consolidate(ROOT, run, "--proof", "stored"),
            "large": consolidate(ROOT, big, "--proof", "stored"),
        }
        limits = (("stored", "before", 0.25), ("large", "stored", 1.3))
        yield Case(f"{kind}, `--proof stored`", (run, big), words, limits)
        shutil.rmtree(big)
    if kind == "xfs":
        made = disk / "merge"
        maker = [sys.executable, str(HERE / "make_base_and_adapter.py"), str(made)]
        measure([*maker, "--gigabytes", f"{gigabytes:g}", "--attention-only"])
        given = ("adapter", "merge", str(made / "adapter"), str(out), "--base", str(made / "base"))
        merges = {"before": build(older, *given), "now": build(ROOT, *given)}
        yield Case("xfs, `adapter merge`", (made,), merges, (("now", "before", 0.55),))


def run_rounds(case: Case, out: Path, repeats: int) -> Samples:
    """Measures every command once per round, after once for what is cached."""
    sources = [file for folder in case.sources for file in files_below(folder)]
    names = list(case.commands)
    samples: Samples = {name: [] for name in names}
    for name in names:
        settle(out)
        measure(case.commands[name])
    for number in range(repeats):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            settle(out)
            warm(sources)
            sample = measure(case.commands[name])
            samples[name].append(sample)
            print(f"  {case.name}, round {number + 1} {name}: {sample.seconds:.2f} s", flush=True)
    settle(out)
    return samples


def measure_space(case: Case, disk: Path, out: Path) -> tuple[float, float]:
    """Returns by how much the disk is fuller with the output of this build, and its size."""
    settle(out)
    before = shutil.disk_usage(disk).used
    measure(case.commands["now"])
    os.sync()
    taken, size = shutil.disk_usage(disk).used - before, size_below(out)
    settle(out)
    return taken, size


def verdict(case: Case, samples: Samples, space: tuple[float, float] | None) -> str:
    """Formats the targets of a case, and whether they are met."""
    seconds = {name: [sample.seconds for sample in found] for name, found in samples.items()}
    found = [
        (f"{first} / {second}", median_ratio(seconds[first], seconds[second]), limit)
        for first, second, limit in case.limits
    ]
    if space is not None:
        taken, size = space
        found += [("% more disk space", 100 * taken / size, 1.0)]
        found += [("peak MB", peak_megabytes(samples["now"]), 100)]
    rows = [
        [what, f"{value:.3f}", f"{limit:g}", "yes" if value <= limit else "NO"]
        for what, value, limit in found
    ]
    return markdown((case.name, "measured", "at most", "met"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--large", type=float, default=8.0, help="gigabytes; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disks", default=",".join(_MAKERS))
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    document = {}
    for kind in options.disks.split(","):
        most = 4 * options.gigabytes + (options.large if kind != "ext4" else 0)
        with mounted(kind, max(_LEAST_IMAGE_BYTES, int(1.2e9 * most))) as disk:
            if disk is None:
                continue
            out = disk / "out"
            for case in cases_on(kind, disk, options.gigabytes, options.large):
                samples = run_rounds(case, out, options.repeats)
                shares = kind != "ext4" and case.name.endswith("proven")
                space = measure_space(case, disk, out) if shares else None
                print(
                    f"\n{compare(samples, LABELS, 'before')}\n\n{verdict(case, samples, space)}\n",
                    flush=True,
                )
                document[case.name] = {
                    "space": space,
                    "samples": {n: [asdict(one) for one in taken] for n, taken in samples.items()},
                }
    print(f"every sample: {keep(f'sharing-{options.gigabytes:g}GB', document)}\n")


if __name__ == "__main__":
    main()
