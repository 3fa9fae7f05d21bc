"""What `ckptkit consolidate --dry-run` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.texts import size_text
from ckptkit.execution.horizon import planned_reads
from ckptkit.pipeline.writing import Prepared
from ckptkit.planning.plan import TASK_BYTES, Compute, OutputFile
from ckptkit.planning.reads import GAP_BYTES, REQUEST_BYTES
from ckptkit_cli._output import Output
from ckptkit_cli._text import counted, escaped, first_of, table, wrapped

_LISTED_TIES = 5


def plan_json(prepared: Prepared, out: str) -> dict[str, Any]:
    """Returns the plan as plain values."""
    plan, estimate = prepared.plan, prepared.estimate
    return {
        "dry_run": True,
        "source": prepared.checkpoint.path,
        "format": prepared.checkpoint.index.format,
        "out": out,
        "tensors": sum(1 for _ in plan.specs()),
        "files": [_file_json(file) for file in plan.files],
        "tied": dict(plan.dropped),
        "tasks": sum(1 for _ in plan.tasks()),
        "workers": prepared.settings.workers,
        "bytes_read": estimate.bytes_read,
        "bytes_written": estimate.bytes_written,
        "bytes_free": estimate.bytes_free,
        "peak_bytes": estimate.peak_bytes,
        "notes": list(plan.notes),
        **_requests_json(prepared),
    }


def _requests_json(prepared: Prepared) -> dict[str, Any]:
    reads = planned_reads(prepared.plan, prepared.inputs.origins)
    if reads is None:
        return {}
    sizes = {"bytes": reads.size_bytes, "most_bytes": REQUEST_BYTES, "gap_bytes": GAP_BYTES}
    return {"requests": {"count": reads.requests, **sizes}}


def _file_json(file: OutputFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "bytes": file.size_bytes,
        "tensors": _tensors_in(file),
        "dtypes": dict(_dtypes_in(file)),
    }


def plan_page(output: Output, prepared: Prepared, out: str) -> Iterator[str]:
    """Yields the plan's lines for people."""
    yield output.styled(f"Plan for {escaped(out)}; nothing was written", "bold")
    for label, text in _facts(prepared):
        yield from wrapped(text, width=output.width, first=f"  {label:<10} ", rest=" " * 13)
    yield ""
    yield from _files(output, prepared.plan.files)
    if prepared.plan.notes:
        yield ""
        yield output.styled("Notes", "bold")
        for note in prepared.plan.notes:
            yield from wrapped(escaped(note), width=output.width, rest="    ")


def _facts(prepared: Prepared) -> Iterator[tuple[str, str]]:
    plan, estimate = prepared.plan, prepared.estimate
    checkpoint = prepared.checkpoint
    dtypes: Counter[str] = Counter()
    for file in plan.files:
        dtypes.update(_dtypes_in(file))
    tasks = sum(1 for _ in plan.tasks())
    yield "source", f"{escaped(checkpoint.path)} ({escaped(checkpoint.index.format)})"
    yield "tensors", f"{sum(1 for _ in plan.specs()):,}: {_in_words(dtypes)}"
    computed = sum(isinstance(segment.body, Compute) for _, segment, _ in plan.specs())
    if computed:
        yield "computed", counted(computed, "tensor")
    ties = [f"{name} = {source}" for name, source in plan.dropped.items()]
    for tie in first_of(ties, _LISTED_TIES):
        yield "tied", escaped(tie)
    yield "reads", size_text(estimate.bytes_read)
    reads = planned_reads(plan, prepared.inputs.origins)
    if reads is not None:
        yield (
            "requests",
            (
                f"about {reads.requests:,} for {size_text(reads.size_bytes)}, of at most"
                f" {size_text(REQUEST_BYTES)} each; gaps of up to {size_text(GAP_BYTES)} are read"
                " with what lies around them"
            ),
        )
    yield (
        "writes",
        (
            f"{size_text(estimate.bytes_written)} in {counted(len(plan.files), 'file')}, by"
            f" {counted(tasks, 'task')} of at most {size_text(TASK_BYTES)}"
        ),
    )
    yield "disk", _room(prepared)
    yield (
        "memory",
        (
            f"about {size_text(estimate.peak_bytes)} at its peak, with"
            f" {counted(prepared.settings.workers, 'thread')}"
        ),
    )


def _room(prepared: Prepared) -> str:
    free, needed = prepared.estimate.bytes_free, prepared.estimate.bytes_written
    if free is None:
        return "free space unknown"
    verdict = "" if needed <= free else ": too little"
    return f"{size_text(free)} free{verdict}"


def _files(output: Output, files: tuple[OutputFile, ...]) -> Iterator[str]:
    rows = [("FILE", "SIZE", "TENSORS", "DTYPES")]
    for file in files:
        tensors = _tensors_in(file)
        rows.append(
            (
                escaped(file.path),
                size_text(file.size_bytes),
                f"{tensors:,}" if tensors else "-",
                ", ".join(_dtypes_in(file)) or "-",
            )
        )
    lines = table(rows, width=output.width, right=(1, 2))
    yield output.styled(lines[0], "dim")
    yield from lines[1:]


def _tensors_in(file: OutputFile) -> int:
    return sum(segment.spec is not None for segment in file.segments)


def _dtypes_in(file: OutputFile) -> Counter[str]:
    """Returns the bytes of each element type."""
    sizes: Counter[str] = Counter()
    for segment in file.segments:
        if segment.spec is not None:
            sizes[segment.spec.dtype.name] += segment.spec.size_bytes
    return sizes


def _in_words(dtypes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in dtypes.items()) or "none"
