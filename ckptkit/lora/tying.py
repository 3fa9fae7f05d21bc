"""Tied embeddings under an adapter: what the trained model computes decides whether they stay tied.

A LoRA of one of two tied names leaves the other as it was: PEFT wraps modules, and the other
module still computes with the shared weight. So the merged weights differ, and both must be
written. Where PEFT changes both alike (trained tokens, `ensure_weight_tying`), they stay one.

Source: peft 0.21, `set_additional_trainable_modules` and `_get_module_names_tied_with_embedding`
in `utils/other.py`, `_add_targets_to_tie` in `tuners/lora/model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.lora.changes import Change, LowRank, Replaced, Rows, is_frozen, tensors_of
from ckptkit.plan.ties import Specs, tie_candidates, tie_conflicts, tied_names_absent

Changes = Mapping[Fqn, Sequence[Change]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two names that the configuration declares to be one tensor.

    Attributes:
        target: The name that `save_pretrained` leaves out.
        source: The name that it keeps.
        is_present: Whether the base holds the target too.
        may_agree: Whether the base's two tensors agree in element type and shape.
    """

    target: Fqn
    source: Fqn
    is_present: bool
    may_agree: bool


@dataclass(frozen=True, slots=True)
class Equality:
    """Two tensors of adapters on whose bytes it depends whether a tie holds.

    Attributes:
        first: Origin and tensor.
        second: Origin and tensor, of the same element type.
        is_transposed: Whether the second is to be read with its two axes exchanged.
    """

    first: tuple[str, TensorEntry]
    second: tuple[str, TensorEntry]
    is_transposed: bool = False


def tied_pairs(config: Mapping[str, Any] | None, specs: Specs) -> list[Pair]:
    """Finds the names that the configuration ties, whether or not the base holds both."""
    agreeing, differing = tie_candidates(config, specs), tie_conflicts(config, specs)
    absent = tied_names_absent(config, specs.keys())
    pairs = {**agreeing, **differing, **absent}
    return [
        Pair(target, source, is_present=target not in absent, may_agree=target not in differing)
        for target, source in pairs.items()
    ]


def shared_changes(
    changes: Changes, pairs: Sequence[Pair], tying: Collection[int]
) -> dict[Fqn, list[Change]]:
    """Adds the changes that PEFT makes to a tied module along with those of the embedding.

    Args:
        changes: Of all adapters, by the tensor changed.
        pairs: What is tied.
        tying: Positions of the adapters that were trained with `ensure_weight_tying`.
    """
    shared = {weight: list(found) for weight, found in changes.items()}
    for pair in pairs:
        own = {c.source.position for c in changes.get(pair.target, ()) if not is_frozen(c)}
        for change in changes.get(pair.source, ()):
            position = change.source.position
            follows = isinstance(change, Rows) or position in tying
            if follows and position not in own and not is_frozen(change):
                shared.setdefault(pair.target, []).append(replace(change, weight=pair.target))
    for found in shared.values():
        found.sort(key=lambda change: change.source.position)
    return shared


def equalities(first: Sequence[Change], second: Sequence[Change]) -> list[Equality] | None:
    """Returns what has to be equal for two tensors to be changed alike.

    Args:
        first: The changes of the one.
        second: The changes of the other.

    Returns:
        The comparisons, or None where the changes differ whatever the bytes are.
    """
    found: list[Equality] = []
    if len(first) != len(second):
        return None
    for one, other in zip(first, second, strict=True):
        needed = _compared(one, other)
        if needed is None:
            return None
        found += needed
    return found


def _compared(one: Change, other: Change) -> list[Equality] | None:
    if tensors_of(one) == tensors_of(other) and one == replace(other, weight=one.weight):
        return []
    origins = (one.source.origin, other.source.origin)
    if isinstance(one, Rows) and isinstance(other, Rows) and one.indices == other.indices:
        return _same(origins, one.rows, other.rows)
    if isinstance(one, Replaced) and isinstance(other, Replaced):
        return _same(origins, one.tensor, other.tensor)
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        return _compared_factors(one, other)
    return None


def _compared_factors(one: LowRank, other: LowRank) -> list[Equality] | None:
    """Compares B·A of one with (B·A)ᵀ of the other, or with its kin.

    The LoRA of an embedding holds the factors that its tied head has, transposed.
    """
    if one.magnitude or other.magnitude or one.scaling != other.scaling:
        return None
    origins = (one.source.origin, other.source.origin)
    forms = {one.form, other.form}
    if len(forms) == 1:
        pairs = ((one.down, other.down), (one.up, other.up))
    elif forms == {"embedding", "linear"}:
        pairs = ((one.down, other.up), (one.up, other.down))
    else:
        return None
    found: list[Equality] = []
    for first, second in pairs:
        needed = _same(origins, first, second, is_transposed=len(forms) > 1)
        if needed is None:
            return None
        found += needed
    return found


def _same(
    origins: tuple[str, str],
    first: TensorEntry,
    second: TensorEntry,
    *,
    is_transposed: bool = False,
) -> list[Equality] | None:
    shape = second.shape[::-1] if is_transposed else second.shape
    if first.dtype != second.dtype or first.shape != shape:
        return None
    return [Equality((origins[0], first), (origins[1], second), is_transposed)]
