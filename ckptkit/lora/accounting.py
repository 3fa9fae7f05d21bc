"""Proof that an adapter and its configuration agree.

Every tensor is used once, and everything that the configuration names has tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ckptkit.core.errors import AdapterError
from ckptkit.core.index import Fqn, Shape, TensorEntry
from ckptkit.core.text import quote
from ckptkit.lora.config import ALL_LINEAR, Adapter, LoraSettings, find_matches, find_old_alpha
from ckptkit.lora.dialects import (
    AdapterTable,
    LoraLayer,
    build_table,
    is_frozen_name,
    is_vocabulary,
    make_plain_name,
)
from ckptkit.lora.inference import (
    find_target_parameters,
    fits_experts,
    fits_target,
    is_saved,
    is_target,
)

_MATRIX = 2
_HINT = "pass the configuration that the run used with --adapter-config"
# What PEFT adds to `modules_to_save` of classifiers; a model has one of them.
_HEADS = frozenset({"classifier", "score", "qa_outputs"})


def refuse_targets_without_tensors(
    table: AdapterTable,
    settings: LoraSettings,
    base: Mapping[Fqn, TensorEntry],
    *,
    is_own_record: bool,
) -> None:
    """Refuses a configuration with targets for which the adapter has no tensors.

    `base` has the tensors of the base by their plain names, and is empty where it is not at hand.
    PEFT ignores targets that a model lacks, so these are accepted in a configuration that the run
    itself wrote (`is_own_record`).
    """
    modules = {_owner(name) for name in base} if is_own_record else set()
    for option, target in _list_unused(table, settings):
        if modules and not any(fits_target(target, module) for module in modules):
            continue
        raise AdapterError(
            f"{option!r} of the configuration names {quote(target)}, for which the adapter has"
            " no tensors",
            hint="the adapter is incomplete, or the configuration is another's; where the model"
            " has no such module, remove the name from a copy of the file and pass it with"
            " --adapter-config",
        )
    if settings.target_modules == ALL_LINEAR:
        return  # names do not show which modules are linear
    adapted = {layer.module for layer in table.layers}
    for name in base:
        module = _owner(name)
        is_weight = name == f"{module}.weight"
        if is_weight and module not in adapted and is_target(settings, module):
            raise AdapterError(
                "'target_modules' of the configuration names it, and the adapter has no tensors"
                " for it",
                where=f"module {module!r}",
                hint=_HINT,
            )


def _list_unused(table: AdapterTable, settings: LoraSettings) -> Iterator[tuple[str, str]]:
    """Yields options with their targets that have no tensors."""
    adapted = [layer.module for layer in table.layers]
    whole = [_owner(make_plain_name(name)) for name in table.whole]
    for target in _list_unused_targets(settings, [*adapted, *whole]):  # whole ones are not adapted
        yield "target_modules", target
    for target in settings.target_parameters:
        owner = _owner(target)
        if not any(not owner or fits_target(owner, module) for module in adapted):
            yield "target_parameters", target
    for target in settings.modules_to_save:
        if target not in _HEADS and not any(is_saved((target,), module) for module in whole):
            yield "modules_to_save", target
    named = settings.trainable_token_indices
    present = {  # of tied embeddings PEFT saves the rows once
        rows
        for target, rows in named.items()
        if any(not target or fits_target(target, module) for module in table.tokens)
    }
    for target, rows in named.items():
        if rows not in present:
            yield "trainable_token_indices", target or "the input embedding"


def _list_unused_targets(settings: LoraSettings, adapted: list[str]) -> Iterator[str]:
    if settings.exclude_modules or settings.layers_to_transform is not None:
        return  # with these options PEFT silently leaves out modules, even all of a target
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


class ModuleRow(Struct, frozen=True):
    """The tensors of an adapter for one module."""

    module: str  # in the base; of experts, the path of the parameter
    kind: str  # linear, embedding, convolution, parameter; tokens; whole; frozen
    shape: Shape  # of the weight as [out, in, ...]; without factors, of the tensor
    names: tuple[Fqn, ...]  # in the adapter's file
    rank: int | None = None
    scaling: float | None = None
    is_dora: bool = False


def account(
    adapter: Adapter, base: Mapping[Fqn, TensorEntry], *, is_own_record: bool = False
) -> tuple[ModuleRow, ...]:
    """Checks an adapter against its configuration and, if it is at hand, its base.

    Each tensor of the adapter is in exactly one of the rows.
    """
    table = build_table(adapter.tensors)
    settings = adapter.settings
    for name, entry in adapter.tensors.items():
        if entry.dtype.kind != "float" and name not in table.whole:
            raise AdapterError(
                f"found elements of {entry.dtype.name}, expected a float type",
                where=f"tensor {name!r}",
                hint="take another copy of the adapter, or load it with PEFT and save it again",
            )
    rows = [_make_layer_row(layer, settings, base) for layer in table.layers]
    rows += [
        _make_token_row(module, entry, settings, adapter) for module, entry in table.tokens.items()
    ]
    rows += [_make_whole_row(name, entry, settings) for name, entry in table.whole.items()]
    refuse_targets_without_tensors(table, settings, base, is_own_record=is_own_record)
    return tuple(rows)


def _make_layer_row(
    layer: LoraLayer, settings: LoraSettings, base: Mapping[Fqn, TensorEntry]
) -> ModuleRow:
    is_tied = settings.ensure_weight_tying and is_vocabulary(layer.module)
    if is_target(settings, layer.owner) or is_tied:
        row = _make_module_row(layer, settings)
        weight, shape = base.get(Fqn(f"{layer.module}.weight")), layer.shape
        is_matrix = weight is not None and len(shape) == len(weight.shape) == _MATRIX
        # One that is packed has a single column.
        if weight is None or not is_matrix or weight.shape[-1] == 1:
            return row
        if shape not in {weight.shape, weight.shape[::-1]}:
            raise AdapterError(
                f"found factors for a weight of shape {list(shape)}, expected"
                f" {list(weight.shape)} as in the base",
                where=f"module {layer.module!r}",
                hint="the adapter was trained on another base",
            )
        return row
    parameters = find_parameters(layer, settings, base)
    if not parameters:
        raise AdapterError(
            "the adapter has factors for it, but neither 'target_modules' nor"
            " 'target_parameters' of its configuration names it",
            where=f"module {layer.module!r}",
            hint=_HINT,
        )
    path, experts = next(iter(parameters.items()))
    module = path if len(parameters) == 1 else f"{layer.module} (level {layer.level})"
    about = ("parameter", (experts, *layer.shape), layer.names)
    return ModuleRow(module, *about, layer.inner // experts, settings.scaling(path))


def _make_module_row(layer: LoraLayer, settings: LoraSettings) -> ModuleRow:
    rank = settings.rank(layer.owner)
    where = f"module {layer.module!r}"
    if layer.inner != rank:
        ranks = find_matches(settings.rank_pattern, layer.module)
        hint = _HINT
        if layer.inner in ranks[1:]:
            hint = (
                f"{len(ranks)} patterns of 'rank_pattern' fit this module, and PEFT sorts them when"
                " it saves, which changes the one that counts; pass a copy of the file in which"
                " only the right one fits with --adapter-config"
            )
        raise AdapterError(
            f"LoRA's factor A of shape {list(layer.down.shape)} was found against rank {rank} in"
            " the configuration",
            where=where,
            hint=hint,
        )
    for part, option, is_set, is_present in (
        ("magnitude of DoRA", "use_dora", settings.use_dora, layer.magnitude is not None),
        ("bias of factor B", "lora_bias", settings.lora_bias, layer.up_bias is not None),
    ):
        if is_set != is_present and not (option == "lora_bias" and layer.is_embedding):
            article, verb = ("no", "has") if is_set else ("a", "has not")
            raise AdapterError(
                f"{article} {part} was found, and the configuration {verb} {option!r}",
                where=where,
                hint=_HINT,
            )
    kind = "embedding" if layer.is_embedding else "linear"
    return ModuleRow(
        *(layer.module, "convolution" if layer.is_convolution else kind, layer.shape, layer.names),
        rank=rank,
        scaling=settings.scaling(layer.owner),
        is_dora=layer.magnitude is not None,
    )


def note_old_alphas(settings: LoraSettings, rows: Sequence[ModuleRow]) -> Iterator[str]:
    """Yields a note where PEFT reads another alpha today than versions before 0.14 did.

    Only configurations without a version are doubtful; `LoraSettings.scaling` reads them as PEFT
    does today.
    """
    if settings.peft_version is not None:
        return
    doubtful = [
        (row.module, settings.alpha(row.module), alpha)
        for row in rows
        if row.rank is not None
        and (alpha := find_old_alpha(settings, row.module, row.rank)) is not None
        and alpha != settings.alpha(row.module)
    ]
    if doubtful:
        module, now, then = doubtful[0]
        yield (
            f"the patterns give {module!r} the alpha {now:g}, and gave it {then:g} before PEFT 0.14"
            f" (so for {len(doubtful):,} of {len(rows):,} modules): the configuration has no"
            " version, and was read as PEFT reads it today"
        )


def find_parameters(
    layer: LoraLayer, settings: LoraSettings, base: Mapping[Fqn, TensorEntry]
) -> dict[str, int]:
    """Returns the parameters to which factors may belong, with their numbers of experts.

    There are several where neither ranks nor shapes decide.
    """
    shapes = {
        name.rpartition(".")[2]: entry.shape
        for name, entry in base.items()
        if name.rpartition(".")[0] == layer.module
    }
    parameters = {}
    for parameter in find_target_parameters(settings, layer.module, shapes):
        path = f"{layer.module}.{parameter}"
        experts, rest = divmod(layer.inner, settings.rank(path))
        shape = shapes.get(parameter)
        if not rest and (shape is None or fits_experts(layer, experts, shape)):
            parameters[path] = experts
    return parameters


def _make_token_row(
    module: str, entry: TensorEntry, settings: LoraSettings, adapter: Adapter
) -> ModuleRow:
    named = settings.trainable_token_indices.items()
    # One that names no embedding means the input embedding, and so any.
    fitting = (rows for name, rows in named if not name or fits_target(name, module))
    rows = next(fitting, None)
    if rows is None or len(rows) != entry.shape[0]:
        expected = "none" if rows is None else f"{len(rows):,}"
        raise AdapterError(
            f"found {entry.shape[0]:,} trained rows, expected {expected} as in"
            " 'trainable_token_indices' of the configuration",
            where=f"module {module!r}",
            hint=_HINT,
        )
    names = tuple(name for name, tensor in adapter.tensors.items() if tensor is entry)
    return ModuleRow(module, "tokens", entry.shape, names)


def _make_whole_row(name: Fqn, entry: TensorEntry, settings: LoraSettings) -> ModuleRow:
    module, _, parameter = make_plain_name(name).rpartition(".")
    is_bias = parameter == "bias" and settings.bias != "none"
    if not (is_bias or is_vocabulary(module) or is_saved(settings.modules_to_save, module)):
        raise AdapterError(
            "it was trained whole, and 'modules_to_save' of the configuration does not name its"
            " module",
            where=f"tensor {name!r}",
            hint=_HINT,
        )
    kind = "frozen" if is_frozen_name(name) else "whole"
    return ModuleRow(make_plain_name(name), kind, entry.shape, (name,))
