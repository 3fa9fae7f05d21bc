"""Only so that the examples run without a GPU: leave it out of a script of yours.

accelerate, and with it the Trainer, shards models on GPUs only; on two CPU processes it trains
with DDP instead, and says nothing. Here the processes are presented to it as if each had a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def shard_without_gpus() -> None:
    """Has accelerate shard over CPU processes, where there is no GPU; call it first of all."""
    if torch.cuda.is_available():
        return
    os.environ["ACCELERATE_USE_CPU"] = "true"
    stock = PartialState.__init__

    def init(self: Any, *_: object, **options: Any) -> None:
        stock(self, **{**options, "cpu": True})
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._shared_state["device"] = torch.device("cpu")  # FSDP1 refuses "cpu:0"

    PartialState.__init__ = init
