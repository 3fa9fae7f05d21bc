#!/bin/sh
# A zero or a negative number cast to the type of block scales is a number in torch, NaN elsewhere.
#
# Versions: torch 2.13.0 (CPU), ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
#
# Guess: float8_e8m0fnu holds powers of two without zero and sign, so both libraries make NaN (the
# byte 0xff) of 0 and of negative numbers; they agree on all other values.
#
# Seen: torch drops the sign, and makes 2**-127 of zero. ml_dtypes makes NaN of both. All positive
# values of bfloat16 become the same scale in both. A scale of zero, which a block of zeros can
# have, is a small number after one cast and NaN after the other.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import ml_dtypes
import numpy as np
import torch

values = [0.0, -1.0, -6.0, 1.0, 6.0, float("inf")]
ours = torch.tensor(values).to(torch.float8_e8m0fnu)
with np.errstate(all="ignore"):
    others = np.array(values, np.float32).astype(ml_dtypes.float8_e8m0fnu)
print("values   ", values)
print("torch    ", ours.float().tolist())
print("ml_dtypes", others.astype(np.float32).tolist())
assert ours.float().tolist()[:5] == [2.0**-127, 1.0, 8.0, 1.0, 8.0]
assert np.isnan(others.astype(np.float32)[:3]).all()
assert others.astype(np.float32)[3:5].tolist() == [1.0, 8.0]

bits = np.arange(1, 0x7F80, dtype=np.uint32) << 16  # positive and finite
numbers = bits.view(np.float32)
torch_bytes = torch.from_numpy(numbers.copy()).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
other_bytes = numbers.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
print(f"of {len(numbers)} positive values {np.count_nonzero(torch_bytes != other_bytes)} differ")
assert np.array_equal(torch_bytes, other_bytes)
EOF
