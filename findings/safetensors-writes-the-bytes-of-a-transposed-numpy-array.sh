#!/bin/sh
# safetensors writes a transposed numpy array with its shape and the order of the array before.
#
# Versions: safetensors 0.8.0 and 0.7.0, numpy 2.4.6, Python 3.11.
#
# Guess: `safetensors.numpy` writes the values of arrays as they are read by index: of transposed
# ones and of other byte orders, too.
#
# Seen: release 0.8.0 copies the memory that the array points to and takes the shape from the array.
# `kernel.T`, by which a Dense kernel of JAX or Keras becomes a Linear weight of torch, loads with
# the right shape and the values in another order. No error, no warning. `save` does the same. The
# docstring asks for contiguous tensors; nothing checks it, as the torch front end does. Release
# 0.7.0 wrote the right values.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cd "$folder"
cat > save.py <<'PY'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save, save_file

kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
arrays = {
    "contiguous": kernel,
    "transposed": kernel.T,
    "fortran": np.asfortranarray(kernel),
    "copied": np.ascontiguousarray(kernel.T),
}
save_file(arrays, "model.safetensors")
loaded = load_file("model.safetensors")
right = {name: bool(np.array_equal(loaded[name], array)) for name, array in arrays.items()}
print(f"safetensors {safetensors.__version__}: right {right}")
print(f"  transposed {kernel.T.tolist()}, loaded {loaded['transposed'].tolist()}")
assert all(loaded[name].shape == array.shape for name, array in arrays.items())
assert all(np.array_equal(load(save(arrays))[name], loaded[name]) for name in arrays)
assert right["contiguous"] and right["copied"]
assert right["transposed"] == right["fortran"] == (sys.argv[1] == "0.7.0")
if sys.argv[1] == "0.8.0":
    assert loaded["transposed"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
PY
for version in 0.7.0 0.8.0; do
  "$folder/venv/bin/pip" install --quiet safetensors==$version numpy==2.4.6
  "$folder/venv/bin/python" save.py $version
done
