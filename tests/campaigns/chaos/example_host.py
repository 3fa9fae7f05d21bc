"""A rank of an example, as a fork of a process that has imported what it imports.

It is armed as ckpt-chaos arms a program that it starts. The examples leave Python's and NumPy's
random numbers to chance; saves have them, so that two runs that are compared need the same.
"""

from __future__ import annotations

import importlib
import os
import random
import runpy
import sys
from pathlib import Path

import numpy as np
from ckpt_chaos.targets.common import arm_from_env

IMPORTED = (
    *("safetensors.torch", "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp", "torch.optim.adamw", "accelerate", "transformers.trainer", "peft"),
    *("transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "ckptkit.training"),
    *("ckptkit.integrations.accelerate", "ckptkit.integrations.transformers", "ckptkit.run"),
    __name__,
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def be_rank(script: str, *arguments: str) -> None:
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    sys.path[0] = str(EXAMPLES)
    arm_from_env(rank, lazy=True)
    by_module = script == "ckptkit.run"
    words = [script, *arguments]
    sys.argv = [*words[:by_module], str(EXAMPLES / words[by_module]), *words[1 + by_module :]]
    importlib.import_module("on_cpu").prepare_for(sys.argv)  # as examples/on_cpu.py does
    if by_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
