"""Runs on each rank: `python -m ckptkit.run`, in a process that has imported torch already.

Usage: unmodified_run.py SCRIPT ARGUMENT… What ckptkit patches is imported by the script only.
"""

from __future__ import annotations

import runpy
import sys

from tests.distributed.pretending import sitecustomize  # as if it were on PYTHONPATH


def main() -> None:
    assert any(isinstance(finder, sitecustomize.Pretender) for finder in sys.meta_path)
    assert not {"accelerate", "transformers.trainer"} & sys.modules.keys()
    runpy.run_module("ckptkit.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
