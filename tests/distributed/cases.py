"""How scripts that run under torchrun run their cases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

Case = Callable[[Path, str], None]


def run_cases(cases: Mapping[str, Case], *, kind: str = "") -> None:
    """Runs the cases that the arguments name, each in a folder of its own, and ends the process.

    Args:
        cases: By name. An argument is a name, or a name and what kind of it: `name:kind`. Ranks do
            not meet after a case whose name begins with `dies`.
        kind: The kind where the argument has none.
    """
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in names:
        name, _, given = case.partition(":")
        place = Path(folder) / case.replace(":", "_")
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        cases[name](place, given or kind)
        if not name.startswith("dies"):
            dist.barrier()
    # The teardown of gloo's threads now and then aborts a process that is done.
    sys.stdout.flush()
    os._exit(0)
