#!/bin/sh
# With a NaN among the losses, orbax deletes the best steps and calls another one the best.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6, on a CPU, Python 3.11.
#
# Guess: with a `best_fn`, a step whose metric is NaN is never the best one, and pushes out none
# that is better.
#
# Seen, with `max_to_keep=2`: steps are sorted by the metric as it is, and Python's sort has no
# order for NaN. After the losses 3, 2, 1, NaN the diverged step is `best_step()`, from which a run
# that diverged would be rolled back, evaluated or exported. After 1, 2, NaN, 3 the steps with 1 and
# 2 are deleted, and that with 3 is the best. `best_mode="max"` is alike. No error, no warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' 2> log || { tail log; exit 1; }
from math import nan
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp

cases = {
    ("min", (3.0, 2.0, 1.0, 2.0)): (2, [2, 3]),
    ("min", (3.0, 2.0, 1.0, nan)): (3, [2, 3]),
    ("min", (1.0, 2.0, nan, 3.0)): (3, [2, 3]),
    ("max", (3.0, 1.0, 2.0, 1.5)): (0, [0, 2]),
    ("max", (1.0, 2.0, 3.0, nan)): (3, [2, 3]),
    ("max", (3.0, nan, 1.0, 2.0)): (3, [2, 3]),
}
for number, ((mode, metrics), expected) in enumerate(cases.items()):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode=mode
    )
    with ocp.CheckpointManager(Path.cwd() / str(number), options=options) as manager:
        for step, metric in enumerate(metrics):
            state = ocp.args.StandardSave({"x": jnp.ones(1)})
            manager.save(step, args=state, metrics={"loss": metric})
            manager.wait_until_finished()
        found = manager.best_step(), manager.all_steps()
    print(f"{mode} of {metrics}: best step {found[0]}, steps kept {found[1]}")
    assert found == expected, found
PY
