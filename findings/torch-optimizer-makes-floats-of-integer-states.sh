#!/bin/sh
# An optimizer of bfloat16 parameters turns its counters, masks and codes into bfloat16 when it loads.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: `Optimizer.load_state_dict` gives back the states that `state_dict` returned. At most it
# casts floating-point moments to the type of the parameters; integers and booleans stay.
#
# Seen: every tensor of a state but the one named "step" is cast to the type of its parameter, if that
# is a floating-point type. A count of tokens loses its last digits, a mask of bool becomes numbers,
# with which `moment[mask]` raises IndexError, and uint8 codes of a quantized moment become floats. Moments that
# are kept in float32 for the sake of their digits are rounded to bfloat16. No warning. What loads
# through `set_optimizer_state_dict` of torch's distributed checkpoints is cast in the same way.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


class Masked(torch.optim.Optimizer):
    """Keeps moments in float32, a mask, codes, and counts of tokens, of which none is a float."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(1.0)
                state["moment"] = torch.full_like(parameter, 1.0001, dtype=torch.float32)
                state["mask"] = parameter.grad > 0
                state["codes"] = torch.full_like(parameter, 255, dtype=torch.uint8)
                state["tokens"] = torch.tensor(1_000_001)
            state["moment"][state["mask"]] *= 0.5


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = Masked(model.parameters(), {"lr": 0.1})
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    return model, optimizer


model, saved = trained()
saved.step()
before = saved.state[model.weight]
for way in ("load_state_dict", "set_optimizer_state_dict"):
    other, loaded = trained()
    if way == "load_state_dict":
        loaded.load_state_dict(saved.state_dict())
    else:
        set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, saved))
    after = loaded.state[other.weight]
    print(way)
    for name, value in before.items():
        print(f"  {name}: {value.dtype} {value.max().item()}, then {after[name].dtype} {after[name].max().item()}")
    assert after["step"].dtype == torch.float32
    assert {after[name].dtype for name in ("moment", "mask", "codes", "tokens")} == {torch.bfloat16}
    assert after["tokens"].item() == 999424
    other.weight.grad = model.weight.grad.clone()
    try:
        loaded.step()
    except IndexError as error:
        print(f"  next step: {error}")
    else:
        raise AssertionError("the mask still selects")
EOF
