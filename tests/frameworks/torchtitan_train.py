"""torchtitan's own command, `torchtitan.train`, on a machine without a GPU.

Its trainer asks the module of the device, such as `torch.cuda`, for the name and the memory of the
device. `torch.cpu` does not have these functions: they are added here, before it is imported.
"""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def llama3() -> Any:
    """Its debug model, with an attention that has a backward on a CPU, and sums that gloo has."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.parallelize_fn = parallelize
    return config


def parallelize(model: Any, **options: Any) -> Any:
    from torchtitan.models.llama3 import parallelize_llama

    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


if __name__ == "__main__":
    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu.get_device_name = lambda _device=None: "cpu"
    cpu.get_device_properties = lambda _device=None: SimpleNamespace(total_memory=2**34)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda _device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
