#!/bin/sh
# A merged model of PEFT has the update of tied embeddings twice, the live one once.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11.
#
# Guess: LoRA on `embed_tokens` and `lm_head` of a model that ties them, with
# `ensure_weight_tying=True`, is merged once: `merge_and_unload` gives the logits of the live model.
#
# Seen: the base has one weight for both modules, and each of the two adapter layers adds the same
# update to it. Embeddings and head of the merged model have the update two times, and its logits
# are others than those of the model that was trained. No warning says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()
before = model.model.embed_tokens.weight.detach().clone()
targets = ["embed_tokens", "lm_head"]
live = get_peft_model(model, LoraConfig(r=2, target_modules=targets, ensure_weight_tying=True)).eval()
for name, parameter in live.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter)
layer = live.base_model.model.model.embed_tokens
update = layer.get_delta_weight("default").detach()
tokens = torch.arange(8)[None]
with torch.no_grad():
    expected = live(tokens).logits
    merged = live.merge_and_unload()
    found = merged(tokens).logits
times = ((merged.model.embed_tokens.weight - before) / update).median().item()
print(f"the update stands {times:.2f} times in the merged embeddings")
print(f"largest difference of logits: {(found - expected).abs().max():.3f} of {expected.abs().max():.3f}")
assert round(times, 2) == 2.0
assert not torch.allclose(found, expected, atol=1e-3)
EOF
