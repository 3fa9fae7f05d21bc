"""A PEFT configuration made from the tensors of an adapter, as far as they tell.

They do not tell alphas, whether the scaling is rsLoRA's, or which rows of an embedding were
trained; whoever asks has to know. Options that PEFT got late are only written where they are
in use: older versions warn of what they do not know.

Which modules a configuration names, by the rules of PEFT.

Source: peft 0.21, `tuners/tuners_utils.py`: `check_target_module_exists` and
`_inject_parameters`; `utils/other.py`: `_set_trainable`.

Which parameters of a base the factors of an adapter are for, told from shapes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.config import ALL_LINEAR, LoraSettings
from ckptkit.lora.dialects import BASE_LAYER, plain_name
from ckptkit.lora.layers import AdapterTable, LoraLayer

_EXPERTS = "experts"  # what Transformers calls modules whose parameters hold all experts
_MATRIX = 2


def is_of_parameter(layer: LoraLayer) -> bool:
    """Tells from names alone whether factors are for a parameter and not for a module."""
    return layer.level > 0 or layer.module.rpartition(".")[2] == _EXPERTS


def fits_experts(layer: LoraLayer, experts: int, shape: Shape) -> bool:
    """Tells whether factors can be those of a parameter.

    Args:
        layer: The factors.
        experts: How many experts they are for.
        shape: Of the parameter: [experts, in, out] or [experts, out, in], or a matrix.
    """
    sizes = (layer.up.shape[0], layer.down.shape[1])
    if len(shape) == _MATRIX:
        return experts == 1 and shape in {sizes, sizes[::-1]}
    return shape in {(experts, *sizes), (experts, *sizes[::-1])}


def inferred_parameters(
    layers: Iterable[LoraLayer], base: Mapping[Fqn, TensorEntry], *, where: str
) -> dict[str, int]:
    """Returns the parameters that are targeted, each with the rank of its factors.

    Args:
        layers: The factors of an adapter, those of modules among them.
        base: The tensors of the base by their plain names; empty where it is elsewhere.
        where: The checkpoint, for errors.
    """
    groups: dict[str, list[LoraLayer]] = defaultdict(list)
    for layer in layers:
        if is_of_parameter(layer):
            groups[layer.module].append(layer)
    found: dict[str, int] = {}
    for module, group in groups.items():
        fitting = _fitting(module, group, base)
        if len(fitting) != len(group):
            raise CannotPlanError(
                f"module {module!r} has factors for {len(group)} of its parameters, and their"
                " shapes do not tell for which",
                where=where,
                hint="pass the adapter_config.json of the run with --adapter-config",
            )
        found |= fitting
    return found


def _fitting(
    module: str, group: Iterable[LoraLayer], base: Mapping[Fqn, TensorEntry]
) -> dict[str, int]:
    """Returns the parameters of a module that some factors fit, with the rank of those."""
    found = {}
    for name, entry in base.items():
        if name.rpartition(".")[0] == module and len(entry.shape) > 1:
            experts = entry.shape[0] if len(entry.shape) > _MATRIX else 1
            for layer in group:
                if not layer.inner % experts and fits_experts(layer, experts, entry.shape):
                    found[str(name)] = layer.inner // experts
    return found


def shortest_names(meant: Collection[str], present: Collection[str]) -> list[str]:
    """Returns names that mean the given paths and no others of those that are there.

    The last segment of a path stands for all that end in it where the base shows that there
    are no others.
    """
    others = {_last(path) for path in present if path not in meant}
    is_whole = all(path in present for path in meant)
    return sorted(
        {_last(path) if is_whole and _last(path) not in others else path for path in meant}
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


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
        by_last.setdefault(_last_segment(module), set()).add(rank)
    return {
        _last_segment(module) if len(by_last[_last_segment(module)]) == 1 else module: rank
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


def _last_segment(module: str) -> str:
    return module.rpartition(".")[2]


def is_target(settings: LoraSettings, module: str) -> bool:
    """Tells whether `target_modules` names a module of the base."""
    if _fits(settings.exclude_modules or (), module) or _is_set_apart(settings, module):
        return False
    targets = settings.target_modules
    if targets is None:
        return False
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or re.fullmatch(targets, module) is not None
    if module in _set_of(targets):
        return True
    return _fits(targets, module) and _in_layers(settings, module)


def _is_set_apart(settings: LoraSettings, module: str) -> bool:
    """Tells whether `modules_to_save` names a module, or one that it is a part of."""
    return any(
        re.match(rf"(^|.*\.){name}($|\..*)", module) is not None
        for name in settings.modules_to_save
    )


def is_saved(modules_to_save: Iterable[str], module: str) -> bool:
    """Tells whether a module, or one that it is a part of, was trained as it is.

    The ends of paths decide, wherever a segment begins: `norm` means `input_layernorm` too.
    """
    parts = module.split(".")
    paths = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    return any(path.endswith(name) for name in modules_to_save for path in paths)


def fits_target(target: str, module: str) -> bool:
    """Tells whether one name of a list means a module: it is its path, or the end of it."""
    return module == target or module.endswith(f".{target}")


def target_parameters(settings: LoraSettings, module: str, held: Iterable[str] = ()) -> list[str]:
    """Returns the parameters of a module that `target_parameters` names.

    Args:
        settings: The configuration.
        module: The path of the module in the base.
        held: The parameters that it has, where that is known: a name without the module's
            means every parameter so called.
    """
    known = tuple(held)
    found = []
    for target in sorted(set(settings.target_parameters)):
        owner, _, parameter = target.rpartition(".")
        if (not owner or fits_target(owner, module)) and (not known or parameter in known):
            found.append(parameter)
    return found


def _fits(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    parts = module.split(".")
    known = _set_of(names)
    return any(".".join(parts[start:]) in known for start in range(len(parts)))


@lru_cache(16)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def _in_layers(settings: LoraSettings, module: str) -> bool:
    """Tells whether a module lies in one of the layers that are to be transformed."""
    layers = settings.layers_to_transform
    if layers is None:
        return True
    patterns = settings.layers_pattern
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return match is not None and int(match[1]) in layers
    matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
    found = next((match for match in matches if match is not None), None)
    return found is not None and int(found[1]) in layers
