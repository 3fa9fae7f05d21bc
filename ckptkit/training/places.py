"""Where the tensors of a model lie in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckptkit.adapters.names import AdapterNames
from ckptkit.core.index import KeyPath
from ckptkit.training.names import innermost

_EMBEDDINGS = ("embed_tokens", "lm_head")


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
    """Returns what tells the active adapter's tensors of a PEFT model; None for other models.

    Source: peft's `PeftModel`, whose `peft_config` holds a configuration for each adapter.
    """
    inner: Any = innermost(model)
    configs = getattr(inner, "peft_config", None)
    active = getattr(inner, "active_adapter", None)
    if not isinstance(configs, dict) or not isinstance(active, str) or active not in configs:
        return None
    config = configs[active]
    targets = getattr(config, "target_modules", None) or ()
    bias = str(getattr(config, "bias", "none"))
    return AdapterNames(
        adapter=active,
        bias="all" if bias == "all" else "lora_only" if bias.endswith("_only") else "none",
        embeddings=not isinstance(targets, str)
        and any(e in targets for e in _EMBEDDINGS)
        and getattr(config, "trainable_token_indices", None) is None,
    )
