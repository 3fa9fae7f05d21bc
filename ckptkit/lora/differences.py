"""What a full fine-tune changed, sorted into what a LoRA can hold and what it cannot.

Source: peft 0.21, `check_target_module_exists` in `tuners/tuners_utils.py` and `_set_trainable` in
`utils/other.py` for how modules are named; `lora/config.py` for the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.lora.config import PEFT_PREFIX
from ckptkit.lora.forms import is_conv1d
from ckptkit.lora.inference import fits_target, is_saved
from ckptkit.options import matches
from ckptkit.plan.vocabulary import is_embedding, is_head

_MATRIX = 2
_WEIGHT, _BIAS = ".weight", ".bias"
# Modules with a matrix that no product of Linear's is: tables of rows, and routers, which
# Transformers has as classes of their own.
_TABLE = re.compile(
    r"(embed_(?!out$).*|.*embeddings?|.*_embed|wte|wpe|shared|tokens_embed|relative_attention_bias"
    r"|gate|router)"
)
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
Role = Literal["linear", "transposed", "whole"]


@dataclass(frozen=True, slots=True)
class DiffPatterns:
    """Which tensors the user wants in which form.

    Attributes:
        include: Names of matrices to approximate; empty for all but heads.
        exclude: Names to leave out.
        full: Names that are kept as they are, with the rest of their modules.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def approximates(self, name: str) -> bool:
        taken = matches(name, self.include) if self.include else not is_head(name)
        return taken and not matches(name, self.exclude)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def role_of(name: str, shape: Shape, model_types: frozenset[str]) -> Role:
    """Tells whether a tensor is the weight of a linear layer, and which way round it is stored."""
    module = module_of(name)
    if len(shape) != _MATRIX or not name.endswith(_WEIGHT) or 0 in shape:
        return "whole"
    if is_embedding(name) or _TABLE.fullmatch(module.rpartition(".")[2]):
        return "whole"
    return "transposed" if is_conv1d(module, model_types) else "linear"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is written of a fine-tune.

    Attributes:
        ranks: The rank of each module that is approximated.
        biased: Approximated modules whose biases are kept.
        whole: Modules that are kept as they are.
        is_tied: Whether some of these are tied to each other.
    """

    ranks: Mapping[str, int]
    biased: frozenset[str] = frozenset()
    whole: tuple[str, ...] = ()
    is_tied: bool = False

    def file_name(self, name: str) -> str | None:
        """Returns what PEFT's files call a tensor that is kept as it is; None if it is not."""
        module = module_of(name)
        if any(module == whole or module.startswith(f"{whole}.") for whole in self.whole):
            return PEFT_PREFIX + name
        if module in self.biased and name.endswith(_BIAS):
            return f"{PEFT_PREFIX}{module}.base_layer{_BIAS}"
        return None


def kept(
    ranks: Mapping[str, int],
    full: Iterable[str],
    tensors: Collection[str],
    tied: Mapping[Fqn, Fqn],
) -> Kept:
    """Decides how tensors that are kept as they are lie in an adapter.

    A bias beside an approximated weight is saved as a bias; anything else with its module.

    Args:
        ranks: The rank of each module that is approximated.
        full: Names of tensors to keep.
        tensors: Names of all tensors of the model.
        tied: From names that hold the same tensor as another one to that one.
    """
    wanted = set(full)
    # An embedding that is replaced leaves the tied head with the old one; it is replaced too.
    ties = {target for target, source in tied.items() if source in wanted}
    wanted |= ties
    biased = {module_of(n) for n in wanted if n.endswith(_BIAS) and module_of(n) in ranks}
    whole = sorted({module_of(name) for name in wanted} - biased)
    for module in whole:
        others = {module_of(name) for name in tensors} - set(whole)
        meant = next((o for o in sorted(others) if is_saved([module], o)), None)
        if meant is not None or not module:
            raise RefusedError(
                f"module {module!r} cannot be saved whole: PEFT, which goes by the ends of names,"
                f" would take {meant!r} for it too",
                where="--full",
                hint="leave it out of --full, or match both with it",
            )
    return Kept(ranks, frozenset(biased), tuple(whole), bool(ties))


def adapter_config(
    kept: Kept,
    modules: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    transposed: bool,
    base: tuple[str, str | None],
) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`; every module is scaled by 1.

    Args:
        kept: What is written.
        modules: Every module of the model that has a tensor.
        config: The model's configuration, or None.
        transposed: Whether weights are stored as [in, out].
        base: Name and commit of the base model.
    """
    rank = max(kept.ranks.values())
    capped = {module: r for module, r in kept.ranks.items() if r != rank}
    patterns = {
        re.escape(name): capped[next(m for m in capped if fits_target(name, m))]
        for name in _by_rank(capped, kept.ranks)
    }
    return {
        "auto_mapping": None,
        "base_model_name_or_path": base[0],
        "bias": "lora_only" if kept.biased else "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": list(kept.whole) or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "revision": base[1],
        "target_modules": names_of(kept.ranks.keys(), modules),
        "task_type": task_of(config),
        "use_dora": False,
        "use_rslora": False,
        **({"ensure_weight_tying": True} if kept.is_tied else {}),  # older versions do not know it
    }


def _by_rank(capped: Mapping[str, int], ranks: Mapping[str, int]) -> list[str]:
    """Returns names that mean the capped modules, each name modules of one rank."""
    found = []
    for rank in sorted(set(capped.values())):
        found += names_of({m for m, r in capped.items() if r == rank}, ranks.keys())
    return found


def names_of(chosen: Collection[str], modules: Iterable[str]) -> list[str]:
    """Returns the shortest names by which PEFT finds these modules and no others.

    Numbers are no names: modules without tensors, which nobody knows of here, have them too.

    Args:
        chosen: The modules.
        modules: Every module of the model that has a tensor.

    >>> names_of({"l.0.q", "l.1.q", "l.0.k"}, {"l.0.q", "l.1.q", "l.0.k", "l.1.k"})
    ['l.0.k', 'q']
    """
    ends: dict[str, set[str]] = {}
    for module in {*modules, *chosen}:
        for path in _path(module):
            ends.setdefault(path.rpartition(".")[2], set()).add(path)
    found = []
    for end, meant in ends.items():
        taken = meant & set(chosen)
        found += [end] if taken == meant and not end.isdecimal() else sorted(taken)
    return sorted(found)


def _path(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def task_of(config: Mapping[str, Any] | None) -> str | None:
    """Returns PEFT's name for what a model does, where its class tells."""
    listed = (config or {}).get("architectures")
    name = listed[0] if isinstance(listed, Sequence) and listed else ""
    return next((task for end, task in _TASKS.items() if str(name).endswith(end)), None)
