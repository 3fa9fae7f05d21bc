"""`ckptkit consolidate`: shards become a model; also what commands of its kind show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit_cli._options import CONVERSION, make_job
from ckptkit_cli._output import Output, counted, escaped, first_of
from ckptkit_cli._program import command

if TYPE_CHECKING:
    from ckptkit.conversion.delete_source import SourceRemoval
    from ckptkit.conversion.prepare import ConversionJob
    from ckptkit.engine.outcome import Event
    from ckptkit.plan.plan import Share

_LISTED_SLICES = 8


@command(*CONVERSION, order=2)
def consolidate(output: Output, **values: Any) -> None:
    """Merge shards into a model folder that loads.

        ckptkit consolidate runs/llama models/llama
        ckptkit consolidate runs/llama/checkpoint-500 models/llama --dtype bfloat16

    Every byte of the source is checked against its stored checksum. OUT appears when it is
    complete and durable, or not at all.
    """
    run_conversion(output, "consolidate", make_job("hf", values), values)


def run_conversion(
    output: Output, title: str, job: ConversionJob, values: Mapping[str, Any]
) -> None:
    """Runs the job of a command, or shows its plan."""
    if values["dry_run"]:
        _show_plan(job, output)
        return
    from ckptkit.conversion.job import run_job
    from ckptkit_cli._pages import Consolidated, consolidation_page
    from ckptkit_cli._progress import Progress

    label = title if job.share is None else f"{title} {job.share}"
    with Progress(output, label) as progress:
        result = run_job(job, progress.listen)
    out = os.fspath(job.out or "")
    if result.manifest is None:
        missing = list(result.missing)
        output.document({"out": out, "slice": str(job.share), "missing": missing})
        output.lines(_slice_page(job.share, missing, out))
        return
    done = Consolidated(
        out,
        result.manifest,
        progress.seconds,
        progress.notes,
        progress.kept,
        progress.shared_bytes,
    )
    progress.warn(done.notes)
    output.document(done.to_json() | _removal_json(result.removal))
    output.lines(consolidation_page(output, done))
    if result.removal is not None:
        count, size = counted(len(result.removal.files), "file"), result.removal.size_bytes
        text = f"{count} of the source, {size_text(size)}, after the output was read back"
        output.lines([f"  removed    {text}"])


def _show_plan(job: ConversionJob, output: Output) -> None:
    """Shows what a run would do, and fails where it would fail before its first byte."""
    from ckptkit.conversion.job import is_divided, refuse_divided_sharing
    from ckptkit.conversion.write import with_expected_sharing
    from ckptkit_cli._pages import plan_json, plan_page

    removal = None
    if job.delete_source:
        from ckptkit.conversion.delete_source import plan_removal

        removal = plan_removal(job)
        if removal.manifest:  # an earlier run has begun it
            output.document(_removal_json(removal))
            output.lines(_removal_page(output, removal))
            return
    job.check_places()
    refuse_divided_sharing(job)
    out = os.fspath(job.out or "")
    with job.plan_output() as plan:
        planned = plan if is_divided(job) else with_expected_sharing(plan, out)
        if planned.comparison is not None:
            planned.comparison.finish(partial(_warn, output))
        output.document(plan_json(planned, out) | _removal_json(removal))
        output.lines(plan_page(output, planned, out))
        output.lines(_removal_page(output, removal))


def _warn(output: Output, event: Event) -> None:
    for note in getattr(event, "notes", ()):
        output.remark(note)


def _removal_json(removal: SourceRemoval | None) -> dict[str, Any]:
    """Returns the field of the files that are, or will be, removed; none if the source stays."""
    return {} if removal is None else {"deleted": removal.to_json()}


def _removal_page(output: Output, removal: SourceRemoval | None) -> Iterator[str]:
    """Yields the lines of a plan: every file that would be removed."""
    if removal is None:
        return
    yield ""
    root = escaped(str(removal.to_json()["root"]))
    yield output.styled(f"Removed from {root} after verification", "bold")
    for path, size_bytes, _ in removal.files:
        yield f"  {size_text(size_bytes):>10}  {escaped(path)}"
    if removal.values:
        text = counted(removal.values, "value")
        yield f"  with {text} that are not tensors, and are in no output"


def _slice_page(share: Share | None, missing: Sequence[int], out: str) -> Iterator[str]:
    """Yields the lines for people."""
    yield f"slice {share} of {escaped(out)} is written"
    if missing:
        listed = ", ".join(first_of([str(number) for number in missing], _LISTED_SLICES))
        yield f"the output appears when these are written too: {listed}"
    else:
        yield "another slice commits the output; if that one was killed, run it again"
