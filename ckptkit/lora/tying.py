"""Tied embeddings under an adapter: whether they stay tied depends on what was trained.

A LoRA of one of two tied names does not change the other weight: PEFT wraps modules, and the other
module still computes with the shared weight. So the merged weights differ, and both must be
written. Where PEFT changes both alike (trained tokens, `ensure_weight_tying`), they stay tied.

Source: peft 0.21, `set_additional_trainable_modules` and `_get_module_names_tied_with_embedding`
in `utils/other.py`, `_add_targets_to_tie` in `tuners/lora/model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.index import Fqn, TensorEntry
from ckptkit.lora.changes import (
    Change,
    Changes,
    LowRankChange,
    Replacement,
    TokenRowsChange,
    is_frozen,
    tensors_of,
)
from ckptkit.plan.ties import Specs, find_absent_tied_names, find_tie_candidates, find_tie_conflicts


@dataclass(frozen=True, slots=True)
class TiedPair:
    """Two names that the configuration ties.

    Attributes:
        target: The name that `save_pretrained` omits.
        source: The name that it writes.
        is_present: Whether the base holds the target too.
        may_agree: Whether the base's two tensors agree in element type and shape.
    """

    target: Fqn
    source: Fqn
    is_present: bool
    may_agree: bool


@dataclass(frozen=True, slots=True)
class Equality:
    """Two tensors of adapters, with their origins, that must be equal for a tie to hold.

    They have the same element type; if `is_transposed`, the second is compared transposed.
    """

    first: tuple[str, TensorEntry]
    second: tuple[str, TensorEntry]
    is_transposed: bool = False


def find_tied_pairs(config: Mapping[str, Any] | None, specs: Specs) -> list[TiedPair]:
    """Returns the names that the configuration ties, whether or not the base holds both."""
    agreeing, differing = find_tie_candidates(config, specs), find_tie_conflicts(config, specs)
    absent = find_absent_tied_names(config, specs.keys())
    pairs = {**agreeing, **differing, **absent}
    return [
        TiedPair(target, source, is_present=target not in absent, may_agree=target not in differing)
        for target, source in pairs.items()
    ]


def share_changes(
    changes: Changes, pairs: Sequence[TiedPair], tying: Collection[int]
) -> dict[Fqn, list[Change]]:
    """Adds the changes that PEFT makes to a tied module together with those of the embedding.

    `tying` has the positions of adapters that were trained with `ensure_weight_tying`.
    """
    shared = {weight: list(own) for weight, own in changes.items()}
    for pair in pairs:
        own = {c.source.position for c in changes.get(pair.target, ()) if not is_frozen(c)}
        for change in changes.get(pair.source, ()):
            position = change.source.position
            follows = isinstance(change, TokenRowsChange) or position in tying
            if follows and position not in own and not is_frozen(change):
                shared.setdefault(pair.target, []).append(replace(change, weight=pair.target))
    for listed in shared.values():
        listed.sort(key=lambda change: change.source.position)
    return shared


def find_equalities(first: Sequence[Change], second: Sequence[Change]) -> list[Equality] | None:
    """Returns what has to be equal for two tensors to be changed alike.

    None means that their changes differ whatever the bytes are.
    """
    if len(first) != len(second):
        return None
    return _join(_compare(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def _join(parts: Iterable[list[Equality] | None]) -> list[Equality] | None:
    joined: list[Equality] = []
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined


def _compare(ours: Change, theirs: Change) -> list[Equality] | None:
    if tensors_of(ours) == tensors_of(theirs) and ours == replace(theirs, weight=ours.weight):
        return []
    origins = (ours.source.origin, theirs.source.origin)
    if (
        isinstance(ours, TokenRowsChange)
        and isinstance(theirs, TokenRowsChange)
        and ours.indices == theirs.indices
    ):
        return _same(origins, ours.rows, theirs.rows)
    if isinstance(ours, Replacement) and isinstance(theirs, Replacement):
        return _same(origins, ours.tensor, theirs.tensor)
    if isinstance(ours, LowRankChange) and isinstance(theirs, LowRankChange):
        return _compare_factors(ours, theirs)
    return None


def _compare_factors(ours: LowRankChange, theirs: LowRankChange) -> list[Equality] | None:
    """Compares factors; those of an embedding are those of its tied head, transposed."""
    if ours.magnitude or theirs.magnitude or ours.scaling != theirs.scaling:
        return None
    origins = (ours.source.origin, theirs.source.origin)
    forms = {ours.form, theirs.form}
    if len(forms) == 1:
        pairs = ((ours.down, theirs.down), (ours.up, theirs.up))
    elif forms == {"embedding", "linear"}:
        pairs = ((ours.down, theirs.up), (ours.up, theirs.down))
    else:
        return None
    return _join(_same(origins, *pair, is_transposed=len(forms) > 1) for pair in pairs)


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
