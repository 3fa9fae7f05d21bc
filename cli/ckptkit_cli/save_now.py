"""`ckptkit save-now`: asks a running training for a save, without a signal and from any host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ckptkit.core.errors import InputError, OutputError, RefusedError, UsageError
from ckptkit.storage.places import local_path
from ckptkit.storage.run_marks import ask_for_save, committed_steps, run_is_live
from ckptkit_cli._failures import told
from ckptkit_cli._options import AsJson
from ckptkit_cli._output import Output
from ckptkit_cli._text import escaped

_POLL_SECONDS = 0.5


def save_now(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The directory that the training saves to.", show_default=False
        ),
    ],
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            help="Wait until the step is saved, at most so long, and print its path.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running training for a save.

    All its ranks save at one of their next steps, and training goes on. The training must use
    ckptkit's Checkpointer and ask its should_save at every step. Exits 4 when no job writes to
    RUN, or when the save does not come in the time of --wait.
    """
    output = Output(as_json=as_json)
    with told(output):
        seconds = _seconds(wait)
        path = local_path(run)
        before = _leave_request(output, run, path)
        saved = None if seconds is None else _wait(path, before, seconds)
        output.document({"run": run, "asked": True, "saved": saved})
        if saved is None:
            said = f"asked {escaped(run)} for a save; the run takes it at its next step"
            output.lines([said])
        else:
            output.lines([f"saved {output.styled(escaped(saved), 'bold')}"])


def _seconds(wait: str | None) -> float | None:
    try:
        seconds = None if wait is None else float(wait)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(
            f"{wait!r} is no number of seconds above 0", where="--wait", hint="pass --wait 600"
        )
    return seconds


def _leave_request(output: Output, run: str, path: Path) -> dict[int, tuple[Path, int]]:
    """Leaves the request, and returns the steps that were there before."""
    if not path.is_dir():
        raise InputError(
            "no directory was found where that of a run was expected",
            where=run,
            hint="pass the directory that the Checkpointer was given",
        )
    try:
        live = run_is_live(path)
        if live is False:
            raise RefusedError(
                "no job is writing to the run, so nobody would take the request",
                where=run,
                hint="start the training first; its Checkpointer locks the directory",
            )
        before = committed_steps(path)
        ask_for_save(path)
    except OSError as error:
        raise OutputError(
            f"the request cannot be left: {error.strerror or error}", where=run
        ) from error
    if live is None:
        output.warn("the file system has no locks, so it is unknown whether a job runs")
    return before


def _wait(path: Path, before: dict[int, tuple[Path, int]], seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        new = {s: found for s, found in _committed(path).items() if before.get(s) != found}
        if new:
            return str(new[max(new)][0])
        left = deadline - time.monotonic()
        if left <= 0:
            raise RefusedError(
                f"no new step was complete within {seconds:g} s of the request",
                where=str(path),
                hint="see the log of the training; the request stands until rank 0 takes it",
            )
        time.sleep(min(_POLL_SECONDS, left))


def _committed(path: Path) -> dict[int, tuple[Path, int]]:
    try:
        return committed_steps(path)
    except OSError as error:
        raise InputError(
            f"the run cannot be listed: {error.strerror or error}", where=str(path)
        ) from error
