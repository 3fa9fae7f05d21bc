"""Scales of packed weights are saved as bitsandbytes would unpack with them, or not at all."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from torch import nn

from ckptkit.training.state.rank_bound import lost_scales, packed_weights


def test_scales_that_an_evaluation_on_a_cpu_has_rounded_are_not_saved() -> None:
    layers: Any = bnb.nn
    layer = layers.Linear4bit(
        *(64, 64), bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
    ).to("cpu")
    state, packed = layer.weight.quant_state, layer.weight.data
    layer.weight = nn.Parameter(packed, requires_grad=False)  # as sharding leaves it
    found = dict(lost_scales(packed_weights(layer, ()), {"weight"}))
    assert "weight.absmax" in found
    # What `forward` of a model in evaluation does where the processor has AVX-512.
    _convert_weight_packed_for_cpu(packed.clone(), state)
    assert packed_weights(layer, ()) == {}
