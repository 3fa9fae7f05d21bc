"""Runs on each rank: an example as Python would run it, or as `python -m MODULE SCRIPT` would.

Usage: examples_rank.py LOGS MODULE SCRIPT ARGUMENT… MODULE may be empty. LOGS gets what each rank
says, and its process id.
"""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    logs, module, *arguments = sys.argv[1:]
    rank = os.environ["RANK"]
    log = os.open(Path(logs) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (Path(logs) / f"pid{rank}").write_text(str(os.getpid()))
    ours = logging.getLogger("ckptkit")
    ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    if "trl" in sys.modules:  # what examples/on_cpu.py does before it runs a script
        importlib.import_module("on_cpu").prepare_for(arguments)
    if not module:
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv.insert(0, module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
