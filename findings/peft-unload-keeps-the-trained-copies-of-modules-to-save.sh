#!/bin/sh
# `unload()` of PEFT returns a base model with the trained copies of `modules_to_save` in it.
#
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.23.0, Python 3.11.
#
# Guess: `unload()`, "the base model by removing all the PEFT modules", returns what
# `disable_adapter()` shows: the model as it was before `get_peft_model`. `merge_and_unload()` is the
# one that keeps what was trained.
#
# Seen: LoRA is removed, and so are the changes of `trainable_token_indices`. Modules of
# `modules_to_save`, such as a head or embeddings, are replaced by their trained copies, and the
# original ones are dropped with the wrappers. The result is neither the base nor the tuned model:
# loading another adapter on it, or saving it as the base, mixes two runs. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> log || { tail log; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def differences(**options):
    torch.manual_seed(0)
    base = Model().eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = base(tokens)
        tuned = get_peft_model(base, LoraConfig(r=2, target_modules=["body"], **options)).eval()
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
        live = tuned(tokens)
        with tuned.disable_adapter():
            disabled = tuned(tokens)
        unloaded = tuned.unload()(tokens)
    assert torch.allclose(disabled, expected, atol=1e-6)
    return [(unloaded - other).abs().max().item() for other in (expected, live)]


found = {
    "LoRA alone": differences(),
    "trainable_token_indices": differences(trainable_token_indices={"embed": [1, 2]}),
    "modules_to_save": differences(modules_to_save=["head"]),
}
for name, (of_base, of_live) in found.items():
    print(f"{name}: unloaded differs by {of_base:.3f} from the base, {of_live:.3f} from the tuned model")
assert found["LoRA alone"][0] < 1e-5 and found["trainable_token_indices"][0] < 1e-5
assert min(found["modules_to_save"]) > 0.1
EOF
