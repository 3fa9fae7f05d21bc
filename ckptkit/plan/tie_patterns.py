"""Tied weights that a model class gives as patterns or as whole modules.

Source: transformers 5.23, `PreTrainedModel.get_expanded_tied_weights_keys`,
`remove_tied_weights_from_state_dict`; `ZambaModel.__init__`, `Zamba2Model.get_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from ckptkit.core.index import Fqn

SHARED_BLOCKS = frozenset({"zamba", "zamba2"})
_BLOCK = re.compile(r"(?P<prefix>(?:.*\.)?layers\.)(?P<layer>\d{1,9})\.shared_transf(?:ormer)?\.")


@dataclass(frozen=True, slots=True)
class TiePattern:
    """Names of a module that are tied to others of the same module.

    Attributes:
        prefix: What the module's names begin with: empty, or a path that ends in a dot.
        target: A regular expression that the tied names begin with, after the prefix.
        source: The same of the names that they are tied to, in the order of both when sorted.
    """

    prefix: str
    target: str
    source: str


def expanded_ties(patterns: Sequence[TiePattern], names: Collection[Fqn]) -> dict[Fqn, Fqn]:
    """Finds the names that patterns tie.

    Returns:
        From each name that `save_pretrained` leaves out to the one that it keeps. Nothing where
        a pattern does not fit the names, as where some of them were left out.
    """
    pairs: dict[Fqn, Fqn] = {}
    for pattern in patterns:
        targets = _beginning(pattern.prefix, pattern.target, names)
        sources = _beginning(pattern.prefix, pattern.source, names)
        if not targets or not sources or len(targets) % len(sources):
            return {}
        for target, source in zip(targets, cycle(sources), strict=False):
            pairs[target] = pairs.get(source, source)
    declared = [re.compile(f"{p.prefix}{p.target}") for p in patterns]
    return dict(_to_kept(pairs, declared))


def shared_blocks(names: Collection[Fqn], distinct: object) -> list[TiePattern]:
    """Returns what Zamba's hybrid layers share.

    Args:
        names: All names of the model; those of shared blocks show which layers are hybrid.
        distinct: After how many hybrid layers Zamba 2 uses the first block again.
    """
    found = {match for name in names if (match := _BLOCK.match(name))}
    layers = sorted({int(match["layer"]) for match in found})
    prefixes = {match["prefix"] for match in found}
    count = distinct if type(distinct) is int and distinct > 0 else 1
    if len(prefixes) != 1:
        return []
    (prefix,) = prefixes
    return [
        TiePattern(prefix, rf"{layer}\.shared_transf", rf"{layers[i % count]}\.shared_transf")
        for i, layer in enumerate(layers)
        if i >= count
    ]


def _beginning(prefix: str, pattern: str, names: Collection[Fqn]) -> list[Fqn]:
    fits = re.compile(pattern).match
    return sorted(n for n in names if n.startswith(prefix) and fits(n[len(prefix) :]))


def _to_kept(
    pairs: Mapping[Fqn, Fqn], declared: Sequence[re.Pattern[str]]
) -> Iterator[tuple[Fqn, Fqn]]:
    """Yields the names of each group that are left out: those that a pattern of targets fits.

    It may fit all of them, as it may begin anywhere in a name; then the last one stays.
    """
    groups: dict[Fqn, set[Fqn]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, {source}).add(target)
    for group in groups.values():
        ordered = sorted(group)
        free = [name for name in ordered if not any(one.search(name) for one in declared)]
        kept = free[0] if free else ordered[-1]
        yield from ((name, kept) for name in ordered if name != kept)
