#!/bin/sh
# A model that is saved in shards over one of a single file is not the one that is loaded again.
#
# Versions: transformers 5.23.0, torch 2.13.0, safetensors 0.8.0, Python 3.11.
#
# Guess: `save_pretrained` into a folder with an older model replaces its weights, as it does where
# both have shards: the older model.safetensors goes, and `from_pretrained` loads the new shards.
#
# Seen: old shards are deleted, an old model.safetensors is not. Beside it lie the new shards and
# their index, and `from_pretrained` takes model.safetensors first: the old weights load, complete,
# without a warning. A model that has outgrown `max_shard_size` (another type of elements, a
# resized vocabulary, a lower limit) is saved and cannot be loaded. The other way round the index
# of the old shards stays beside the new model.safetensors, and names files that are gone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> log || { tail log; exit 1; }
import json
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)


def weights():
    return sorted(name for name in os.listdir("model") if "safetensors" in name)


def is_loaded(model):
    loaded = LlamaForCausalLM.from_pretrained("model").state_dict()
    return all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


old, new, newest = (LlamaForCausalLM(CONFIG) for _ in range(3))
old.save_pretrained("model")
assert weights() == ["model.safetensors"] and is_loaded(old)
new.save_pretrained("model", max_shard_size="8KB")
print("after the save in shards:", weights())
print("loads the old model:", is_loaded(old), "- the new one:", is_loaded(new))
assert "model.safetensors" in weights() and "model.safetensors.index.json" in weights()
assert is_loaded(old) and not is_loaded(new)

os.remove("model/model.safetensors")
assert is_loaded(new)
newest.save_pretrained("model")
print("after a save in one file:", weights())
assert weights() == ["model.safetensors", "model.safetensors.index.json"] and is_loaded(newest)
named = set(json.load(open("model/model.safetensors.index.json"))["weight_map"].values())
assert named and not any(os.path.exists(f"model/{name}") for name in named)
EOF
