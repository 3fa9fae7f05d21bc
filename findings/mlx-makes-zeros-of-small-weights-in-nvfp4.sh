#!/bin/sh
# All weights of a layer below a magnitude of 0.0058 become zeros in NVFP4 of MLX, without a warning.
#
# Versions: mlx 0.32.4 on the CPU, numpy 2.4.6, Python 3.11.
#
# Guess: `mx.quantize(weight, mode="nvfp4")` has about the same relative error for a weight and for
# 0.001 of it, as the other modes have: a scale for each group is there for that.
#
# Seen: the scale of a group is stored in E4M3 as it is, of which the smallest is 0.002. Without
# `global_scale`, which the default leaves out, groups with a maximum below 6 * 0.001 get the scale
# 0: of a weight with a standard deviation of 0.005, 8 percent are zeros against 6 of a large one, at
# 0.002 it is 96 percent, at 0.001 all. `mxfp4`, `mxfp8` and `affine` keep their error down to 1e-6.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def trip(deviation, mode, **options):
    scaled = mx.array(weight * np.float32(deviation))
    unpacked = mx.dequantize(*mx.quantize(scaled, mode=mode, **options), mode=mode, **options)
    unpacked = unpacked.astype(mx.float32)
    error = mx.linalg.norm(unpacked - scaled) / mx.linalg.norm(scaled)
    return float(error), float((unpacked == 0).mean())


for mode in ("nvfp4", "mxfp4", "mxfp8", "affine"):
    found = {deviation: trip(deviation, mode) for deviation in (1, 0.005, 0.002, 0.001, 1e-6)}
    for deviation, (error, zeros) in found.items():
        print(f"{mode}, deviation {deviation}: error {error:.2f}, zeros {zeros:.0%}")
    errors = {deviation: error for deviation, (error, _) in found.items()}
    if mode == "nvfp4":
        assert errors[1] < 0.1 and errors[0.005] < 0.15 and errors[0.002] > 0.9
        assert found[0.001] == found[1e-6] == (1, 1)
    else:
        assert max(errors.values()) < 0.13
PY
