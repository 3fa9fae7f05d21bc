"""What the first export of a small model costs, beside the second: processor time of all processes.

Starts itself under torchrun on one rank and on two, with an empty cache.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import environment

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},  # a family in the shipped data
    "BertForMaskedLM": {},
    "MixtralForCausalLM": {"num_key_value_heads": 2, "num_local_experts": 4},
    "LlavaForConditionalGeneration": {},
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EXPORTS = 3


def make_model(name: str) -> Any:
    """Makes a small model."""
    import transformers

    kind = getattr(transformers, name)
    if name.startswith("Llava"):
        vision = transformers.CLIPVisionConfig(**SIZES, image_size=32, patch_size=16)
        text = transformers.LlamaConfig(**SIZES, vocab_size=128)
        return kind(kind.config_class(text_config=text, vision_config=vision))
    return kind(kind.config_class(**SIZES, **CONFIGS[name], vocab_size=128))


def processor_seconds() -> float:
    """Returns what this process and the children that it has waited for took."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(one)[:2]) for one in who)


def export_often(name: str, folder: str) -> None:
    """Exports on a rank, and prints what each export took."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from ckptkit.training import Checkpointer

    dist.init_process_group("gloo")
    model = make_model(name)
    if dist.get_world_size() > 1:
        fully_shard(model)
    found = []
    with Checkpointer(f"{folder}/run") as checkpointer:
        for number in range(EXPORTS):
            dist.barrier()
            before, began = processor_seconds(), time.perf_counter()
            checkpointer.export(f"{folder}/{number}", state={"model": model}).result()
            found.append([processor_seconds() - before, time.perf_counter() - began])
    print(f"FOUND {json.dumps(found)}", flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Prints a Markdown table; times of several ranks are added."""
    if len(sys.argv) > 1:
        export_often(*sys.argv[1:])
    print("| model | ranks | first CPU s | second CPU s | third CPU s | first s |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in CONFIGS:
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "cache").mkdir()
                settings = environment() | {"XDG_CACHE_HOME": f"{folder}/cache"}
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc_per_node={ranks}", __file__, name, folder]
                settings |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
                done = subprocess.run(
                    command, env=settings, capture_output=True, text=True, check=False
                )
            rows = [line[6:] for line in done.stdout.splitlines() if line.startswith("FOUND ")]
            if len(rows) != ranks:
                raise RuntimeError(done.stderr[-3000:])
            each = [json.loads(row) for row in rows]
            spent = [sum(rank[number][0] for rank in each) for number in range(EXPORTS)]
            first = max(rank[0][1] for rank in each)
            shown = " | ".join(f"{seconds:.3f}" for seconds in spent)
            print(f"| {name} | {ranks} | {shown} | {first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
