"""Which modules a PEFT configuration names; and a configuration inferred from an adapter's tensors.

Tensors do not show alphas, whether the scaling is rsLoRA's, or which rows of an embedding were
trained; the user has to give these. Newer options are only written where they are in use, since
older versions of PEFT warn about options that they do not know.

Source: peft 0.21, `tuners/tuners_utils.py`: `check_target_module_exists` and
`_inject_parameters`; `utils/other.py`: `_set_trainable`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from ckptkit.core.errors import AdapterError, CannotPlanError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.text import join_first
from ckptkit.lora.config import (
    ALL_LINEAR,
    ALPHA,
    MAKE_CONFIG,
    RANK,
    RSLORA,
    TASK,
    LoraSettings,
    match_expression,
)
from ckptkit.lora.dialects import BASE_LAYER, AdapterTable, LoraLayer, make_plain_name

_EXPERTS = "experts"  # Transformers' name of modules whose parameters hold all experts
_MATRIX = 2


def is_of_parameter(layer: LoraLayer) -> bool:
    """Returns whether, by their names, factors are those of a parameter and not of a module."""
    return layer.level > 0 or layer.module.rpartition(".")[2] == _EXPERTS


def fits_experts(layer: LoraLayer, experts: int, shape: Shape) -> bool:
    """Returns whether factors of so many experts fit a parameter.

    Its shape is [experts, in, out] or [experts, out, in], or that of a matrix.
    """
    sizes = (layer.up.shape[0], layer.down.shape[1])
    if len(shape) == _MATRIX:
        return experts == 1 and shape in {sizes, sizes[::-1]}
    return shape in {(experts, *sizes), (experts, *sizes[::-1])}


def infer_parameters(
    layers: Iterable[LoraLayer], base: Mapping[Fqn, TensorEntry], *, where: str
) -> dict[str, int]:
    """Returns the targeted parameters, each with the rank of its factors."""
    groups: dict[str, list[LoraLayer]] = defaultdict(list)
    for layer in layers:
        if is_of_parameter(layer):
            groups[layer.module].append(layer)
    parameters: dict[str, int] = {}
    for module, group in groups.items():
        fitting = {}
        for name, entry in base.items():
            if name.rpartition(".")[0] == module and len(entry.shape) > 1:
                experts = entry.shape[0] if len(entry.shape) > _MATRIX else 1
                for layer in group:
                    if not layer.inner % experts and fits_experts(layer, experts, entry.shape):
                        fitting[str(name)] = layer.inner // experts
        if len(fitting) != len(group):
            raise CannotPlanError(
                f"module {module!r} has factors for {len(group)} of its parameters, and their"
                " shapes do not show for which",
                where=where,
                hint="pass the adapter_config.json of the run with --adapter-config",
            )
        parameters |= fitting
    return parameters


def find_shortest_names(meant: Collection[str], present: Collection[str]) -> list[str]:
    """Returns names that match the paths `meant` and no others of a model.

    The last segment of a path is enough where `present` shows that no other path ends in it. A
    number is not: modules without tensors have numbers too.
    """
    # PEFT compares the modules around those of a model, too.
    parts = [path.split(".") for path in present]
    around = {".".join(path[:stop]) for path in parts for stop in range(1, len(path) + 1)}
    others = {_last(path) for path in (around | set(present)) - set(meant)}
    is_whole = all(path in present for path in meant)
    names = set()
    for path in meant:
        last = _last(path)
        is_enough = is_whole and not last.isdigit() and last not in others
        names.add(last if is_enough else path)
    return sorted(names)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


FAN_IN = "fan_in_fan_out"
TOKEN_ROWS = "trainable_token_indices"  # noqa: S105  no secret
_GIVE = {
    ALPHA: "--lora-alpha N",
    RSLORA: "--use-rslora or --no-use-rslora",
    FAN_IN: "--fan-in-fan-out or --no-fan-in-fan-out",
    TOKEN_ROWS: "--token-indices I,J,...",
}
_DEFAULT_RANK = 8
# Options that choose among layers, and those whose values have paths of modules.
_CHOOSING = ("exclude_modules", "layers_to_transform", "layers_pattern")
_BY_PATH = frozenset({*_CHOOSING, "target_modules", "rank_pattern", "alpha_pattern"})
_LISTED = 7
# Model types with Transformers' Conv1D, which stores [in, out], and what such modules are called.
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D_NAMES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})


def infer_config(
    table: AdapterTable,
    base: Mapping[Fqn, TensorEntry],
    overrides: Mapping[str, Any],
    *,
    where: str,
) -> tuple[dict[str, Any], list[str]]:
    """Infers the configuration of an adapter, by the keys of `overrides`; with its assumptions.

    An alpha of None is the rank of each module.
    """
    stored_as_in_out = _fan_in(table, base)
    needed = [ALPHA, RSLORA] if table.layers else []
    needed += [TOKEN_ROWS] if table.tokens else []
    needed += [FAN_IN] if stored_as_in_out is None else []
    missing = [key for key in needed if key not in overrides]
    if missing:
        raise CannotPlanError(
            "no adapter_config.json was found, and the tensors of the adapter do not show"
            f" {', '.join(missing)}",
            where=where,
            hint="pass the adapter_config.json of the run with --adapter-config"
            f" ({MAKE_CONFIG}); the adapter commands also take"
            f" {', '.join(_GIVE[key] for key in missing)}; `ckptkit inspect` shows the command",
        )
    modules = {layer.module: layer.inner for layer in table.layers if not is_of_parameter(layer)}
    parameters = infer_parameters(table.layers, base, where=where)
    ranks = {**modules, **parameters}
    usual = Counter(ranks.values()).most_common(1)[0][0] if ranks else _DEFAULT_RANK
    if overrides.get(RANK, usual) != usual:
        raise AdapterError(
            f"LoRA's factors have rank {usual} against {overrides[RANK]} in the records of the run",
            where=where,
            hint="pass the configuration that the run used with --adapter-config",
        )
    # Biases that were trained without their weight.
    lone = [
        name
        for name in table.whole
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" not in table.whole
    ]
    is_own = all(name.endswith(f".{BASE_LAYER}.bias") for name in lone)
    frozen = f".{BASE_LAYER}."  # of targeted embeddings, which PEFT saves with the factors
    whole = [name for name in table.whole if frozen not in name and name not in lone]
    saved = sorted({make_plain_name(name).rpartition(".")[0] for name in whole})
    is_scaled = overrides.get(ALPHA, 0) is not None
    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": overrides.get(TASK),
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": usual if overrides.get(ALPHA) is None else overrides[ALPHA],
        "lora_dropout": 0.0,
        "bias": ("lora_only" if is_own else "all") if lone else "none",
        "target_modules": find_shortest_names(modules, {name.rpartition(".")[0] for name in base}),
        "modules_to_save": saved or None,
        "fan_in_fan_out": bool(overrides.get(FAN_IN, stored_as_in_out)),
    }
    # Ranks that are not the usual one, by the shortest unambiguous names.
    by_last: dict[str, set[int]] = defaultdict(set)
    for module, rank in ranks.items():
        by_last[_last(module)].add(rank)
    pattern = {
        _last(module) if len(by_last[_last(module)]) == 1 else module: rank
        for module, rank in ranks.items()
        if rank != usual
    }
    options = {
        "rank_pattern": pattern,
        "alpha_pattern": {} if is_scaled else pattern,
        "target_parameters": find_shortest_names(parameters, set(base)),
        RSLORA: bool(overrides.get(RSLORA)),
        "use_dora": any(layer.magnitude is not None for layer in table.layers),
        "lora_bias": any(layer.up_bias is not None for layer in table.layers),
        TOKEN_ROWS: overrides[TOKEN_ROWS] if table.tokens else None,
    }
    document |= {key: value for key, value in options.items() if value}
    targets = document["target_modules"]
    note = (
        "adapter_config.json was inferred from the tensors and from what was given: rank"
        f" {document['r']}{', DoRA' if 'use_dora' in document else ''}, target_modules"
        f" {join_first(targets, len(targets), _LISTED) or 'none'};"
        f" {'one alpha is' if is_scaled else 'alpha = rank is'} assumed for all of them"
    )
    frozen_biases = (
        "tensors do not show whether biases of the base were trained with the adapter: they are"
        " assumed to be frozen"
    )
    return document, [note] if lone else [note, frozen_biases]


def _fan_in(table: AdapterTable, base: Mapping[Fqn, TensorEntry]) -> bool | None:
    """Returns whether weights are stored as [in, out]; None where their shapes do not show it."""
    shapes = [
        (layer.shape, weight.shape)
        for layer in table.layers
        if not (layer.is_embedding or layer.is_convolution)
        and (weight := base.get(Fqn(f"{layer.module}.weight"))) is not None
        and len(weight.shape) == _MATRIX
    ]
    straight = {own == stored for own, stored in shapes if own[0] != own[1] and 1 not in stored}
    if straight:
        return straight == {False}
    is_unclear = any(layer.module.rpartition(".")[2] in _CONV1D_NAMES for layer in table.layers)
    return None if is_unclear else False


def move_config(
    document: Mapping[str, Any], origins: Mapping[str, str], *, where: str
) -> Mapping[str, Any]:
    """Returns a configuration for modules with other names than in training, by `origins`."""
    settings = LoraSettings.parse(document, where=where)
    targets = settings.target_modules
    is_listed = not (isinstance(targets, str) and targets.lower() == ALL_LINEAR)
    ranks = {module: settings.rank(origin) for module, origin in origins.items()}
    alphas = {module: settings.alpha(origin) for module, origin in origins.items()}
    is_same = all(settings.rank(m) == ranks[m] and settings.alpha(m) == alphas[m] for m in origins)
    if is_listed and is_same and all(is_target(settings, module) for module in origins):
        return document
    if not all(is_target(settings, origin) for origin in origins.values()):
        return document  # which is refused where tensors are accounted for
    moved = {key: value for key, value in document.items() if key not in _BY_PATH}
    moved["target_modules"] = sorted(origins)
    if rank_pattern := {m: rank for m, rank in ranks.items() if rank != settings.r}:
        moved["rank_pattern"] = rank_pattern
    if alpha_pattern := {m: a for m, a in alphas.items() if a != settings.lora_alpha}:
        moved["alpha_pattern"] = alpha_pattern
    return moved


def is_of_all_layers(document: Mapping[str, Any]) -> bool:
    """Returns whether a configuration names modules of every layer, and none by its path."""
    targets = document.get("target_modules")
    names = targets if isinstance(targets, list) else ["."]
    chosen = any(document.get(key) not in (None, []) for key in _CHOOSING)
    return not chosen and not any("." in str(name) for name in names)


def is_target(settings: LoraSettings, module: str) -> bool:
    """Returns whether `target_modules` names a module of the base."""
    if _fits(settings.exclude_modules or (), module) or any(
        match_expression(name, module, r"(^|.*\.){}($|\..*)") is not None
        for name in settings.modules_to_save  # which name it, or one that contains it
    ):
        return False
    targets = settings.target_modules
    if targets is None:
        return False
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or _is_whole(targets, module)
    if module in _set_of(targets):
        return True
    return _fits(targets, module) and _in_layers(settings, module)


def is_saved(modules_to_save: Iterable[str], module: str) -> bool:
    """Returns whether a module, or one that contains it, was trained whole.

    The ends of paths decide, wherever a segment begins: `norm` matches `input_layernorm` too.
    """
    parts = module.split(".")
    paths = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    return any(path.endswith(name) for name in modules_to_save for path in paths)


def fits_target(target: str, module: str) -> bool:
    """Returns whether a name in a list matches a module: it is its path, or the end of it."""
    return module == target or module.endswith(f".{target}")


def find_target_parameters(
    settings: LoraSettings, module: str, present: Iterable[str] = ()
) -> list[str]:
    """Returns the parameters of a module that `target_parameters` names.

    A name without a module matches every parameter with that name. `present` are the module's
    parameters, where they are known.
    """
    existing = tuple(present)
    names = []
    for target in sorted(set(settings.target_parameters)):
        owner, _, parameter = target.rpartition(".")
        if (not owner or fits_target(owner, module)) and (not existing or parameter in existing):
            names.append(parameter)
    return names


def _fits(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return _is_whole(names, module)
    parts = module.split(".")
    targets = _set_of(names)
    return any(".".join(parts[start:]) in targets for start in range(len(parts)))


def _is_whole(expression: str, module: str) -> bool:
    return match_expression(expression, module, r"(?:{})\Z") is not None


@lru_cache(16)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def _in_layers(settings: LoraSettings, module: str) -> bool:
    layers = settings.layers_to_transform
    if layers is None:
        return True
    patterns = settings.layers_pattern
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return match is not None and int(match[1]) in layers
    form = r"(?:^|.*?\.){}\.(\d+)\."
    matches = (match_expression(pattern, module, form) for pattern in patterns)
    first = next((match for match in matches if match is not None), None)
    return first is not None and int(first[1]) in layers


def is_conv1d(module: str, model_types: frozenset[str]) -> bool:
    return bool(model_types & _CONV1D_TYPES) and module.rpartition(".")[2] in _CONV1D_NAMES
