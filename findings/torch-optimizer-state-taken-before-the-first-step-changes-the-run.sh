#!/bin/sh
# Reading the state of an optimizer before its first step changes the run that follows.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: `get_optimizer_state_dict` only reads. A run that saves at step 0, or reads the state once
# to size its checkpoint, takes the same steps afterwards as a run that does not.
#
# Seen: an optimizer without states is stepped once with gradients of zero and lr 0, and keeps what
# that step leaves. Adam counts one step too many: its first update is 0.744 of lr where it should
# be 1, and all corrections after it are those of a later step. SGD with `dampening` halves its
# first update. Rprop takes its first step sizes from lr 0, so its updates are 1e-6 where they
# should be 0.01, and after 20 steps they are still a hundredth. Nothing is logged.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

LR = 0.01


def updates(kind, read_first, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = kind(model.parameters(), lr=LR, **options)
    if read_first:
        get_optimizer_state_dict(model, optimizer)
    sizes = []
    for _ in range(20):
        before = model.weight.detach().clone()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append((model.weight.detach() - before).abs().mean().item())
    return sizes, optimizer.state[model.weight]


for kind, options, ratio in [
    (torch.optim.AdamW, {"weight_decay": 0.0}, 0.744),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, 0.5),
    (torch.optim.Rprop, {}, 0.0001),
]:
    expected, _ = updates(kind, False, **options)
    found, state = updates(kind, True, **options)
    print(
        f"{kind.__name__}: first update {found[0]:.6f} for {expected[0]:.6f},"
        f" 20th {found[19]:.6f} for {expected[19]:.6f}"
    )
    assert round(found[0] / expected[0], 4 if ratio < 0.01 else 3) == ratio, found[0] / expected[0]
    if "step" in state:
        print(f"  steps counted after 20 steps: {int(state['step'])}")
        assert int(state["step"]) == 21
EOF
