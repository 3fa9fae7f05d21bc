"""Saves of this build beside those of the build at 0659fc7, in turns, on two ranks.

Usage: python benchmarks/saves_before.py [--gigabytes 1] [--saves 20] [--pairs 10]

Each run is a process a rank that saves the weights of a Llama, sharded with FSDP2 over gloo, again
and again, and keeps the last step. A sample is the median of all its saves but the first. The order
changes from pair to pair, and ratios are medians of the ratios within a pair.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import ROOT, WORK, markdown, measure, median_ratio, settle, size_below
from sharing import BEFORE, build_before

_RANKS = 2
_LIMIT = 1.02
_FACTS = {"blocked": "training blocked, s", "durable": "until durable, s", "size": "bytes"}


def save(out: Path, gigabytes: float, saves: int) -> None:
    """Is one rank: saves, and has rank 0 print what it found."""
    import torch.distributed as dist
    from make_checkpoint import llama_config
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    from ckptkit.training import Checkpointer

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LlamaForCausalLM(llama_config(gigabytes, 2048))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Checkpointer(out, keep_last=1) as checkpointer:
        reports = [checkpointer.save(n, {"model": model}).report() for n in range(1, saves + 1)]
    if dist.get_rank() == 0:
        found = {
            "blocked": statistics.median(report.blocked_seconds for report in reports[1:]),
            "durable": statistics.median(report.durable_seconds for report in reports[1:]),
            "size": size_below(out / f"checkpoint-{saves}"),
        }
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(root: Path, out: Path, words: Sequence[str]) -> dict[str, Any]:
    """Runs the ranks with the code below a folder, and returns what they found."""
    settle(out)
    settings = ("PYTHONSAFEPATH=1", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
    paths = f"PYTHONPATH={root}:{Path(__file__).parent}"
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={_RANKS}")
    command = ("env", *settings, paths, sys.executable, *ranks, __file__, *words)
    output = measure([*command, "--out", str(out)]).output
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def main() -> None:
    """Parses the command line; with `--out`, is a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=20, help="saves of a run")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        save(options.out, options.gigabytes, options.saves)
        return
    out = WORK / "saves"
    builds = {BEFORE: build_before(), "now": ROOT}
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in builds}
    words = (f"--gigabytes={options.gigabytes}", f"--saves={options.saves}")
    for pair in range(options.pairs):
        for name in list(builds)[:: 1 if pair % 2 else -1]:
            samples[name].append(run(builds[name], out, words))
            print(f"  pair {pair + 1} {name}: {samples[name][-1]}", flush=True)
    shutil.rmtree(out)
    rows = []
    for fact, label in _FACTS.items():
        before, now = ([sample[fact] for sample in samples[name]] for name in builds)
        ratio = median_ratio(now, before)
        values = [f"{statistics.median(taken):,.4g}" for taken in (before, now)]
        rows.append([label, *values, f"{ratio:.4f}", "yes" if ratio <= _LIMIT else "NO"])
    print(markdown(("a save", BEFORE, "now", "x", f"at most {_LIMIT}"), rows))


if __name__ == "__main__":
    main()
