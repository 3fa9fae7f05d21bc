"""How a script of several ranks hands over its figures: a line that rank 0 prints."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import torch.distributed as dist


def hand_over(found: object) -> NoReturn:
    """Prints what each rank has found, as a list in JSON, and ends the process."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(everywhere), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
