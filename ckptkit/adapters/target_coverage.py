"""Proof that an adapter has tensors for everything that its configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptkit.adapters.config import ALL_LINEAR, LoraSettings
from ckptkit.adapters.dialects import plain_name
from ckptkit.adapters.layers import AdapterTable
from ckptkit.adapters.targets import fits_target, is_saved, is_target
from ckptkit.core.errors import AdapterError
from ckptkit.core.index import Fqn, TensorEntry

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

    Raises:
        AdapterError: If something named has no tensors.
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
