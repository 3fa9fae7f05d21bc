"""`ckptkit.training.dcp` beside the functions of torch that it stands for.

Usage: python benchmarks/dcp_door.py [--blocks 28] [--rounds 5] [--saves 200] [--ranks 1024]

Five tables, each of one run: how long `async_save` blocks training on two ranks, with torch's
thread and with its process; how long loads take; saves to S3 and loads from there; the memory of a
rank over many saves; and what ranks agree on in a save of many ranks, which are threads of one
process: what rank 0 computes, for which all wait, and then another rank. What their networks take
is in neither.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from measuring import ROOT, WORK
from saving import MS, over, run_ranks, table

sys.path.insert(0, str(ROOT))

from tests.object_store import running_object_store

OURS = "ckptkit.training.dcp"
_KINDS = ("dcp.async_save, thread", "dcp.async_save, process")
_MB = 1_000_000


def blocked(rounds: int, blocks: int) -> None:
    """Prints how long the calls block, in turns in one run for each kind of torch's."""
    rows = []
    for kind in _KINDS:
        options = (f"--rounds={rounds}", f"--blocks={blocks}", f"--savers={OURS};{kind}")
        ranks = run_ranks("compare", *options)
        found = {name: over(ranks, name, lambda v: v["call"]) for name in (OURS, kind)}
        ratio = statistics.median(a / b for a, b in zip(found[OURS], found[kind], strict=True))
        durable = {
            name: statistics.median(over(ranks, name, lambda v: v["durable"])) for name in found
        }
        for name, values in found.items():
            shown = [f"{statistics.median(values) * MS:.0f}", f"{durable[name]:.2f}"]
            rows.append([name, *shown, f"{ratio:.2f}" if name == OURS else "1.00"])
    table(["two ranks", "blocked, ms", "durable, s", "x blocked"], rows)


def loaded(rounds: int, blocks: int) -> None:
    """Prints how long loads of one checkpoint take, as it is cut and cut otherwise."""
    ranks = run_ranks("load", f"--rounds={rounds}", f"--blocks={blocks}")
    rows = []
    for cut in ("rows", "columns"):
        ours, theirs = (
            [
                max(values)
                for values in zip(*(rank[f"{cut}, {name}"] for rank in ranks), strict=True)
            ]
            for name in (OURS, "dcp.load")
        )
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        shown = [f"{statistics.median(values):.2f}" for values in (ours, theirs)]
        rows.append([f"saved by rows, loaded by {cut}", *shown, f"{ratio:.2f}"])
    table(["two ranks, s", OURS, "dcp.load", "x dcp.load"], rows)


def at_urls(rounds: int, blocks: int) -> None:
    """Prints how long saves to the S3 of the tests and loads from it take."""
    with running_object_store() as store:
        options = store.direct_options
        os.environ |= {
            "AWS_ENDPOINT_URL": store.direct,
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "CKPTKIT_BENCHMARK_URL": f"{store.bucket('door').url}/run",
        }
        ranks = run_ranks("urls", f"--rounds={rounds}", f"--blocks={blocks}")
    rows = []
    for what in ("blocked", "durable", "load"):
        ours, theirs = (
            [max(values) for values in zip(*(r[f"{what}, {name}"] for r in ranks), strict=True)]
            for name in (OURS, "torch")
        )
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        shown = [f"{statistics.median(values):.2f}" for values in (ours, theirs)]
        rows.append([what, *shown, f"{ratio:.2f}"])
    table(["two ranks and S3, s", OURS, "torch", "x torch"], rows)


def memory(saves: int, blocks: int) -> None:
    """Prints the memory of the larger rank after some of the saves."""
    ranks = run_ranks("many", f"--steps={saves}", f"--blocks={blocks}")
    rows = []
    for name in ranks[0]:
        held = {n: max(rank[name][n] for rank in ranks) for n in ranks[0][name]}
        first = held["5"]
        rows.append([name, *(f"{v / _MB:.1f}" for v in held.values()),
                     f"{held[str(saves)] / first - 1:+.1%}"])  # fmt: skip
    table(["MB after saves", *ranks[0][OURS], f"5 to {saves}"], rows)


def coordination(ranks: int, tensors: int) -> None:
    """Prints what coordinates a save, beside torch's planning; their networks are in neither."""
    keys = [f"model.layers.{number}.weight" for number in range(tensors)]
    saves = _agree(ranks, keys)
    theirs = _plan(ranks, keys)
    in_all = sum(theirs)
    rows = [
        [name, f"{first:.3f}", f"{other * MS:.1f}", f"{first + other:.3f}",
         f"{(first + other) / in_all:.3f}"]
        for name, (first, other) in zip(
            ("ckptkit, the first save", "ckptkit, later saves", "torch"), (*saves, theirs),
            strict=True,
        )
    ]  # fmt: skip
    header = [f"{ranks:,} ranks, {tensors} tensors", "rank 0, processor s", "another rank, ms"]
    table([*header, "one after the other, s", "x torch"], rows)


def _agree(ranks: int, keys: Sequence[str]) -> list[tuple[float, float]]:
    """Returns what a first save takes, where loaders differ on all ranks, and a later one.

    That is the processor time of rank 0 and of another rank, at the call and at the commit.
    """
    import torch

    from ckptkit.training import dcp
    from ckptkit.training.agree.key_values import LocalKeyValueStore
    from ckptkit.training.agree.peers import Peers

    store = LocalKeyValueStore()
    names = {key.removeprefix("model."): torch.empty(0) for key in keys}
    agreements = [dcp.Agreement(Peers(rank, ranks, store, "nonce")) for rank in range(ranks)]
    states = [
        dcp.FlatState({"model": names, "loader": {f"rank_{rank}": rank}}) for rank in range(ranks)
    ]

    def begin(rank: int) -> None:
        asking, state = agreements[rank], states[rank]
        expected = asking.expected(state)
        agreed = asking.question(state, WORK / "step-1", expected)()
        asking.answer(state, agreed, expected)
        proof = {"proof": {"rank": rank, "path": "", "size_bytes": 0, "crc32": 0}}
        asking.peers.agree("the commit", proof, lambda _: 0, timeout_seconds=600)

    def turn() -> tuple[float, float]:
        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(1, ranks)]
        of_all = time.process_time()
        for thread in threads:
            thread.start()
        began = time.thread_time()
        begin(0)
        took = time.thread_time() - began
        for thread in threads:
            thread.join()
        return took, (time.process_time() - of_all - took) / (ranks - 1)

    first, *later = [turn() for _ in range(4)]
    return [first, (statistics.median(t for t, _ in later), statistics.median(a for _, a in later))]


def _plan(ranks: int, keys: Sequence[str]) -> tuple[float, float]:
    """Returns the processor time of torch's rank 0, and of another rank.

    Rank 0 unpickles the plans of all ranks, plans, and pickles the answers; each other rank pickles
    a plan, which is there already, and unpickles an answer.
    """
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    whole, part = torch.Size((8 * ranks, 64)), torch.Size((8, 64))

    def plan_of(rank: int) -> bytes:
        at = torch.Size((8 * rank, 0))
        data = TensorWriteData(ChunkStorageMetadata(at, part), TensorProperties(), whole)
        items = [
            WriteItem(MetadataIndex(key, at), WriteItemType.SHARD, tensor_data=data) for key in keys
        ]
        items.append(WriteItem(MetadataIndex(f"loader.rank_{rank}"), WriteItemType.BYTE_IO))
        paths: dict[str, Any] = {key: tuple(key.split(".", 1)) for key in keys}
        paths[f"loader.rank_{rank}"] = ("loader", f"rank_{rank}")
        return pickle.dumps(SavePlan(items, planner_data=paths))

    texts = [plan_of(rank) for rank in range(ranks)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    began = time.thread_time()
    received = [pickle.loads(text) for text in texts]  # noqa: S301, TID251  made above
    plans, _ = planner.create_global_plan(received)
    answers = [pickle.dumps(plan) for plan in plans]
    ended = time.thread_time()
    for plan, answer in zip(received, answers, strict=True):
        pickle.dumps(plan)
        pickle.loads(answer)  # noqa: S301, TID251
    return ended - began, (time.thread_time() - ended) / ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--parts", default="blocked,loaded,urls,memory,coordination")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if "coordination" in parts:
        coordination(options.ranks, options.tensors)
    if "blocked" in parts:
        blocked(options.rounds, options.blocks)
    if "loaded" in parts:
        loaded(options.rounds, options.blocks)
    if "urls" in parts:
        at_urls(options.rounds, max(1, options.blocks // 7))
    if "memory" in parts:
        memory(options.saves, max(1, options.blocks // 14))


if __name__ == "__main__":
    main()
