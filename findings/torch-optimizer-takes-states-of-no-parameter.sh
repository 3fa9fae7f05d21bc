#!/bin/sh
# An optimizer loads states that belong to none of its parameters, and starts anew without a word.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: `Optimizer.load_state_dict` compares the keys of `state` with the numbers of the parameters
# in `param_groups`, and raises for states that it cannot place, as a module does for its keys.
#
# Seen: only the lengths of the groups are compared. States under the texts '0' and '1', which a
# trip through JSON or through the flat keys of a distributed checkpoint makes of 0 and 1, are kept
# in `optimizer.state` under these texts, where no step reads them. The moments of all parameters
# start from zero at the next step, and the texts go into the next checkpoint beside new states.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    step(model, optimizer)
saved = optimizer.state_dict()
saved["state"] = {str(number): state for number, state in saved["state"].items()}

resumed = torch.optim.Adam(model.parameters())
resumed.load_state_dict(saved)
of_parameters = [parameter in resumed.state for parameter in model.parameters()]
print(f"loaded without an error; parameters with a state: {of_parameters}")
step(model, resumed)
steps = [int(resumed.state[parameter]["step"]) for parameter in model.parameters()]
print(f"after one more step the states are at step {steps}, where 6 was meant")
print(f"keys of the next state dict: {list(resumed.state_dict()['state'])}")
assert of_parameters == [False, False]
assert steps == [1, 1]
assert sorted(map(str, resumed.state_dict()["state"])) == ["0", "0", "1", "1"]
EOF
