"""Makes the input of `zero3.py`: a Llama of random weights, laid out as ZeRO-3 saves it in float32.

    python benchmarks/make_zero3.py OUT --gigabytes 2 --ranks 4

DeepSpeed itself is not needed: its files are dictionaries that `torch.save` wrote. Each rank's has
the master weights, which are all that there is of the model, and Adam's two moments, so that it
is as large as in training. Beside the checkpoint lie the bytes of the weights alone, in one file
for each rank: what the least that anybody can do has to read and write.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import llama_config
from transformers import LlamaForCausalLM

TAG = "global_step10"
_HIDDEN = 2048
_VERSION = "0.19.8"


def _shapes(gigabytes: float) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(gigabytes, _HIDDEN))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _model_states(shapes: dict[str, torch.Size], ranks: int) -> dict[str, Any]:
    return {
        "module": {name: torch.empty(0) for name in shapes},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": 10,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}},
        "ds_version": _VERSION,
    }


def _optimizer_states(flat: torch.Tensor, ranks: int) -> dict[str, Any]:
    state = {
        "step": torch.tensor(10.0),
        "exp_avg": torch.full_like(flat, 0.5),
        "exp_avg_sq": torch.full_like(flat, 0.25),
    }
    group = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
            "fp32_flat_groups": [flat],
        },
        "ds_config": {},
        "ds_version": _VERSION,
    }


def make_zero3(out: Path, gigabytes: float, ranks: int) -> None:
    """Writes `checkpoint/` and `bytes/` below a folder, replacing what is there."""
    shutil.rmtree(out, ignore_errors=True)
    folder, alone = out / "checkpoint" / TAG, out / "bytes"
    folder.mkdir(parents=True)
    alone.mkdir()
    shapes = _shapes(gigabytes)
    elements = sum(-(-shape.numel() // ranks) for shape in shapes.values())
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        flat = torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 0.02
        torch.save(_model_states(shapes, ranks), folder / f"{name}_model_states.pt")
        torch.save(_optimizer_states(flat, ranks), folder / f"{name}_optim_states.pt")
        flat.numpy().tofile(alone / str(rank))
    (folder.parent / "latest").write_text(TAG, encoding="utf-8")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    make_zero3(options.out, options.gigabytes, options.ranks)


if __name__ == "__main__":
    main()
