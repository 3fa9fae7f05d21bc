#!/bin/sh
# What save_lora_adapter of diffusers writes, load_lora_adapter of the same folder does not find.
#
# Versions: diffusers 0.42.1, peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: model.save_lora_adapter(folder) and model.load_lora_adapter(folder, prefix=None) are a pair,
# as save_lora_weights and load_lora_weights of a pipeline are.
#
# Seen: the first writes pytorch_lora_weights.safetensors; the second looks for
# pytorch_lora_weights.bin and raises OSError, since use_safetensors is None there and counts as
# False. With use_safetensors=True, or weight_name, it loads. With the default prefix "transformer"
# it then takes nothing, because the file has no prefix, and says so in a warning only.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 diffusers==0.42.1 \
    peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import os

from diffusers import AutoencoderKL, FluxTransformer2DModel
from peft import LoraConfig

sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "in_channels": 4}
more = {"num_attention_heads": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8}


def build():
    return FluxTransformer2DModel(**sizes, **more, axes_dims_rope=(4, 4, 8))


model = build()
model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
model.save_lora_adapter("lora")
written = os.listdir("lora")


def load(**options):
    model = build()
    try:
        model.load_lora_adapter("lora", **options)
    except OSError as error:
        return str(error)
    return sum("lora_" in name for name in model.state_dict())


plain, named = load(prefix=None), load(prefix=None, use_safetensors=True)
prefixed = load(use_safetensors=True)
print(f"written: {written}")
print(f"load_lora_adapter(folder, prefix=None): {plain}")
print(f"with use_safetensors=True: {named} tensors of the adapter")
print(f"with the default prefix besides: {prefixed} tensors of the adapter")
assert written == ["pytorch_lora_weights.safetensors"]
assert "pytorch_lora_weights.bin" in str(plain)
assert named == 4
assert prefixed == 0
EOF
