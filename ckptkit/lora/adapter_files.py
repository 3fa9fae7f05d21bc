"""The files of one adapter: PEFT's folder, or a LoRA file that a pipeline of diffusers loads.

Source: peft 0.21, `PeftModel.save_pretrained`; diffusers 0.42, `_save_lora_weights` in
`loaders/lora_base.py` and `_create_lora_config` in `utils/peft_utils.py`, which passes the options
in the header to `LoraConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptkit.consumers.table import ADAPTER_CONFIG, DIFFUSERS, DIFFUSERS_LORA, find_consumer
from ckptkit.core.index import Fqn
from ckptkit.core.model_configs import class_of
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.pipeline_names import SETTINGS
from ckptkit.plan.layouts.hf import layout_adapter
from ckptkit.plan.plan import Literal, OutputFile, Product, lay_out_file

_UNET = "UNet"
# Older versions of PEFT, which get the options as arguments, do not know it.
_NEWER = {"peft_version"}


def name_component(config: Mapping[str, Any] | None) -> str:
    """Returns what pipelines call a model of diffusers; empty for a model of another library."""
    if find_consumer(config) is not DIFFUSERS or config is None:
        return ""
    return "unet" if class_of(config).startswith(_UNET) else "transformer"


def layout_adapter_files(
    products: Sequence[Product], document: Mapping[str, Any], component: str
) -> tuple[OutputFile, ...]:
    """Lays an adapter out.

    Args:
        products: Its tensors, by the names that PEFT's files give them.
        document: The content of its `adapter_config.json`.
        component: The component of a pipeline that it changes; empty for a folder of PEFT.
    """
    if not component:
        data = json.dumps(document, indent=2, sort_keys=True).encode()
        config = lay_out_file(ADAPTER_CONFIG, [(len(data), Literal(data), None)])
        return (layout_adapter(products), config)
    named = [
        replace(product, spec=replace(product.spec, name=Fqn(f"{component}.{name}")))
        for product in products
        if (name := product.spec.name.removeprefix(PEFT_PREFIX))
    ]
    options = {
        f"{component}.{key}": value
        for key, value in document.items()
        if value and key not in _NEWER
    }
    metadata = {SETTINGS: json.dumps(options, indent=2, sort_keys=True)}
    return (layout_adapter(named, DIFFUSERS_LORA.stem, metadata),)
