"""`ckptkit ls`: the steps of a run.

`ckptkit prune`: removes the steps of a run that no rule keeps.

`ckptkit save-now`: asks a running training for a save, without a signal and from any host.

What `ls` and `prune` show of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from ckptkit.core.errors import InputError, OutputError, RefusedError, UsageError
from ckptkit.core.text import size_text
from ckptkit.options import check_choice, positive_number
from ckptkit.runs.listing import RunListing
from ckptkit.runs.marks import ask_for_save, committed_steps, run_is_live
from ckptkit.runs.pruning import Pruned, PrunedStep
from ckptkit.runs.run_paths import run_below
from ckptkit.runs.save_order import BestMode, Retention
from ckptkit.runs.steps import RunStep
from ckptkit.storage.places import PathLike, local_path
from ckptkit_cli import _job_options as options
from ckptkit_cli._job_options import Run, WatchState
from ckptkit_cli._options import AsJson, SrcOption, sources_of
from ckptkit_cli._output import Output, counted, escaped, exit_unless, table, told, wrapped


def ls(
    run: Run,
    state: WatchState = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a run.

    Of each step: whether it is complete, its size, age and metrics, and where a watch has pushed
    it. Headers alone are read. Steps of other frameworks are listed as well.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.runs.listing import list_run

        listing = list_run(taken_run(output, sources_of(run, src_option).first), state=state)
        now = time.time()
        output.document(listing.to_json(now=now))
        output.lines(listing_page(output, listing, now=now))


def prune(
    run: options.Run,
    keep_last: options.KeepLast = None,
    keep_every: options.KeepEvery = None,
    keep_best: options.KeepBest = None,
    best_mode: options.BestModeChoice = "min",
    dry_run: options.DryRun = False,
    state: options.WatchState = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """Remove the steps of a run that no rule keeps.

    A step stays if any rule keeps it. Whatever the rules say, the newest complete step stays, and
    so do steps that are not complete, that somebody reads or pushes at this moment, or that the
    Trainer calls its best. A kill at any moment leaves each step whole or gone.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.runs.pruning import prune_run

        check_choice("--best-mode", best_mode, get_args(BestMode))
        retention = Retention(
            keep_last=positive_number(keep_last, option="--keep-last", example=3),
            keep_every=positive_number(keep_every, option="--keep-every", example=1000),
            keep_best=keep_best,
            best_mode=cast(BestMode, best_mode),
        )
        place = taken_run(output, sources_of(run, src_option).first)
        pruned = prune_run(place, retention, dry_run=dry_run, state=state)
        now = time.time()
        output.document(pruned.to_json(now=now))
        output.lines(pruned_page(output, pruned, now=now))
        for one in pruned.failed:
            output.warn(f"{one.step.path} was not removed: {one.why}")
        exit_unless(not pruned.failed, OutputError)


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


_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_METRICS = 3
_RIGHT = (2, 3)


def age_text(seconds: float) -> str:
    """Returns an age in a unit of which there are two at least, so that it reads at a glance.

    >>> age_text(5), age_text(150), age_text(8000), age_text(200_000)
    ('5 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(seconds, 0):.0f} s"


def taken_run(output: Output, run: PathLike) -> PathLike:
    """Returns the run that is meant, and tells of one that lies below what was named."""
    below = run_below(run)
    if os.fspath(below) != os.fspath(run):
        output.warn(f"no step lies in {os.fspath(run)}; the run {os.fspath(below)} was taken")
    return below


def listing_page(output: Output, listing: RunListing, *, now: float) -> Iterator[str]:
    """Yields the lines of `ckptkit ls`."""
    yield f"{output.styled(escaped(listing.location), 'bold')}{_liveness(listing.live)}"
    rows: list[tuple[str, ...]] = [("step", "state", "size", "age", "metrics", "pushed to")]
    rows += [_listed(step, now) for step in listing.steps]
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
    rows += [_verdict(one, now, dry_run=pruned.dry_run) for one in pruned.steps]
    yield from table(rows, width=output.width, right=_RIGHT, elastic=(5, 4, 0))
    for name in pruned.cleared:
        done = "would be cleared up" if pruned.dry_run else "was cleared up"
        yield escaped(f"  {name}: what an interrupted removal had left {done}")
    for note in pruned.notes:
        yield from wrapped(escaped(note), width=output.width)
    count, size = counted(len(pruned.removed), "step"), size_text(pruned.freed_bytes)
    verb = "would be removed, which frees" if pruned.dry_run else "removed,"
    yield f"  {count} {verb} {size}{'' if pruned.dry_run else ' freed'}"


def _liveness(live: bool | None) -> str:
    if live is None:
        return ""
    return ", a job is writing to it" if live else ", no job is writing to it"


def _listed(step: RunStep, now: float) -> tuple[str, ...]:
    state = "complete" if step.complete else "incomplete"
    return (escaped(step.name), state, *_facts(step, now), escaped(_pushes(step)))


def _verdict(one: PrunedStep, now: float, *, dry_run: bool) -> tuple[str, ...]:
    gone = "would go" if dry_run else "removed"
    action = {"keep": "stays", "remove": gone, "failed": "not removed"}[one.action]
    return (escaped(one.step.name), action, *_facts(one.step, now), escaped(one.why))


def _facts(step: RunStep, now: float) -> tuple[str, str, str]:
    age = age_text(now - step.modified) if step.modified else ""
    return size_text(step.size_bytes), age, escaped(_metrics(step.metrics))


def _metrics(metrics: Mapping[str, float | None]) -> str:
    numbers = [f"{name} {value:.6g}" for name, value in metrics.items() if value is not None]
    more = len(numbers) - _METRICS
    return ", ".join(numbers[:_METRICS]) + (f" +{more}" if more > 0 else "")


def _pushes(step: RunStep) -> str:
    done = [p.repo_id + (f"@{p.tag}" if p.tag else "") for p in step.pushes if p.state == "pushed"]
    begun = [f"{p.repo_id} (begun)" for p in step.pushes if p.state == "pushing"]
    return ", ".join([*done, *begun])
