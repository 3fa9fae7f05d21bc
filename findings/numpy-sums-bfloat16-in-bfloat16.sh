#!/bin/sh
# The sum of an array of bfloat16 stops at 256 ones, and its mean goes to zero.
#
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, Python 3.11.
#
# Guess: numpy sums bfloat16 as it sums float16, by pairs and with a mean in float32, so that 1,000
# ones have the sum 1,000 and the mean 1.
#
# Seen: a type of ml_dtypes is added one by one in itself. 256 + 1 is 256 in bfloat16, so the sum of
# 1,000 or 100,000 ones is 256, and the mean of 100,000 ones 0.0026; of float8_e4m3fn the sum stops
# at 16. No warning. float16 and bfloat16 with dtype=np.float32 are right, and so is the product of
# an array with itself by `@`. A statistic of weights that is not cast first is wrong.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" -W error - <<'EOF'
import ml_dtypes
import numpy as np

for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(1000, kind)
    cast = float(ones.sum(dtype=np.float32))
    print(f"{ones.dtype}: sum {ones.sum()}, mean {ones.mean()}, summed in float32 {cast}")
    assert cast == 1000
ones = np.ones(1000, ml_dtypes.bfloat16)
assert float(np.ones(1000, np.float16).sum()) == 1000
assert (float(ones.sum()), float(ones @ ones)) == (256, 1000)
assert float(ones.mean()) < 0.26
assert float(np.ones(1000, ml_dtypes.float8_e4m3fn).sum()) == 16
many = np.ones(100_000, ml_dtypes.bfloat16)
print(f"100,000 ones of bfloat16: mean {many.mean()}")
assert float(many.mean()) < 0.003
EOF
