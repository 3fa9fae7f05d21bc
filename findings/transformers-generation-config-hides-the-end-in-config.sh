#!/bin/sh
# A generation_config.json without eos_token_id hides the eos_token_id of config.json.
#
# Versions: transformers 5.23.0, torch 2.13.0, Python 3.11.
#
# Guess: generate() takes what generation_config.json does not say from config.json, so that a
# model whose config.json has eos_token_id stops there either way.
#
# Seen: without generation_config.json the id of config.json is used and generation stops after one
# token. With a generation_config.json that has a temperature alone, the model loads with
# generation_config.eos_token_id None, nothing is said, and generation goes on to the limit of
# length. A file that adds a sampling option takes the end of the text away.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=1, eos_token_id=5, pad_token_id=0)
model = LlamaForCausalLM(config)
with torch.no_grad():  # every next token is 5
    model.model.norm.weight.fill_(1)
    model.model.embed_tokens.weight.fill_(1)
    model.lm_head.weight.zero_()
    model.lm_head.weight[5] = 1
model.save_pretrained("model")
file = Path("model/generation_config.json")


def count(content):
    if content is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(json.dumps(content))
    model = AutoModelForCausalLM.from_pretrained("model")
    tokens = torch.ones(1, 1, dtype=torch.long)
    made = model.generate(tokens, max_new_tokens=12, do_sample=False)
    return model.generation_config.eos_token_id, made.shape[1] - 1


alone, beside = count(None), count({"temperature": 0.7})
print(f"without generation_config.json: eos_token_id {alone[0]}, {alone[1]} new tokens")
print(f"with a temperature in it: eos_token_id {beside[0]}, {beside[1]} new tokens")
assert json.loads(Path("model/config.json").read_text())["eos_token_id"] == 5
assert alone == (5, 1)
assert beside == (None, 12)
EOF
