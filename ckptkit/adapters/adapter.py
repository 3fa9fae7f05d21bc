"""An adapter as the rest of ckptkit sees it: settings, and tensors under the names of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.adapters.config import LoraSettings
from ckptkit.core.index import Fqn, TensorEntry


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter of a checkpoint.

    Attributes:
        name: What the run called it, "default" unless it chose a name.
        settings: Its configuration.
        origin: The name under which a plan knows the source of its tensors.
        tensors: Its tensors by the names that PEFT's files give them, such as
            `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, in natural order.
    """

    name: str
    settings: LoraSettings
    origin: str
    tensors: Mapping[Fqn, TensorEntry]
