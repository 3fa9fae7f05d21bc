#!/bin/sh
# A model of diffusers under FSDP2 records a class that no library has.
#
# Versions: diffusers 0.42.1, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: fully_shard changes the class of a module to a subclass called FSDP + name; save_pretrained
# of diffusers writes the name of the class of the library to config.json, as that of Transformers
# does to "architectures".
#
# Seen: diffusers writes "_class_name": "FSDPAutoencoderKL", and its AutoModel raises ValueError on
# that folder, in words about a model_index.json that is not there. Transformers 5 removes the prefix and writes the name of its class.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 diffusers==0.42.1
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import json
from pathlib import Path

import torch.distributed as dist
from diffusers import AutoencoderKL, AutoModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

state = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=2)
state.save_pretrained("diffusers")
dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
fully_shard(state, mesh=mesh)
state.save_config("diffusers")
sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1))
fully_shard(model, mesh=mesh)
model.save_pretrained("transformers", state_dict={})
dist.destroy_process_group()

name = json.loads(Path("diffusers/config.json").read_text())["_class_name"]
other = json.loads(Path("transformers/config.json").read_text())["architectures"]
try:
    AutoModel.from_pretrained("diffusers")
    said = "loads"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(f"diffusers records {name!r}; AutoModel: {said}")
print(f"Transformers records {other}")
assert name == "FSDPAutoencoderKL"
assert said.startswith("ValueError: `diffusers` has no class")
assert other == ["LlamaForCausalLM"]
EOF
