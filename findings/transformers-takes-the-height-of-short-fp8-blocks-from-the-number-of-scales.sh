#!/bin/sh
# Transformers unpacks FP8 weights whose last block is short with blocks of another height.
#
# Versions: transformers 5.23.0, torch 2.13.0, safetensors 0.8.0, on a CPU, Python 3.11.
#
# Guess: rows of a weight that 128 does not divide are unpacked by `weight_block_size` of the
# configuration, the last block short, as DeepSeek publishes such weights; or they are refused.
#
# Seen: the height of a block is the number of rows divided by the number of rows of scales. A weight
# of 192 rows with two rows of scales has blocks of 96 then: rows 96 to 127 get the scale of the
# second block, without an error. Where the division has a rest (320 rows, three rows of scales) the
# weight is refused: "Weight shape (320, 640) not divisible by scale grid (3, 5)".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - 2> log <<'EOF'
import json

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BLOCK = 128


def load_key_projection(heads):
    """Returns the rows' scales that a loaded weight of ones shows; 64 rows for each head."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128 * heads, intermediate_size=256, num_hidden_layers=1, head_dim=64,
        num_attention_heads=heads * 2, num_key_value_heads=heads, tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        grid = -(-rows // BLOCK), -(-columns // BLOCK)
        tensors[name] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
        # The scale of a block is one more than the number of its row.
        scales = torch.arange(1.0, grid[0] + 1)[:, None].expand(grid)
        tensors[name.replace("weight", "weight_scale_inv")] = scales.contiguous()
    save_file(tensors, "model.safetensors", metadata={"format": "pt"})
    said = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    said["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
    }
    json.dump(said, open("config.json", "w"))
    loaded = AutoModelForCausalLM.from_pretrained(".", dtype=torch.bfloat16)
    weight = loaded.model.layers[0].self_attn.k_proj.weight
    return [float(value) for value in weight[:, 0].float()]


shown = load_key_projection(3)
starts = [row for row in range(1, len(shown)) if shown[row] != shown[row - 1]]
print(f"192 rows, two rows of scales: the second scale begins at row {starts[0]}, not at {BLOCK}")
assert starts == [96], starts
try:
    shown = load_key_projection(5)
except Exception as error:
    print(f"320 rows, three rows of scales: refused, {type(error).__name__}")
else:
    missing = [row for row in range(1, len(shown)) if shown[row] != shown[row - 1]]
    raise SystemExit(f"320 rows were loaded, with changes at {missing}")
EOF
