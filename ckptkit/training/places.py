"""Where the tensors of a model lie in a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckptkit.adapters.names import AdapterNames, holds_adapters
from ckptkit.core.index import KeyPath
from ckptkit.training.names import clean_fqn, innermost

_EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT's EMBEDDING_LAYER_NAMES
_SIDES = ("input", "output")
_PEFT_PREFIX = "base_model.model."  # of what lies in the model that PEFT was given


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """From a tensor's name to its DCP directory, and to its key path there.

    Attributes:
        unit: The directory.
        path: What comes before the name in the key path.
        adapter: Where the model is split, as the Trainer splits it: what tells the tensors of
            the adapter, which lie in `unit` under the names that PEFT's files give them.
        base_unit: Where it is split, the directory of all other tensors.
    """

    unit: str
    path: KeyPath
    adapter: AdapterNames | None = None
    base_unit: str = ""

    def of(self, fqn: str) -> tuple[str, KeyPath]:
        """Returns the directory of a tensor, and its key path."""
        if self.adapter is None:
            return self.unit, (*self.path, fqn)
        in_file = self.adapter.file_name(fqn)
        if in_file is None:
            return self.base_unit, (*self.path, fqn)
        return self.unit, (*self.path, in_file)

    @property
    def units(self) -> tuple[str, ...]:
        """The directories."""
        return (self.unit,) if self.adapter is None else (self.unit, self.base_unit)

    def by_unit(self, names: Iterable[str]) -> dict[str, list[KeyPath]]:
        """Returns the key paths of a tensor's names, by the directory that each is in."""
        found: dict[str, list[KeyPath]] = {}
        for name in names:
            unit, path = self.of(name)
            found.setdefault(unit, []).append(path)
        return found


def adapter_names(model: nn.Module) -> AdapterNames | None:
    """Returns what tells the active adapter's tensors of a PEFT model.

    Returns:
        None for other models, and for adapters that consist of no modules of their own.

    Source: peft's `PeftModel`, whose `peft_config` holds a configuration for each adapter.
    """
    inner: Any = innermost(model)
    configs = getattr(inner, "peft_config", None)
    active = getattr(inner, "active_adapter", None)
    if not isinstance(configs, dict) or not isinstance(active, str) or active not in configs:
        return None
    if not any(holds_adapters(name.rpartition(".")[2]) for name, _ in inner.named_modules()):
        return None  # prompts, and others that PEFT's files do not name by their modules
    bias = str(getattr(configs[active], "bias", "none"))
    return AdapterNames(
        adapter=active,
        bias="all" if bias == "all" else "lora_only" if bias.endswith("_only") else "none",
        embeddings=tuple(_saved_embeddings(inner, configs[active])),
    )


def _saved_embeddings(model: Any, config: Any) -> Iterator[str]:
    """Yields the names of embeddings that PEFT saves with an adapter.

    Source: peft 0.21, `get_peft_model_state_dict` with `save_embedding_layers="auto"`.
    """
    names = [clean_fqn(name) for name, _ in model.named_modules()]
    targeted = any(_is_target(name, config) for name in names)
    only_tokens = getattr(config, "trainable_token_indices", None) is not None
    if (not targeted or only_tokens) and not _was_resized(model, config):
        return
    layers = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in _SIDES]
    if targeted:
        layers = [getattr(layer, "base_layer", None) for layer in layers]
    for name, module in model.named_modules():
        if any(module is layer for layer in layers):
            yield clean_fqn(name)


def _is_target(name: str, config: Any) -> bool:
    """Tells whether a module is an embedding that an adapter targets."""
    last, targets = name.rpartition(".")[2], getattr(config, "target_modules", None) or ()
    if last not in _EMBEDDINGS:
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, name.removeprefix(_PEFT_PREFIX)) is not None
    return last in targets


def _was_resized(model: Any, config: Any) -> bool:
    """Tells whether a model has another number of tokens than the one that it was made from."""
    own: Any = getattr(model, "config", None)
    tokens = getattr(own, "vocab_size", None)
    origin = getattr(config, "base_model_name_or_path", None)
    if not tokens or not origin:
        return False
    try:
        before = own.from_pretrained(origin, local_files_only=True)
    except (OSError, ValueError):  # not there any more, or not on this machine
        return False
    return bool(getattr(before, "vocab_size", tokens) != tokens)
