"""The names of a LoRA file of diffusers, which has the adapters of a pipeline's components.

A name begins with the component, unless one component wrote the file by itself. Some training
scripts write the factors under the names that diffusers had before PEFT. The header's text
`lora_adapter_metadata` is JSON with PEFT's options, whose keys begin with the component too.

Source: diffusers 0.30 to 0.42, `loaders/lora_base.py` (`_save_lora_weights`), `loaders/peft.py`
(`save_lora_adapter`), `utils/state_dict_utils.py` (`convert_state_dict_to_diffusers`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping

SETTINGS = "lora_adapter_metadata"
WRITER = "diffusers"
_STEM = "pytorch_lora_weights"
_COMPONENT = re.compile(r"(transformer(?:_2)?|unet|text_encoder(?:_[23])?|prior|controlnet)\.(.+)")
_PARTS = (
    (re.compile(r"\.lora(_linear_layer)?\.down\."), ".lora_A."),
    (re.compile(r"\.lora(_linear_layer)?\.up\."), ".lora_B."),
)


def is_pipeline_lora(path: str, metadata: Mapping[str, str]) -> bool:
    """Returns whether a file is one, by its name or by the texts of its header."""
    return posixpath.basename(path).startswith(_STEM) or SETTINGS in metadata


def split_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the component of each tensor, if names have one, and the name that PEFT gives it."""
    listed = list(names)
    found = {name: _COMPONENT.fullmatch(name) for name in listed}
    paths: dict[str, tuple[str, ...]] = {}
    for name in listed:
        match = found[name] if all(found.values()) else None
        plain = name if match is None else match[2]
        for pattern, part in _PARTS:
            plain = pattern.sub(part, plain)
        paths[name] = (plain,) if match is None else (match[1], plain)
    return paths
