"""Parsers of what a run leaves for its resumes: facts, records, structures, values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ckptkit.core.model_configs import parse_json_object
from ckptkit.formats.ranks.flat import parse_layout
from ckptkit.lora.quantized import FourBitState
from ckptkit.runs.push_journal import parse_journal
from ckptkit.runs.retention import trainer_state
from ckptkit.storage.overlay import MemorySource
from ckptkit.training.resume.stored_step import parse_facts
from ckptkit.training.state.objects import object_from_bytes
from ckptkit.training.state.structures import assemble, leaf_paths, leaves_by_key, parse_structures
from ckptkit.writer.record import parse_record
from tests.campaigns.fuzz.judge import Target
from tests.campaigns.fuzz.mutation import mutate_archive, mutate_json
from tests.campaigns.fuzz.seeds import fixture, found_in_fixtures, prefixed

_FACTS: tuple[Callable[[bytes], object], ...] = (
    lambda data: parse_facts(data, where="x"),
    lambda data: parse_layout(data, "x"),
    lambda data: parse_record(data, where="x"),
    lambda data: parse_journal(data, where="x"),
    lambda data: trainer_state(MemorySource({"s/trainer_state.json": data}), "s"),
    lambda data: FourBitState.parse(data, where="x"),
)


def _run_facts(data: bytes) -> None:
    if data:
        _FACTS[data[0] % len(_FACTS)](data[1:])


def _facts_seeds() -> list[bytes]:
    record = {
        "rank": 0, "world_size": 2, "attempt": "a1", "units": {"model": {}, "": {}},
        "files": [{"path": "__0_0.distcp", "size_bytes": 9, "crc32": 3}],
        "dispensable": [{"name": "rng", "unit": "x", "path": ["a", 1], "problem": "none"}],
    }  # fmt: skip
    push = {
        "step": 4,
        "digest": "d",
        "state": "pushed",
        "repo_id": "o/n",
        "commit": "c",
        "tag": "t",
    }
    four = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 8],
        "nested_blocksize": 256, "nested_offset": 0.5,
    }  # fmt: skip
    documents: list[tuple[int, Any]] = [
        (2, record),
        (3, {"ckptkit_pushes": 1, "run": "r", "steps": {"4": push}}),
        (5, four),
    ]
    seeds = [bytes([kind]) + json.dumps(document).encode() for kind, document in documents]
    runs = found_in_fixtures("**/ckptkit_run.json", 4) + found_in_fixtures("**/*run*.json", 4)
    layouts = found_in_fixtures("**/*flat*.json", 4) + found_in_fixtures("**/*layout*.json", 4)
    seeds += [b"\0" + one for one in runs] + [b"\1" + one for one in layouts]
    return seeds + [b"\4" + one for one in found_in_fixtures("**/trainer_state.json", 3)]


def _run_structures(data: bytes) -> None:
    document = parse_json_object(data, where="x")
    for _, _, nodes in parse_structures(document, where="x"):
        leaves_by_key(nodes, "x")
        leaves = dict.fromkeys(leaf_paths(nodes, "x")) if nodes else {}
        assemble(nodes, leaves, "x")


def _structure_seeds() -> list[bytes]:
    nodes = [
        ["dict", [["a", 1], [3, 2]]],
        ["list", [3, 4]],
        ["OrderedDict", []],
        ["leaf", ["a", 0]],
        ["defaultdict", [["x", 5]], "list"],
        ["leaf", ["a", 1, "x"]],
    ]
    return [json.dumps({"version": 1, "structures": [["u", ["k"], nodes]]}).encode()]


def _run_objects(data: bytes) -> None:
    object_from_bytes(data, where="x")


def _object_seeds() -> list[bytes]:
    files = (("verl_one_rank", "*extra*.pt"), ("nanotron_qwen2_tp2", "*random*.pt"))
    return [fixture(*one) for one in (*files, ("trainer_fsdp2", "*rng*"), ("torch_nested", "*.pt"))]


TARGETS = (
    Target("run-files", _run_facts, _facts_seeds, prefixed(mutate_json, 1), share=12),
    Target("structures", _run_structures, _structure_seeds, mutate_json, share=10),
    Target(
        "objects-of-a-step",
        _run_objects,
        _object_seeds,
        mutate_archive,
        share=2,
        most_bytes=1 << 15,
    ),
)
