"""`ckptkit consolidate`: from shards to a folder that loads.

`ckptkit convert`: a model in another layout.

What `consolidate` and `convert` share: the options, the run, and the plan that is shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ckptkit.core.errors import UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.engine.outcome import Event, Planned
from ckptkit.options import (
    ConsolidateRequest,
    Layout,
    Resources,
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
    from ckptkit.conversion.consolidate import Consolidation
    from ckptkit.conversion.delete_source import SourceRemoval


_NOT_SLICED = {
    "resume": "--resume; a slice that was written is kept anyway, and any other is run again",
    "delete_source": "--delete-source, for which one process has to know that all is written",
}


def run_command(title: str, layout: Layout, given: Mapping[str, Any]) -> None:
    """Runs one of the two commands.

    Args:
        title: Its name.
        layout: What the output looks like; the request refuses an unknown one.
        given: The options, by the names that they have in `consolidate`.
    """
    output = Output(as_json=given["as_json"], quiet=given["quiet"], events=given["events"])
    with told(output):
        job = job_of(title, layout, given)
        share = slice_of(given)
        if given["dry_run"]:
            job.show_plan(output)
        elif share is not None:
            job.run_slice(output, share)
        else:
            job.run(output)


def job_of(title: str, layout: Layout, given: Mapping[str, Any]) -> Job:
    """Reads the options, by the names that they have in `consolidate`."""
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
    places = _Places(given["src"], given["out"], given["base"], given["also"])
    check_if_exists(given["if_exists"], overwrite=given["overwrite"])
    return Job(
        title=title,
        places=places,
        request=request,
        resources=resources,
        overwrite=given["overwrite"],
        verifies=given["if_exists"] == "verify",
        resumes=given["resume"],
        deletes=given["delete_source"],
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


def slice_of(given: Mapping[str, Any]) -> Share | None:
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


def _warn(output: Output, event: Event) -> None:
    for note in event.notes if isinstance(event, Planned) else ():
        output.warn(note)


@dataclass(frozen=True, slots=True)
class _Places:
    src: str
    out: str
    base: str | None
    also: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for.

    Attributes:
        title: The command's name.
        places: What is read and written.
        request: What the output should hold.
        resources: What the execution may use.
        overwrite: Whether an output that holds something is replaced.
        verifies: Whether an output that is there is proven to be the one asked for.
        resumes: Whether a run that was interrupted is gone on with.
        deletes: Whether the files that were read are removed when the output is proven.
    """

    title: str
    places: _Places
    request: ConsolidateRequest
    resources: Resources
    overwrite: bool
    verifies: bool
    resumes: bool = False
    deletes: bool = False

    def run(self, output: Output) -> None:
        """Writes the output, and tells what was written."""
        began = time.perf_counter()
        with Progress(output, self.title) as progress:
            removal = None
            if self.deletes:
                manifest, removal = self._written_and_removed(progress)
            else:
                manifest = self._confirmed(progress) or self._written(progress)
            seconds = time.perf_counter() - began
        self._tell(output, manifest, seconds, progress, removal)

    def run_slice(self, output: Output, share: Share) -> None:
        """Writes one part of the output, and puts the whole in place where it is the last."""
        from ckptkit.conversion.consolidate import run_consolidation_slice
        from ckptkit_cli._pages import slice_json, slice_page

        began = time.perf_counter()
        with Progress(output, f"{self.title} {share}") as progress:
            manifest = self._confirmed(progress)
            if manifest is None:
                done = run_consolidation_slice(
                    self._consolidation(),
                    share,
                    overwrite=self.overwrite,
                    listener=progress.listen,
                )
                manifest = done.manifest
                if manifest is None:
                    output.document(slice_json(done, self.places.out))
                    output.lines(slice_page(done, self.places.out))
                    return
        self._tell(output, manifest, time.perf_counter() - began, progress)

    def _tell(
        self,
        output: Output,
        manifest: Manifest,
        seconds: float,
        progress: Progress,
        removal: SourceRemoval | None = None,
    ) -> None:
        from ckptkit_cli._pages import Consolidated, consolidation_page, removal_json, removed_page

        done = Consolidated(self.places.out, manifest, seconds, progress.notes, progress.kept)
        progress.warn(done.notes)
        output.document(done.to_json() | removal_json(removal))
        output.lines(consolidation_page(output, done))
        output.lines(removed_page(removal))

    def _confirmed(self, progress: Progress) -> Manifest | None:
        if not self.verifies:
            return None
        from ckptkit.conversion.fingerprint import confirmed

        return confirmed(self._consolidation(), progress.listen)

    def _consolidation(self) -> Consolidation:
        from ckptkit.conversion.consolidate import Consolidation

        places = self.places
        return Consolidation(
            *(places.src, places.out, self.request, places.base, places.also), self.resources
        )

    def _written(self, progress: Progress) -> Manifest:
        from ckptkit.conversion.consolidate import run_consolidation

        places = self.places
        return run_consolidation(
            places.src,
            places.out,
            self.request,
            base=places.base,
            also=places.also,
            overwrite=self.overwrite,
            resources=self.resources,
            listener=progress.listen,
            resume=self.resumes,
        )

    def _written_and_removed(self, progress: Progress) -> tuple[Manifest, SourceRemoval | None]:
        from ckptkit.conversion.delete_source import write_and_remove

        return write_and_remove(
            self._consolidation(),
            partial(self._written, progress),
            progress.listen,
            overwrite=self.overwrite,
        )

    def _removal(self) -> SourceRemoval:
        from ckptkit.conversion.delete_source import planned_removal

        return planned_removal(self._consolidation())

    def show_plan(self, output: Output) -> None:
        """Shows what a run would do, and fails where it would fail before its first byte."""
        from ckptkit.conversion.prepare import prepared
        from ckptkit.conversion.write import check_destination
        from ckptkit_cli._pages import plan_json, plan_page, planned_page, removal_json

        removal = self._removal() if self.deletes else None
        if removal is not None and removal.manifest:  # it was begun already
            output.document(removal_json(removal))
            output.lines(planned_page(output, removal))
            return
        src, out, also, base = (
            self.places.src,
            self.places.out,
            self.places.also,
            self.places.base,
        )
        like = self.request.like
        check_destination(src, out, overwrite=self.overwrite, also=also, base=base, like=like)
        with prepared(
            src, out, self.request, base=base, resources=self.resources, also=also
        ) as plan:
            plan.comparison.finish(partial(_warn, output))
            output.document(plan_json(plan, out) | removal_json(removal))
            output.lines(plan_page(output, plan, out))
            output.lines(planned_page(output, removal))


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
