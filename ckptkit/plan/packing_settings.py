"""What the configuration of a model says of how its weights are packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import RefusedError
from ckptkit.plan.number_formats import BITSANDBYTES, PackedGroup

CONFIG_KEYS = ("quantization_config", "compression_config")
"""The keys of `config.json` under which it is said."""
HEADER = "__metadata__"
"""Of the settings: the texts in the headers of safetensors."""
_TEXT, _COMPRESSED = "text_config", "compressed-tensors"
_LOADS = ("load_in_4bit", "load_in_8bit")
_PUBLISHED = "pass the configuration that was published with these files with --config"
WHOLE = 0
"""Of a block: all rows, or all columns."""
Blocks = tuple[int, int]
_TENSOR, _CHANNEL = (WHOLE, WHOLE), (1, WHOLE)


class Settings(Struct, frozen=True):
    """How the numbers of one weight are packed."""

    # The rows and columns that share a scale, as the packed tensor has them; several where the
    # shape of the scales decides.
    blocks: tuple[Blocks, ...]
    calls: str = ""  # what the configuration calls the scheme
    bits: tuple[int, ...] = (8,)  # of a number; several where the shape decides
    is_one_less: bool = False  # whether zero points are stored less one
    said: Mapping[str, Any] = {}  # what the configuration may only say as the tensors do


def find_quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns what a configuration says of packed weights; None where it says nothing."""
    text = (config or {}).get(_TEXT)
    for part in (config or {}, text if isinstance(text, Mapping) else {}):
        for key in CONFIG_KEYS:
            if isinstance(part.get(key), Mapping):
                found: Mapping[str, Any] = part[key]
                return found
    return None


def find_method(options: Mapping[str, Any] | None) -> str:
    """Returns `quant_method`, which bitsandbytes' configurations before 2023-08 do not have."""
    said = options or {}
    is_old = "quant_method" not in said and any(said.get(key) for key in _LOADS)
    return BITSANDBYTES if is_old else str(said.get("quant_method"))


def drop_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of the same model with unpacked weights."""
    rest = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    if isinstance(rest.get(_TEXT), Mapping):
        rest[_TEXT] = {k: v for k, v in rest[_TEXT].items() if k not in CONFIG_KEYS}
    return rest


def restore_quantization(
    config: Mapping[str, Any], packed: Mapping[str, Any], kept: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns a configuration that says of packed weights what another one does.

    `kept`: modules that the other one does not have, and that are not packed.
    """
    said = find_quantization(packed)
    assert said is not None  # noqa: S101  of a packed model
    if modules := sorted(set(kept)):
        key = "ignore" if said.get("quant_method") == _COMPRESSED else "modules_to_not_convert"
        said = {**said, key: [*(said.get(key) or ()), *modules]}
    own = next((key for key in CONFIG_KEYS if isinstance(packed.get(key), Mapping)), "")
    if own or not isinstance(config.get(_TEXT), Mapping):
        return {**config, own or CONFIG_KEYS[0]: said}
    key = next(key for key in CONFIG_KEYS if isinstance(packed[_TEXT].get(key), Mapping))
    return {**config, _TEXT: {**config[_TEXT], key: said}}


def read_settings(options: Mapping[str, Any], group: PackedGroup, *, location: str) -> Settings:
    """Returns how a weight is packed; refuses a configuration that says something else of it.

    `options`: what `find_quantization` returned.
    """
    scheme = group.scheme
    try:
        settings = _READERS[scheme.method](options, group)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        settings = None
    if settings is None:
        wrong = (
            f"does not say how {group.packed.name!r} is packed, which has the tensors of"
            f" {scheme.title}"
        )
    elif not settings.blocks or (scheme.calls and settings.calls not in scheme.calls):
        called = settings.calls or "nothing"
        wrong = f"has {called!r} for {group.name!r}, whose tensors are those of {scheme.title}"
    else:
        said = ((key, options.get(key), expected) for key, expected in settings.said.items())
        unlike = next((of for of in said if of[1] is not None and of[1] != of[2]), None)
        if unlike is None:
            return settings
        key, found, expected = unlike
        wrong = f"has {found!r} for {key!r}, expected {expected!r}: {group.name!r} is packed so"
    raise RefusedError(
        wrong, where=f"{location}, the configuration's quantization_config", hint=_PUBLISHED
    )


def _read_fp8(options: Mapping[str, Any], group: PackedGroup) -> Settings:
    if group.scheme.blocks is not None:
        return Settings((group.scheme.blocks,), options.get("expert_dtype") or "")
    sizes = options.get("weight_block_size")
    if sizes is None:
        return Settings((_TENSOR, _CHANNEL))
    # Where scales are powers of two, they are so by name.
    return Settings((_read_sizes(sizes),), options.get("scale_fmt") or "")


def _read_fixed(_options: Mapping[str, Any], group: PackedGroup) -> Settings:
    assert group.scheme.blocks is not None  # noqa: S101  a row of the table
    return Settings((group.scheme.blocks,))


def _read_groups(options: Mapping[str, Any], group: PackedGroup) -> Settings:
    """Reads the groups of compressed-tensors.

    Which of them a weight belongs to is found by the shapes of its tensors: names of classes in
    `targets` say nothing here.
    """
    scheme = group.scheme
    sparse = (options.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        return Settings((), sparse)
    if (options.get("transform_config") or {}).get("config_groups"):
        return Settings((), "a transform_config")  # part of the model is computed while it runs
    called, blocks, bits = "", [], []
    for one in options["config_groups"].values():
        name = one.get("format") or options.get("format") or ""
        weights = one.get("weights")
        if weights is None or name not in scheme.calls:
            called = called or name
            continue
        if weights.get("symmetric") is False and "zero" not in group.companions:
            called = called or "symmetric: false, without a zero point"
            continue
        called = name
        blocks.append(_read_strategy(weights))
        bits.append(int(weights["num_bits"]))
    return Settings(tuple(dict.fromkeys(blocks)), called, tuple(dict.fromkeys(bits)))


def _read_strategy(weights: Mapping[str, Any]) -> Blocks:
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "group")
    if strategy == "tensor":
        return _TENSOR
    if strategy == "channel" or size == -1:
        return _CHANNEL
    sizes = weights["block_structure"] if strategy == "block" else (1, size)
    return _read_sizes(sizes)


def _read_sizes(sizes: Any) -> Blocks:
    high, wide = (int(size) for size in sizes)
    if min(high, wide) < 1:
        raise ValueError
    return high, wide


def _read_modelopt(options: Mapping[str, Any], group: PackedGroup) -> Settings:
    called = options["quant_algo"]
    if called == "MIXED_PRECISION":
        module = group.name.rpartition(".")[0]
        called = options["quantized_layers"][module]["quant_algo"]
    fixed = group.scheme.blocks
    return Settings((_TENSOR, _CHANNEL) if fixed is None else (fixed,), called)


def _read_gptq(options: Mapping[str, Any], _group: PackedGroup) -> Settings:
    called = "marlin" if options.get("is_marlin_format") else options.get("checkpoint_format")
    called, bits = called or "gptq", int(options["bits"])
    return Settings((_read_rows(options),), called, (bits,), is_one_less=called == "gptq")


def _read_awq(options: Mapping[str, Any], _group: PackedGroup) -> Settings:
    bits, called = int(options.get("bits", 4)), str(options.get("version", "gemm")).lower()
    return Settings((_read_rows(options),), called, (bits,))


def _read_rows(options: Mapping[str, Any]) -> Blocks:
    size = int(options["group_size"])
    return (WHOLE, 1) if size == -1 else _read_sizes((size, 1))


def _read_torchao(options: Mapping[str, Any], group: PackedGroup) -> Settings:
    """Reads what torchao says of a tensor in the header of its file."""
    said = json.loads(options[HEADER][group.name])
    blocks = _read_sizes(said["_data"]["block_size"])
    return Settings((blocks,), said["_type"])


def _read_bitsandbytes(options: Mapping[str, Any], group: PackedGroup) -> Settings:
    """Reads what Transformers says beside what bitsandbytes stores with each weight itself."""
    said: dict[str, Any] = {key: key in group.scheme.calls for key in _LOADS}
    state = group.companions.get("state")
    if state is not None:
        said["bnb_4bit_quant_type"] = str(state.name).rpartition("__")[2]
        said["bnb_4bit_quant_storage"] = group.packed.dtype.name
        is_nested = any(".nested_" in ending for ending in group.companions)
        said["bnb_4bit_use_double_quant"] = is_nested
    called = next((key for key in _LOADS if options.get(key)), "")
    return Settings((_CHANNEL,), called, said=said)


_READERS = {
    "awq": _read_awq,
    BITSANDBYTES: _read_bitsandbytes,
    "compressed-tensors": _read_groups,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_fixed,
    "torchao": _read_torchao,
}
