"""Which names are tied weights, by a Transformers configuration and without a model.

A name is left out of an output only where `from_pretrained` will certainly restore it, so
every rule here errs on the side of writing both names: an output that holds the same bytes
twice still loads, and one that lacks a name that nothing restores has random weights.

Names are those of the live model, as `model.state_dict()` has them. Most classes give pairs of
names; some give patterns or whole modules (`TiePattern`), which are expanded here.

Source: transformers 5.23, `PreTrainedModel.get_expanded_tied_weights_keys`, `tie_weights` and
`remove_tied_weights_from_state_dict`; `ZambaModel.__init__`, `Zamba2Model.get_layers`; the table in
`tied_names.json` is derived from the library's classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from msgspec import Struct

from ckptkit.core.data_rows import read_table
from ckptkit.core.dtypes import DType
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.model_configs import architecture_of

Specs = Mapping[Fqn, tuple[DType, Shape]]
_FLAG = "tie_word_embeddings"
_OLD_FLAG = "tie_embedding"  # LFM2's first name for it, which still overrides the other
_HEADED = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_DISTINCT_BLOCKS = "num_mem_blocks"
_NESTING = 4  # real configurations nest twice


class _TieTable(Struct, frozen=True):
    """What the model classes of transformers tie; made by `fixtures/generators/tied_names.py`."""

    heads: tuple[tuple[str, str], ...]  # target and source, of a class without rules
    by_default: frozenset[str]  # model types that are tied where no flag is given
    or_text: frozenset[str]  # tied by their own flag or that of `text_config`
    as_text: frozenset[str]  # tied by that of `text_config` alone
    always: frozenset[str]  # tied whatever the flag says
    other_flag: dict[str, str]  # tied by a flag of another name, which is set unless it is given
    flag_scales_outputs: frozenset[str]  # the flag also scales the head's input
    # Path and model type of the part whose flag decides (empty for the root), classes, and what is
    # tied, target to source; a `*` stands for one segment of a name.
    rules: tuple[tuple[str, str, tuple[str, ...], dict[str, str]], ...]
    # By class, in order: prefix of a module, pattern of targets in it, pattern of their sources,
    # the field that decides it if any, and the value that the field has by default.
    patterns: dict[str, tuple[tuple[str, str, str, str, bool], ...]]


_TABLE = read_table(__file__, "tied_names.json", _TieTable)
_PAIRS: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
for _path, _kind, _classes, _tied in _TABLE.rules:
    _PAIRS.setdefault((_path, _kind), {}).update(dict.fromkeys(_classes, _tied))
_ROOT_PAIRS = _PAIRS.pop(("", ""))


def find_tie_candidates(config: Mapping[str, Any] | None, names: Specs) -> Mapping[Fqn, Fqn]:
    """Finds the names that the configuration declares tied, and that could hold one tensor.

    `config`: a parsed `config.json`, or None, which declares nothing. `names`: element type and
    shape of every tensor, by live name. Returns from each name that `save_pretrained` leaves out to
    the one that it keeps; both are in `names`, and agree in element type and shape. Whether they
    hold the same bytes is for the caller to see.
    """
    return {t: s for t, s in _find_declared_pairs(config, names).items() if names[t] == names[s]}


def find_tie_conflicts(config: Mapping[str, Any] | None, names: Specs) -> Mapping[Fqn, Fqn]:
    """Finds the names that are declared tied but differ in element type or shape.

    They cannot hold the same bytes; a caller treats them as a candidate whose bytes differ.
    """
    return {t: s for t, s in _find_declared_pairs(config, names).items() if names[t] != names[s]}


def choose_ties_to_drop(
    config: Mapping[str, Any] | None, same: Mapping[Fqn, Fqn], broken: Collection[Fqn]
) -> Mapping[Fqn, Fqn]:
    """Chooses which tied names an output may leave out.

    One flag ties all names of a model. Where one pair differs, the flag is about to be set
    false, and nothing would restore the others; so then all are written.

    `config`: the configuration before `untie_config`. `same`: the candidates whose bytes agree.
    `broken`: the targets whose bytes, type or shape differ from those of their source.
    """
    if broken and untie_config(config or {}) != config:
        return {}
    return same


def find_absent_tied_names(
    config: Mapping[str, Any] | None, names: Collection[Fqn]
) -> Mapping[Fqn, Fqn]:
    """Finds the names that a live model has and that were left out where it was saved.

    Only classes that are known to have a head are considered.

    Returns from each absent name to the one in `names` that holds its bytes.
    """
    architecture = _architecture(config or {})
    if config is None or not (architecture in _ROOT_PAIRS or architecture.endswith(_HEADED)):
        return {}
    absent: dict[Fqn, Fqn] = {}
    for flag_path, rules in _rules(config):
        for target, pattern in rules.items():
            sources = _match(pattern, names)
            if Fqn(target) not in names and len(sources) == 1 and _is_tied(config, flag_path):
                absent[Fqn(target)] = sources[0]
    return absent


def find_class_without_targets(
    config: Mapping[str, Any] | None, names: Collection[Fqn]
) -> str | None:
    """Finds a class that ties names by patterns. The checkpoint has no name that fits them.

    Which names a live model has there is not in the configuration.

    Returns the class; None where all is there, or nothing is tied in this way.
    """
    name = _architecture(config or {})
    is_shared = name.startswith("Zamba") and _model_type(config or {}) in SHARED_BLOCKS
    if config is None or not (name in _TABLE.patterns or is_shared) or not _is_tied(config, ""):
        return None
    patterns = _patterns(config, names)
    is_needed = bool(patterns) or is_shared
    return name if is_needed and not expand_ties(patterns, names) else None


def untie_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the configuration that ties nothing.

    A model type that is tied whatever its configuration says is left alone, and so is one
    where the flag also decides whether outputs are scaled: changing it would change what the
    model computes, while `from_pretrained` keeps differing weights apart with a warning.
    """
    return _untie(config, _NESTING, is_root=True)


def _untie(config: Mapping[str, Any], depth: int, *, is_root: bool) -> dict[str, Any]:
    model_type = _model_type(config)
    if model_type in _TABLE.always | _TABLE.flag_scales_outputs:
        return dict(config)
    changed = {
        key: _untie(value, depth - 1, is_root=False)
        if isinstance(value, Mapping) and depth > 0
        else value
        for key, value in config.items()
    }
    if is_root or _FLAG in config or model_type in _TABLE.by_default:
        changed[_FLAG] = False
    if _OLD_FLAG in config:
        changed[_OLD_FLAG] = False
    if model_type in _TABLE.other_flag:
        changed[_TABLE.other_flag[model_type]] = False
    return changed


def _find_declared_pairs(
    config: Mapping[str, Any] | None, names: Collection[Fqn]
) -> dict[Fqn, Fqn]:
    """Returns every declared pair whose two names are present."""
    if config is None:
        return {}
    pairs: dict[Fqn, Fqn] = {}
    for flag_path, rules in _rules(config):
        for target, pattern in rules.items() if _is_tied(config, flag_path) else ():
            sources = _match(pattern, names) if target in names else []
            if len(sources) == 1:
                pairs[Fqn(target)] = sources[0]
    # Of names tied in a chain only the first source is kept, as the others are targets too.
    kept: dict[Fqn, Fqn] = {}
    for target, source in pairs.items():
        kept[target] = source
        for _ in pairs:
            kept[target] = pairs.get(kept[target], kept[target])
    return kept | expand_ties(_patterns(config, names), names) if _is_tied(config, "") else kept


def _patterns(config: Mapping[str, Any], names: Collection[Fqn]) -> list[TiePattern]:
    """Returns what the model's class ties by patterns or whole modules."""
    name = _architecture(config)
    if name.startswith("Zamba") and _model_type(config) in SHARED_BLOCKS:
        return find_shared_blocks(names, config.get(_DISTINCT_BLOCKS))
    return [
        TiePattern(prefix, target, source)
        for prefix, target, source, condition, default in _TABLE.patterns.get(name, ())
        if not condition or config.get(condition, default) is True
    ]


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields what the model's class ties, each with the path of the flag that decides it."""
    name = _architecture(config)
    if name not in _ROOT_PAIRS:
        for target, source in _TABLE.heads:
            yield "", {target: source}
        return
    yield "", _ROOT_PAIRS[name]
    for (path, model_type), pairs in _PAIRS.items():
        if name in pairs and _model_type(_nested(config, path)) == model_type:
            yield path, pairs[name]


def _match(pattern: str, names: Collection[Fqn]) -> list[Fqn]:
    if not pattern.startswith("*"):
        return [Fqn(pattern)] if pattern in names else []
    rest = pattern[1:]
    return [name for name in names if name.endswith(rest) and "." not in name[: -len(rest)]]


def _is_tied(config: Mapping[str, Any], flag_path: str) -> bool:
    """Returns whether the flag of a configuration, or of a nested one, ties the weights."""
    nested = _nested(config, flag_path)
    model_type = _model_type(nested)
    if model_type in _TABLE.always:
        return not _has_own_code(config)
    if model_type in _TABLE.as_text:
        return _own_flag(_nested(nested, "text_config"))
    if model_type in _TABLE.or_text and _own_flag(_nested(nested, "text_config")):
        return True
    return _own_flag(nested, has_default=not _has_own_code(config))


def _own_flag(config: Mapping[str, Any], *, has_default: bool = True) -> bool:
    other = _TABLE.other_flag.get(_model_type(config))
    if other is not None:
        return config.get(other, has_default) is True
    default = has_default and _model_type(config) in _TABLE.by_default
    return config.get(_FLAG, default) is True and config.get(_OLD_FLAG, True) is True


def _architecture(config: Mapping[str, Any]) -> str:
    return "" if _has_own_code(config) else architecture_of(config)


def _has_own_code(config: Mapping[str, Any]) -> bool:
    """Returns whether the model folder contains the class, whose defaults are then unknown."""
    return bool(config.get("auto_map"))


def _nested(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for step in filter(None, path.split(".")):
        inner = config.get(step)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def _model_type(config: Mapping[str, Any]) -> str:
    value = config.get("model_type")
    return value if isinstance(value, str) else ""


SHARED_BLOCKS = frozenset({"zamba", "zamba2"})
_BLOCK = re.compile(r"(?P<prefix>(?:.*\.)?layers\.)(?P<layer>\d{1,9})\.shared_transf(?:ormer)?\.")


class TiePattern(Struct, frozen=True):
    """Names of a module that are tied to others of the same module."""

    prefix: str  # what the module's names begin with: empty, or a path that ends in a dot
    target: str  # a regular expression that the tied names begin with, after the prefix
    source: str  # the same of the names that they are tied to, in the order of both when sorted


def expand_ties(patterns: Sequence[TiePattern], names: Collection[Fqn]) -> dict[Fqn, Fqn]:
    """Finds the names that patterns tie.

    Returns from each name that `save_pretrained` leaves out to the one that it keeps. Nothing where
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
    groups: dict[Fqn, set[Fqn]] = {}
    for target, source in pairs.items():
        groups.setdefault(source, {source}).add(target)
    declared = [re.compile(f"{p.prefix}{p.target}") for p in patterns]
    kept: dict[Fqn, Fqn] = {}
    for group in groups.values():
        ordered = sorted(group)
        # A pattern of targets may begin anywhere in a name, and so may fit all; the last one stays.
        free = [name for name in ordered if not any(one.search(name) for one in declared)]
        stays = free[0] if free else ordered[-1]
        kept |= {name: stays for name in ordered if name != stays}
    return kept


def find_shared_blocks(names: Collection[Fqn], distinct: object) -> list[TiePattern]:
    """Returns what Zamba's hybrid layers share.

    `names`: all names of the model; those of shared blocks show which layers are hybrid.
    `distinct`: after how many hybrid layers Zamba 2 uses the first block again.
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
