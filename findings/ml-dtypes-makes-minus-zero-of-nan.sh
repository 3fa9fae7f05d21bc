#!/bin/sh
# NaN becomes -0 in the narrow floats of ml_dtypes, and infinity the largest number, silently.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
#
# Guess: float4_e2m1fn, float6_e2m3fn and float6_e3m2fn have neither NaN nor infinity; both are cast
# to the largest number, or numpy warns of an invalid value, as it does for casts to integers.
#
# Seen: infinity and large numbers become the largest number with their sign. NaN becomes -0, and a
# negative NaN 0. Numpy warns of neither, while a cast of NaN to int8 warns. A damaged block of
# weights looks like zeros once it is packed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" -W error - <<'EOF'
import ml_dtypes
import numpy as np

values = np.array([np.nan, np.copysign(np.nan, -1), np.inf, -np.inf, 1e9], np.float32)
for name, largest in {"float4_e2m1fn": 6.0, "float6_e2m3fn": 7.5, "float6_e3m2fn": 28.0}.items():
    found = values.astype(getattr(ml_dtypes, name)).astype(np.float32)
    print(f"{name}: NaN {found[0]}, -NaN {found[1]}, inf {found[2]}, -inf {found[3]}, 1e9 {found[4]}")
    assert found.tolist() == [0, 0, largest, -largest, largest]
    assert np.signbit(found[:2]).tolist() == [True, False]
try:
    values[:1].astype(np.int8)
except RuntimeWarning as warning:
    print(f"int8: {warning}")
else:
    raise SystemExit("no warning for int8")
EOF
