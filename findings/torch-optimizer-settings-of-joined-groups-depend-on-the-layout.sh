#!/bin/sh
# One checkpoint of two groups, loaded into one group, gives other settings nested than flattened.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: the state of an optimizer with two groups (0.1 and 0 of weight decay) does not fit one with a
# single group, as `Optimizer.load_state_dict` says by ValueError; or the group keeps its own decay.
#
# Seen: `set_optimizer_state_dict` loads it without an error, strict as it is. From the nested
# layout the group gets the decay of the last group of the checkpoint, 0, and all weights stop
# decaying. From the layout of `flatten_optimizer_state_dict=True` it gets that of the first, 0.1,
# and biases and norms decay too. The decay that the run has set, 0.3, is in neither. Three groups
# for the two are loaded too: flat each gets the settings of its parameters, nested one group is left
# without any setting, and the next step raises KeyError.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import copy

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def trained(*groups):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    named = dict(model.named_parameters())
    groups = [{"params": [named[n] for n in names], "weight_decay": decay} for names, decay in groups]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


ALL = ["0.weight", "0.bias", "1.weight", "1.bias"]
two = [(ALL[:1], 0.1), (ALL[1:], 0.0)]
three = [(ALL[:1], 0.7), (ALL[1:2], 0.8), (ALL[2:], 0.9)]
saved_model, saved = trained(*two)


def decays_after_load(flat, *groups):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = copy.deepcopy(get_optimizer_state_dict(saved_model, saved, options=options))
    model, optimizer = trained(*groups)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return [group.get("weight_decay") for group in optimizer.param_groups]


found = {
    (count, layout): decays_after_load(layout == "flat", *groups)
    for count, groups in [("one", [(ALL, 0.3)]), ("three", three)]
    for layout in ("nested", "flat")
}
for (count, layout), decays in found.items():
    print(f"{count} group(s), {layout}: {decays}")
assert found["one", "nested"] == [0.0]
assert found["one", "flat"] == [0.1]
assert found["three", "nested"] == [0.1, None, 0.0]
assert found["three", "flat"] == [0.1, 0.0, 0.0]
try:
    trained((ALL, 0.3))[1].load_state_dict(saved.state_dict())
except ValueError as error:
    print("Optimizer.load_state_dict:", error)
else:
    raise AssertionError("Optimizer.load_state_dict loads it too")
EOF
