"""Parameters of packed weights, and what tensors are by their names and shapes."""

from __future__ import annotations

import pytest

from ckptkit.plan.weight_kinds import StoredWeight, describe_stored

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("tensors", "name", "parameters", "label"),
    [
        # bitsandbytes, two codes in a byte, in a column of any element type
        ([("q_proj.weight", (8, 1), "uint8")], "q_proj.weight", 16, "4-bit"),
        ([("q_proj.weight", (2, 1), "float32")], "q_proj.weight", 16, "4-bit"),
        (
            [("m.q_proj.base_layer.weight", (4, 1), "bfloat16")],
            "m.q_proj.base_layer.weight",
            16,
            "4-bit",
        ),
        (
            [
                ("fc.weight", (8, 1), "uint8"),
                ("fc.weight.absmax", (1,), "float32"),
                ("fc.weight.quant_state.bitsandbytes__nf4", (90,), "uint8"),
            ],
            "fc.weight",
            16,
            "4-bit",
        ),
        (
            [("fc.weight", (8, 1), "uint8"), ("fc.weight.absmax", (1,), "float32")],
            "fc.weight.absmax",
            0,
            "scales",
        ),
        ([("fc.weight", (4, 2), "int8"), ("fc.SCB", (4,), "float32")], "fc.weight", 8, "8-bit"),
        ([("fc.weight", (4, 2), "int8"), ("fc.SCB", (4,), "float32")], "fc.SCB", 0, "scales"),
        # GPTQ and AWQ: the zero points show the bits
        (
            [
                ("fc.qweight", (2, 16), "int32"),
                ("fc.qzeros", (1, 2), "int32"),
                ("fc.scales", (1, 16), "float16"),
            ],
            "fc.qweight",
            256,
            "4-bit",
        ),
        (
            [
                ("fc.qweight", (4, 16), "int32"),
                ("fc.qzeros", (1, 4), "int32"),
                ("fc.scales", (1, 16), "float16"),
            ],
            "fc.qweight",
            256,
            "8-bit",
        ),
        (
            [("fc.qweight", (2, 16), "int32"), ("fc.qzeros", (1, 2), "int32")],
            "fc.qzeros",
            0,
            "zero points",
        ),
        # compressed-tensors: zero points, packed by rows, show the bits
        (
            [
                ("fc.weight_packed", (16, 2), "int32"),
                ("fc.weight_zero_point", (2, 1), "int32"),
                ("fc.weight_scale", (16, 1), "bfloat16"),
                ("fc.weight_shape", (2,), "int64"),
            ],
            "fc.weight_packed",
            256,
            "4-bit",
        ),
        (
            [
                ("fc.weight_packed", (16, 4), "int32"),
                ("fc.weight_zero_point", (4, 1), "int32"),
                ("fc.weight_scale", (16, 1), "bfloat16"),
            ],
            "fc.weight_packed",
            256,
            "8-bit",
        ),
        # MXFP4, NVFP4 and FP8
        (
            [
                ("e.up_proj_blocks", (2, 4, 1, 16), "uint8"),
                ("e.up_proj_scales", (2, 4, 1), "uint8"),
            ],
            "e.up_proj_blocks",
            256,
            "4-bit",
        ),
        (
            [
                ("fc.weight", (4, 8), "uint8"),
                ("fc.weight_scale", (4, 1), FP8),
                ("fc.weight_scale_2", (), "float32"),
            ],
            "fc.weight",
            64,
            "4-bit",
        ),
        ([("fc.weight", (4, 8), FP8), ("fc.weight_scale", (), "float32")], "fc.weight", 32, ""),
        (
            [("fc.weight", (4, 8), FP8), ("fc.weight_scale_inv", (1, 1), "float32")],
            "fc.weight_scale_inv",
            0,
            "scales",
        ),
        # factors of LoRA
        ([("q.lora_A.weight", (4, 16), "float32")], "q.lora_A.weight", 64, "rank 4"),
        (
            [("q.lora_B.default.weight", (16, 4), "float32")],
            "q.lora_B.default.weight",
            64,
            "rank 4",
        ),
        ([("e.lora_embedding_A", (4, 50), "float32")], "e.lora_embedding_A", 200, "rank 4"),
        ([("c.lora_A.weight", (4, 3, 3, 3), "float32")], "c.lora_A.weight", 108, "rank 4"),
        # plain tensors, some of which are named like others
        ([("logit_scale", (), "float32")], "logit_scale", 1, ""),
        ([("norm.weight", (8,), "float32"), ("norm.bias", (8,), "float32")], "norm.bias", 8, ""),
        ([("score.weight", (2, 1), "float32")], "score.weight", 2, ""),
    ],
)
def test_a_stored_tensor_stands_for_so_many_parameters(
    tensors: list[tuple[str, tuple[int, ...], str]], name: str, parameters: int, label: str
) -> None:
    assert describe_stored(tensors)[name] == StoredWeight(parameters, label)
