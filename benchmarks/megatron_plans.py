"""Time and memory to plan a consolidation of many ranks with the save plans of Megatron-Core.

    python -m benchmarks.megatron_plans FOLDER [RANKS] [TENSORS]

The checkpoint is a Llama whose layers are stored apart, every matrix and norm in a part for each
rank. Its `.metadata` is made with torch's own classes, as rank 0 writes it: each rank's plan
arrives as a copy. Its data files are sparse. Making it for 1,024 ranks and 2,000 tensors takes
minutes and 7 GB, and is done only if it is not there. Measured are `ckptkit.inspect`, and planning
with the map of the model (`consolidate --dry-run`), each in a process of its own, and its largest
resident memory.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

_HIDDEN, _HEAD, _GROUPS = 1024, 128, 8
_MEASURE = """
import re, sys, time
start = time.perf_counter()
from pathlib import Path
{}
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(f"{{count:,}} tensors in {{time.perf_counter() - start:.1f}} s, {{peak:,.0f}} MiB")
"""
_PROGRAMS = {
    "inspect": "import ckptkit\ncount = len(ckptkit.inspect(sys.argv[1]).tensors)",
    "plan": """
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.options import ConsolidateRequest
run = Path(sys.argv[1])
job = ConversionJob(run, run / "out", ConsolidateRequest(), base=str(run / "hub"))
with job.plan_output() as planned:
    count = sum(1 for _ in planned.plan.specs())
""",
}


def list_shapes(ranks: int, tensors: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's tensors; the first dimension is divided by the ranks."""
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (_HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * _GROUPS * _HEAD, _HIDDEN),
        "self_attention.linear_proj.weight": (_HIDDEN, _GROUPS * _HEAD),
        "mlp.linear_fc1.layer_norm_weight": (_HIDDEN,),
        "mlp.linear_fc1.weight": (4 * _HIDDEN, _HIDDEN),
        "mlp.linear_fc2.weight": (_HIDDEN, 2 * _HIDDEN),
    }
    layers = (tensors - 3) // len(layer)
    shapes: dict[str, tuple[int, ...]] = {
        f"decoder.layers.{number}.{name}": shape
        for number in range(layers)
        for name, shape in layer.items()
    }
    vocabulary = (16 * ranks, _HIDDEN)
    outer = {"embedding.word_embeddings.weight": vocabulary, "output_layer.weight": vocabulary}
    return {**shapes, **outer, "decoder.final_layernorm.weight": (_HIDDEN,)}


def make(folder: Path, ranks: int, tensors: int) -> None:
    """Writes the checkpoint, and a folder `hub` with the configuration beside it."""
    import torch
    from torch.distributed.checkpoint import metadata as stored
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    shapes = list_shapes(ranks, tensors)
    plans = []
    for rank in range(ranks):
        items = []
        for name, (rows, *rest) in shapes.items():
            offset = torch.Size([rows // ranks * rank, *(0 for _ in rest)])
            written = TensorWriteData(
                stored.ChunkStorageMetadata(offset, torch.Size([rows // ranks, *rest])),
                stored.TensorProperties(dtype=torch.bfloat16),
                torch.Size([rows, *rest]),
            )
            index = stored.MetadataIndex((name + " ")[:-1], copy.copy(offset))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        plans.append(SavePlan(items, planner_data={}))
    _, metadata = create_default_global_save_plan(plans)
    record = 2 * max(map(math.prod, shapes.values())) // ranks + 4096  # more than a part takes
    metadata.storage_data = {
        stored.MetadataIndex((item.index.fqn + " ")[:-1], item.index.offset): _StorageInfo(
            f"__{rank}_0.distcp", record * number, record
        )
        for rank, plan in enumerate(plans)
        for number, item in enumerate(plan.items)
    }
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    step = folder / "iter_0000001"
    step.mkdir(parents=True)
    for rank in range(ranks):
        with (step / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(record * len(shapes))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "num_hidden_layers": (tensors - 3) // 6,
        "num_attention_heads": _GROUPS,
        "num_key_value_heads": _GROUPS,
        "head_dim": _HEAD,
        "intermediate_size": 2 * _HIDDEN,
        "vocab_size": 16 * ranks,
        "tie_word_embeddings": False,
    }
    (folder / "hub").mkdir()
    (folder / "hub" / "config.json").write_text(json.dumps(config))
    (step / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    with (step / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def main() -> None:
    folder = Path(sys.argv[1])
    ranks, tensors = map(int, sys.argv[2:4] or ("1024", "2000"))
    path = folder / "iter_0000001" / ".metadata"
    if not path.exists():
        make(folder, ranks, tensors)
    print(f"{path.stat().st_size / 1e6:,.0f} MB of .metadata")
    for name, program in _PROGRAMS.items():
        print(f"{name}: ", end="", flush=True)
        subprocess.run([sys.executable, "-c", _MEASURE.format(program), str(folder)], check=True)


if __name__ == "__main__":
    main()
