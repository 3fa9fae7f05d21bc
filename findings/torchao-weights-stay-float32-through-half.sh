#!/bin/sh
# A model with weights of torchao says float32 after half(), and no error tells that it stayed.
#
# Versions: torchao 0.18.0, torch 2.13.0 (CPU), Python 3.11.
#
# Guess: `model.half()` and `.to(torch.bfloat16)` change the element type that quantized weights
# have after `dequantize()`, as they do for the other parameters, or raise.
#
# Seen: Int8Tensor and Float8Tensor return themselves from half(), double() and .to(dtype), and still
# say float32, while the norm beside them is float16. `is_quantized` is False for both, and their
# storage claims four bytes for each element, 16,384 where the packed numbers have 4,096. What plans
# files or memory by dtype and storage of a parameter is wrong by a factor of four.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

for kind in (Int8WeightOnlyConfig, Float8WeightOnlyConfig):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.LayerNorm(64))
    quantize_(model, kind())
    weight = model[0].weight
    storage_bytes, packed_bytes = weight.untyped_storage().nbytes(), weight.qdata.nbytes
    model.half()
    after = model[0].weight
    types = {
        "half": after.dtype,
        "dequantized": after.dequantize().dtype,
        "norm": model[1].weight.dtype,
        "double": weight.double().dtype,
        "to": weight.to(torch.bfloat16).dtype,
    }
    print(type(weight.data).__name__, f"is_quantized {weight.is_quantized}")
    print("  ", {name: str(value) for name, value in types.items()})
    print(f"   storage {storage_bytes} bytes, packed numbers {packed_bytes} bytes")
    assert types.pop("norm") == torch.float16
    assert set(types.values()) == {torch.float32}
    assert not weight.is_quantized
    assert (storage_bytes, packed_bytes) == (16384, 4096)
EOF
