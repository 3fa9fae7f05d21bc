"""Environment variables of the job's launcher; no other module of this package reads them."""

from __future__ import annotations

import math
import os


def ranks_of_this_machine() -> int | None:
    """Returns how many ranks the launcher started on this machine, None if unknown.

    Source:
        `LOCAL_WORLD_SIZE` in https://docs.pytorch.org/docs/stable/elastic/run.html,
        "Environment Variables".
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def own_environment() -> dict[str, str]:
    return dict(os.environ)


def slurm_end_time() -> float | None:
    """Returns when Slurm ends this job, in seconds since the epoch, None if unknown.

    Slurm sets the variable when the job starts, so a later change of the time limit is not visible.

    Source:
        `SLURM_JOB_END_TIME` in https://slurm.schedmd.com/sbatch.html, "Output environment
        variables".
    """
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    try:
        end = float(text)
    except ValueError:
        return None
    return end if math.isfinite(end) and end > 0 else None
