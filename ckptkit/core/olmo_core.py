"""What OLMo-core's `config.json` says of a model, and the configuration of Transformers for it.

Source: olmo_core/nn/transformer/config.py, olmo_core/nn/attention/__init__.py, and
olmo_core/nn/hf/config.py (`get_hf_config`), OLMo-core 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = b'"_CLASS_"'
"""A key of it, which no configuration of Transformers has."""
_INTERLEAVED = "complex"  # rotary embeddings of pairs of neighbours
_DROPLESS = "dropless"
_RMS = ("rms", "cute_rms", "fused_rms", "qwen_rms")  # other norms compute other values
_MOST, _MOST_LAYERS = 1 << 32, 10_000
_WITHOUT_EFFECT = frozenset(
    (
        *("_CLASS_", "type", "name", "dtype", "backend", "use_flash", "full_precision"),
        *("layer_norm", "bias", "init_method", "init_device", "init_seed", "init_std"),
        *("embedding_init_std", "freeze_params", "loss_implementation", "capacity_factor"),
        *("lb_loss_weight", "lb_loss_granularity", "z_loss_weight", "z_loss_granularity"),
        *("scale_loss_by_num_layers", "gating_function", "jitter_eps"),
    )
)
_TYPES: Mapping[tuple[str, str], str] = {  # by the kinds of block and of the norm of q and k
    ("reordered_norm", "whole"): "Olmo2",
    ("default", ""): "Llama",
    ("default", "head"): "Qwen3",
    ("moe", "whole"): "Olmoe",
    ("moe_reordered_norm", "whole"): "FlexOlmo",
}
_MODEL_TYPES = {"FlexOlmo": "flex_olmo"}


def _has_more(table: Mapping[str, Any], keys: str) -> bool:
    """Returns whether a table says anything else that matters."""
    known = _WITHOUT_EFFECT | {*keys.split()}
    return any(value and key not in known for key, value in table.items())


def _part(table: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def read_settings(document: Mapping[str, Any]) -> dict[str, int]:
    """Returns what decides about the form of the weights, as maps name it in `when`."""
    block = _part(document, "model", "block")
    kind = block.get("name")
    mixer = _part(block, "sequence_mixer") or _part(block, "attention")
    if not isinstance(kind, str):
        return {}
    settings: dict[str, int] = {"norms_after": kind.endswith("reordered_norm")}
    settings["rope_interleaved"] = _part(mixer, "rope").get("name") == _INTERLEAVED
    experts = _part(block, "feed_forward_moe")
    if experts:
        settings["dropless"] = experts.get("name") == _DROPLESS
    return settings


def make_config(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the configuration of Transformers; None where this one does not say enough."""
    model, block = _part(document, "model"), _part(document, "model", "block")
    mixer = _part(block, "sequence_mixer") or _part(block, "attention")
    experts, feed = _part(block, "feed_forward_moe"), _part(block, "feed_forward")
    rope, norm, normed = _part(mixer, "rope"), _part(block, "layer_norm"), _part(mixer, "qk_norm")
    kind = ("head" if mixer.get("use_head_qk_norm") else "whole") if normed else ""
    name = _TYPES.get((str(block.get("name")), kind))
    window = _part(mixer, "sliding_window")
    known = (
        (model, "block lm_head d_model n_layers vocab_size tie_word_embeddings"),
        (block, "sequence_mixer attention feed_forward feed_forward_moe"),
        (mixer, "rope qk_norm use_head_qk_norm n_heads n_kv_heads head_dim sliding_window"),
        (rope, "theta partial_rotary_factor"),
        (feed, "hidden_size activation"),
        (experts, "hidden_size num_experts router"),
        (_part(experts, "router"), "top_k"),
    )
    if (
        name is None
        or not rope
        or mixer.get("name", "default") != "default"
        or any(part.get("name") not in _RMS for part in (norm, *([normed] if normed else [])))
        or bool(experts) == bool(feed)
        or rope.get("partial_rotary_factor", 1.0) != 1.0
        or feed.get("activation", "silu") != "silu"
        or _part(experts, "router").get("gating_function", "softmax") != "softmax"
        or any(part.get("bias") for part in (mixer, feed, norm, _part(model, "lm_head")))
        or any(_has_more(table, keys) for table, keys in known)
    ):
        return None
    sizes: dict[str, Any] = {
        "vocab_size": model.get("vocab_size"),
        "hidden_size": model.get("d_model"),
        "intermediate_size": (experts or feed).get("hidden_size"),
        "num_hidden_layers": model.get("n_layers"),
        "num_attention_heads": mixer.get("n_heads"),
        "num_key_value_heads": mixer.get("n_kv_heads") or mixer.get("n_heads"),
    }
    if experts:
        sizes["num_experts"] = experts.get("num_experts")
        sizes["num_experts_per_tok"] = _part(experts, "router").get("top_k")
    if mixer.get("head_dim"):
        sizes["head_dim"] = mixer["head_dim"]
    theta, eps = rope.get("theta", 500_000), norm.get("eps", 1e-5)
    is_sized = all(type(size) is int and 0 < size < _MOST for size in sizes.values())
    is_sized = is_sized and sizes["num_hidden_layers"] <= _MOST_LAYERS
    if not is_sized or not all(type(n) in {int, float} and 0 < n < _MOST for n in (theta, eps)):
        return None
    config: dict[str, Any] = {}
    if window:
        layers = _list_windows(window, sizes["num_hidden_layers"])
        if not all(type(size) is int for size in layers):
            return None
        found = {size for size in layers if size > 0}
        if name != "Olmo2" or len(found) > 1:
            return None
        if found:
            name, config["sliding_window"] = "Olmo3", found.pop()
            types = ("full_attention", "sliding_attention")
            config["layer_types"] = [types[size > 0] for size in layers]
    tokens = _part(document, "dataset", "tokenizer")
    length = _part(document, "train_module").get("max_sequence_length")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": _MODEL_TYPES.get(name, name.lower()),
        **sizes,
        **config,
        "attention_bias": False,
        "hidden_act": "silu",
        **({"max_position_embeddings": length} if type(length) is int else {}),
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "tie_word_embeddings": bool(model.get("tie_word_embeddings")),
        **{key: tokens.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _list_windows(window: Mapping[str, Any], layers: int) -> list[Any]:
    """Returns the window of each layer; -1 where a layer sees all."""
    given = window.get("pattern")
    pattern = given if isinstance(given, list) and given else [None]
    ends = ("first", "last")
    first, last = (window.get(f"force_full_attention_on_{end}_layer", True) for end in ends)
    listed = [pattern[(at - bool(first)) % len(pattern)] for at in range(layers)]
    if first:
        listed[0] = -1
    if last:
        listed[-1] = -1
    return listed
