"""`ckptkit consolidate`: from shards to a folder that loads.

`ckptkit convert`: a model in another layout.

What `consolidate` and `convert` share: the options, the run, and the plan that is shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ckptkit.core.errors import UsageError
from ckptkit.engine.outcome import Event, Planned
from ckptkit.options import (
    ConsolidateRequest,
    Layout,
    check_if_exists,
    file_limit,
    make_resources,
    name_prefixes,
    vocabulary_size,
)
from ckptkit.plan.shares import Share, parse_slice
from ckptkit_cli import _job_options as job_options
from ckptkit_cli import _job_options as machines
from ckptkit_cli import _job_options as parts
from ckptkit_cli import _options as options
from ckptkit_cli import _options as storage
from ckptkit_cli._options import located
from ckptkit_cli._output import Output, told
from ckptkit_cli._progress import Progress

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob

_NOT_SLICED = {
    "resume": "--resume; a slice that was written is kept anyway, and any other is run again",
    "delete_source": "--delete-source, for which one process has to know that all is written",
}


def run_command(title: str, layout: Layout, given: Mapping[str, Any]) -> None:
    """Runs one of the two commands.

    Args:
        title: Its name.
        layout: The layout of the output; the request refuses an unknown one.
        given: The options, by the names of their parameters in `consolidate`.
    """
    output = Output(as_json=given["as_json"], quiet=given["quiet"], events=given["events"])
    with told(output):
        job = job_of(layout, given)
        if given["dry_run"]:
            _show_plan(job, output)
        else:
            _run(title, job, output)


def job_of(layout: Layout, given: Mapping[str, Any]) -> ConversionJob:
    """Reads the options, by the names of their parameters in `consolidate`."""
    from ckptkit.conversion.prepare import ConversionJob

    given = located(given)
    request = ConsolidateRequest(
        dtype=given["dtype"],
        keep_dtype=tuple(given["keep_dtype"] or ()),
        include=tuple(given["include"] or ()),
        exclude=tuple(given["exclude"] or ()),
        select=given["select"],
        max_file_bytes=file_limit(given["max_shard_size"], like=given["like"]),
        names=given["names"],
        allow_code=given["allow_code"],
        layout=layout,
        like=given["like"],
        vocab_size=vocabulary_size(given["vocab_size"]),
        optimizer=given["optimizer"],
        model_config=given["model_config"],
        strip_prefix=name_prefixes(given["strip_prefix"]),
    )
    resources = make_resources(
        worker_count(given["workers"]),
        given["memory_budget"],
        given["memory_limit"],
        bandwidth=given["bandwidth"],
        engine=given["engine"],
    )
    check_if_exists(given["if_exists"], overwrite=given["overwrite"])
    return ConversionJob(
        src=given["src"],
        out=given["out"],
        request=request,
        base=given["base"],
        also=given["also"],
        resources=resources,
        overwrite=given["overwrite"],
        if_exists=given["if_exists"],
        resume=given["resume"],
        delete_source=given["delete_source"],
        share=_slice_of(given),
    )


def worker_count(workers: str | None) -> int | None:
    """Reads the number of threads."""
    if workers is None:
        return None
    try:
        return int(workers)
    except ValueError as error:
        raise UsageError(
            f"{workers!r} is no whole number", where="--workers", hint="leave it out, or pass 4"
        ) from error


def _slice_of(given: Mapping[str, Any]) -> Share | None:
    """Reads which part of the work is to be done, None where all of it is."""
    text, engine = given["slice_"], given["engine"]
    if text is None:
        return None
    other = next((why for option, why in _NOT_SLICED.items() if given[option]), "")
    if engine != "local":
        other = f"--engine {engine}, which shares the work out by itself"
    if other:
        raise UsageError(
            f"stands beside {other}", where=f"--slice {text}", hint="leave one of the two out"
        )
    return parse_slice(text)


def _run(title: str, job: ConversionJob, output: Output) -> None:
    """Runs a job, and shows its result."""
    from ckptkit.conversion.job import run_job
    from ckptkit_cli._pages import (
        Consolidated,
        consolidation_page,
        removal_json,
        removed_page,
        slice_json,
        slice_page,
    )

    began = time.perf_counter()
    label = title if job.share is None else f"{title} {job.share}"
    with Progress(output, label) as progress:
        result = run_job(job, progress.listen)
        seconds = time.perf_counter() - began
    out = os.fspath(job.out)
    if result.manifest is None:
        output.document(slice_json(job.share, result.missing, out))
        output.lines(slice_page(job.share, result.missing, out))
        return
    done = Consolidated(out, result.manifest, seconds, progress.notes, progress.kept)
    progress.warn(done.notes)
    output.document(done.to_json() | removal_json(result.removal))
    output.lines(consolidation_page(output, done))
    output.lines(removed_page(result.removal))


def _show_plan(job: ConversionJob, output: Output) -> None:
    """Shows what a run would do, and fails where it would fail before its first byte."""
    from ckptkit_cli._pages import plan_json, plan_page, planned_page, removal_json

    removal = None
    if job.delete_source:
        from ckptkit.conversion.delete_source import plan_removal

        removal = plan_removal(job)
        if removal.manifest:  # an earlier run has begun it
            output.document(removal_json(removal))
            output.lines(planned_page(output, removal))
            return
    job.check_places()
    out = os.fspath(job.out)
    with job.plan_output() as planned:
        planned.comparison.finish(partial(_warn, output))
        output.document(plan_json(planned, out) | removal_json(removal))
        output.lines(plan_page(output, planned, out))
        output.lines(planned_page(output, removal))


def _warn(output: Output, event: Event) -> None:
    for note in event.notes if isinstance(event, Planned) else ():
        output.warn(note)


def consolidate(
    src: options.Source,
    out: options.Destination,
    select: options.Selection = None,
    dtype: options.DType = "keep",
    keep_dtype: options.KeepDType = None,
    names: options.Names = "auto",
    strip_prefix: parts.StripPrefix = None,
    base: options.Base = None,
    also: options.Also = None,
    like: options.Like = None,
    vocab_size: options.VocabSize = None,
    max_shard_size: options.MaxShardSize = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    optimizer: parts.Optimizer = False,
    allow_code: options.AllowCode = False,
    model_config: parts.ModelConfig = None,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    resume: job_options.Resume = False,
    delete_source: job_options.DeleteSource = False,
    if_exists: job_options.IfExists = "error",
    memory_budget: options.MemoryBudget = "64MB",
    memory_limit: options.MemoryLimit = None,
    workers: options.Workers = None,
    bandwidth: machines.Bandwidth = None,
    engine: machines.EngineName = "local",
    slice_: machines.Slice = None,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: job_options.Events = False,
) -> None:
    """Merge shards into a model folder that loads.

    Every source byte is checked against its stored checksum on the way. OUT appears when it is
    complete and durable, or not at all.
    """
    run_command("consolidate", "hf", locals())


def convert(
    src: options.Source,
    out: options.Destination,
    to: options.To,
    select: options.Selection = None,
    dtype: options.DType = "keep",
    keep_dtype: options.KeepDType = None,
    names: options.Names = "auto",
    strip_prefix: parts.StripPrefix = None,
    base: options.Base = None,
    also: options.Also = None,
    like: options.Like = None,
    vocab_size: options.VocabSize = None,
    max_shard_size: options.MaxShardSize = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    optimizer: parts.Optimizer = False,
    allow_code: options.AllowCode = False,
    model_config: parts.ModelConfig = None,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    resume: job_options.Resume = False,
    delete_source: job_options.DeleteSource = False,
    if_exists: job_options.IfExists = "error",
    memory_budget: options.MemoryBudget = "64MB",
    memory_limit: options.MemoryLimit = None,
    workers: options.Workers = None,
    bandwidth: machines.Bandwidth = None,
    engine: machines.EngineName = "local",
    slice_: machines.Slice = None,
    src_option: storage.SrcOption = None,
    dst_option: storage.DstOption = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    events: job_options.Events = False,
) -> None:
    """Write a model in another layout.

    'hf' is a folder that Transformers loads, 'torch' a pytorch_model.bin, and 'dcp' a sharded
    checkpoint that FSDP training starts from. Checks and options are those of consolidate.
    """
    run_command("convert", cast(Layout, to), locals())
