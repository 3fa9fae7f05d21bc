"""Loads checkpoints with Megatron-Core, and writes what its ranks have under Transformers' names.

The first argument is a list of loads as JSON: `case` of `fixtures/generators/megatron_models.py`,
`source`, `out`, and the sizes `tp`, `pp` and `ep`. Needs megatron-core.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures" / "generators"))
import megatron_models as models
from megatron.core import dist_checkpointing, parallel_state
from megatron_families import laid_out
from safetensors.torch import save_file


def load(case: str, source: str, out: str, **sizes: int) -> None:
    setup = replace(models.CASES[case], **sizes)
    models.initialize_parallel(setup)
    (model,) = models.build(setup)
    with torch.no_grad():
        for _, tensor, _ in models.live_tensors(model, setup):
            tensor.zero_()
    # As Megatron-LM does: what the checkpoint says of its layers decides which names are asked for.
    common = dist_checkpointing.load_common_state_dict(source)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(prefix="", metadata=metadata)}
    model.load_state_dict(dist_checkpointing.load(wanted, source)["model"])
    whole = models.gather_live([model], setup)
    if dist.get_rank() == 0:
        named = laid_out(setup.family, whole, setup.vocabulary)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, out)
    parallel_state.destroy_model_parallel()


def main() -> None:
    models.prepare_for_cpu()
    dist.init_process_group("gloo")
    for one in json.loads(sys.argv[1]):
        load(**one)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
