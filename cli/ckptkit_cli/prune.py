"""`ckptkit prune`: removes the steps of a run that no rule keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import OutputError
from ckptkit.core.text import size_text
from ckptkit.options import parse_total
from ckptkit.storage.locations import place_of
from ckptkit_cli._options import JSON, KEPT, OUTPUT, RETENTION, RUN, SRC_OPTION, STATE
from ckptkit_cli._output import Output, counted, escaped, exit_unless, table, wrapped
from ckptkit_cli._program import Option, command
from ckptkit_cli.ls import RIGHT, find_the_run, step_facts

if TYPE_CHECKING:
    from ckptkit.runs.pruning import Pruned


@command(
    RUN,
    *RETENTION,
    Option(
        "--max-total-size",
        KEPT,
        "Remove the oldest steps until all together fit into SIZE, such as 500GB, also those that"
        " a rule other than --keep-best keeps.",
        "SIZE",
        parse=partial(parse_total, option="--max-total-size"),
    ),
    Option(
        "--drop-optimizer-older-than",
        KEPT,
        "Of the steps that stay, all but the newest N lose their optimizer, if it is in files of"
        " its own and the step has a manifest.",
        "N",
        count=3,
    ),
    Option(
        "--incomplete",
        KEPT,
        "Remove incomplete steps too, if a complete one exists and nothing was written to them in"
        " the last 10 minutes.",
    ),
    Option("--dry-run", OUTPUT, "Show what would be removed; remove nothing."),
    STATE,
    SRC_OPTION,
    JSON,
    order=11,
)
def prune(
    output: Output,
    run: str,
    *,
    max_total_size: int | None,
    drop_optimizer_older_than: int | None,
    incomplete: bool,
    dry_run: bool,
    state: str | None,
    src_option: Mapping[str, Any],
    **rules: Any,
) -> None:
    """Remove the steps of a run that no rule keeps.

        ckptkit prune runs/llama --keep-last 3 --keep-best eval_loss --dry-run
        ckptkit prune runs/llama --max-total-size 500GB --incomplete
        ckptkit prune runs/llama --keep-for 7d --drop-optimizer-older-than 3

    A step stays if any rule keeps it. The newest complete step always stays, and so do steps that
    are being read or pushed, or that the Trainer calls its best, and without --incomplete those
    that are not complete. If the command is killed, each step is either whole or gone, or has
    lost its optimizer: then it still makes a model, and training cannot go on from it.
    """
    from ckptkit.runs.pruning import prune_run
    from ckptkit.runs.retention import Retention
    from ckptkit_cli._progress import Progress

    place = find_the_run(output, place_of(run, src_option))
    with Progress(output, "prune") as progress:
        pruned = prune_run(
            place,
            Retention(**rules),
            dry_run=dry_run,
            state=state,
            incomplete=incomplete,
            most_bytes=max_total_size,
            whole_steps=drop_optimizer_older_than,
            listener=progress.listen,
        )
    now = time.time()
    output.document(pruned.to_json(now=now))
    output.lines(pruned_page(output, pruned, now=now))
    for failure in pruned.failed:
        what = "its optimizer was" if failure.dropped else "it was"
        output.warn(f"{failure.step.path}: {what} not removed: {failure.why}")
    exit_unless(not pruned.failed, OutputError)


def pruned_page(output: Output, pruned: Pruned, *, now: float) -> Iterator[str]:
    """Yields the lines of `ckptkit prune`; a dry run shows the same table."""
    yield output.styled(escaped(pruned.location), "bold")
    rows: list[tuple[str, ...]] = [("step", "verdict", "size", "age", "metrics", "why")]
    removed, thinned = ("would go", "would thin") if pruned.dry_run else ("removed", "thinned")
    verdicts = {"keep": "stays", "remove": removed, "thin": thinned, "failed": "not removed"}
    for entry in pruned.steps:
        step, verdict = entry.step, verdicts[entry.action]
        rows.append((escaped(step.name), verdict, *step_facts(step, now), escaped(entry.why)))
    yield from table(rows, width=output.width, right=RIGHT, elastic=(5, 4, 0))
    for name in pruned.cleared:
        verb = "would be removed" if pruned.dry_run else "was removed"
        yield escaped(f"  {name}: the rest of an interrupted removal {verb}")
    for note in pruned.notes:
        yield from wrapped(escaped(note), width=output.width)
    gone = [counted(len(pruned.removed), "step")] if pruned.removed or not pruned.thinned else []
    if pruned.thinned:
        gone.append(f"the optimizer of {counted(len(pruned.thinned), 'step')}")
    size = size_text(pruned.freed_bytes)
    end = f"would be removed, which frees {size}" if pruned.dry_run else f"removed, {size} freed"
    yield f"  {' and '.join(gone)} {end}"
