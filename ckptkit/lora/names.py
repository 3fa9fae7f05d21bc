"""Names of adapter tensors: as a PEFT model holds them, and as PEFT's files call them.

Source: peft 0.21, `utils/save_and_load.py` and `tuners/tuners_utils.py`: files leave out the name
of the adapter, keep the modules of `modules_to_save` under the name of what they replace, and
keep DoRA's magnitude without `.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# What PEFT's tuners call the containers of their adapters' parameters.
_TUNERS = (
    *("boft_", "bone_", "c3a_", "delora_", "fourierft_", "hada_", "hra_", "ia3_", "ln_tuning_"),
    *("lokr_", "lora_", "miss_", "oft_", "randlora_", "road_", "shira_", "vera_", "waveft_"),
)
_WHOLE_MODULES = "modules_to_save"
_TOKENS = "trainable_tokens_delta"
_MAGNITUDE = "lora_magnitude_vector"
_BASE = "base_layer"

Bias = Literal["none", "all", "lora_only"]

# What Transformers calls the modules at both ends of a language model.
_INPUTS = frozenset(
    ("embed_in", "embed_tokens", "embeddings", "shared", "tok_embeddings", "word_embeddings", "wte")
)
_OUTPUTS = frozenset(("decoder", "embed_out", "lm_head", "output_layer", "vocab_projector"))
_SHARED = "shared"  # an input embedding that others, which are called `embed_tokens`, repeat


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Tells which tensors of a PEFT model belong to one adapter.

    Attributes:
        adapter: Its name, "default" unless the user chose another.
        bias: Which biases of the base model were trained with it; `bias` of its configuration.
        embeddings: The modules of embeddings that lie in its files as they are: those that it
            targets, or that were given another number of tokens.
    """

    adapter: str = "default"
    bias: Bias = "none"
    embeddings: tuple[str, ...] = ()

    def file_name(self, fqn: str) -> str | None:
        """Returns what PEFT's files call a tensor; None if it is not the adapter's.

        Args:
            fqn: Its name in the model, without the segments of wrappers.

        Example:
            >>> names = AdapterNames()
            >>> names.file_name("base_model.model.q.lora_A.default.weight")
            'base_model.model.q.lora_A.weight'
            >>> names.file_name("base_model.model.score.modules_to_save.default.weight")
            'base_model.model.score.weight'
            >>> names.file_name("base_model.model.q.base_layer.weight") is None
            True
        """
        parts = fqn.split(".")
        for at, part in enumerate(parts[1:], start=1):
            if part == self.adapter and holds_adapters(parts[at - 1]):
                return ".".join(_without_adapter(parts, at))
        if self._is_trained_bias(parts) or fqn.rpartition(".")[0] in self.embeddings:
            return fqn
        return None

    def _is_trained_bias(self, parts: list[str]) -> bool:
        if parts[-1] != "bias":
            return False
        return self.bias == "all" or (self.bias == "lora_only" and parts[-2:-1] == [_BASE])


def holds_adapters(part: str) -> bool:
    return part.startswith(_TUNERS) or part in {_WHOLE_MODULES, _TOKENS}


def is_input_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _INPUTS


def is_vocabulary(module: str) -> bool:
    return is_input_embedding(module) or module.rpartition(".")[2] in _OUTPUTS


def vocabulary_of(modules: Iterable[str]) -> set[str]:
    """Returns the input embedding and the head among modules, as far as names tell.

    Args:
        modules: Paths in the base model.

    Example:
        >>> sorted(vocabulary_of(["shared", "encoder.embed_tokens", "encoder.norm", "lm_head"]))
        ['lm_head', 'shared']
    """
    found = {module for module in modules if is_vocabulary(module)}
    if _SHARED not in {module.rpartition(".")[2] for module in found}:
        return found
    return {module for module in found if module.rpartition(".")[2] != "embed_tokens"}


def _without_adapter(parts: list[str], at: int) -> list[str]:
    holder = parts[at - 1]
    if holder == _WHOLE_MODULES:
        return [*parts[: at - 1], *parts[at + 1 :]]
    if holder == _MAGNITUDE:
        return parts[:at]
    return [*parts[:at], *parts[at + 1 :]]
