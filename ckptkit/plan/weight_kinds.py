"""What names say about tensors: adapters that PEFT trained, by method, and packed weights.

PEFT puts `base_model.model.` before the names of a model, wraps the layers that it adapts, and
gives its own tensors names that show the method. A segment that is also a name in a class of
Transformers is no sign by itself: `prompt_encoder` is a module of SAM.

A state dict with packed weights, or with the tensors of an adapter, loads without an error as a
model with random weights. Such state dicts are refused unless their raw form is wanted.

Source: peft 0.21, `tuners/*/layer.py` and `model.py` (`adapter_layer_names`, `other_param_names`)
for the segments, `peft_model.py` and `utils/save_and_load.py` for those of prompts; torchtune 0.6,
`modules/peft/lora.py` and `dora.py`; Megatron-Bridge 0.5, `peft/lora_layers.py`, `dora_layers.py`
and `canonical_lora.py`, as NeMo 2 before it; mlx-lm, `tuner/lora.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.data_rows import read_table
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn, Shape, TensorEntry


class Method(Struct, frozen=True):
    """A method of PEFT."""

    key: str  # its `peft_type` in `adapter_config.json`
    title: str  # the usual name of one of its adapters, with the article
    segments: tuple[str, ...] = ()  # the segments of tensor names that this method alone has
    merges: bool = True  # whether `merge_and_unload` of PEFT makes one model of base and adapter


class AdapterSign(Struct, frozen=True):
    """What shows that tensors are an adapter's."""

    name: str  # the first tensor that does
    method: str  # the key of the method; empty where names do not show it
    form: str = "PEFT"  # whose names the factors have, a key of `FACTORS`

    @property
    def title(self) -> str:
        """What it belongs to, with the article."""
        if self.form != PEFT:
            return f"a LoRA adapter in {self.form}'s form"
        known = METHODS.get(self.method)
        if known is None or known.key == LORA:  # LoRA goes without saying
            return "an adapter of PEFT"
        return f"{known.title} of PEFT"


MERGED_BESIDE = (
    "the model beside the adapter has it merged already, as its framework writes both: a conversion"
    " takes that model alone"
)

PEFT, TORCHTUNE, MEGATRON_BRIDGE, MLX = "PEFT", "torchtune", "Megatron-Bridge", "MLX"
FACTORS: Mapping[str, re.Pattern[str]] = {
    PEFT: re.compile(
        r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)"
        r"(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?"
    ),
    # torchtitan has the same names in its own modules.
    TORCHTUNE: re.compile(
        r"(?P<module>.+)\.(?P<part>lora_a|lora_b|magnitude)(?:(?<=\.magnitude)|\.weight)"
    ),
    MEGATRON_BRIDGE: re.compile(
        r"(?P<module>.+)\.adapter\.(?:adapter_(?P<branch>[a-z]+)\.)?"
        r"(?P<part>linear_in|linear_out|weight_magnitude)(?:(?<=_magnitude)|\.weight)"
    ),
    MLX: re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b)"),
}
"""The names of LoRA's tensors, by the framework that calls them so."""
_OTHER_FACTORS = {"lora_a", "lora_b", "linear_in", "linear_out"}

LORA, ADALORA, XLORA = "LORA", "ADALORA", "XLORA"
_MULTITASK = "MULTITASK_PROMPT_TUNING"
# Methods that build on another one come first: they have its segments too. PEFT's files of prompts
# hold what a module computes, `prompt_embeddings`, whatever the method.
_TABLE = read_table(__file__, "peft_methods.json", tuple[Method, ...])
METHODS: Mapping[str, Method] = {method.key: method for method in _TABLE}
"""All methods by their `peft_type`, those that build on another one before it."""

_BY_SEGMENT = {segment: method.key for method in _TABLE for segment in method.segments}
# Any method may train rows of embeddings besides, in a module of their own.
_SEGMENT = re.compile(
    r"(?:^|(?<!token_adapter)\.)("
    + "|".join(sorted(_BY_SEGMENT, key=len, reverse=True))
    + r")(?=\.|$)"
)
# Methods that more than one segment shows; the module of a prompt is `prompt_encoder`.
_MARKS: Mapping[str, re.Pattern[str]] = {
    XLORA: re.compile(r"(?:^|\.)base_model\.lora_model\."),
    **{
        key: re.compile(rf"(?:^|\.)prompt_encoder\.[^.]+\.(?:{parts})$")
        for key, parts in {
            _MULTITASK: r"prefix_task_(?:cols|rows)",
            "P_TUNING": r"(?:mlp_head\.\d+|lstm_head)\.\w+",
            "CPT": r"delta_embedding\.weight",
            "CARTRIDGE": r"(?:trainable|frozen)_embedding",
            "PREFIX_TUNING": r"transform\.\d+\.(?:weight|bias)",
        }.items()
    },
}
# What PEFT puts around layers, and a prompt of whatever method; then what it puts around a model.
# A `base_layer` holds parameters and nothing else.
_AROUND = (
    re.compile(
        r"(?:^|\.)(?:base_layer\.[^.\d][^.]*(?:\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\.\w+)?$"
        r"|token_adapter\.trainable_tokens_delta(?:\.|$)|modules_to_save\.|original_module\."
        r"|prompt_encoder\.[^.]+\.embedding\.weight$)"
    ),
    re.compile(r"(?:^|\.)base_model\.model\."),
)
_WRAPPER = "base_model."
_OF_TASKS = "prefix_task_cols"
_PROMPT_FILE = frozenset({"prompt_embeddings", _OF_TASKS, "prefix_task_rows"})
# torch's parametrizations hold the LoRA that Jina's models consist of.
_PARAMETRIZED = re.compile(r"(?:^|\.)parametrizations\.")
_OWN_FACTOR = re.compile(r"(.*)\.lora_(?:A|B)\.([^.]+)\.(?:weight|bias)$")
_OWN_BASE = re.compile(r"(.*)\.base_layer\.(?:weight|bias)$")
_OWN_LORA = "_lora"
_WORDS = frozenset(
    {
        *_BY_SEGMENT,
        *_PROMPT_FILE,
        *("base_model", "base_layer", "modules_to_save", "original_module", "prompt_encoder"),
        *_OTHER_FACTORS,
    }
)


def find_adapter(names: Iterable[str], own: Collection[str] = ()) -> AdapterSign | None:
    """Finds out whether tensors are an adapter's, or those of a model that PEFT wraps.

    `names`: of a whole state dict. `own`: names of the adapters that are a part of the model; see
    `own_adapters`. Returns None where nothing shows it.

    Example:
        >>> find_adapter(["base_model.model.norm.weight", "base_model.model.q_proj.ia3_l"])
        AdapterSign(name='base_model.model.q_proj.ia3_l', method='IA3', form='PEFT')
        >>> find_adapter(["layers.0.attn.q_proj.lora_a.weight"])
        AdapterSign(name='layers.0.attn.q_proj.lora_a.weight', method='LORA', form='torchtune')
        >>> find_adapter(["prompt_encoder.shared_embedding.positional_embedding"]) is None
        True
    """
    held = list(names)
    if _WORDS.isdisjoint(segment for name in held for segment in name.split(".")):
        return None  # nearly always, and soon
    if modules := _modules_of_own(held, own):
        held = [name for name in held if not _is_own(name, modules, own)]
    methods: dict[str, str] = {}  # that names show, each with the first name that does
    for name in held:
        if _PARAMETRIZED.search(name) is None:
            for match in _SEGMENT.finditer(name):
                methods.setdefault(_BY_SEGMENT[match[1]], name)
        for method, mark in _MARKS.items():
            if mark.search(name) is not None:
                methods.setdefault(method, name)
    if _OF_TASKS in held and _are_wrapped(held):
        methods[_MULTITASK] = _OF_TASKS
    if methods:
        method = next(method for method in METHODS if method in methods)
        return AdapterSign(methods[method], method)
    for name in held:
        if not _OTHER_FACTORS.isdisjoint(name.split(".")):
            for form, pattern in FACTORS.items():
                if pattern.fullmatch(name) is not None:
                    return AdapterSign(name, LORA, form)
    found = (name for part in _AROUND for name in held if part.search(name) is not None)
    around = next(found, "")
    return AdapterSign(around or held[0], "") if around or _are_wrapped(held) else None


def explain_lost_adapter(names: Iterable[str]) -> str:
    """Explains a checkpoint that has an adapter's optimizer state and no model; else empty.

    `names` are those of all its tensors.
    """
    if find_adapter(names) is None:
        return ""
    return (
        "only the optimizer's state of an adapter is here: under FSDP1, PEFT 0.21 finds no weights"
        " to save; save through ckptkit.integrations, or with FSDP2"
    )


def _are_wrapped(names: Sequence[str]) -> bool:
    return bool(names) and all(n in _PROMPT_FILE or n.startswith(_WRAPPER) for n in names)


def own_adapters(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Returns the names of the LoRA adapters that a model itself consists of.

    Source: `Phi4MMForCausalLM`, whose layers have `lora_A.speech`, `lora_A.vision` and
    `base_layer`, and whose `config.json` has `speech_lora` and `vision_lora`.
    """
    return frozenset(
        key.removesuffix(_OWN_LORA)
        for key, value in (config or {}).items()
        if key.endswith(_OWN_LORA) and isinstance(value, Mapping)
    )


def advice_on(method: str, folder: str = "") -> str:
    """Returns what to do with an adapter that `ckptkit adapter` does not handle.

    `method`: its method; empty where it is not known. `folder`: PEFT's folder of it; empty for one
    in a checkpoint.
    """
    known = METHODS.get(method)
    merged = (
        "merge_and_unload() makes one model of it and its base"
        if known is None or known.merges
        else "PEFT has no merged form of it"
    )
    if folder:
        return f"load it with peft.PeftModel.from_pretrained(base, {folder!r}); {merged}"
    return (
        "load this state dict into the PEFT model that was trained, as peft.get_peft_model builds"
        f" it; its save_pretrained writes PEFT's folder, and {merged}"
    )


def refusal_of(method: str) -> str:
    """Returns why `ckptkit adapter` refuses a method, to follow what was found."""
    if method == ADALORA:
        return (
            ", whose factors go with singular values ('lora_E') and with ranks that training"
            " changed; LoRA, rsLoRA and DoRA are modelled"
        )
    return "; LoRA, rsLoRA and DoRA are modelled"


def _modules_of_own(names: Sequence[str], own: Collection[str]) -> frozenset[str]:
    if not own:
        return frozenset()
    if any(_AROUND[1].search(name) is not None for name in names):
        return frozenset()  # what PEFT wraps was trained since
    factors = (_OWN_FACTOR.match(name) for name in names)
    return frozenset(match[1] for match in factors if match is not None and match[2] in own)


def _is_own(name: str, modules: Collection[str], own: Collection[str]) -> bool:
    """Returns whether a tensor is a factor of the model itself, or wrapped by such factors."""
    factor, base = _OWN_FACTOR.match(name), _OWN_BASE.match(name)
    if factor is not None:
        return factor[2] in own
    return base is not None and base[1] in modules


PACKED_WEIGHT = "a packed 4-bit or 8-bit weight"
# GPTQ, AWQ and AQLM store their tensors instead of `weight`; bitsandbytes in addition to it; fp8
# and compressed tensors with an ending; MXFP4 with blocks and scales of fused experts.
_IN_PLACE = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|codes|codebooks|weight_packed|weight_shape|weight_scale"
    r"|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_g_idx"
    r"|input_scale|input_global_scale|input_zero_point|k_scale|v_scale|q_scale|SCB|weight_format"
    r"|activation_scale|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB"
    r"|quant_state\.bitsandbytes__\w+))$"
)
_ENDING = re.compile(r"(_blocks|_scales|_scale_inv|_scale|_packed)$")
# The names of scales: of `x.weight` in fp8 and compressed tensors, and `x.qweight` in GPTQ and AWQ.
_SCALE_ENDINGS = ("_scale", "_scale_inv", "_scale_2", "_scales")
_SCALE = re.compile(r"(.*)(?:_scale|_scale_inv|_scale_2|_scales|\.scales)")
# Layers that have more than one input in every model: with one column, their weight is packed.
_PROJECTION = re.compile(
    r"(\b(q|k|v|o|qkv|gate|up|down|gate_up|out)_proj|\bc_attn|\bc_fc|query_key_value|\bw[123]"
    r"|dense_h_to_4h|dense_4h_to_h)\.weight$"
)
_MATRIX = 2
_PACKED = re.compile(r"\.(quant_state\.bitsandbytes__\w+|absmax|quant_map|SCB)$")


def find_dense_name(name: str) -> str:
    """Returns the name of the weight that a packed tensor stands for, or belongs to.

    >>> find_dense_name("layers.0.q_proj.qweight"), find_dense_name("layers.0.q_proj.weight.absmax")
    ('layers.0.q_proj.weight', 'layers.0.q_proj.weight')
    >>> find_dense_name("mlp.experts.down_proj_blocks"), find_dense_name("norm.weight")
    ('mlp.experts.down_proj', 'norm.weight')
    """
    dense = _IN_PLACE.sub(".weight", name)
    return dense if dense != name else _ENDING.sub("", name)


def looks_packed(name: str, shape: Shape, dtype: str = "") -> bool:
    """Returns whether a tensor seems to be a packed weight, or stored with one.

    >>> looks_packed("layers.0.q_proj.weight", (2048, 1)), looks_packed("score.weight", (2, 1))
    (True, False)
    >>> looks_packed("fc1.weight", (64, 64), "int8"), looks_packed("mask", (64, 64), "int8")
    (True, False)
    """
    in_one_column = shape[1:] == (1,) and shape[0] > 1 and _PROJECTION.search(name)
    of_bytes = len(shape) == _MATRIX and dtype in {"int8", "uint8"} and name.endswith(".weight")
    return bool(in_one_column or of_bytes or _PACKED.search(name))


def explain_random_weights(
    tensors: Iterable[tuple[str, Shape, str]],
    *,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Explains why Transformers would load another model without an error; empty if it would not.

    Bytes that have a scale are known to Transformers, as in compressed tensors.

    `tensors`: names, shapes and element types of a whole model. `config`: the model's
    configuration: adapters that it declares are a part of the model.
    """
    rows = list(tensors)
    sign = find_adapter((name for name, _, _ in rows), own_adapters(config))
    if sign is not None:
        return random_weights_message(sign.name, sign.title)
    return _explain_packed(rows)


def _explain_packed(tensors: Sequence[tuple[str, Shape, str]]) -> str:
    names = {name for name, _, _ in tensors}
    for name, shape, dtype in tensors:
        is_scaled = any(name + end in names for end in _SCALE_ENDINGS)
        if looks_packed(name, shape, "" if is_scaled else dtype):
            return random_weights_message(name, PACKED_WEIGHT)
    return ""


def random_weights_message(name: str, what: str) -> str:
    """Explains why a state dict with tensor `name` is no model that Transformers loads."""
    return (
        f"tensor {name!r} belongs to {what}; under these names Transformers would load a"
        " model with random weights"
    )


def refuse_random_weights(
    entries: Iterable[TensorEntry],
    *,
    location: str,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Refuses adapters and packed weights, which load as another model without an error.

    `entries`: what would be written.
    """
    if reason := explain_random_weights(map(_describe, entries), config=config):
        raise RefusedError(reason, where=location, hint=hint_at_raw_names())


def refuse_packed(entries: Iterable[TensorEntry], *, location: str) -> None:
    """Refuses packed weights; see `refuse_random_weights`."""
    if reason := _explain_packed(list(map(_describe, entries))):
        raise RefusedError(reason, where=location, hint=hint_at_raw_names())


def _describe(entry: TensorEntry) -> tuple[str, Shape, str]:
    return entry.name, entry.shape, entry.dtype.name


def hint_at_raw_names(advice: str = "") -> str:
    """Returns a hint that ends with the option that writes the raw state dict."""
    raw = "pass --names live to write the raw state dict all the same"
    return f"{advice}; {raw}" if advice else raw


def is_quantized(name: Fqn, shape: Shape, names: Mapping[Fqn, DType]) -> bool:
    scale = _SCALE.fullmatch(name)
    if scale is not None:
        bases = (names.get(Fqn(scale[1] + end)) for end in ("", ".qweight", "_packed", "_blocks"))
        return any(
            base is not None and (base.itemsize == 1 or base.kind == "int") for base in bases
        )
    is_scaled = any(Fqn(name + end) in names for end in _SCALE_ENDINGS)
    is_of_bitsandbytes = _is_column(name, shape) or _PACKED.search(name) is not None
    return is_of_bitsandbytes or (names[name].itemsize == 1 and is_scaled)


# How many parameters a stored tensor stands for, and what it is where its name and shape say so.
#
# Source: bitsandbytes 0.50, `functional.py` (two codes of 4 bits in a byte, in a column of any
# element type); AutoGPTQ and AutoAWQ, whose `qweight` and `qzeros` pack numbers into 32 bits;
# compressed-tensors, `pack-quantized` (`weight_packed` by columns, `weight_zero_point` by rows) and
# `nvfp4-pack-quantized` (two in a byte); openai/gpt-oss, MXFP4 (`_blocks`); peft,
# `tuners/lora/layer.py` (A has the rank first, B second).
_RANK_OF_FACTOR = r"(?:^|\.)lora_(?:embedding_)?([AB])(?:\.|$)"  # few commands compile these
_WORD_BITS = 32
_BITS = (2, 3, 4, 8)
# What is stored with a packed weight, by the ending of its name.
_COMPANIONS = (
    ("scales", r"(\.(nested_)?absmax|\.SCB|[._]scales?(_inv|_2)?)$"),
    ("zero points", r"(\.qzeros|_zero_point)$"),
    (
        "settings",
        r"(\.(nested_)?quant_map|\.quant_state\.bitsandbytes__\w+|_shape|g_idx|\.weight_format)$",
    ),
)
FOUR_BIT, _RANK = "4-bit", "rank"
_BASE_LAYER = ".base_layer."
_QUANT = "quant_state.bitsandbytes__"


class StoredWeight(Struct, frozen=True):
    """What a stored tensor is."""

    parameters: int  # how many parameters of the model it holds; none for scales
    label: str = ""  # such as `4-bit`, `scales` or `rank 8`; empty for a plain tensor

    @property
    def is_packed(self) -> bool:
        """Whether it is a packed weight, or stored with one."""
        return bool(self.label) and not self.label.startswith(_RANK)


def describe_stored(tensors: Iterable[tuple[str, Shape, str]]) -> dict[str, StoredWeight]:
    """Describes the tensors of one model.

    `tensors`: names, shapes and element types.

    >>> found = describe_stored([("q_proj.weight", (8, 1), "uint8"), ("q_proj.lora_A", (4, 3), "")])
    >>> found["q_proj.weight"], found["q_proj.lora_A"]
    (StoredWeight(parameters=16, label='4-bit'), StoredWeight(parameters=12, label='rank 4'))
    """
    rows = list(tensors)
    groups: dict[str, dict[str, Shape]] = {}
    for name, shape, _ in rows:
        groups.setdefault(find_dense_name(name), {})[name] = shape
    return {
        name: _describe_stored(name, shape, dtype, groups[find_dense_name(name)])
        for name, shape, dtype in rows
    }


def _describe_stored(
    name: str, shape: Shape, dtype: str, group: Mapping[str, Shape]
) -> StoredWeight:
    """Describes a tensor; `group` has the shapes of all that are stored for its weight."""
    elements = math.prod(shape)
    factor = re.search(_RANK_OF_FACTOR, name)
    if factor is not None and len(shape) >= _MATRIX:
        return StoredWeight(elements, f"{_RANK} {shape[0 if factor[1] == 'A' else 1]:,}")
    if len(group) > 1:
        for label, ending in _COMPANIONS:
            if re.search(ending, name):
                return StoredWeight(0, label)
    labels = {
        label for label, ending in _COMPANIONS if any(re.search(ending, one) for one in group)
    }
    if name.endswith(".qweight"):
        bits = _find_bits(group, "qzeros", "scales", 1)
        return StoredWeight(elements * _WORD_BITS // bits if bits else elements, _bits_text(bits))
    is_eight_bit = any(other.endswith("SCB") for other in group)
    if any(_QUANT in other for other in group) or (not is_eight_bit and _is_column(name, shape)):
        return StoredWeight(2 * elements * dtype_named(dtype).itemsize, FOUR_BIT)
    is_paired = (
        name.endswith(("_blocks", "weight_packed")) or f"{name}_scale_2" in group
    ) and "scales" in labels
    if is_paired and dtype == "uint8":
        return StoredWeight(2 * elements, FOUR_BIT)
    if name.endswith("weight_packed"):  # without zero points, the configuration alone has the bits
        bits = _find_bits(group, "weight_zero_point", "weight_scale", 0)
        return StoredWeight(elements * _WORD_BITS // bits if bits else elements, _bits_text(bits))
    if "scales" in labels and dtype in {"int8", "uint8"}:
        return StoredWeight(elements, _bits_text(8))
    return StoredWeight(elements)


def _bits_text(bits: int) -> str:
    return f"{bits}-bit" if bits else "packed"


def _is_column(name: str, shape: Shape) -> bool:
    """Returns whether a weight is packed by its shape, also where PEFT has it as `base_layer`."""
    if shape[1:] != (1,):
        return False
    return looks_packed(name.replace(_BASE_LAYER, "."), shape) or (
        _BASE_LAYER in name and name.endswith(".weight") and shape[0] > 1
    )


def _find_bits(group: Mapping[str, Shape], zeros: str, scales: str, packed: int) -> int:
    """Returns the bits of a number where zero points show them, else 0.

    `group`: shapes of what is stored for a weight, by name. `zeros`: how the name of its zero
    points ends, which are packed as the weight is. `scales`: how that of its scales ends. `packed`:
    the dimension in which zero points are packed.
    """
    first, second = (
        next((shape for name, shape in group.items() if name.endswith(f".{ending}")), ())
        for ending in (zeros, scales)
    )
    if len(first) != _MATRIX or len(second) != _MATRIX or not second[packed]:
        return 0
    bits = _WORD_BITS * first[packed] // second[packed]
    return bits if bits in _BITS and bits * second[packed] == _WORD_BITS * first[packed] else 0
