"""Small models of every class of the installed Transformers, made from its own defaults.

All widths of a configuration are divided by one number, so that whatever has to divide or to add
up still does; counts of layers, of experts and of tokens are cut. What does not follow from that
stands in `OVERRIDES`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

DIVISORS = (32, 16, 8, 4, 2, 1)
MOST_ELEMENTS = 12_000_000  # of a model, where a smaller divisor is not tried for
TOO_MANY_ELEMENTS = 120_000_000
SECONDS = 30
ABSTRACT = ("PreTrainedModel", "PretrainedModel")
LEAST_WIDTH = 4

_WIDTH = re.compile(
    r"(^|_)(hidden|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|embd|embed|embedding|emb|ffn|dim|dims"
    r"|width|widths|channel|channels|rank|intermediate|inner|filters|units|planes|size|sizes"
    r"|features|mrope_section|ff|proj|projection|d_state|dmodel|nhid|ngf)(_|$)"
)
_NOT_WIDTH = re.compile(
    r"(^|_)(num|image|patch|vocab|kernel|window|layer|layers|head|heads|token|tokens|id|ids"
    r"|position|positions|chunk|stride|strides|group|groups|pool|ratio|prob|dropout|conv_kernel"
    r"|buckets|tubelet|frame|frames|max|min|resolution|grid|block|blocks|rate|n_mels|mel|fft|bins|"
    r"type|interval|temporal|scale|merge|downsample|upsample|init|axis|crop|codebook|segment|"
    r"local|experts|fpn|num_feature|cardinality|input_size|sampling|factor|seq|seqlen|context)(_|$)"
)
_WIDTH_ANYWAY = re.compile(
    r"(\w+_)?(head_dim|block_dim|embed_dim|layer_dim|token_dim|hidden_dim|conv_dim|hidden_size"
    r"|hidden_sizes|embedding_dim|latent_dim|position_dim|embedding_size|head_size|ffn_dim|dim_head"
    r"|intermediate_size|token_hidden_size|hidden_size_per_layer_input|head_hidden_size|ffn_size"
    r"|conv_channels|codebook_dim|context_dim|hidden_channels|window_dim|num_channels_unused|"
    r"num_feature_units|pooler_dim|mlp_dim|mask_dim|feature_size|decoder_dim|inner_dim)"
)
_FEW = re.compile(
    r"(\w+_)?(n_layers?|num_(\w+_)?layers|n_(\w+_)?layers|(en|de)coder_layers|(text|vision)_layers|"
    r"num_blocks|depth|num_hidden_layers|layers|num_layers|n_blocks)"
)
_EXPERTS = re.compile(
    r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_experts)"
)
_CHOSEN_EXPERTS = re.compile(r"(num_experts_per_tok|moe_k|top_k_experts|moe_topk|moe_top_k)")
_TOKENS = re.compile(r"(\w+_)?(vocab_size|entity_vocab_size|n_positions|max_position_embeddings)")
_TOKEN_ID = re.compile(r"(\w+_)?(token_id|token_index|padding_idx|pad_id)")
FEW_LAYERS, FEW_EXPERTS, FEW_CHOSEN_EXPERTS, FEW_TOKENS = 2, 8, 2, 256
LONGEST_OF_STAGES = 5  # lists of more have an entry for each layer
_MOST = (
    (_FEW, FEW_LAYERS),
    (_EXPERTS, FEW_EXPERTS),
    (_CHOSEN_EXPERTS, FEW_CHOSEN_EXPERTS),
    (_TOKENS, FEW_TOKENS),
)

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_THREE_SCALES = _RESNET | {"out_features": ["stage2", "stage3", "stage4"]}
_NO_TIMM = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
_DETR = {**_NO_TIMM, "backbone_config": _RESNET}
_HYBRID = {
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_PREDICTION = {"prediction_length": 4, "context_length": 8}

# By model type: where a larger divisor leaves heads with an odd width, which saving then refuses.
LARGEST_DIVISOR = {
    "ernie4_5_vl_moe": 8,
    "ernie4_5_vl_moe_text": 8,
    "kimi_k25": 4,
    "kimi_k25_vision": 4,
    "step3p7": 16,
    "step3p5_vision": 16,
}
# By model type: fields of its configuration, by dotted path.
OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": _PREDICTION,
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "bridgetower": {"contrastive_hidden_size": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "emu3_vqgan": {"base_channels": 32},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "mimi": {"upsample_groups": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "perceiver": {
        "d_latents": 40,
        "d_model": 24,
        "num_self_attends_per_block": 2,
        "num_cross_attention_heads": 1,
    },
    "dbrx": {"attn_config.rope_theta": 10_000.0},
    "qwen3_omni_moe": {"talker_config.spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "hunyuan_vl_text": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "hiera": {"decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 48},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "deformable_detr": {**_NO_TIMM, "backbone_config": _THREE_SCALES},
    "detr": _DETR,
    "informer": _PREDICTION,
    "reformer": {"is_decoder": True},
    "t5gemma": {"is_encoder_decoder": True},
    "table-transformer": _DETR,
    "time_series_transformer": _PREDICTION,
    "vilt": {"num_images": 2},
    "zamba": _HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": _HYBRID,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}


def model_classes() -> dict[str, Any]:
    """Returns every model class that Transformers exports, by name; of aliases the first."""
    found = {}
    modules = transformers._class_to_module  # spares the import of all else
    for name in sorted(name for name, module in modules.items() if ".modeling_" in f".{module}"):
        model_class = class_named(name)
        if model_class is not None and model_class.__name__ == name:
            found[name] = model_class
    return found


def class_named(name: str) -> Any:
    """Returns a model class of Transformers, or None for one that nothing can be built of."""
    try:
        found = getattr(transformers, name)
    except (AttributeError, ImportError, RuntimeError):
        return None
    if not (inspect.isclass(found) and issubclass(found, PreTrainedModel)):
        return None
    config = getattr(found, "config_class", None)
    is_abstract = found.__init__ is PreTrainedModel.__init__ or name.endswith(ABSTRACT)
    return found if inspect.isclass(config) and not is_abstract else None


def small_config(config_class: Any, divisor: int, *, cut: bool, explicit: bool = False) -> Any:
    """Makes a configuration whose widths are the default's, divided."""
    config = config_class()
    overrides = OVERRIDES.get(config.model_type, {})
    fields = _small(config, divisor, cut=cut, explicit=explicit)
    fields |= {key: value for key, value in overrides.items() if "." not in key}
    for path, value in overrides.items():
        *parents, last = path.split(".")
        inner: Any = fields
        for parent in parents:
            inner = inner[parent]
        if parents:
            setattr(inner, last, value)
    return config_class(**fields)


def _small(config: Any, divisor: int, *, cut: bool, explicit: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    whole = vars(config)
    layers = [
        v for k, v in whole.items() if _FEW.fullmatch(k) and type(v) is int and v > FEW_LAYERS
    ]
    for name, value in whole.items():
        if isinstance(value, PretrainedConfig):
            own = vars(value)  # getattr would refuse fields that vary from layer to layer
            given = {f.name: own[f.name] for f in dataclasses.fields(value) if f.name in own}
            small = _small(value, divisor, cut=cut, explicit=explicit)
            given = given if explicit else {}
            if getattr(value, "out_features", None):  # of a backbone, which is no field
                given["out_features"] = value.out_features
            fields[name] = type(value)(**given | small | OVERRIDES.get(value.model_type, {}))
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = _scaled_mapping(value, divisor)
        else:
            small = _smaller(name, value, divisor, layers if cut else [])
            if small is not None:
                fields[name] = small
    return fields


def _scaled_mapping(value: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    return {
        k: [max(1, n // divisor) for n in v]
        if k == "mrope_section"
        else _scaled_mapping(v, divisor)
        if isinstance(v, Mapping)
        else v
        for k, v in value.items()
    }


def _smaller(name: str, value: Any, divisor: int, layers: list[int]) -> Any:
    """Returns a smaller value of a field, or None where it stays as it is."""
    if isinstance(value, (list, tuple)) and value:
        return _smaller_list(name, list(value), divisor, layers)
    if type(value) is not int:
        return None
    if _TOKEN_ID.fullmatch(name):
        return value if value < FEW_TOKENS else 3
    for pattern, most in _MOST:
        if pattern.fullmatch(name) and (layers or pattern is not _FEW):
            return min(value, most)
    return _divided(value, divisor) if _is_width(name) else None


def _smaller_list(name: str, values: list[Any], divisor: int, layers: list[int]) -> Any:
    if len(values) in layers and len(values) > LONGEST_OF_STAGES:
        return values[:FEW_LAYERS]
    if _is_width(name) and all(type(value) is int for value in values):
        return [_divided(value, divisor) for value in values]
    return None


def _is_width(name: str) -> bool:
    if _WIDTH_ANYWAY.fullmatch(name):
        return True
    return bool(_WIDTH.search(name)) and not _NOT_WIDTH.search(name)


def _divided(value: int, divisor: int) -> int:
    return value // divisor if value % divisor == 0 and value // divisor >= LEAST_WIDTH else value


def small_model_config(model_class: Any, most: int = TOO_MANY_ELEMENTS) -> Any:
    """Returns the configuration of a small model, which was built without elements."""
    first: Exception | None = None
    best: tuple[int, Any] | None = None
    for options in _attempts(model_class.config_class.model_type):
        if best is not None and options["divisor"] == DIVISORS[0]:
            break  # the divisors of one way of cutting were tried
        try:
            with time_limit(SECONDS):
                config = small_config(model_class.config_class, **options)
                model = on_meta(model_class, config)
        except Exception as error:  # noqa: BLE001  any class may want what is not here
            first = first or error
            continue
        elements = sum(p.numel() for p in model.parameters())
        if best is None or elements < best[0]:
            best = (elements, config)
        if elements <= MOST_ELEMENTS:
            break
    if best is None:
        raise first or ValueError("nothing was tried")
    if best[0] > most:
        raise ValueError(f"the smallest configuration has {best[0]:,} elements")
    return best[1]


def _attempts(model_type: str) -> Iterator[dict[str, Any]]:
    largest = LARGEST_DIVISOR.get(model_type, DIVISORS[0])
    for explicit, cut, divisor in product((False, True), (True, False), DIVISORS):
        if divisor <= largest:
            yield {"explicit": explicit, "cut": cut, "divisor": divisor}


def on_meta(model_class: Any, config: Any) -> Any:
    """Builds a model without elements."""
    config._attn_implementation = "eager"  # others need kernels
    with torch.device("meta"):
        return model_class(config)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the time is over."""

    def too_slow(_signum: int, _frame: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_slow)
    left = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(left)
