#!/bin/sh
# torch loads no state of a schedule-free optimizer from the flat layout, and says nothing.
#
# Versions: torch 2.13.0, schedulefree 1.4.1, Python 3.11.
#
# Guess: a state of a schedule-free optimizer goes through `get_optimizer_state_dict` and
# `set_optimizer_state_dict`, nested and flattened, and the resumed run takes the same steps as the
# one that went on.
#
# Seen: that is so for the nested layout. From the flat one the settings of the groups are loaded,
# and the states are not: `z` and `exp_avg_sq` are gone, and the next step begins both anew. Strict
# loading finds nothing missing. The loader takes one step to learn which names a state has. A
# schedule-free optimizer refuses that step before `train()`, and `train()` looks the states up,
# which leaves an empty entry for each parameter. The loader takes these entries for the states of
# an optimizer that has stepped, and looks for no name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 schedulefree==1.4.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
import copy

import torch
from schedulefree import AdamWScheduleFree
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)


def build(train=True):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01)
    if train:
        optimizer.train()
    return model, optimizer


def step(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def load(model, optimizer, saved, options):
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)


for flat in (False, True):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build()
    step(model, optimizer, 10)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    try:
        load(*build(train=False), saved, options)
        refused = False
    except Exception as error:
        refused = "not in train mode" in str(error)
    resumed, resumed_optimizer = build()
    load(resumed, resumed_optimizer, saved, options)
    names = sorted(resumed_optimizer.state[resumed.weight])
    count = resumed_optimizer.param_groups[0]["k"]
    step(model, optimizer, 10)
    step(resumed, resumed_optimizer, 10)
    apart = float((model.weight - resumed.weight).detach().abs().max())
    print(f"flat {flat}: states {names}, {count} steps counted, weights differ by {apart:.4f}")
    assert refused and count == 10
    assert names == ([] if flat else ["exp_avg_sq", "z"])
    assert (apart > 0.001) == flat and (flat or apart == 0)
PY
