"""Plans for GPT 175B, Llama 405B and GPT 1T as 1,024 ranks save them, made by the real planner.

Usage: python benchmarks/simulated_scale.py [--models gpt-175b,llama-405b,gpt-1t] [--ranks 1024]

Shapes, chunks and sizes are those of the models, in float32; the data files are holes, since
planning looks at their sizes and reads none of them. What is printed are the tables of
docs/reference/scale.md: what planning takes here, and how long the bytes take at given bandwidths.
With a star it is not the nodes that limit them, but the file system, or how many requests S3
answers.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import HERE, MB, WORK, keep, markdown, measure, settle, warm

GB = 1_000_000_000
_NODES = (1, 16, 64)
_PART_BYTES = 5 << 20  # of which S3 copies at least so many by one request
Shapes = dict[str, tuple[int, ...]]


def _gpt(layers: int, width: int, vocabulary: int = 51_200, positions: int = 2_048) -> Shapes:
    shapes: Shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    for layer in range(layers):
        for name, rows, columns in (
            *(("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width)),
            *(("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width)),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (rows,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def _llama(layers: int, width: int, inner: int, key_value: int, vocabulary: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        rows = {
            "self_attn.q_proj": (width, width),
            "self_attn.o_proj": (width, width),
            "self_attn.k_proj": (key_value, width),
            "self_attn.v_proj": (key_value, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


MODELS = {
    "gpt-175b": lambda: _gpt(96, 12_288),
    "llama-405b": lambda: _llama(126, 16_384, 53_248, 1_024, 128_256),
    "gpt-1t": lambda: _gpt(128, 25_600),
}


def make(model: str, ranks: int, out: Path) -> None:
    """Writes the checkpoint of holes; for a process of its own, since torch stays in memory."""
    from make_metadata import make_metadata

    shutil.rmtree(out, ignore_errors=True)
    make_metadata(out, ranks, MODELS[model]())


def plan(src: Path, nodes: int) -> dict[str, Any]:
    """Plans as each node does, and returns what came of it; for a process of its own."""
    began = time.process_time()
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.options import ConsolidateRequest
    from ckptkit.plan.plan import Share, split_plan, tasks_of

    request = ConsolidateRequest(names="live")
    with ConversionJob(src, WORK / "out" / "scale", request).plan_output() as output:
        planned = time.process_time()
        output.fingerprint()
        compared = time.process_time()
        share = sum(1 for _ in tasks_of(output.plan, Share(nodes // 2, nodes)))
        dealt = time.process_time()
        files = output.plan.files
        return {
            "tensors": sum(1 for _ in output.plan.specs()),
            "chunks": len(output.checkpoint.index.records),
            "files": len(files),
            "segments": sum(len(file.segments) for file in files),
            "tasks": sum(1 for _ in output.plan.tasks()),
            "tasks_of_a_node": share,
            "shares": len(split_plan(output.plan, nodes)),
            "bytes": output.plan.bytes_written,
            "plan_seconds": planned - began,
            "fingerprint_seconds": compared - planned,
            "deal_seconds": dealt - compared,
        }


def _measured(model: str, ranks: int, nodes: int) -> dict[str, Any]:
    src = WORK / f"{model}-{ranks}"
    script = [sys.executable, str(HERE / "simulated_scale.py")]
    if not (src / ".metadata").exists():
        print(f"making {src.name} (once)", flush=True)
        measure([*script, "--make", model, "--ranks", str(ranks), "--into", str(src)])
    settle(WORK / "out" / "scale", seconds=0)
    warm([src / ".metadata"])
    sample = measure([*script, "--plan", str(src), "--nodes", str(nodes)])
    found: dict[str, Any] = json.loads(sample.output.splitlines()[-1])
    size = (src / ".metadata").stat().st_size
    return found | {"peak_bytes": sample.peak_bytes, "metadata_bytes": size}


def _planned(rows: dict[str, dict[str, Any]]) -> str:
    header = (
        *("model", "float32 GB", "tensors", "chunks", "`.metadata` MB", "files", "tasks"),
        *("planning, CPU s", "peak MB", "fingerprint, CPU s"),
    )
    lines = [
        [
            model,
            f"{found['bytes'] / GB:,.0f}",
            f"{found['tensors']:,}",
            f"{found['chunks']:,}",
            f"{found['metadata_bytes'] / MB:,.0f}",
            f"{found['files']:,}",
            f"{found['tasks']:,}",
            f"{found['plan_seconds']:.1f}",
            f"{found['peak_bytes'] / MB:,.0f}",
            f"{found['fingerprint_seconds']:.2f}",
        ]
        for model, found in rows.items()
    ]
    return markdown(header, lines)


def _copied(model: str, ranks: int) -> float:
    """Returns which part of the bytes lies in chunks that S3 can copy by itself."""
    copied = total = 0
    for shape in MODELS[model]().values():
        row = 4 * math.prod(shape[1:])
        total += shape[0] * row
        if -(-shape[0] // ranks) * row >= _PART_BYTES:
            copied += shape[0] * row
    return copied / total


def _timed(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """Returns how long the bytes take at given bandwidths."""
    header = (
        *("model", "nodes", "tasks a node", "GB read, and written, by a node"),
        *("Lustre: minutes", "from S3: minutes"),
    )
    lines = []
    for model, found in rows.items():
        for nodes in _NODES:
            each = found["bytes"] / nodes
            by_node = each / (options.node_gb * GB)
            by_disk = 2 * found["bytes"] / (options.storage_gb * GB)
            by_requests = found["chunks"] / options.requests
            cells = [f"{found['tasks'] / nodes:,.0f}", f"{each / GB:,.0f}"]
            for other in (by_disk, by_requests):
                limit = "" if by_node >= other else " *"
                cells.append(f"{max(by_node, other) / 60:,.1f}{limit}")
            lines.append([model, str(nodes), *cells])
    return markdown(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--node-gb", type=float, default=2.0, help="read, and written, a second")
    parser.add_argument("--storage-gb", type=float, default=200.0, help="both together, a second")
    parser.add_argument("--requests", type=float, default=5_500, help="that S3 answers a second")
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    parser.add_argument("--make", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make:
        make(options.make, options.ranks, options.into)
        return
    if options.plan:
        print(json.dumps(plan(options.plan, options.nodes)))
        return
    rows = {}
    for model in options.models.split(","):
        rows[model] = _measured(model, options.ranks, options.nodes)
        if not options.keep:
            shutil.rmtree(WORK / f"{model}-{options.ranks}")
    print(f"{_planned(rows)}\n")
    print(f"{_timed(rows, options)}\n")
    for model in rows:
        print(f"{model}: S3 can copy {_copied(model, options.ranks):.0%} by itself")
    keep("simulated_scale", rows)


if __name__ == "__main__":
    main()
