"""Proof that every tensor of an adapter is used once, by what its configuration names.

Proof that an adapter has tensors for everything that its configuration names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import AdapterError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.lora.config import ALL_LINEAR, Adapter, LoraSettings, all_matching
from ckptkit.lora.dialects import is_frozen_name, plain_name
from ckptkit.lora.generations import alpha_of_one_key
from ckptkit.lora.inference import fits_experts, fits_target, is_saved, is_target, target_parameters
from ckptkit.lora.layers import AdapterTable, LoraLayer, table_of
from ckptkit.lora.names import is_vocabulary

# What PEFT adds to `modules_to_save` of classifiers, of which a model has one.
_HEADS = frozenset({"classifier", "score", "qa_outputs"})


def refuse_targets_without_tensors(
    table: AdapterTable,
    settings: LoraSettings,
    base: Mapping[Fqn, TensorEntry],
    *,
    is_own_record: bool,
) -> None:
    """Refuses a configuration that names what the adapter has no tensors for.

    Args:
        table: The tensors of the adapter.
        settings: Its configuration.
        base: The tensors of the base by their plain names; empty where it is elsewhere.
        is_own_record: Whether the run itself wrote the configuration. PEFT passes over targets
            that a model lacks, so with the base at hand such ones are then no fault.
    """
    known = {_owner(name) for name in base} if is_own_record else set()
    for option, target in _unused(table, settings):
        if known and not any(fits_target(target, module) for module in known):
            continue
        raise AdapterError(
            f"{option!r} of the configuration names {target!r}, for which the adapter has no"
            " tensors",
            hint="the adapter is incomplete, or the configuration is another's; where the model"
            " has no such module, remove the name from a copy of the file and pass it with"
            " --adapter-config",
        )
    _refuse_bare_weights(table, settings, base)


def _refuse_bare_weights(
    table: AdapterTable, settings: LoraSettings, base: Mapping[Fqn, TensorEntry]
) -> None:
    """Refuses a base that has a targeted weight of which the adapter has no factors."""
    if settings.target_modules == ALL_LINEAR:
        return  # which modules are linear, names do not tell
    adapted = {layer.module for layer in table.layers}
    for name in base:
        module = _owner(name)
        is_weight = name == f"{module}.weight"
        if is_weight and module not in adapted and is_target(settings, module):
            raise AdapterError(
                "'target_modules' of the configuration names it, and the adapter has no tensors"
                " for it",
                where=f"module {module!r}",
                hint="pass the configuration that the run used with --adapter-config",
            )


def _unused(table: AdapterTable, settings: LoraSettings) -> Iterator[tuple[str, str]]:
    """Yields options and what they name in vain."""
    adapted = [layer.module for layer in table.layers]
    whole = [_owner(plain_name(name)) for name in table.whole]
    for target in _unused_targets(settings, [*adapted, *whole]):  # what is saved is not adapted
        yield "target_modules", target
    for target in settings.target_parameters:
        owner = _owner(target)
        if not any(not owner or fits_target(owner, module) for module in adapted):
            yield "target_parameters", target
    for target in settings.modules_to_save:
        if target not in _HEADS and not any(is_saved((target,), module) for module in whole):
            yield "modules_to_save", target
    for target in _unused_tokens(table, settings):
        yield "trainable_token_indices", target or "the input embedding"


def _unused_tokens(table: AdapterTable, settings: LoraSettings) -> Iterator[str]:
    """Yields embeddings without trained rows; PEFT saves those of tied ones for one of them."""
    named = settings.trainable_token_indices
    found = {
        rows
        for target, rows in named.items()
        if any(not target or fits_target(target, module) for module in table.tokens)
    }
    yield from (target for target, rows in named.items() if rows not in found)


def _unused_targets(settings: LoraSettings, adapted: list[str]) -> Iterator[str]:
    if settings.exclude_modules or settings.layers_to_transform is not None:
        return  # PEFT leaves out what these options do, whole targets too, and says nothing
    targets = settings.target_modules
    if isinstance(targets, str):
        if not any(is_target(settings, module) for module in adapted):
            yield targets
        return
    for target in targets or ():
        if not any(fits_target(target, module) for module in adapted):
            yield target


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


_MATRIX = 2
_HINT = "pass the configuration that the run used with --adapter-config"


@dataclass(frozen=True, slots=True)
class Row:
    """What an adapter holds for one module.

    Attributes:
        module: The path in the base model; of a parameter of experts, the parameter's.
        kind: `linear`, `embedding`, `convolution` or `parameter` for factors, `tokens` for
            rows of an embedding, `whole` for a tensor that replaces the base's, `frozen` for
            one that was trained upon and saved with the adapter.
        rank: Of factors, else None.
        scaling: Of factors, else None.
        is_dora: Whether magnitudes belong to the factors.
        shape: Of what is changed: [out, in, ...] of factors, else of the tensor itself.
        names: The tensors, by their names in the adapter's file.
    """

    module: str
    kind: str
    rank: int | None
    scaling: float | None
    is_dora: bool
    shape: Shape
    names: tuple[Fqn, ...]


def account(
    adapter: Adapter, base: Mapping[Fqn, TensorEntry], *, is_own_record: bool = False
) -> tuple[Row, ...]:
    """Checks an adapter against its configuration and, where it is there, its base.

    Args:
        adapter: The adapter.
        base: The tensors of the base by their plain names; empty where it is elsewhere.
        is_own_record: Whether the run itself wrote the configuration. PEFT passes over targets
            that a model lacks, so with the base at hand such ones are then no fault.

    Returns:
        A row for every module, each tensor of the adapter in exactly one of them.
    """
    table = table_of(adapter.tensors)
    settings = adapter.settings
    for name, entry in adapter.tensors.items():
        if entry.dtype.kind != "float" and name not in table.whole:
            raise AdapterError(
                f"elements of {entry.dtype.name} were found where a float type belongs",
                where=f"tensor {name!r}",
                hint="take another copy of the adapter, or load it with PEFT and save it again",
            )
    rows = [_layer_row(layer, settings, base) for layer in table.layers]
    rows += [_token_row(module, entry, settings, adapter) for module, entry in table.tokens.items()]
    rows += [_whole_row(name, entry, settings) for name, entry in table.whole.items()]
    refuse_targets_without_tensors(table, settings, base, is_own_record=is_own_record)
    return tuple(rows)


def _layer_row(layer: LoraLayer, settings: LoraSettings, base: Mapping[Fqn, TensorEntry]) -> Row:
    is_tied = settings.ensure_weight_tying and is_vocabulary(layer.module)
    if is_target(settings, layer.owner) or is_tied:
        row = _module_row(layer, settings)
        _check_base(layer, base)
    elif parameters := parameters_of(layer, settings, base):
        row = _parameter_row(layer, parameters, settings)
    else:
        raise AdapterError(
            "the adapter has factors for it, which neither 'target_modules' nor"
            " 'target_parameters' of its configuration names",
            where=f"module {layer.module!r}",
            hint=_HINT,
        )
    return row


def _module_row(layer: LoraLayer, settings: LoraSettings) -> Row:
    rank = settings.rank(layer.owner)
    where = f"module {layer.module!r}"
    if layer.inner != rank:
        raise AdapterError(
            f"LoRA's factor A of shape {list(layer.down.shape)} was found against rank {rank} in"
            " the configuration",
            where=where,
            hint=_hint_of_rank(layer, settings),
        )
    if settings.use_dora != (layer.magnitude is not None):
        found, expected = ("no", "has") if settings.use_dora else ("a", "has not")
        raise AdapterError(
            f"{found} magnitude of DoRA was found, and the configuration {expected} 'use_dora'",
            where=where,
            hint=_HINT,
        )
    if settings.lora_bias != (layer.up_bias is not None) and not layer.is_embedding:
        found, expected = ("no", "has") if settings.lora_bias else ("a", "has not")
        raise AdapterError(
            f"{found} bias of factor B was found, and the configuration {expected} 'lora_bias'",
            where=where,
            hint=_HINT,
        )
    kind = "embedding" if layer.is_embedding else "linear"
    return Row(
        module=layer.module,
        kind="convolution" if layer.is_convolution else kind,
        rank=rank,
        scaling=settings.scaling(layer.owner),
        is_dora=layer.magnitude is not None,
        shape=layer.shape,
        names=layer.names,
    )


def _hint_of_rank(layer: LoraLayer, settings: LoraSettings) -> str:
    ranks = all_matching(settings.rank_pattern, layer.module)
    if layer.inner not in ranks[1:]:
        return _HINT
    return (
        f"{len(ranks)} patterns of 'rank_pattern' fit this module, and PEFT sorts them when it"
        " saves, which changes the one that counts; pass a copy of the file in which only the right"
        " one fits with --adapter-config"
    )


def old_alphas(settings: LoraSettings, rows: Sequence[Row]) -> Iterator[str]:
    """Yields what to tell the user where PEFT reads another alpha today than it did.

    Only configurations that do not tell their version are doubtful; what is returned for them
    by `LoraSettings.scaling` is what PEFT of today reads.
    """
    if settings.peft_version is not None:
        return
    doubtful = [
        (row.module, settings.alpha(row.module), alpha)
        for row in rows
        if row.rank is not None
        and (alpha := alpha_of_one_key(settings, row.module, row.rank)) is not None
        and alpha != settings.alpha(row.module)
    ]
    if doubtful:
        module, now, then = doubtful[0]
        yield (
            f"the patterns give {module!r} the alpha {now:g}, and gave it {then:g} before PEFT 0.14"
            f" (so for {len(doubtful):,} of {len(rows):,} modules): the configuration does not tell"
            " its version, and was read as PEFT reads it today"
        )


def parameters_of(
    layer: LoraLayer, settings: LoraSettings, base: Mapping[Fqn, TensorEntry]
) -> dict[str, int]:
    """Returns the parameters that factors may be meant for, each with its number of experts.

    Args:
        layer: Factors of a module that has targeted parameters.
        settings: The configuration.
        base: The tensors of the base by their plain names; empty where it is elsewhere.

    Returns:
        Paths of parameters in the base; several where neither ranks nor shapes tell.
    """
    held = {
        name.rpartition(".")[2]: entry.shape
        for name, entry in base.items()
        if name.rpartition(".")[0] == layer.module
    }
    found = {}
    for parameter in target_parameters(settings, layer.module, held):
        path = f"{layer.module}.{parameter}"
        experts, rest = divmod(layer.inner, settings.rank(path))
        shape = held.get(parameter)
        if not rest and (shape is None or fits_experts(layer, experts, shape)):
            found[path] = experts
    return found


def _parameter_row(layer: LoraLayer, parameters: Mapping[str, int], settings: LoraSettings) -> Row:
    path, experts = next(iter(parameters.items()))
    return Row(
        module=path if len(parameters) == 1 else f"{layer.module} (level {layer.level})",
        kind="parameter",
        rank=layer.inner // experts,
        scaling=settings.scaling(path),
        is_dora=False,
        shape=(experts, *layer.shape),
        names=layer.names,
    )


def _check_base(layer: LoraLayer, base: Mapping[Fqn, TensorEntry]) -> None:
    """Refuses factors that do not fit the weight beside them, unless that one is packed."""
    weight = base.get(Fqn(f"{layer.module}.weight"))
    shape = layer.shape
    if weight is None or len(shape) != _MATRIX or len(weight.shape) != _MATRIX:
        return
    if weight.shape[-1] != 1 and shape not in {weight.shape, weight.shape[::-1]}:
        raise AdapterError(
            f"factors for a weight of shape {list(shape)} were found against"
            f" {list(weight.shape)} in the base",
            where=f"module {layer.module!r}",
            hint="the adapter was trained on another base",
        )


def _token_row(module: str, entry: TensorEntry, settings: LoraSettings, adapter: Adapter) -> Row:
    rows = rows_of_tokens(settings, module)
    if rows is None or len(rows) != entry.shape[0]:
        named = "none" if rows is None else f"{len(rows):,}"
        raise AdapterError(
            f"{entry.shape[0]:,} trained rows were found against {named} in"
            " 'trainable_token_indices' of the configuration",
            where=f"module {module!r}",
            hint=_HINT,
        )
    names = tuple(name for name, one in adapter.tensors.items() if one is entry)
    return Row(module, "tokens", None, None, is_dora=False, shape=entry.shape, names=names)


def rows_of_tokens(settings: LoraSettings, module: str) -> tuple[int, ...] | None:
    """Returns which rows of an embedding were trained; None if it is not named.

    A configuration that names no embedding means the input embedding, and so any.
    """
    found = settings.trainable_token_indices
    return next(
        (rows for name, rows in found.items() if not name or fits_target(name, module)), None
    )


def _whole_row(name: Fqn, entry: TensorEntry, settings: LoraSettings) -> Row:
    module, _, parameter = plain_name(name).rpartition(".")
    is_bias = parameter == "bias" and settings.bias != "none"
    if not (is_bias or is_vocabulary(module) or is_saved(settings.modules_to_save, module)):
        raise AdapterError(
            "it was trained as a whole, and 'modules_to_save' of the configuration does not name"
            " its module",
            where=f"tensor {name!r}",
            hint=_HINT,
        )
    kind = "frozen" if is_frozen_name(name) else "whole"
    return Row(plain_name(name), kind, None, None, is_dora=False, shape=entry.shape, names=(name,))
