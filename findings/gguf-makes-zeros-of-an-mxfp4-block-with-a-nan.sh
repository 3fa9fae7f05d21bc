#!/bin/sh
# One NaN or infinity makes zeros of all 32 weights of its MXFP4 block, without a warning.
#
# Versions: gguf 0.19.0, numpy 2.4.6, Python 3.11.
#
# Guess: the scale of such a block becomes NaN (the byte 0xff of E8M0), so that all its weights are
# NaN again when they are read, as those of a Q8_0 or Q4_0 block are.
#
# Seen: the block of MXFP4 is read as 32 zeros, and numpy warns of nothing for NaN. In Q8_0, Q4_0,
# Q5_1 and TQ1_0 the weights of the block become NaN, with a warning of the cast. A diverged weight
# is invisible after the conversion to MXFP4, and 31 good ones beside it are gone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import warnings

import numpy as np
from gguf import GGMLQuantizationType, quants


def trip(values, name):
    kind = GGMLQuantizationType[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        packed = quants.quantize(values, kind)
    return quants.dequantize(packed, kind)[0, :32], len(caught)


whole = np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 256)
for odd in (np.nan, np.inf):
    damaged = whole.copy()
    damaged[0, 5] = odd
    for name in ("MXFP4", "Q8_0", "Q4_0", "Q5_1", "TQ1_0"):
        block, count = trip(damaged, name)
        zeros, nans = int((block == 0).sum()), int(np.isnan(block).sum())
        print(f"{name} with {odd}: {zeros} zeros, {nans} NaN of 32, warnings: {count}")
        if name == "MXFP4":
            assert zeros == 32 and (count == 0 or np.isinf(odd))
        else:
            assert nans >= 31
block, count = trip(whole, "MXFP4")
print(f"MXFP4 of the whole block: {int((block == 0).sum())} zeros")
assert not (block == 0).any()
EOF
