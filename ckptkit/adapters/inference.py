"""A PEFT configuration made from the tensors of an adapter, as far as they tell.

They do not tell alphas, whether the scaling is rsLoRA's, or which rows of an embedding were
trained; whoever asks has to know. Options that PEFT got late are only written where they are
in use: older versions warn of what they do not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.adapters.dialects import BASE_LAYER, plain_name
from ckptkit.adapters.inferred_parameters import (
    inferred_parameters,
    is_of_parameter,
    shortest_names,
)
from ckptkit.adapters.layers import AdapterTable
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, TensorEntry

ALPHA = "lora_alpha"
RSLORA = "use_rslora"
FAN_IN = "fan_in_fan_out"
TOKEN_ROWS = "trainable_token_indices"  # noqa: S105  no secret
_GIVE = {
    ALPHA: "--lora-alpha N",
    RSLORA: "--use-rslora or --no-use-rslora",
    FAN_IN: "--fan-in-fan-out or --no-fan-in-fan-out",
    TOKEN_ROWS: "--token-indices I,J,...",
}
_MATRIX = 2
_DEFAULT_RANK = 8
_LISTED = 7
_CONV1D = {"c_attn", "c_fc", "c_proj", "q_attn"}  # modules of GPT-2, which are stored as [in, out]


@dataclass(frozen=True, slots=True)
class Inferred:
    """A configuration, and what was taken for granted to make it.

    Attributes:
        document: The content of `adapter_config.json`.
        notes: What it rests on, in words.
    """

    document: Mapping[str, Any]
    notes: tuple[str, ...]


def infer(
    table: AdapterTable,
    base: Mapping[Fqn, TensorEntry],
    given: Mapping[str, Any],
    *,
    where: str,
) -> Inferred:
    """Makes a configuration that says what the tensors of an adapter do.

    Args:
        table: The tensors.
        base: The tensors of the base by their plain names; empty where it is elsewhere.
        given: What the user knows, by the keys of the configuration.
        where: The checkpoint, for errors.

    Raises:
        CannotPlanError: If something was not given that tensors do not tell, by name.
    """
    _refuse_unknown(table, base, given, where)
    modules = {one.module: one.inner for one in table.layers if not is_of_parameter(one)}
    parameters = inferred_parameters(table.layers, base, where=where)
    ranks = {**modules, **parameters}
    usual = Counter(ranks.values()).most_common(1)[0][0] if ranks else _DEFAULT_RANK
    is_stored_as_in_out = given.get(FAN_IN, _fan_in(table, base))
    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": given.get(ALPHA, usual),
        "lora_dropout": 0.0,
        "bias": _bias(table),
        "target_modules": shortest_names(modules, {name.rpartition(".")[0] for name in base}),
        "modules_to_save": _saved(table) or None,
        "fan_in_fan_out": bool(is_stored_as_in_out),
    }
    pattern = _rank_pattern(ranks, usual)
    document |= {"rank_pattern": pattern} if pattern else {}
    if parameters:
        document["target_parameters"] = shortest_names(parameters, set(base))
    document |= _in_use(table, given)
    return Inferred(document, _notes(document))


def _refuse_unknown(
    table: AdapterTable,
    base: Mapping[Fqn, TensorEntry],
    given: Mapping[str, Any],
    where: str,
) -> None:
    needed = [ALPHA, RSLORA] if table.layers else []
    needed += [TOKEN_ROWS] if table.tokens else []
    needed += [FAN_IN] if _fan_in(table, base) is None else []
    missing = [key for key in needed if key not in given]
    if missing:
        raise CannotPlanError(
            "no adapter_config.json was found, and the tensors of the adapter do not tell"
            f" {', '.join(missing)}",
            where=where,
            hint="pass the adapter_config.json of the run with --adapter-config; the adapter"
            f" commands also take {', '.join(_GIVE[key] for key in missing)}",
        )


def _fan_in(table: AdapterTable, base: Mapping[Fqn, TensorEntry]) -> bool | None:
    """Tells whether weights are stored as [in, out]; None where their shapes do not tell."""
    shapes = [
        (layer.shape, weight.shape)
        for layer in table.layers
        if not (layer.is_embedding or layer.is_convolution)
        and (weight := base.get(Fqn(f"{layer.module}.weight"))) is not None
        and len(weight.shape) == _MATRIX
    ]
    told = {own == stored for own, stored in shapes if own[0] != own[1] and 1 not in stored}
    if told:
        return told == {False}
    is_unclear = any(layer.module.rpartition(".")[2] in _CONV1D for layer in table.layers)
    return None if is_unclear else False


def _bias(table: AdapterTable) -> str:
    biases = [name for name in table.whole if name.endswith(".bias")]
    lone = [name for name in biases if f"{name.removesuffix('bias')}weight" not in table.whole]
    if not lone:
        return "none"
    own = all(name.endswith(f".{BASE_LAYER}.bias") for name in lone)
    return "lora_only" if own else "all"


def _is_lone_bias(name: str, table: AdapterTable) -> bool:
    """Tells whether a bias was trained while the weight beside it was not."""
    return name.endswith(".bias") and f"{name.removesuffix('bias')}weight" not in table.whole


def _saved(table: AdapterTable) -> list[str]:
    """Returns the modules that were trained as they are, by their paths."""
    frozen = f".{BASE_LAYER}."  # of targeted embeddings, which PEFT saves beside the factors
    whole = [n for n in table.whole if frozen not in n and not _is_lone_bias(n, table)]
    return sorted({plain_name(name).rpartition(".")[0] for name in whole})


def _rank_pattern(ranks: Mapping[str, int], usual: int) -> dict[str, int]:
    """Returns the ranks that are not the usual one, by the shortest names that tell them."""
    by_last: dict[str, set[int]] = {}
    for module, rank in ranks.items():
        by_last.setdefault(_last(module), set()).add(rank)
    return {
        _last(module) if len(by_last[_last(module)]) == 1 else module: rank
        for module, rank in ranks.items()
        if rank != usual
    }


def _in_use(table: AdapterTable, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the newer options that the adapter makes use of."""
    found: dict[str, Any] = {}
    if given.get(RSLORA):
        found[RSLORA] = True
    if any(layer.magnitude is not None for layer in table.layers):
        found["use_dora"] = True
    if any(layer.up_bias is not None for layer in table.layers):
        found["lora_bias"] = True
    if table.tokens:
        found[TOKEN_ROWS] = given[TOKEN_ROWS]
    return found


def _notes(document: Mapping[str, Any]) -> tuple[str, ...]:
    targets = document["target_modules"]
    more = f" and {len(targets) - _LISTED:,} more" if len(targets) > _LISTED else ""
    named = f"{', '.join(targets[:_LISTED]) or 'none'}{more}"
    what = (
        "adapter_config.json was inferred from the tensors and from what was given: rank"
        f" {document['r']}{', DoRA' if 'use_dora' in document else ''}, target_modules {named};"
        " one alpha is taken for all of them"
    )
    if document["bias"] != "none":
        return (what,)
    frozen = (
        "tensors do not tell whether biases of the base were trained with the adapter: they are"
        " taken as frozen"
    )
    return (what, frozen)


def _last(module: str) -> str:
    return module.rpartition(".")[2]
