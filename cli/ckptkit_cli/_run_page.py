"""What `ls` and `prune` show of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ckptkit.core.texts import size_text
from ckptkit.pipeline.listing import RunListing, RunStep
from ckptkit.pipeline.pruning import Pruned, PrunedStep
from ckptkit.pipeline.run_places import run_below
from ckptkit.storage.places import PathLike
from ckptkit_cli._output import Output
from ckptkit_cli._text import counted, escaped, table, wrapped

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
