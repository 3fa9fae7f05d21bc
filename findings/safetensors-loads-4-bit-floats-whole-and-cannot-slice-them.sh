#!/bin/sh
# safetensors reads a tensor of 4-bit floats whole, and no slice of it.
#
# Versions: safetensors 0.8.0, torch 2.13.0, Python 3.11.
#
# Guess: the header counts elements, two for each byte; `get_slice` of rows returns these rows of
# torch's packed type, as it does for other types, so that ranks can read their parts.
#
# Seen: the header has F4 and the shape [4, 6] for a tensor of torch's shape [4, 3]. `get_tensor`
# and `load_file` give [4, 3] with the same bytes. Each slice, by rows too, ends in a RuntimeError
# that says that [4, 6] is not the shape of 12 elements; `get_slice(...).get_shape()` is [4, 6].
# What loads shards by `get_slice` cannot load such weights.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

packed = torch.arange(12, dtype=torch.uint8).reshape(4, 3)
save_file({"x": packed.view(torch.float4_e2m1fn_x2), "y": packed.clone()}, "x.safetensors")
whole = load_file("x.safetensors")["x"]
print(f"whole: {list(whole.shape)} of {whole.dtype}")
assert torch.equal(whole.view(torch.uint8), packed)
with safe_open("x.safetensors", "pt") as file:
    part = file.get_slice("x")
    print(f"in the header: {part.get_shape()} of {part.get_dtype()}")
    assert part.get_shape() == [4, 6]
    assert torch.equal(file.get_slice("y")[1:3], packed[1:3])
    for rows in (slice(0, 2), slice(1, 3)):
        try:
            part[rows]
        except RuntimeError as error:
            print(f"rows {rows.start} to {rows.stop}: {error}")
        else:
            raise SystemExit("a slice was read")
EOF
