"""What classes of Transformers and diffusers say of themselves, as data that is read when needed.

Source: `class_facts.jsonl`, which `fixtures/generators/class_facts.py` makes of the libraries.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptkit.core.data_rows import read_row
from ckptkit.core.index import Fqn
from ckptkit.core.model_configs import architecture_of, class_of, list_model_types
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.hub_names.known_models import is_beyond_counts
from ckptkit.plan.selection import KeptDtypes

DATA = Path(__file__).with_name("class_facts.jsonl")


def _lists(config: Mapping[str, Any], key: str, *, guesses: bool = True) -> Iterator[str]:
    """Yields the patterns in a list of a model's class, and in those of the types of its parts.

    A class has the lists of the parts that it has by default; other parts are known by their type.
    Where the class is not known, `guesses` takes what any class of its type has.
    """
    own, *nested = list_model_types(config) or [""]
    facts = [read_row(DATA, "classes", architecture_of(config))]
    if facts == [None] and guesses:
        facts = [read_row(DATA, "types", own)]
    for listed in (*facts, *(read_row(DATA, "types", kind) for kind in nested)):
        yield from (listed or {}).get(key, ())


def find_kept_by_transformers(config: Mapping[str, Any]) -> KeptDtypes:
    """Returns what a class of Transformers keeps in float32 where it is loaded in 16 bits.

    Source: transformers 5.23, `PreTrainedModel._get_dtype_plan` and `build_glob_alternation`: an
    asterisk is any text, everything else a regular expression that is searched in the name.
    """
    return kept_by_transformers(_lists(config, "always"), _lists(config, "float16"))


def kept_by_transformers(always: Iterable[str], in_float16: Iterable[str]) -> KeptDtypes:
    """Returns what lists of patterns keep: in 16 bits of any kind, and in float16 alone."""

    def expressions(patterns: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pattern.replace("*", ".*") for pattern in patterns))

    return KeptDtypes(expressions(always), expressions(in_float16))


def adapt_kept(kept: KeptDtypes, hub: HubNames) -> KeptDtypes:
    """Returns what the installed transformers keeps, with names on disk as those of training."""
    known = (Fqn(name) for name in kept.names)
    live = (source for name in known if name in hub.tensors for source in hub.tensors[name].sources)
    return replace(kept_by_transformers(*hub.kept), names=kept.names.union(live))


def find_kept_by_diffusers(config: Mapping[str, Any]) -> KeptDtypes:
    """Returns what a class of diffusers keeps in float32 where it is loaded in another type.

    Source: diffusers 0.42, `load_model_dict_into_meta`: a whole part of the name is compared.
    """
    kept = read_row(DATA, "diffusers_classes", class_of(config)) or ()
    return KeptDtypes(tuple(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in kept))


_NUMBERED = re.compile(r"layers\\?\.\d")  # of one size of the model: counts say more


def find_left_out(names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Returns those names in a model's files that the class of a configuration does not load.

    Source: transformers 5.23, `PreTrainedModel._adjust_missing_and_unexpected_keys`.
    """
    listed = (p for p in _lists(config, "ignored", guesses=False) if _NUMBERED.search(p) is None)
    ignored = [re.compile(pattern) for pattern in dict.fromkeys(listed)]
    return {
        name
        for name in names
        if is_beyond_counts(name, config) or any(pattern.search(name) for pattern in ignored)
    }


def caches_by_default(model_type: str) -> bool:
    """Returns whether models of a type keep keys and values unless their configuration says so."""
    return model_type not in read_row(DATA, "without_cache")


def find_text_model(model_type: str) -> str:
    """Returns the class that `AutoModelForCausalLM` takes for a model type; empty for none."""
    return read_row(DATA, "text_models", model_type) or ""


_DECODERS = ("decoder", "generator", "text_config")


def generation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with which a model generates that has no `generation_config.json`.

    Source: transformers 5.23, `GenerationConfig.from_model_config` of a document: those that stand
    in `config.json`, and in its decoder where it has none. Defaults of its class do not count.
    """
    decoder = next((config[key] for key in _DECODERS if config.get(key)), None)
    parts = (decoder, config) if isinstance(decoder, Mapping) else (config,)
    stated = ((key, part.get(key)) for part in parts for key in read_row(DATA, "generation_keys"))
    return {key: value for key, value in stated if value is not None}
