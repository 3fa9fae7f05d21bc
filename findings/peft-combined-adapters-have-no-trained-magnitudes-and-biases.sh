#!/bin/sh
# A combination of DoRA adapters has the magnitudes of an untrained one, and lora_bias is zero in it.
#
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: `add_weighted_adapter` combines all that an adapter has trained, or refuses an adapter with
# parts that it cannot combine, as it refuses two with the same `modules_to_save`.
#
# Seen: only the matrices A and B are combined. The new adapter of two DoRA adapters has the
# magnitude vectors that a fresh adapter on this base begins with, and with `lora_bias=True` its
# biases are zero. One adapter with weight 1 is not itself any more: its outputs differ by 30%
# and more. The new adapter is saved with `use_dora` or `lora_bias`, and nothing is said.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" -W always - <<'EOF' 2> log || { tail log; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def one_with_weight_one(**options):
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["0"], **options)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), config, adapter_name="one")
    layer = model.base_model.model[0]
    fresh = layer.lora_magnitude_vector["one"].weight.detach().clone() if "use_dora" in options else None
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.5 * torch.randn_like(parameter)
    inputs = torch.randn(16, 8)
    expected = model(inputs).detach()
    model.add_weighted_adapter(["one"], [1.0], "combined", combination_type="cat")
    assert torch.allclose(layer.get_delta_weight("combined"), layer.get_delta_weight("one"))
    model.set_adapter("combined")
    difference = (model(inputs).detach() - expected).abs().max() / expected.abs().max()
    return layer, fresh, difference.item()


_, _, plain = one_with_weight_one()
dora, fresh, dora_difference = one_with_weight_one(use_dora=True)
biased, _, bias_difference = one_with_weight_one(lora_bias=True)
print(f"one adapter with weight 1, outputs differ by: LoRA {plain:.3f}, DoRA {dora_difference:.3f}")
print(f"with lora_bias {bias_difference:.3f}")
magnitudes = {name: part.weight.detach() for name, part in dora.lora_magnitude_vector.items()}
assert plain < 1e-5 and dora_difference > 0.1 and bias_difference > 0.1
assert not torch.allclose(magnitudes["one"], fresh)
assert torch.allclose(magnitudes["combined"], fresh)
print("magnitudes: trained", magnitudes["one"][:3].tolist(), "combined", magnitudes["combined"][:3].tolist())
assert biased.lora_B["one"].bias.abs().max() > 0.1
assert biased.lora_B["combined"].bias.abs().max() == 0
EOF
