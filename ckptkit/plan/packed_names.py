"""Names of the tensors that quantization methods store in the place of a weight."""

from __future__ import annotations

import re

# GPTQ, AWQ and AQLM keep their tensors in the place of `weight`; bitsandbytes beside it; fp8 and
# compressed tensors with an ending; MXFP4 with blocks and scales of fused experts.
_IN_PLACE = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|codes|codebooks|weight_packed|weight_shape|weight_scale"
    r"|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_g_idx"
    r"|input_scale|input_global_scale|input_zero_point|k_scale|v_scale|q_scale|SCB|weight_format"
    r"|activation_scale|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB"
    r"|quant_state\.bitsandbytes__\w+))$"
)
_ENDING = re.compile(r"(_blocks|_scales|_scale_inv|_scale|_packed)$")


def dense_name(name: str) -> str:
    """Returns the name of the weight that a packed tensor stands for, or belongs to.

    >>> dense_name("layers.0.q_proj.qweight"), dense_name("layers.0.q_proj.weight.absmax")
    ('layers.0.q_proj.weight', 'layers.0.q_proj.weight')
    >>> dense_name("mlp.experts.down_proj_blocks"), dense_name("norm.weight")
    ('mlp.experts.down_proj', 'norm.weight')
    """
    found = _IN_PLACE.sub(".weight", name)
    return found if found != name else _ENDING.sub("", name)
