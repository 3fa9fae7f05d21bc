#!/bin/sh
# A combination of rsLoRA adapters is the square root of its rank times too large.
#
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: `add_weighted_adapter` of one adapter with weight 1 gives an adapter with the same update,
# and "cat" of two gives the weighted sum exactly, whatever the scaling of the adapters.
#
# Seen: the factors of the adapters are applied to the new weights, and the new adapter gets
# `lora_alpha` equal to its rank, to have the factor 1. But `use_rslora` stays True from the first
# adapter, and alpha divided by the root of the rank is that root: 2 for rank 4, 2.83 for two of
# them in "cat", 8 for rank 64. "linear", "svd" and "ties" have it too. The saved adapter has the
# same configuration, so that loading and merging it repeat the wrong scale. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> log || { tail log; exit 1; }
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8))


def update(model, name):
    return model.base_model.model[0].get_delta_weight(name).detach()


def factors(rslora):
    config = {"r": 4, "lora_alpha": 16, "target_modules": ["0"], "use_rslora": rslora}
    model = get_peft_model(base(), LoraConfig(**config), adapter_name="one")
    model.add_adapter("two", LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    one, two = update(model, "one"), update(model, "two")
    found = {}
    for kind, options in [("cat", {}), ("linear", {}), ("svd", {"svd_rank": 4}), ("ties", {"density": 1.0})]:
        model.add_weighted_adapter(["one"], [1.0], kind, combination_type=kind, **options)
        found[kind] = (update(model, kind) / one).median().item()
    model.add_weighted_adapter(["one", "two"], [0.7, 0.3], "both", combination_type="cat")
    found["cat of two"] = (update(model, "both") / (0.7 * one + 0.3 * two)).median().item()
    model.save_pretrained("saved", selected_adapters=["both"])
    loaded = PeftModel.from_pretrained(base(), "saved/both")
    assert torch.allclose(update(loaded, "default"), update(model, "both"))
    return {kind: round(factor, 2) for kind, factor in found.items()}


plain, rank_stabilized = factors(False), factors(True)
print("factor of the combined update, LoRA:", plain)
print("factor of the combined update, rsLoRA:", rank_stabilized)
assert set(plain.values()) == {1.0}
assert rank_stabilized == {"cat": 2.0, "linear": 2.0, "svd": 2.0, "ties": 2.0, "cat of two": 2.83}
EOF
