#!/bin/sh
# DeepSpeed 0.19.8 loads a universal checkpoint into ZeRO 3 with the settings of the first group of
# parameters in all groups, and with one tensor as the step of all groups.
#
# Two groups are trained, of which one has no weight decay, as is usual for biases and norms. After
# `load_checkpoint` with `load_universal`, both decay. The step of torch's AdamW is a tensor that is
# counted up in place: as all groups share it, it grows by the number of groups at each step, and
# the correction of the moments is that of a later step. Stage 1 keeps both apart.
#
# Guess before the run: the settings of each group are restored by their order, and after four steps
# and one more the step of each group is 5.
# Seen: with stage 3, decays [0.1, 0.1] and steps [6.0, 6.0]; with stage 1, [0.1, 0.0] and [5.0, 5.0].
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

stage, folder, action = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups, lr=0.01),
    config={
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": action == "load"},
    },
)


def step():
    loss = engine(torch.ones(2, 8)).square().sum()
    engine.backward(loss)
    engine.step()


if action == "save":
    for _ in range(4):
        step()
    engine.save_checkpoint(folder, tag="four", client_state={"universal_checkpoint_info": {}})
else:
    engine.load_checkpoint(folder, tag="universal", load_lr_scheduler_states=False)
    step()
    inner = engine.optimizer.optimizer
    decays = [group["weight_decay"] for group in inner.param_groups]
    steps = sorted(float(state["step"]) for state in inner.state.values())
    print("FOUND", stage, decays, steps)
PY
for stage in 1 3; do
  python="$work/venv/bin/python"
  "$python" "$work/run.py" $stage "$work/$stage" save > "$work/log" 2>&1 || { tail "$work/log"; exit 1; }
  "$python" -m deepspeed.checkpoint.ds_to_universal --input_folder "$work/$stage/four" \
    --output_folder "$work/$stage/universal" > "$work/log" 2>&1 || { tail "$work/log"; exit 1; }
  "$python" "$work/run.py" $stage "$work/$stage" load 2> "$work/log" | grep FOUND >> "$work/found" \
    || { tail "$work/log"; exit 1; }
done
cat "$work/found"
cat > "$work/expected" <<'TXT'
FOUND 1 [0.1, 0.0] [5.0, 5.0]
FOUND 3 [0.1, 0.1] [6.0, 6.0]
TXT
diff "$work/expected" "$work/found"
echo "as described"
