#!/bin/sh
# A step that was renamed by hand keeps torchtitan from resuming, though others are whole.
#
# Versions: torchtitan 0.3.0, torch 2.13.0, Python 3.11.
#
# Guess: of the folder of checkpoints, folders called step-N are the steps, and of these the newest
# with an index is loaded. A step that is put aside as `broken-step-30` or `step-30.bad` is none.
#
# Seen: `re.search(r"step-(\d+)", name)` finds a step anywhere in a name, so `broken-step-30` is
# step 30. The path is then made of the number, `step-30`, which is not there: FileNotFoundError at
# each start, though step-20 is whole.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchtitan==0.3.0 spmd_types==0.2.3
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
from pathlib import Path
from types import SimpleNamespace

from torchtitan.components.checkpoint import CheckpointManager

for name in ("step-10", "step-20", "broken-step-30"):
    Path("run", name).mkdir(parents=True)
    Path("run", name, ".metadata").touch()
manager = SimpleNamespace(folder="run")
step = CheckpointManager._find_load_step(manager)
path = CheckpointManager._create_checkpoint_id(manager, step)
print(f"it resumes from step {step}, in {path}, which exists: {Path(path).is_dir()}")
assert step == 30
assert not Path(path).exists()
EOF
