#!/bin/sh
# Torch turns infinity into 448 in float8_e4m3fn, and into infinity or NaN in the other types.
#
# Versions: torch 2.13.0 (CPU), ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
#
# Guess: float8_e4m3fn has no infinity, so what is beyond its range becomes NaN, as in
# float8_e4m3fnuz and as in ml_dtypes; a diverged tensor is seen as such after the cast.
#
# Seen: everything beyond 448, infinity included, becomes 448. Only NaN stays NaN. float8_e5m2
# keeps infinity, float8_e4m3fnuz and float8_e5m2fnuz make NaN of it. ml_dtypes makes NaN of all
# beyond 464 in float8_e4m3fn. So two libraries write different bytes for one cast, and a check
# for finite values passes after torch's.
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

values = [448.0, 464.0, 465.0, 1e6, float("inf"), float("-inf"), float("nan")]
found = {}
for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"):
    cast = torch.tensor(values).to(getattr(torch, f"float8_{name}"))
    with np.errstate(all="ignore"):
        other = np.array(values, np.float32).astype(getattr(ml_dtypes, f"float8_{name}"))
    found[name] = cast.float().tolist(), other.astype(np.float32).tolist()
    print(f"{name}: torch {found[name][0]}, ml_dtypes {found[name][1]}")

torch_values, other_values = found["e4m3fn"]
assert torch_values[:6] == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
assert other_values[:2] == [448.0, 448.0]
assert np.isnan(other_values[2:]).all()
assert np.isnan(found["e4m3fnuz"][0]).tolist() == [True] * 7
assert found["e5m2"][0][4:6] == [float("inf"), float("-inf")]
EOF
