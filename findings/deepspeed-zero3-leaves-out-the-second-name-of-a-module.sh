#!/bin/sh
# DeepSpeed 0.19.8 with ZeRO 3 lists a weight under both names if two modules share the parameter,
# and under one name if the model has one module twice.
#
# `shared_params` in a checkpoint says which weight of the state dict is another one. It is made from
# `named_children`, which visits each module once, so that a module with two names is not in it. Its
# second name stays in the state dict as an empty tensor that nothing refers to, and the script that
# makes a whole state dict, `zero_to_fp32.py`, leaves that key out without a word: a strict
# `load_state_dict` of its result into the same model then fails.
#
# Guess before the run: `shared_params` has `again.weight` and `again.bias` in both cases, as
# `named_parameters(remove_duplicate=False)` has, and the whole state dict has six keys.
# Seen: two shared parameters give {'again.weight': 'head.weight', 'again.bias': 'head.bias'} and six
# keys; one module twice gives {} and four keys.
#
# Versions: DeepSpeed 0.19.8, torch 2.13.0, on the CPU.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 setuptools wheel ninja
cat > "$work/run.py" <<'PY'
import os
import sys
import warnings

warnings.simplefilter("ignore")
import torch
import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

shares, folder = sys.argv[1], sys.argv[2]
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29778"}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.again = self.head
        if shares == "parameters":
            self.again = torch.nn.Linear(8, 4)
            self.again.weight, self.again.bias = self.head.weight, self.head.bias

    def forward(self, x):
        x = self.first(x)
        return self.head(x) + self.again(x)


engine, *_ = deepspeed.initialize(
    model=Model(),
    config={
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    },
)
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
engine.save_checkpoint(folder, tag="one")
stored = torch.load(f"{folder}/one/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
whole = get_fp32_state_dict_from_zero_checkpoint(folder, tag="one")
print("FOUND", shares, len(stored["module"]), dict(stored["shared_params"]), len(whole))
PY
for shares in parameters module; do
  "$work/venv/bin/python" "$work/run.py" $shares "$work/$shares" 2> "$work/log" | grep FOUND >> "$work/found" \
    || { tail "$work/log"; exit 1; }
done
cat "$work/found"
cat > "$work/expected" <<'TXT'
FOUND parameters 6 {'again.weight': 'head.weight', 'again.bias': 'head.bias'} 6
FOUND module 6 {} 4
TXT
diff "$work/expected" "$work/found"
echo "as described"
