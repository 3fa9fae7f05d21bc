"""What `consolidate` and `convert` share: the options, the run, and the plan that is shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.planning.requests import (
    ConsolidateRequest,
    Layout,
    Resources,
    file_limit,
    make_resources,
    vocabulary_size,
)
from ckptkit_cli._failures import told
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress


def run_command(title: str, layout: Layout, given: Mapping[str, Any]) -> None:
    """Runs one of the two commands.

    Args:
        title: Its name.
        layout: What the output looks like; the request refuses an unknown one.
        given: The options, by the names that they have in `consolidate`.
    """
    output = Output(as_json=given["as_json"], quiet=given["quiet"])
    with told(output):
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
        )
        resources = make_resources(
            worker_count(given["workers"]), given["memory_budget"], given["memory_limit"]
        )
        places = _Places(given["src"], given["out"], given["base"], tuple(given["also"] or ()))
        job = _Job(title, places, request, resources, given["overwrite"])
        (job.show_plan if given["dry_run"] else job.run)(output)


def worker_count(workers: str | None) -> int | None:
    """Reads the number of threads.

    Raises:
        UsageError: If it is no whole number.
    """
    if workers is None:
        return None
    try:
        return int(workers)
    except ValueError as error:
        raise UsageError(
            f"{workers!r} is no whole number", where="--workers", hint="leave it out, or pass 4"
        ) from error


@dataclass(frozen=True, slots=True)
class _Places:
    src: str
    out: str
    base: str | None
    also: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    title: str
    places: _Places
    request: ConsolidateRequest
    resources: Resources
    overwrite: bool

    def run(self, output: Output) -> None:
        from ckptkit.pipeline.consolidating import run_consolidation
        from ckptkit_cli._consolidation_page import Consolidated, consolidation_page

        places = self.places
        began = time.perf_counter()
        with Progress(output, self.title) as progress:
            manifest = run_consolidation(
                places.src,
                places.out,
                self.request,
                base=places.base,
                also=places.also,
                overwrite=self.overwrite,
                resources=self.resources,
                listener=progress.listen,
            )
        done = Consolidated(places.out, manifest, time.perf_counter() - began, progress.notes)
        for note in done.notes:
            output.warn(note)
        output.document(done.to_json())
        output.lines(consolidation_page(output, done))

    def show_plan(self, output: Output) -> None:
        """Shows what a run would do, and fails where it would fail before its first byte."""
        from ckptkit.pipeline.destination import check_destination
        from ckptkit.pipeline.planning import prepared
        from ckptkit_cli._plan_page import plan_json, plan_page

        src, out, also = self.places.src, self.places.out, self.places.also
        check_destination(src, out, overwrite=self.overwrite, also=also)
        with prepared(
            src, out, self.request, base=self.places.base, resources=self.resources, also=also
        ) as plan:
            output.document(plan_json(plan, out))
            output.lines(plan_page(output, plan, out))
