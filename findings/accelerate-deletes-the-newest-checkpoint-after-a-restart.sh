#!/bin/sh
# After a restart accelerate numbers checkpoints from 0 again, and its limit deletes the newest one.
#
# Versions: accelerate 1.15.0, torch 2.13.0, Python 3.11.
#
# Guess: with `automatic_checkpoint_naming`, a run that `load_state()` resumed goes on with the number
# after that of the newest folder. With `total_limit` the oldest folder is deleted, and none if the
# new one cannot be written.
#
# Seen: `load_state()` finds the newest folder by its number, and leaves the count of the new process
# at 0. Beside three folders and a limit of three, the first save deletes checkpoint_0 and writes the
# newest state under that name. The second deletes it again, as the oldest by number, and only then
# finds that checkpoint_1 exists and raises ValueError. The newest state is gone, nothing new is
# written, and the next restart loads checkpoint_2, from before the first one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0
cd "$folder"
cat > run.py <<'EOF'
"""Resumes a run if it has checkpoints, saves some more, and prints what it loaded and what is there."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

config = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=config)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model = accelerator.prepare(model)
if os.path.isdir("run/checkpoints"):
    accelerator.load_state()
loaded, error = model.weight.item(), None
try:
    for _ in range(int(sys.argv[1])):
        model.weight.data += 1  # the weight counts the saves
        accelerator.save_state()
except ValueError as raised:
    error = str(raised)
print(json.dumps({"loaded": loaded, "folders": sorted(os.listdir("run/checkpoints")), "error": error}))
EOF
for saves in 3 2 0; do
  "$folder/venv/bin/python" run.py $saves 2>> log | tail -1 | tee -a found
done
"$folder/venv/bin/python" - <<'EOF'
import json

first, second, third = map(json.loads, open("found"))
names = ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
assert first == {"loaded": 0, "folders": names, "error": None}
assert second["loaded"] == 3 and second["folders"] == names[1:]
assert "checkpoint_1 (1) already exists" in second["error"]
assert third["loaded"] == 3  # and not 4, which the second process saved
EOF
