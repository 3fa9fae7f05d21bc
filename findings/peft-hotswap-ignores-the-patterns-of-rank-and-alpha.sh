#!/bin/sh
# An adapter with patterns of rank or alpha is swapped in with the scale of the other layers.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11.
#
# Guess: `hotswap_adapter` of an adapter with another alpha, rank or rsLoRA gives the logits of that
# adapter, or raises.
#
# Seen: the weights are those of the new adapter. Its `rank_pattern` and `alpha_pattern` are matched
# with the names of tensors, `...q_proj.lora_A.default.weight`, in place of modules, so that no
# pattern ever matches, and the scale is `lora_alpha / r`. With rank 2 for q_proj in an adapter of
# rank 4, its update is half of what was trained, by `alpha_pattern` of 32 for 8 a quarter. An
# adapter that is swapped for itself becomes another one, too. `use_rslora` and `use_dora` are
# compared first, and raise where they differ. No error, no warning here.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

tokens = torch.arange(10)[None]


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 48, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()


def save(folder, seed, **options):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)
    model = get_peft_model(base(), config).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
    return model(tokens).logits


def scale(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]


cases = {
    "no pattern": ({}, {}, 2.0),
    "rank_pattern": ({}, {"rank_pattern": {"q_proj": 2}}, 4.0),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 32}}, {"alpha_pattern": {"q_proj": 32}}, 8.0),
}
with torch.no_grad():
    for number, (name, (old, new, trained)) in enumerate(cases.items()):
        first, second = f"{number}/first", f"{number}/second"
        save(first, 1, **old)
        expected = save(second, 2, **new)
        loaded = PeftModel.from_pretrained(base(), second).eval()
        swapped = PeftModel.from_pretrained(base(), first).eval()
        hotswap_adapter(swapped, second, "default")
        itself = PeftModel.from_pretrained(base(), second).eval()
        hotswap_adapter(itself, second, "default")
        apart = float((swapped(tokens).logits - expected).abs().max())
        print(f"{name}: scale of q_proj {scale(loaded)} loaded, {scale(swapped)} swapped, logits differ by {apart:.4f}")
        assert torch.allclose(loaded(tokens).logits, expected, atol=1e-5)
        assert scale(loaded) == trained and scale(swapped) == scale(itself) == 2.0
        assert (apart > 0.01) == (trained != 2.0)
PY
