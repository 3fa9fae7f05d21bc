#!/bin/sh
# dcp.load compares shapes and not element types: fractions, signs and imaginary parts are lost.
#
# Versions: torch 2.13.0, Python 3.11.
#
# Guess: as for a shape that differs, which ends in "Size mismatch", loading into a tensor of
# another element type is refused; at most floats are cast to floats.
#
# Seen: the stored type is in the metadata, and is not looked at. float32 goes into int64, uint8
# (300 becomes 44) and bool, complex64 into float32 (a warning of `copy_`, no error), 1e30 becomes
# infinity in float16. The types of a resumed run are those of the model that was built, whatever
# the checkpoint has, and a step counter that became an integer is never missed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF' 2> "$folder/log"
import torch
import torch.distributed.checkpoint as dcp

saved = {
    "fractions": torch.tensor([1.5, -2.75]),
    "beyond": torch.tensor([1.5, 300.0]),
    "flags": torch.tensor([0.25, 0.0]),
    "complex": torch.tensor([1 + 2j, 3j]),
    "large": torch.tensor([1e30, 1.0]),
}
dcp.save(saved, checkpoint_id="step", no_dist=True)
live = {
    "fractions": torch.zeros(2, dtype=torch.int64),
    "beyond": torch.zeros(2, dtype=torch.uint8),
    "flags": torch.zeros(2, dtype=torch.bool),
    "complex": torch.zeros(2),
    "large": torch.zeros(2, dtype=torch.float16),
}
dcp.load(live, checkpoint_id="step", no_dist=True)
for name, tensor in live.items():
    print(f"{name}: saved {saved[name].tolist()}, loaded {tensor.tolist()} as {tensor.dtype}")
found = {name: tensor.tolist() for name, tensor in live.items()}
assert found["fractions"] == [1, -2] and found["beyond"] == [1, 44]
assert found["flags"] == [True, False] and found["complex"] == [1.0, 0.0]
assert found["large"] == [float("inf"), 1.0]
try:
    dcp.load({"fractions": torch.zeros(1, 2)}, checkpoint_id="step", no_dist=True)
except BaseException as error:
    print(f"another shape: {str(error).strip().splitlines()[-1]}")
else:
    raise SystemExit("a tensor of another shape was loaded")
EOF
