#!/bin/sh
# Whether Transformers loads a file with block scales depends on `dtype` in config.json.
#
# Versions: transformers 5.23.0, safetensors 0.8.0, torch 2.13.0, Python 3.11.
#
# Guess: a tensor of F8_E8M0 or F4 beside the float32 weights of a model loads, or is reported as
# unexpected, with any configuration, as one of F8_E4M3 is.
#
# Seen: with `dtype` in config.json the model loads. Without it, as configurations of older models
# are, `from_pretrained` looks for the type of the weights in the file, by a table of its own that
# lacks F8_E8M0, F4, C64 and two more types of safetensors, and ends in "unknown dtype". The type of
# all weights is float32 in both files; passing dtype=torch.float32 loads it, dtype="auto" does not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained("m")
weights = load_file("m/model.safetensors")
config = json.load(open("m/config.json"))
found = {}
for kind in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
    scale = torch.zeros(4, dtype=torch.uint8).view(kind)
    save_file({**weights, "scale": scale}, "m/model.safetensors", metadata={"format": "pt"})
    for says in (True, False):
        said = {k: v for k, v in config.items() if says or k not in {"dtype", "torch_dtype"}}
        json.dump(said, open("m/config.json", "w"))
        for options in ({}, {"dtype": "auto"}, {"dtype": torch.float32}):
            try:
                AutoModelForCausalLM.from_pretrained("m", **options)
                end = "loads"
            except ValueError as error:
                end = str(error)
            found[kind, says, str(options)] = end
            print(f"{kind}, dtype in config.json {says}, {options}: {end}")
for (kind, says, options), end in found.items():
    needs = kind != torch.float8_e4m3fn and not says and "float32" not in options
    assert ("unknown dtype" in end) == needs, (kind, says, options)
EOF
