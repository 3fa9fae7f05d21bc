#!/bin/sh
# Orbax restores one array under two names, if a key with a dot spells the path of another array.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6, on a CPU, Python 3.11.
#
# Guess: {"a.b": x, "a": {"b": y}} comes back with x and y in their places, or saving raises.
#
# Seen: the name of an array in the store is its path joined by dots, so both have the name "a.b",
# and both are written there. The tree comes back whole, with one of the two arrays in both places,
# with and without a target; which of them depends on the moment. No error, no warning. Keys with
# "/" are kept apart. A flat state of torch or safetensors names ("decoder.bias") beside the same
# model as a nested tree is such a checkpoint.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' 2> log || { tail log; exit 1; }
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

checkpointer = ocp.StandardCheckpointer()
for number, separator in enumerate(("/", ".")):
    imported = {separator.join(("decoder", "bias")): jnp.array([1.0, 2.0])}
    state = {**imported, "decoder": {"bias": jnp.array([3.0, 4.0])}}
    path = Path.cwd() / str(number)
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    for target in (None, abstract):
        restored = checkpointer.restore(path, target)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        values = {jax.tree_util.keystr(name): leaf.tolist() for name, leaf in jax.tree.leaves_with_path(restored)}
        print(f"{'no target' if target is None else 'with target'}: {values}")
        nested, flat = values.values()
        if separator == "/":
            assert (nested, flat) == ([3.0, 4.0], [1.0, 2.0])
        else:
            assert nested == flat and flat in ([1.0, 2.0], [3.0, 4.0])
PY
