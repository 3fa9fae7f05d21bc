"""LoRA that PEFT does not place: in forms of other frameworks, or on their modules.

Source: torchtune 0.6, `modules/peft/lora.py` and `dora.py`; torchtitan 0.3, `components/lora.py`;
Megatron-Bridge 0.5, `peft/utils.py` and `canonical_lora.py`; mcore-bridge 1.1, `tuners/lora.py`;
tinker-cookbook, `weights/_merge_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ckptkit.core.frameworks import BY_NAME, recognise_by_modules
from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.dialects import (
    BASE_LAYER,
    DEFAULT,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    cut_wrappers,
)
from ckptkit.plan.weight_kinds import FACTORS, MEGATRON_BRIDGE, MLX, PEFT, TORCHTUNE

TINKER = "Tinker"
_OWN_TOOLS = {
    MEGATRON_BRIDGE: "Megatron-Bridge's examples/conversion/adapter/export_adapter.py writes PEFT's"
    " files",
    TORCHTUNE: "torchtune's recipes write PEFT's files beside its own for most models",
    TINKER: "tinker_cookbook.weights.build_lora_adapter writes PEFT's files",
    MLX: "mlx_lm.fuse merges it",
    PEFT: "the framework that trained it writes PEFT's files, such as ms-swift with --to_hf",
}
_PARTS = {
    **dict.fromkeys(("lora_A", "lora_a", "linear_in"), LORA_A),
    **dict.fromkeys(("lora_B", "lora_b", "linear_out"), LORA_B),
    **dict.fromkeys(("lora_magnitude_vector", "magnitude"), MAGNITUDE),
}
_EXPERTS = 3
OF_TINKER = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<matrix>w[123]|gate_proj|up_proj|down_proj)"
    r"|(?P<head>.*)\bunembed_tokens"
)
"""Modules of Tinker that no model has: matrices of experts, which are stacked, and the head."""
_WRAPPED = "to_wrap"  # what Megatron-Bridge calls PEFT's base_layer


class Factor(Struct, frozen=True):
    module: str  # by the framework's name
    part: str  # `lora_A`, `lora_B`, `lora_magnitude_vector`; empty for others
    adapter: str
    branch: str  # the part of the module that has the adapter, such as `q`
    ending: str  # its name after the module


class ForeignAdapter(Struct, frozen=True):
    """What a state dict holds of an adapter that PEFT cannot place."""

    form: str  # a key of `FACTORS`, or `TINKER`
    framework: str  # whose names the modules have; empty where that is not known
    factors: Mapping[Fqn, Factor]  # by names without wrappers
    rest: tuple[Fqn, ...]  # the names of all other tensors

    @property
    def title(self) -> str:
        """What it is, with the article."""
        of = f" with the names of {self.framework}" if self.framework not in {"", self.form} else ""
        return f"a LoRA adapter in {self.form}'s form{of}"

    @property
    def own_tool(self) -> str:
        """What else converts it, as a sentence."""
        profile = BY_NAME.get(self.framework)
        return (profile and profile.own_tool) or _OWN_TOOLS[self.form]

    @property
    def is_handled(self) -> bool:
        """Whether there may be a conversion."""
        if self.form == TINKER and self.rest:
            return False
        is_known = self.form == TINKER or bool(self.framework)
        return is_known and all(factor.part for factor in self.factors.values())

    @property
    def has_peft_form(self) -> bool:
        """Whether PEFT has modules for all of it; it has none for matrices of single experts."""
        return not any(".experts." in factor.module for factor in self.factors.values())

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(factor.adapter for factor in self.factors.values()))


def find_foreign(entries: Sequence[TensorEntry]) -> ForeignAdapter | None:
    """Finds an adapter of another framework among the tensors of one state dict."""
    plain = {name_plainly(entry): entry for entry in entries}
    for form, pattern in FACTORS.items():
        found = {name: match for name in plain if (match := pattern.fullmatch(name)) is not None}
        factors = {
            name: Factor(
                match["module"],
                _PARTS.get(match["part"], ""),
                match.groupdict().get("adapter") or DEFAULT,
                match.groupdict().get("branch") or "",
                name[len(match["module"]) :],
            )
            for name, match in found.items()
        }
        if not any(factor.part in {LORA_A, LORA_B} for factor in factors.values()):
            continue
        rest = tuple(name for name in plain if name not in factors)
        framework = recognise_by_modules(factor.module for factor in factors.values())
        if form != PEFT or framework:
            return ForeignAdapter(form, framework, factors, rest)
        if any(_is_of_tinker(factor, plain[name]) for name, factor in factors.items()):
            return ForeignAdapter(TINKER, "", factors, rest)
    return None


def name_plainly(entry: TensorEntry) -> Fqn:
    """Returns the name of a tensor in the framework's model, without wrappers."""
    parts = ".".join(cut_wrappers(entry.name)).removeprefix(PEFT_PREFIX).split(".")
    return Fqn(".".join(part for part in parts if part not in {BASE_LAYER, _WRAPPED}))


def _is_of_tinker(factor: Factor, entry: TensorEntry) -> bool:
    found = OF_TINKER.fullmatch(factor.module)
    return found is not None and (found["head"] is not None or len(entry.shape) == _EXPERTS)
