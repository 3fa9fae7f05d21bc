"""`ckptkit ls`, `ckptkit prune` and `ckptkit save-now`: the steps of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import InputError, OutputError, RefusedError, UsageError
from ckptkit.core.text import size_text
from ckptkit.runs.listing import RunListing
from ckptkit.runs.marks import ask_for_save, committed_steps, run_is_live
from ckptkit.runs.pruning import Pruned
from ckptkit.runs.run_paths import find_run
from ckptkit.runs.save_order import BestMode, Retention
from ckptkit.runs.steps import RunStep
from ckptkit.storage.places import PathLike, local_path, place_of
from ckptkit_cli._command import Argument, Option, command
from ckptkit_cli._options import BEST_MODE, JSON, OUTPUT, RETENTION, RUN, SRC_OPTION, STATE
from ckptkit_cli._output import Output, counted, escaped, exit_unless, table, wrapped


@command(RUN, STATE, SRC_OPTION, JSON)
def ls(output: Output, run: str, state: str | None, src_option: Mapping[str, Any]) -> None:
    """List the steps of a run.

        ckptkit ls runs/llama

    Of each step: whether it is complete, its size, age and metrics, and where a watch has pushed
    it. Only headers are read. Steps of other frameworks are listed too.
    """
    from ckptkit.runs.listing import list_run

    listing = list_run(_find_run(output, place_of(run, src_option)), state=state)
    now = time.time()
    output.document(listing.to_json(now=now))
    output.lines(listing_page(output, listing, now=now))


@command(
    RUN,
    *RETENTION,
    BEST_MODE,
    Option("--dry-run", OUTPUT, "Show what would be removed; remove nothing."),
    STATE,
    SRC_OPTION,
    JSON,
)
def prune(
    output: Output,
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    best_mode: BestMode,
    *,
    dry_run: bool,
    state: str | None,
    src_option: Mapping[str, Any],
) -> None:
    """Remove the steps of a run that no rule keeps.

        ckptkit prune runs/llama --keep-last 3 --keep-best eval_loss --dry-run

    A step stays if any rule keeps it. The newest complete step always stays, and so do steps that
    are not complete, that are being read or pushed, or that the Trainer calls its best. If the
    command is killed, each step is either whole or gone.
    """
    from ckptkit.runs.pruning import prune_run

    retention = Retention(keep_last, keep_every, keep_best, best_mode)
    place = _find_run(output, place_of(run, src_option))
    pruned = prune_run(place, retention, dry_run=dry_run, state=state)
    now = time.time()
    output.document(pruned.to_json(now=now))
    output.lines(pruned_page(output, pruned, now=now))
    for failure in pruned.failed:
        output.warn(f"{failure.step.path} was not removed: {failure.why}")
    exit_unless(not pruned.failed, OutputError)


_POLL_SECONDS = 0.5


def _parse_wait(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"{text!r} is not a number of seconds above 0", where="--wait", hint="pass --wait 600"
        )
    return seconds


@command(
    Argument("run", "RUN", "The directory that the training saves to."),
    Option(
        "--wait",
        OUTPUT,
        "Wait until the step is saved, for at most SECONDS, and print its path.",
        "SECONDS",
        parse=_parse_wait,
    ),
    JSON,
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
    if not path.is_dir():
        raise InputError(
            "expected the directory of a run, found none",
            where=run,
            hint="pass the directory of the Checkpointer",
        )
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


_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_METRICS = 3
_RIGHT = (2, 3)


def age_text(seconds: float) -> str:
    """Returns an age in the largest unit that gives at least two.

    >>> age_text(5), age_text(150), age_text(8000), age_text(200_000)
    ('5 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _find_run(output: Output, run: PathLike) -> PathLike:
    """Returns the run at or below a directory, and warns if it is below."""
    below = find_run(run)
    if os.fspath(below) != os.fspath(run):
        output.warn(f"{os.fspath(run)} has no steps; using the run {os.fspath(below)}")
    return below


def listing_page(output: Output, listing: RunListing, *, now: float) -> Iterator[str]:
    """Yields the lines of `ckptkit ls`."""
    job = {None: "", True: ", a job is writing to it", False: ", no job is writing to it"}
    yield f"{output.styled(escaped(listing.location), 'bold')}{job[listing.live]}"
    rows: list[tuple[str, ...]] = [("step", "state", "size", "age", "metrics", "pushed to")]
    for step in listing.steps:
        state = "complete" if step.complete else "incomplete"
        done = [p for p in step.pushes if p.state == "pushed"]
        pushes = [p.repo_id + (f"@{p.tag}" if p.tag else "") for p in done]
        pushes += [f"{p.repo_id} (begun)" for p in step.pushes if p.state == "pushing"]
        rows.append((escaped(step.name), state, *_facts(step, now), escaped(", ".join(pushes))))
    yield from table(rows, width=output.width, right=_RIGHT, elastic=(5, 4, 0))
    for step in listing.steps:
        if not step.complete:
            text = f"{step.name} is not complete: {step.problem}"
            yield from wrapped(escaped(text), width=output.width)
    for note in listing.notes:
        yield from wrapped(escaped(note), width=output.width)
    complete = sum(step.complete for step in listing.steps)
    yield (
        f"  {counted(len(listing.steps), 'step')}, {complete:,} complete,"
        f" {size_text(listing.size_bytes)}"
    )


def pruned_page(output: Output, pruned: Pruned, *, now: float) -> Iterator[str]:
    """Yields the lines of `ckptkit prune`; a dry run shows the same table."""
    yield output.styled(escaped(pruned.location), "bold")
    rows: list[tuple[str, ...]] = [("step", "verdict", "size", "age", "metrics", "why")]
    removed = "would go" if pruned.dry_run else "removed"
    verdicts = {"keep": "stays", "remove": removed, "failed": "not removed"}
    for entry in pruned.steps:
        step, verdict = entry.step, verdicts[entry.action]
        rows.append((escaped(step.name), verdict, *_facts(step, now), escaped(entry.why)))
    yield from table(rows, width=output.width, right=_RIGHT, elastic=(5, 4, 0))
    for name in pruned.cleared:
        verb = "would be removed" if pruned.dry_run else "was removed"
        yield escaped(f"  {name}: the rest of an interrupted removal {verb}")
    for note in pruned.notes:
        yield from wrapped(escaped(note), width=output.width)
    count, size = counted(len(pruned.removed), "step"), size_text(pruned.freed_bytes)
    verb = "would be removed, which frees" if pruned.dry_run else "removed,"
    yield f"  {count} {verb} {size}{'' if pruned.dry_run else ' freed'}"


def _facts(step: RunStep, now: float) -> tuple[str, str, str]:
    age = age_text(now - step.modified) if step.modified else ""
    numbers = [f"{name} {value:.6g}" for name, value in step.metrics.items() if value is not None]
    more = len(numbers) - _METRICS
    metrics = ", ".join(numbers[:_METRICS]) + (f" +{more}" if more > 0 else "")
    return size_text(step.size_bytes), age, escaped(metrics)
