"""How Megatron-Core cuts each tensor over the ranks of tensor parallelism, by its name.

Files of ranks store no global shapes. A column-parallel layer is cut along axis 0, and so are its
biases; a row-parallel one along axis 1, its bias is whole. Each rank has its own part of the gate
and of the up projection in `linear_fc1`, one after the other.

Source: megatron/core/tensor_parallel/layers.py, megatron/core/transformer/{attention,mlp,
multi_latent_attention,multi_token_prediction,dot_product_attention}.py,
megatron/core/transformer/moe/{router,experts,shared_experts}.py, Megatron-Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from ckptkit.core.errors import FormatError
from ckptkit.core.index import Shape
from ckptkit.core.text import quote
from ckptkit.formats.pickle.torch_values import TensorRef

Cut = Literal["rows", "halves of rows", "columns", "whole", "rows or whole"]
_RULES: Mapping[Cut, re.Pattern[str]] = {
    "rows": re.compile(
        r"(?:.*\.)?(?:embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias)"
        r"|self_attention\.linear_(?:qkv|q|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)"
        r"|core_attention\.softmax_offset|eh_proj\.weight)"
    ),
    "halves of rows": re.compile(r".*\.linear_fc1\.(?:weight|bias)"),
    "columns": re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight"),
    "whole": re.compile(
        r"(?:.*\.)?(?:embedding\.(?:position|tokentype)_embeddings\.weight"
        r"|\w*norm\.(?:weight|bias)|\w+\.layer_norm_(?:weight|bias)"
        r"|(?:linear_proj|linear_fc2)\.bias"
        r"|router\.(?:weight|bias|expert_bias)|shared_experts\.gate_weight)"
    ),
    # Of Transformer Engine every rank has the whole, else its rows.
    "rows or whole": re.compile(r".*\.self_attention\.linear_(?:q|kv)_down_proj\.weight"),
}
_FC1, _FC2 = ".linear_fc1.", ".linear_fc2.weight"
_MATRIX = 2


def find_cut(name: str) -> Cut | None:
    """Returns how a tensor is cut; None if that is not known of its name.

    >>> find_cut("decoder.layers.0.mlp.linear_fc2.weight"), find_cut("decoder.other.weight")
    ('columns', None)
    """
    return next((cut for cut, pattern in _RULES.items() if pattern.fullmatch(name)), None)


def is_gated(name: str, tensors: Mapping[str, TensorRef], *, where: str) -> bool:
    """Returns whether the rows of a `linear_fc1` are those of a gate and of an up projection."""
    base = name[: name.rindex(_FC1)]
    shape, outer = tensors[name].shape, _shape_of(tensors, base + _FC2)
    if shape and len(outer) == _MATRIX and shape[0] in {outer[1], 2 * outer[1]}:
        return shape[0] != outer[1]
    raise FormatError(
        f"{quote(name)} of shape {list(shape)} does not fit {quote(base + _FC2)} of shape"
        f" {list(outer)}: expected as many rows as that has columns, or twice as many",
        where=where,
    )


def has_whole_rows(
    name: str, tensors: Mapping[str, TensorRef], parts: int, rotary: int | None, *, where: str
) -> bool:
    """Returns whether every rank has all rows of a down projection.

    They are the columns of the up projection, and for keys and values those of the rotary
    embedding besides.
    """
    up = name.replace("_down_proj", "_up_proj")
    shape, outer = tensors[name].shape, _shape_of(tensors, up)
    if len(outer) == len(shape) == _MATRIX:
        added = 0 if "linear_q_" in name else rotary
        if added is None:
            return shape[0] > outer[1]
        if shape[0] in {outer[1] + added, (outer[1] + added) / parts}:
            return shape[0] == outer[1] + added
    raise FormatError(
        f"{quote(name)} of shape {list(shape)} does not fit {quote(up)} of shape {list(outer)}:"
        f" expected as many rows as that has columns{', and the rotary ones' * ('kv' in name)}, or"
        f" a part of {parts}",
        where=where,
    )


def _shape_of(tensors: Mapping[str, TensorRef], name: str) -> Shape:
    tensor = tensors.get(name)
    return () if tensor is None else tensor.shape
