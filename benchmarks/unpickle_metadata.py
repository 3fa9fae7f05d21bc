"""What planning is held against: C's unpickler, which runs whatever the file says.

Usage: python benchmarks/unpickle_metadata.py METADATA

Prints the seconds it took, which leave out the import of torch.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

import torch.distributed.checkpoint.metadata  # noqa: F401  not to be measured


def main() -> None:
    """Unpickles the file."""
    began = time.perf_counter()
    with Path(sys.argv[1]).open("rb") as file:
        pickle.load(file)  # noqa: S301, TID251  that is what is measured
    print(f"{time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
