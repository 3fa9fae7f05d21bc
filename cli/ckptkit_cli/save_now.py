"""`ckptkit save-now`: requests a save from a running training."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

from ckptkit.core.errors import InputError, OutputError, RefusedError
from ckptkit.storage.locations import local_path
from ckptkit_cli._options import JSON, OUTPUT, parse_number
from ckptkit_cli._output import Output, escaped
from ckptkit_cli._program import Argument, Option, command

_POLL_SECONDS = 0.5


@command(
    Argument("run", "RUN", "The directory that the training saves to."),
    Option(
        "--wait",
        OUTPUT,
        "Wait until the step is saved, for at most SECONDS, and print its path.",
        "SECONDS",
        parse=partial(
            parse_number,
            option="--wait",
            hint="pass --wait 600",
            expected="a number of seconds above 0",
            fits=lambda seconds: 0 < seconds < math.inf,
        ),
    ),
    JSON,
    order=8,
)
def save_now(output: Output, run: str, wait: float | None) -> None:
    """Request a save from a running training.

        ckptkit save-now runs/llama --wait 600

    All its ranks save at one of their next steps, and training continues. The training must use
    ckptkit's Checkpointer and call its should_save at every step. Exits with 4 if no job writes to
    RUN, or if no step is saved within the time of --wait.
    """
    path = local_path(run)
    before = _request_save(output, run, path)
    saved = None if wait is None else _wait_for_step(path, before, wait)
    output.document({"run": run, "asked": True, "saved": saved})
    if saved is None:
        output.lines([f"requested a save of {escaped(run)}; the run saves at its next step"])
    else:
        output.lines([f"saved {output.styled(escaped(saved), 'bold')}"])


def _request_save(output: Output, run: str, path: Path) -> dict[int, tuple[Path, int]]:
    """Writes the request, and returns the steps that existed before."""
    from ckptkit.runs.find_run import absent_run
    from ckptkit.runs.marks import ask_for_save, committed_steps, run_is_live

    if not path.is_dir():
        raise absent_run(run)
    try:
        live = run_is_live(path)
        if live is False:
            raise RefusedError(
                "no job is writing to the run, so nothing would answer the request",
                where=run,
                hint="start the training first; its Checkpointer locks the directory",
            )
        before = committed_steps(path)
        ask_for_save(path)
    except OSError as error:
        raise OutputError(
            f"the request cannot be written: {error.strerror or error}", where=run
        ) from error
    if live is None:
        output.warn("the file system has no locks, so it is unknown whether a job runs")
    return before


def _wait_for_step(path: Path, before: dict[int, tuple[Path, int]], seconds: float) -> str:
    from ckptkit.runs.marks import committed_steps

    deadline = time.monotonic() + seconds
    while True:
        try:
            steps = committed_steps(path)
        except OSError as error:
            raise InputError(
                f"the run cannot be listed: {error.strerror or error}", where=str(path)
            ) from error
        new = {step: at for step, at in steps.items() if before.get(step) != at}
        if new:
            return str(new[max(new)][0])
        left = deadline - time.monotonic()
        if left <= 0:
            raise RefusedError(
                f"no new step was complete within {seconds:g} s of the request",
                where=str(path),
                hint="see the log of the training; the request stays until rank 0 answers it",
            )
        time.sleep(min(_POLL_SECONDS, left))
