"""Converts each complete step of a run on a Ray cluster, and shares each one among its nodes.

    python examples/ray_convert.py runs/llama models
    ray job submit -- python examples/ray_convert.py s3://bucket/runs/llama s3://bucket/models

The cluster is that of RAY_ADDRESS, or one on this machine. All nodes have to see both paths. A step
whose model exists is left alone, so the same command converts the steps that came since.
"""

from __future__ import annotations

import argparse

import ckptkit


def main() -> None:
    """Reads the command line, and converts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints are")
    parser.add_argument("out", help="where the model folders go")
    parser.add_argument("--dtype", default="keep", help="of the weights, such as bfloat16")
    arguments = parser.parse_args()
    for step in ckptkit.list_run(arguments.run).steps:
        if not step.complete:
            continue
        model = f"{arguments.out}/{step.name}"
        try:
            manifest = ckptkit.consolidate(step.path, model, dtype=arguments.dtype, engine="ray")
        except ckptkit.OutputExistsError:
            continue
        print(f"{model}  {len(manifest.tensors)} tensors", flush=True)


if __name__ == "__main__":
    main()
