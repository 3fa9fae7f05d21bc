"""`--engine ray` with two local Ray workers on two cores, beside the local engine with two threads.

Usage: python benchmarks/on_ray.py [SRC] [--gigabytes 4] [--repeats 3]

The cluster runs before anything is measured, two raylets of one core each. "whole" is the
command from planning to the commit; for Ray it has the start of its two processes in it, about
the same for every size. "ready" counts from when both of them are: the bytes written from then
on, in the seconds until the commit, against the local engine's from its first task on.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from measuring import HERE, MB, WORK, keep, markdown, measure, settle, warm
from ray.cluster_utils import Cluster

import ckptkit
from ckptkit.engine.outcome import BytesWritten, Event, Started

_ENGINES: dict[str, dict[str, Any]] = {
    "local, two threads": {"workers": 2},
    "ray, two workers": {"engine": "ray"},
}


class _Watch(logging.Handler):
    """Notes when work began, and what was written since."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ready_at = 0.0
        self.bytes_since = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.ready_at, self.bytes_since = time.perf_counter(), 0

    def listen(self, event: Event) -> None:
        if isinstance(event, Started):
            self.ready_at = time.perf_counter()
        if isinstance(event, BytesWritten):
            self.bytes_since += event.size_bytes


def _run(src: Path, out: Path, options: dict[str, Any]) -> dict[str, float]:
    settle(out, seconds=0.5)
    warm(path for path in src.rglob("*") if path.is_file())
    watch = _Watch()
    log = logging.getLogger("ckptkit.engine.ray")
    log.setLevel(logging.INFO)
    log.addHandler(watch)
    began = time.perf_counter()
    try:
        ckptkit.consolidate(src, out, names="live", listener=watch.listen, **options)
    finally:
        log.removeHandler(watch)
    ended = time.perf_counter()
    rate = watch.bytes_since / (ended - watch.ready_at)
    return {"seconds": ended - began, "bytes_per_second": rate}


def _table(samples: dict[str, list[dict[str, float]]]) -> str:
    first = next(iter(samples))
    rows = []
    for name, found in samples.items():
        pairs = list(zip(found, samples[first], strict=True))
        whole = [one["seconds"] / local["seconds"] for one, local in pairs]
        ready = [local["bytes_per_second"] / one["bytes_per_second"] for one, local in pairs]
        rows.append(
            [
                name,
                f"{statistics.median(one['seconds'] for one in found):.2f}",
                f"{statistics.median(whole):.2f}",
                f"{statistics.median(one['bytes_per_second'] for one in found) / MB:,.0f}",
                f"{statistics.median(ready):.2f}",
            ]
        )
    header = ("engine", "whole s", "x local", "ready MB/s", "x local")
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", nargs="?", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    src = options.src or WORK / f"checkpoint-{options.gigabytes:g}gb"
    if not src.exists():
        maker = [sys.executable, str(HERE / "make_checkpoint.py"), str(src)]
        measure([*maker, "--gigabytes", str(options.gigabytes), "--ranks", "4"])
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in _ENGINES}
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        for number in range(options.repeats):
            order = list(_ENGINES)[:: -1 if number % 2 else 1]
            for name in order:
                samples[name].append(_run(src, WORK / "out" / "on-ray", _ENGINES[name]))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(WORK / "out" / "on-ray", ignore_errors=True)
    print(f"{_table(samples)}\n")
    keep("on_ray", samples)


if __name__ == "__main__":
    main()
