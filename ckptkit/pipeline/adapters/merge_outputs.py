"""Which tensors a merged model has, how each comes to be, and what its configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.adapters.changes import Change, Replaced
from ckptkit.adapters.merged_config import has_vocabulary, vocabularies, with_vocabulary
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape
from ckptkit.pipeline.adapters.merge_products import (
    BaseTensor,
    MergeRules,
    merged_product,
    several_needed,
)
from ckptkit.pipeline.adapters.tied_changes import MergedTies
from ckptkit.planning.plan import Product

Changes = Mapping[Fqn, Sequence[Change]]
_MATRIX = 2


def merged_products(
    tensors: Sequence[BaseTensor],
    changes: Changes,
    ties: MergedTies,
    shapes: Mapping[Fqn, Shape],
    rules: MergeRules,
) -> Iterator[Product]:
    """Yields every tensor that the base has, with what the adapters do to it.

    Args:
        tensors: The tensors of the base, as they are written.
        changes: Of live tensors.
        ties: What becomes of tied names.
        shapes: Of live tensors in the base.
        rules: How everything is merged and written.

    Raises:
        RefusedError: If a tensor cannot be merged.
    """  # noqa: DOC501  `several_needed` makes it
    for tensor in tensors:
        first = tensor.live[0]
        if tensor.part is None and first in ties.dropped:
            continue
        touched = [live for live in tensor.live if live in changes]
        if touched and len(tensor.live) > 1:
            raise several_needed(tensor.name, changes[touched[0]][0])
        found = [*_inherited(first, changes, ties, shapes), *changes.get(first, ())]
        yield merged_product(tensor, found, rules, shapes[first])


def added_products(
    tensors: Sequence[BaseTensor],
    changes: Changes,
    ties: MergedTies,
    shapes: Mapping[Fqn, Shape],
    rules: MergeRules,
    called: Mapping[Fqn, Fqn],
) -> Iterator[Product]:
    """Yields what the base does not have: tied names that are no longer tied, and new heads.

    Arguments and errors are those of `merged_products`; `called` has the names in the output
    where they are others than those of the live model.
    """
    by_live = {tensor.live[0]: tensor for tensor in tensors if tensor.part is None}
    for target, source in ties.written.items():
        tensor = replace(by_live[source], name=called.get(target, target), live=(target,))
        frozen = _frozen(changes.get(source, ()))
        updates = [*frozen, *changes.get(target, ())]
        yield merged_product(tensor, updates, rules, shapes[source])
    held = {live for tensor in tensors for live in tensor.live}
    for name, found in changes.items():
        change = found[0]
        is_tied = name in ties.written or name in ties.dropped
        if name not in held and not is_tied and isinstance(change, Replaced):
            output = called.get(name, name)
            tensor = BaseTensor.stored(output, name, change.source.origin, change.tensor)
            yield merged_product(tensor, (), rules, change.tensor.shape)


def _inherited(
    name: Fqn, changes: Changes, ties: MergedTies, shapes: Mapping[Fqn, Shape]
) -> list[Change]:
    """Returns what a name that is no longer tied has from the other: another number of rows."""
    if any(isinstance(change, Replaced) for change in changes.get(name, ())):
        return []
    others = [
        other
        for pair in ties.untied.items()
        for other in (pair[0] if pair[1] == name else pair[1],)
        if name in pair
    ]
    frozen = [change for other in others for change in _frozen(changes.get(other, ()))]
    return [change for change in frozen[:1] if change.tensor.shape != shapes[name]]


def _frozen(changes: Sequence[Change]) -> list[Replaced]:
    return [change for change in changes if isinstance(change, Replaced) and change.frozen]


def written_ties(ties: MergedTies, tensors: Sequence[BaseTensor]) -> dict[Fqn, Fqn]:
    """Returns the tied names that are left out, as they are called in the output."""
    called = {tensor.live[0]: tensor.name for tensor in tensors if tensor.part is None}
    return {
        called.get(target, target): called.get(source, source)
        for target, source in ties.dropped.items()
    }


def resized_config(
    config: Mapping[str, Any],
    changes: Changes,
    shapes: Mapping[Fqn, Shape],
    products: Sequence[Product],
    *,
    is_live: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration with the number of tokens that is written.

    Args:
        config: The configuration.
        changes: Of live tensors.
        shapes: Of live tensors in the base.
        products: What is written.
        is_live: Whether the weights are a run's own, and the configuration may be older.

    Returns:
        The configuration, and what was changed, in words.

    Raises:
        RefusedError: If only some of the tensors with a row for each token have the new number.
    """
    for name, found in changes.items():
        if name not in shapes or not has_vocabulary(name):
            continue
        last = [change for change in found if isinstance(change, Replaced)]
        old = shapes[name]
        new = last[-1].tensor.shape if last else old
        if new == old:
            continue
        _refuse_other_rows(products, old[0], new[0], last[-1])
        resized = with_vocabulary(config, old[0], new[0])
        told = f"the vocabulary has {new[0]:,} tokens against {old[0]:,} in the base"
        said = ", and 'vocab_size' is set so" if resized != config else ""
        return resized, [told + said]
    return _brought_up_to_date(config, products) if is_live else (dict(config), [])


def _brought_up_to_date(
    config: Mapping[str, Any], products: Sequence[Product]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration with the number of tokens that a run's own weights have.

    What lies beside a run may be the configuration from before its vocabulary was resized.
    Nothing is changed where the weights, or the configuration, have several such numbers.
    """
    rows = {
        product.spec.shape[0]
        for product in products
        if len(product.spec.shape) == _MATRIX and has_vocabulary(product.spec.name)
    }
    said = vocabularies(config)
    if len(rows) != 1 or len(said) != 1 or rows == said:
        return dict(config), []
    (new,), (old,) = rows, said
    told = (
        f"the vocabulary has {new:,} tokens against {old:,} in config.json, and 'vocab_size' is"
        " set so"
    )
    return with_vocabulary(config, old, new), [told]


def _refuse_other_rows(products: Sequence[Product], old: int, new: int, change: Replaced) -> None:
    for product in products:
        spec = product.spec
        if has_vocabulary(spec.name) and spec.shape[:1] == (old,):
            raise RefusedError(
                f"{change.weight!r} has {new:,} rows in the adapter, and {spec.name!r} has {old:,},"
                " which the adapter does not replace",
                where=change.source.where,
                hint="pass the model with the larger vocabulary, as it was before training, as"
                " --base",
            )
