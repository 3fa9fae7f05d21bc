"""`ckptkit consolidate` from S3 to S3, with and without copies at the store, beside s3fs copying.

Usage: python benchmarks/s3.py [--gigabytes 1] [--workers 2] [--repeats 3] [--budget 64MB]

The store is moto's server in a process of its own, unmodified. Bytes are counted by a proxy before
it, in runs of their own: the timed ones talk to the server itself. While bytes are counted, the
process may not write to any file at all, so that temporary ones would make it fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import (
    HERE,
    MB,
    ROOT,
    Sample,
    ckptkit,
    keep,
    make_checkpoint,
    markdown,
    measure,
    median_ratio,
    size_below,
)
from s3_account import KEY, REGION, SECRET

sys.path.insert(0, str(ROOT))

from tests.object_store import ObjectStore, running_object_store

_WIDE = 4096  # a quarter of its matrices is larger than the smallest part that S3 takes
_BUCKET, _SOURCE = "benchmark", "run"
_NO_FILES = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh")
# Whatever differs in the options of the two sides makes them two stores to ckptkit.
_THROUGH = "config_kwargs.user_agent_extra=other"


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured.

    Attributes:
        store: The server, with the source in it.
        workers: Threads of ckptkit, and objects that s3fs copies at a time.
        budget: ckptkit's `--memory-budget`.
    """

    store: ObjectStore
    workers: int
    budget: str

    def consolidate(self, endpoint: str, *, at_store: bool) -> list[str]:
        """Returns the command."""
        source, target = _options(endpoint), _options(endpoint)
        if not at_store:
            target.append(_THROUGH)
        pairs = [("--src-option", one) for one in source]
        pairs += [("--dst-option", one) for one in target]
        return ckptkit(
            "consolidate",
            *(f"s3://{_BUCKET}/{_SOURCE}", f"s3://{_BUCKET}/out"),
            *(word for pair in pairs for word in pair),
            *("--workers", str(self.workers), "--memory-budget", self.budget, "--quiet"),
        )

    def copy(self, *, at_store: bool) -> list[str]:
        """Returns the command with which s3fs copies the same objects."""
        options = [f"--workers={self.workers}", *["--at-store"][: int(at_store)]]
        return self._objects("copy", f"{_BUCKET}/{_SOURCE}", f"{_BUCKET}/out", *options)

    def put(self, folder: Path) -> None:
        """Puts a checkpoint there."""
        measure(self._objects("put", str(folder), f"{_BUCKET}/{_SOURCE}"))

    def measured(self, command: Sequence[str]) -> Sample:
        """Runs a command and removes what it wrote."""
        sample = measure(command)
        measure(self._objects("remove", f"{_BUCKET}/out"))
        return sample

    def _objects(self, *words: str) -> list[str]:
        return [sys.executable, str(HERE / "s3_objects.py"), self.store.direct, *words]


def _options(endpoint: str) -> list[str]:
    return [
        f"key={KEY}",
        f"secret={SECRET}",
        f"client_kwargs.endpoint_url={endpoint}",
        f"client_kwargs.region_name={REGION}",
    ]


def count_bytes(job: Job, model_bytes: int) -> Mapping[str, Mapping[str, Any]]:
    """Runs both ways once through the proxy, and without a file to write to."""
    found = {}
    for name, at_store in (("copied at the store", True), ("through the node", False)):
        job.store.proxy.reset()
        command = job.consolidate(job.store.endpoint, at_store=at_store)
        sample = job.measured([*_NO_FILES, *command])
        read, sent = job.store.proxy.sent["GET"], job.store.proxy.received["PUT"]
        found[name] = {
            "read_bytes": read,
            "sent_bytes": sent,
            "read_share": read / model_bytes,
            "requests": dict(job.store.proxy.requests),
            "peak_bytes": sample.peak_bytes,
        }
    return found


def time_rounds(job: Job, repeats: int) -> Mapping[str, list[Sample]]:
    """Measures all ways in turns, so that a slow minute is everybody's."""
    ways = {
        "ckptkit, copied at the store": job.consolidate(job.store.direct, at_store=True),
        "s3fs, copied at the store": job.copy(at_store=True),
        "ckptkit, through the node": job.consolidate(job.store.direct, at_store=False),
        "s3fs, through the node": job.copy(at_store=False),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, command in ways.items():
            samples[name].append(job.measured(command))
    return samples


def report(counts: Mapping[str, Any], samples: Mapping[str, list[Sample]], model: int) -> str:
    """Returns the tables."""
    rows = [
        [
            name,
            f"{one['read_bytes'] / MB:,.1f}",
            f"{one['sent_bytes'] / MB:,.1f}",
            f"{one['read_share']:.3f}",
            f"{one['peak_bytes'] / MB:.0f}",
        ]
        for name, one in counts.items()
    ]
    counted = markdown(("", "read MB", "sent MB", "read / model", "peak MB"), rows)
    times = []
    for name, found in samples.items():
        peer = samples[f"s3fs, {name.partition(', ')[2]}"]
        ratio = median_ratio([s.seconds for s in found], [s.seconds for s in peer])
        seconds = sorted(sample.seconds for sample in found)[len(found) // 2]
        peak = max(sample.peak_bytes for sample in found)
        times.append([name, f"{seconds:.1f}", f"{ratio:.2f}", f"{peak / MB:.0f}"])
    timed = markdown(("", "median s", "against s3fs", "peak MB"), times)
    return f"model: {model / MB:,.0f} MB\n\n{counted}\n\n{timed}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", default="64MB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=_WIDE)
    options = parser.parse_args(arguments)
    src = make_checkpoint(options.gigabytes, options.ranks, options.hidden)
    model = size_below(src / "pytorch_model_fsdp_0")
    with running_object_store() as store:
        job = Job(store, options.workers, options.budget)
        job.put(src)
        counts = count_bytes(job, model)
        samples = time_rounds(job, options.repeats)
    print(report(counts, samples, model))
    times = {name: [asdict(sample) for sample in found] for name, found in samples.items()}
    keep("s3", {"model_bytes": model, "counted": counts, "timed": times})


if __name__ == "__main__":
    main()
