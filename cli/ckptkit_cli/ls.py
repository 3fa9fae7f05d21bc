"""`ckptkit ls`: the steps of a run, and which one to resume from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptkit.core.errors import InputError
from ckptkit.core.text import size_text
from ckptkit.storage.locations import place_of
from ckptkit_cli._options import JSON, OUTPUT, RUN, SRC_OPTION, STATE
from ckptkit_cli._output import (
    Output,
    counted,
    escaped,
    exit_unless,
    first_of,
    table,
    wrapped,
)
from ckptkit_cli._program import Option, command

if TYPE_CHECKING:
    from ckptkit.runs.listing import RunListing
    from ckptkit.runs.push_journal import CommandRun
    from ckptkit.runs.steps import RunStep
    from ckptkit.storage.places import PathLike

_LISTED_PROBLEMS = 3
_HEADER = ("step", "state", "size", "age", "metrics", "pushed to")


@command(
    RUN,
    Option(
        "--verify",
        OUTPUT,
        "Read all data of complete steps, and check it against its checksums. Exits with 6 if a"
        " step is damaged.",
    ),
    STATE,
    SRC_OPTION,
    JSON,
    order=9,
)
def ls(
    output: Output, run: str, *, verify: bool, state: str | None, src_option: Mapping[str, Any]
) -> None:
    """List the steps of a run.

        ckptkit ls runs/llama
        ckptkit ls runs/llama --verify

    Of each step: whether it is complete, its size, age and metrics, and where a watch has pushed
    it; then the step to resume from, and how. Only headers are read without --verify. Steps of
    other frameworks are listed too.
    """
    from ckptkit.runs.listing import advise_on_resume, list_run

    place = find_the_run(output, place_of(run, src_option))
    listing = list_run(place, state=state)
    found = _verify_steps(output, place, listing) if verify else {}
    damaged = [step for step in listing.steps if found.get(step.name)]
    good = replace(listing, steps=tuple(s for s in listing.steps if s not in damaged))
    advice = advise_on_resume(good)
    now = time.time()
    document = listing.to_json(now=now)
    for entry in document["steps"] if verify else ():
        problems = found.get(entry["name"])
        entry["verified"] = None if problems is None else not problems
        entry["damage"] = problems or []
    document["resume"] = None
    if advice is not None:
        step, call = advice
        document["resume"] = {"step": step.step, "path": step.path, "call": call}
    output.document(document)
    output.lines(listing_page(output, listing, advice, now=now, found=found))
    exit_unless(not damaged)


def _verify_steps(output: Output, run: PathLike, listing: RunListing) -> dict[str, list[str]]:
    """Returns what is wrong with each complete step, by its name."""
    from ckptkit.conversion.verify import run_verification
    from ckptkit_cli._progress import Progress

    found = {}
    for step in listing.steps:
        if not step.complete:
            continue
        with Progress(output, f"verify {step.name}") as progress:
            try:
                place = place_of(run).beside(step.path)
                report = run_verification(place, listener=progress.listen)
                problems = [str(problem) for problem in report.problems]
            except InputError as error:
                problems = [str(error)]
        found[step.name] = problems
    return found


_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_METRICS = 3
RIGHT = (2, 3)


def age_text(seconds: float) -> str:
    """Returns an age in the largest unit that gives at least two.

    >>> age_text(5), age_text(150), age_text(8000), age_text(200_000)
    ('5 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(seconds, 0):.0f} s"


def find_the_run(output: Output, run: PathLike) -> PathLike:
    """Returns the run at or below a directory, and warns if it is below."""
    from ckptkit.runs.find_run import find_run

    below = find_run(run)
    if os.fspath(below) != os.fspath(run):
        output.warn(f"{os.fspath(run)} has no steps; using the run {os.fspath(below)}")
    return below


def listing_page(
    output: Output,
    listing: RunListing,
    advice: tuple[RunStep, str] | None,
    *,
    now: float,
    found: Mapping[str, list[str]],
) -> Iterator[str]:
    """Yields the lines of `ckptkit ls`."""
    job = {None: "", True: ", a job is writing to it", False: ", no job is writing to it"}
    yield f"{output.styled(escaped(listing.location), 'bold')}{job[listing.live]}"
    rows: list[tuple[str, ...]] = [(*_HEADER, "commands")]
    for step in listing.steps:
        state = "sealed" if step.sealed else "complete"
        state = "weights only" if step.thinned else state
        state = state if step.complete else "incomplete"
        if step.name in found:
            state = "damaged" if found[step.name] else "verified"
        done = [p for p in step.pushes if p.state == "pushed"]
        pushes = [p.repo_id + (f"@{p.tag}" if p.tag else "") for p in done]
        begun = [p.repo_id for p in step.pushes if p.state == "pushing"]
        pushes += [f"{repo_id} (begun)" for repo_id in begun]
        if (watch := listing.watch) is not None and watch.repo_id not in begun:
            pushes += [f"{watch.repo_id} (waits)"] if step.step in watch.waiting else []
            pushes += [f"{watch.repo_id} (failed)"] if step.step in watch.failed else []
        row = (escaped(step.name), state, *step_facts(step, now), escaped(", ".join(pushes)))
        rows.append((*row, escaped(", ".join(map(_command_text, step.commands)))))
    if not any(step.commands for step in listing.steps):
        rows = [row[:-1] for row in rows]
    yield from table(rows, width=output.width, right=RIGHT, elastic=(5, 4, 0))
    for step in listing.steps:
        if not step.complete:
            text = f"{step.name} is not complete: {step.problem}"
            yield from wrapped(escaped(text), width=output.width)
        for problem in first_of(found.get(step.name, []), _LISTED_PROBLEMS):
            yield from wrapped(escaped(f"{step.name} is damaged: {problem}"), width=output.width)
    for text in _watch_lines(listing):
        yield from wrapped(escaped(text), width=output.width)
    for note in listing.notes:
        yield from wrapped(escaped(note), width=output.width)
    damaged = sum(map(bool, found.values()))
    good = [step for step in listing.steps if step.complete and not found.get(step.name)]
    counts = [counted(len(listing.steps), "step"), f"{len(good):,} complete"]
    thinned = sum(bool(step.thinned) for step in good)
    counts += [f"{thinned:,} of them with weights only"] if thinned else []
    counts += [f"{damaged:,} damaged"] if damaged else []
    yield f"  {', '.join(counts)}, {size_text(listing.size_bytes)}"
    yield from _resume_lines(output, listing, advice, has_weights=bool(thinned))


def _command_text(run: CommandRun) -> str:
    ended = "begun" if run.status is None else f"exit {run.status}"
    return f"{os.path.basename(run.command.split(' ')[0])} ({ended})"  # noqa: PTH119  a name


def _watch_lines(listing: RunListing) -> Iterator[str]:
    """Yields why steps are not pushed."""
    watch = listing.watch
    if watch is None:
        return
    for step, why in watch.failed.items():
        yield f"step {step} cannot be pushed to {watch.repo_id}: {why}"
    if watch.problem:
        yield f"not pushed to {watch.repo_id} at the last try: {watch.problem}"


def _resume_lines(
    output: Output,
    listing: RunListing,
    advice: tuple[RunStep, str] | None,
    *,
    has_weights: bool,
) -> Iterator[str]:
    if advice is None:
        text = "no step is complete: training would begin anew"
        if has_weights:
            text = "no step has its optimizer: training would go on from weights alone"
        yield from wrapped(text, width=output.width)
        return
    step, call = advice
    newer = [s.name for s in listing.steps if s.step > step.step]
    text = f"resume from {step.name}" + ("" if newer else ", the newest")
    yield f"  {escaped(text)}"
    if call:
        yield f"    {output.styled(escaped(call), 'cyan')}"


def step_facts(step: RunStep, now: float) -> tuple[str, str, str]:
    age = age_text(now - step.modified) if step.modified else ""
    numbers = [f"{name} {value:.6g}" for name, value in step.metrics.items() if value is not None]
    more = len(numbers) - _METRICS
    metrics = ", ".join(numbers[:_METRICS]) + (f" +{more}" if more > 0 else "")
    return size_text(step.size_bytes), age, escaped(metrics)
