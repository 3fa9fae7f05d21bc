#!/bin/sh
# A NaN among weights becomes 448 in 8-bit floats of MLX, and all 32 weights of its block 896.
#
# Versions: mlx 0.32.4 on the CPU, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
#
# Guess: `mx.to_fp8` makes the NaN of E4M3 (0x7f) of NaN, as the casts of torch and ml_dtypes do; a
# block of `mxfp8` with a NaN or an infinity has NaN in its place at least.
#
# Seen: `to_fp8` makes 448, the largest number, of NaN, and of both infinities 448 and -448, though
# `from_fp8` knows 0x7f. In mxfp8 the other 31 weights of the block, which were -1 to 0, are read as
# -896: finite and 900 times too large. In mxfp4 and nvfp4 the others are zeros. In affine mode NaN is
# read as the smallest weight of its group, and the others are right. Only an infinity in affine mode
# leaves NaN behind. So a diverged weight is not seen any more in a quantized model.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import math

import ml_dtypes
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
for number, expected in ((math.nan, 448), (math.inf, 448), (-math.inf, -448)):
    code = mx.to_fp8(mx.array(number))
    back, other = mx.from_fp8(code, mx.float32).item(), np.float32(number).astype(ml_dtypes.float8_e4m3fn)
    print(f"{number}: {back} in MLX, {other} in ml_dtypes")
    assert back == expected and np.isnan(other)
assert math.isnan(mx.from_fp8(mx.array(0x7F, dtype=mx.uint8), mx.float32).item())

whole = np.linspace(-1, -0.1, 32, dtype=np.float32).reshape(1, 32)
for odd in (math.nan, math.inf):
    weight = whole.copy()
    weight[0, 5] = odd
    for mode, size in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16), ("affine", 32)):
        options = {"mode": mode, "group_size": size}
        unpacked = mx.dequantize(*mx.quantize(mx.array(weight), **options), **options)
        row = np.array(unpacked.astype(mx.float32))[0, :size]
        others, was = np.delete(row, 5), np.delete(whole[0, :size], 5)
        print(f"{mode} with {odd}: {row[5]} in its place, others {others.min()} to {others.max()}")
        if mode == "affine" and math.isinf(odd):
            assert np.isnan(row).all()
            continue
        assert np.isfinite(row).all()
        if mode == "affine":
            assert np.abs(others - was).max() < 0.05
        else:
            assert set(others.tolist()) == {-896.0 if mode == "mxfp8" else 0.0}
PY
