"""What classes of Transformers and diffusers say of themselves, as data that is read when needed.

`AutoModelForCausalLM` gives a text model for the configuration of many multimodal ones, and people
train that. Its tensors fit `text_config`, not the whole: they are recognised by names, and can be
put into the whole model.

Source: `class_facts.jsonl`, which `fixtures/generators/class_facts.py` makes of the libraries;
transformers 5.23, `AutoModelForCausalLM.from_pretrained` and `get_text_config`.
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
from ckptkit.hub_names.known_models import find_tied, is_beyond_counts
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


_PARTS = ("text_config", "llm_config", "language_config")
# What only names of a whole model have.
_OF_WHOLE = re.compile(
    r"(?:^|\.)(?:language_model|text_model|llm|thinker|visual|vision\w*|audio\w*|image\w*|video\w*"
    r"|multi_modal_projector|mm_projector|connector|embed_vision|embed_audio|aligner|talker)\."
)
_TEXT = re.compile(r"(?:model\.)?language_model\.")
_ENCODER = re.compile(r"(?:^|\.)encoder\.")
_HEADS = frozenset({"lm_head", "embed_out"})
_BODIES = frozenset({"model", "transformer", "gpt_neox", "backbone"})
_ROOT, _HEAD = "model.", "lm_head."
_OF_ROOT = ("dtype", "torch_dtype", "transformers_version", "tie_word_embeddings")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def find_text_config(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any] | None:
    """Returns the configuration of the text model whose tensors these are; None if they are not."""
    part = next((config[k] for k in _PARTS if isinstance(config.get(k), Mapping)), None)
    if part is None or not names or any(map(_OF_WHOLE.search, names)):
        return None
    if not any(name.startswith(_ROOT) for name in names):
        return None
    kinds = part.get("model_type"), config.get("model_type")
    found = next((c for k in kinds if isinstance(k, str) and (c := find_text_model(k))), "")
    if not found:
        return None
    inherited = {key: config[key] for key in (*_OF_ROOT, *_IDS) if config.get(key) is not None}
    own = {key: value for key, value in part.items() if value is not None or key not in inherited}
    return {**inherited, **own, "architectures": [found]}


def find_class(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Returns the text model whose tensors these are, for a configuration that names no class.

    Source: transformers 5.23, whose only classes with a head named so beside one decoder are those
    of `AutoModelForCausalLM`.

    Empty where others of its type may have these names too: those with an encoder, with another
    head, or without one.
    """
    kind = config.get("model_type")
    found = find_text_model(kind) if isinstance(kind, str) else ""
    roots = {name.partition(".")[0] for name in names}
    body = roots - _HEADS
    is_whole = any(map(_OF_WHOLE.search, names)) or any(map(_ENCODER.search, names))
    if not found or is_whole or not body <= _BODIES or len(body) != 1:
        return ""
    is_tied = bool(find_tied({**config, "architectures": [found]}))
    return found if roots > body or is_tied or config.get("tie_word_embeddings") is True else ""


def take_from_whole(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str] | None:
    """Returns which tensors of a multimodal model are those of its text model; None if none are."""
    kind = config.get("model_type")
    is_text = isinstance(kind, str) and bool(find_text_model(kind))
    is_text = is_text and architecture_of(config).endswith("ForCausalLM")
    if not is_text or any(isinstance(config.get(key), Mapping) for key in _PARTS):
        return None
    taken = {}
    for name in names:
        inside = _TEXT.match(name)
        if inside is None and _OF_WHOLE.search(name) is None:
            taken[name] = name  # such as the head
        elif inside is not None:
            stem = name[inside.end() :].removeprefix(_ROOT)
            taken[name] = stem if stem.startswith(_HEAD) else f"{_ROOT}{stem}"
    is_inside = any(map(_TEXT.match, names))
    return taken if is_inside and len(set(taken.values())) == len(taken) else None


def place_in_whole(names: Collection[str], base: Collection[str]) -> dict[str, str] | None:
    """Returns the names of a text model's tensors in the multimodal model; None if none fit."""
    stems = {name: name.removeprefix(_ROOT) for name in names if name.startswith(_ROOT)}
    first = next(iter(stems.values()), "")
    there = set(base)
    found = [known[: -len(first)] for known in sorted(there) if known.endswith(f".{first}")]
    # Conversions may split tensors on disk, so that not all names are there.
    fitting = [(sum(prefix + stem in there for stem in stems.values()), prefix) for prefix in found]
    if not fitting:
        return None
    _, prefix = max(fitting, key=lambda pair: pair[0])
    placed = {name: prefix + stem for name, stem in stems.items()}
    for name in names:
        if name not in stems:  # such as the head
            placed[name] = next((known for known in there if known.endswith(f".{name}")), name)
    return placed
