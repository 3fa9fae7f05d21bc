"""Processes as the unit of measurement: wall time with their start, processor time, peak memory.

Nothing here may import anything large: what the measuring process holds when it starts another
counts towards the peak of that one (`exec` keeps the high-water mark of the memory it replaces).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = HERE / "work"  # ignored by git
RESULTS = WORK / "results"
MB = 1_000_000
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
_WARM_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process, from its start to its end.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Processor time of it and its children, user and system.
        peak_bytes: Largest resident set of it or any child.
        output: What it printed, both streams.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def script(name: str) -> list[str]:
    """Returns the command for a script installed beside the running interpreter."""
    return [str(Path(sys.executable).parent / name)]


def ckptkit(*arguments: str) -> list[str]:
    """Returns a ckptkit command: the installed script, or the module where none is installed."""
    installed = Path(sys.executable).parent / "ckptkit"
    start = [str(installed)] if installed.exists() else [sys.executable, "-m", "ckptkit_cli"]
    return [*start, *arguments]


def measure(command: Sequence[str]) -> Sample:
    """Runs a command to its end.

    Raises:
        RuntimeError: If it fails; the message ends with what it printed last.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {output[-2000:]}")
    return Sample(
        seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * _PEAK_UNIT, output.strip()
    )


def environment() -> dict[str, str]:
    """Returns the environment with this project importable, installed or not."""
    # An installed package has its modules compiled; keep those of a working copy as well.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")]
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def make_checkpoint(gigabytes: float, ranks: int = 4, hidden: int = 2048) -> Path:
    """Returns a checkpoint of that size below `WORK`, made when it is not there yet.

    Args:
        gigabytes: About how large it is.
        ranks: Between how many its matrices are split.
        hidden: The model's width, and so the size of the pieces.
    """
    wide = "" if hidden == 2048 else f"-{hidden}wide"  # noqa: PLR2004  the usual one
    out = WORK / f"checkpoint-{gigabytes:g}GB-{ranks}ranks{wide}"
    words = ["--gigabytes", str(gigabytes), "--ranks", str(ranks), "--hidden", str(hidden)]
    maker = [sys.executable, str(HERE / "make_checkpoint.py"), str(out)]
    return make_once(out, "config.json", [*maker, *words])


def make_once(out: Path, last: str, maker: Sequence[str]) -> Path:
    """Returns a folder, made when it is not there yet.

    Args:
        out: The folder.
        last: The file in it that is written last.
        maker: The command that makes it.
    """
    if not (out / last).exists():
        print(f"making {out.name} (once)", flush=True)
        measure(maker)
    return out


def files_below(folder: Path) -> list[Path]:
    """Lists the regular files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_below(folder: Path) -> int:
    """Adds up the sizes of the files below a folder."""
    return sum(path.stat().st_size for path in files_below(folder))


def warm(files: Iterable[Path]) -> None:
    """Reads files into the page cache."""
    buffer = bytearray(_WARM_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cool(files: Iterable[Path]) -> None:
    """Drops files from the page cache; they must have been written back."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle(out: Path, seconds: float = 0.5) -> None:
    """Deletes an output and waits until the disk is quiet, discards of freed blocks included."""
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
    os.sync()
    time.sleep(seconds)


def median_ratio(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the median of paired ratios: a slow minute slows both sides of a pair."""
    return statistics.median(a / b for a, b in zip(samples, baseline, strict=True))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table, the first column to the left and all others to the right."""
    lines = [header, [":--"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def peak_megabytes(samples: Iterable[Sample]) -> float:
    """Returns the most memory that a command took."""
    return max(sample.peak_bytes for sample in samples) / MB


def compare(
    samples: Mapping[str, Sequence[Sample]], labels: Mapping[str, str], baseline: str
) -> str:
    """Formats what was measured, one line a command, beside one of them."""
    header = ("", "seconds (median)", "min", "max", f"x {baseline}", "CPU seconds", "peak MB")
    first = [sample.seconds for sample in samples[baseline]]
    rows = []
    for name, found in samples.items():
        seconds = [sample.seconds for sample in found]
        times = (statistics.median(seconds), min(seconds), max(seconds))
        ratio, cpu = median_ratio(seconds, first), [sample.cpu_seconds for sample in found]
        figures = [f"{value:.2f}" for value in (*times, ratio, statistics.median(cpu))]
        rows.append([labels[name], *figures, f"{peak_megabytes(found):.0f}"])
    return markdown(header, rows)


def keep(name: str, document: object) -> Path:
    """Writes what was measured as JSON below `RESULTS`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
