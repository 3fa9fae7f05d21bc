"""Text models of multimodal configurations: recognised by names, and put into the whole model.

`AutoModelForCausalLM` gives a text model for the configuration of many multimodal ones, and people
train that. Its tensors fit `text_config`, not the whole.

Source: transformers 5.23, `AutoModelForCausalLM.from_pretrained` and `get_text_config`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ckptkit.consumers.class_facts import find_text_model
from ckptkit.core.model_configs import architecture_of
from ckptkit.hub_names.model_shapes import find_tied

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
