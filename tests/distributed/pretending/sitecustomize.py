"""On PYTHONPATH: has accelerate shard models on the CPU, which it does on GPUs only.

accelerate takes up FSDP for kinds of processes that it holds for GPUs, so a group of processes on
the CPU pretends to be one. At its end it gives gloo's threads time to let go of the tensors of
the last reduction: one that does so while the interpreter ends takes the process down (SIGABRT).
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def pretend(state: ModuleType) -> None:
    import torch

    kinds, kind = state.DistributedType, state.PartialState
    real = kind.__init__

    @functools.wraps(real)
    def init(self: Any, cpu: bool = True, **options: Any) -> None:
        real(self, cpu or True, **options)
        shared = self._shared_state
        if shared.get("distributed_type") == kinds.MULTI_CPU:
            shared["distributed_type"] = kinds.MULTI_GPU
        shared["device"] = torch.device("cpu")  # FSDP1 wants it without a number

    kind.__init__ = init


class Pretender(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "accelerate.state":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_pretend(module: ModuleType) -> None:
            run(module)
            pretend(module)

        loader.exec_module = run_and_pretend
        return spec


def wait_for_gloo() -> None:
    if "torch.distributed" in sys.modules:
        time.sleep(0.5)


atexit.register(wait_for_gloo)  # the first, and so run the last
sys.meta_path.insert(0, Pretender())
