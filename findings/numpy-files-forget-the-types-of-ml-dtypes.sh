#!/bin/sh
# np.save writes bfloat16 and the narrow floats as bytes without a type, and loads them so.
#
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, Python 3.11.
#
# Guess: np.save of an array of bfloat16 either keeps the name of the type, or refuses it, as it
# refuses objects with allow_pickle=False.
#
# Seen: the header of .npy has '<V2' for bfloat16 and '<V1' for most floats of 8, 6 or 4 bits and for
# int4: many types have one name. Loading gives raw bytes of kind V, with ml_dtypes imported too,
# and no error; arithmetic on them fails, comparing and copying do not. `view` with the right type
# gives the array back, if somebody knows it. float8_e5m2 is written as '<f1', which np.load
# refuses: the file that np.save wrote cannot be read.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" -W error - <<'EOF'
import ml_dtypes
import numpy as np

names = "bfloat16 float8_e4m3fn float8_e8m0fnu float6_e2m3fn float4_e2m1fn int4 uint2"
for name in names.split():
    kind = np.dtype(getattr(ml_dtypes, name))
    array = np.array([0, 1, 1]).astype(kind)
    np.save("x.npy", array, allow_pickle=False)
    np.savez("x.npz", x=array)
    loaded = np.load("x.npy", allow_pickle=False)
    print(f"{name}: loaded as {loaded.dtype}, from .npz as {np.load('x.npz')['x'].dtype}")
    assert loaded.dtype == np.dtype(f"V{kind.itemsize}")
    assert (loaded == array.view(loaded.dtype)).all()
    assert loaded.view(kind).tobytes() == array.tobytes()
    try:
        loaded + loaded
    except TypeError:
        continue
    raise SystemExit("bytes were added")

np.save("x.npy", np.ones(3, ml_dtypes.float8_e5m2), allow_pickle=False)
try:
    np.load("x.npy", allow_pickle=False)
except ValueError as error:
    print(f"float8_e5m2: {error}")
else:
    raise SystemExit("float8_e5m2 was loaded")
EOF
