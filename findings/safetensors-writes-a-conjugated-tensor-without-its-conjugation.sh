#!/bin/sh
# safetensors writes other values than a conjugated or negated view has, without an error.
#
# Versions: safetensors 0.8.0, torch 2.13.0, Python 3.11.
#
# Guess: `save_file` of `tensor.conj()` writes the conjugated values, as `torch.save` and
# `torch.distributed.checkpoint` do, or refuses it, as it refuses tensors that are not contiguous.
#
# Seen: it writes the bytes below the view. Torch only marks a conjugated view, and the imaginary
# part of one is marked as negative; both marks are lost. The file loads, and all imaginary parts,
# or all values, have the other sign. `HuggingFaceStorageWriter` of torch's distributed
# checkpoints serializes with safetensors and does the same; its file system writer does not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

torch.manual_seed(0)
numbers = torch.randn(2, 3, dtype=torch.complex64)
rotated = numbers.conj()
negated = torch.randn(1, 1, 5, dtype=torch.complex64).conj().imag[..., :1]
assert negated.is_neg() and negated.is_contiguous()

for name, tensor in {"conjugated": rotated, "negated": negated}.items():
    save_file({"x": tensor}, "x.safetensors")
    loaded = load_file("x.safetensors")["x"]
    as_marked = tensor.resolve_conj().resolve_neg()
    other_sign = loaded.conj().resolve_conj() if loaded.is_complex() else -loaded
    print(f"{name}: equal {torch.equal(loaded, as_marked)}, other sign {torch.equal(other_sign, as_marked)}")
    assert not torch.equal(loaded, as_marked)
    assert torch.equal(other_sign, as_marked)

torch.save({"x": rotated}, "x.pt")
assert torch.equal(torch.load("x.pt")["x"], rotated)
dcp.save({"x": rotated}, checkpoint_id="files", no_dist=True)
files = {"x": torch.zeros_like(numbers)}
dcp.load(files, checkpoint_id="files", no_dist=True)
dcp.save({"x": rotated}, storage_writer=HuggingFaceStorageWriter("hub"), no_dist=True)
hub = load_file("hub/model-00001-of-00001.safetensors")["x"]
print(f"file system writer: equal {torch.equal(files['x'], rotated)}")
print(f"HuggingFaceStorageWriter: equal {torch.equal(hub, rotated)}")
assert torch.equal(files["x"], rotated)
assert not torch.equal(hub, rotated)
EOF
