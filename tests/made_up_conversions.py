"""Conversions that compute, which no model of transformers has: registered for Mixtral."""

from __future__ import annotations

from typing import Any

import torch
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import ConversionOps, WeightConverter


class Doubled(ConversionOps):  # type: ignore[misc]  # transformers is not followed
    """On the way to disk, one tensor is halved."""

    def convert(self, input_dict: Any, **_options: Any) -> Any:
        return {name: _only(value) * 2 for name, value in input_dict.items()}

    @property
    def reverse_op(self) -> Any:
        return Halved()


class Halved(Doubled):
    def convert(self, input_dict: Any, **_options: Any) -> Any:
        return {name: _only(value) / 2 for name, value in input_dict.items()}


class Unmixed(ConversionOps):  # type: ignore[misc]
    """On the way to disk, two tensors become a sum in float32 and a difference."""

    supports_many_to_many = True

    def convert(self, input_dict: Any, target_patterns: Any, **_options: Any) -> Any:
        raise NotImplementedError

    @property
    def reverse_op(self) -> Any:
        return Mixed()


class Mixed(Unmixed):
    def convert(self, input_dict: Any, target_patterns: Any, **_options: Any) -> Any:
        first, second = (_only(value) for value in input_dict.values())
        total = first.float().sum(dim=-1) + second.float().sum(dim=-1)
        return dict(zip(target_patterns, (total, first - second), strict=True))


def _only(value: Any) -> torch.Tensor:
    found: torch.Tensor = value[0] if isinstance(value, list) else value
    return found


def register() -> None:
    """Lets Mixtral have them, beside its own."""
    own = get_checkpoint_conversion_mapping("mixtral")
    made_up = [
        WeightConverter("lm_head.weight", "lm_head.weight", operations=[Doubled()]),
        WeightConverter(
            ["self_attn.kv_total", "self_attn.kv_difference"],
            ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            operations=[Unmixed()],
        ),
    ]
    register_checkpoint_conversion_mapping("mixtral", [*own, *made_up], overwrite=True)
