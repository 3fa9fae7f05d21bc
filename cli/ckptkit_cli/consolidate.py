"""`ckptkit consolidate`, `convert` and `average`: shards become a model, whole or averaged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit.options import GGUF, Layout, positive_number, refuse_gguf
from ckptkit.storage.locations import Sources
from ckptkit_cli._options import (
    AVERAGED,
    CONVERSION,
    READ,
    TO,
    make_job,
    parse_number,
    parse_weights,
)
from ckptkit_cli._output import Output, counted, escaped, first_of
from ckptkit_cli._program import Argument, Option, command

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
    _run_command(output, "consolidate", make_job("hf", values), values)


@command(*CONVERSION, TO, order=3)
def convert(output: Output, to: Layout, **values: Any) -> None:
    """Write a model in another layout.

        ckptkit convert runs/llama shards/llama --to dcp

    'hf' is a folder that Transformers loads, 'torch' a pytorch_model.bin, and 'dcp' a sharded
    checkpoint that FSDP training starts from. 'megatron' is one that Megatron-LM starts from at
    any parallel size, 'torchtitan' one for torchtitan. Checks and options are those of consolidate.
    GGUF is made of a model folder by llama.cpp.
    """
    if str(to) == GGUF:
        refuse_gguf(values["src"], values["out"])
    _run_command(output, "convert", make_job(to, values), values)


_NOT_AVERAGED = {"src", "also", "optimizer", "delete_source"}
AVERAGE = (
    Argument(
        "sources",
        "SRC...",
        "Steps, folders or URLs, the oldest first; with --last, one run.",
        repeated=True,
    ),
    *(entry for entry in CONVERSION if entry.name not in _NOT_AVERAGED),
    Option(
        "--last",
        READ,
        "Average the newest K complete steps of the run SRC.",
        "K",
        parse=partial(positive_number, option="--last", example=5),
    ),
    Option(
        "--weights",
        AVERAGED,
        "How much each source counts, such as 0.5,0.3,0.2; they are divided by their sum. By"
        " default, all count the same.",
        "W,W,...",
        parse=parse_weights,
    ),
    Option(
        "--ema",
        AVERAGED,
        "Average exponentially: begin with the oldest source x, and for each newer one take DECAY"
        " times the average plus (1 - DECAY) times x.",
        "DECAY",
        parse=partial(parse_number, option="--ema", example="0.9"),
    ),
    Option(
        "--take-last",
        AVERAGED,
        "Take tensors whose names match from the last source. Integers need it where they differ."
        " Can be repeated.",
        "GLOB",
        repeated=True,
    ),
)


@command(*AVERAGE, order=4)
def average(output: Output, sources: Sequence[str], **values: Any) -> None:
    """Average the weights of several steps.

        ckptkit average runs/llama models/soup --last 5
        ckptkit average runs/a/checkpoint-900 runs/a/checkpoint-1000 models/soup --weights 1,3

    Floats are averaged in float32, float64 in float64, and rounded once. All sources need the same
    tensors. Configuration and tokenizer are those of the last source. Checks are those of
    consolidate.
    """
    from ckptkit.conversion.average import AverageJob, Weighting

    places = Sources(sources[0], values["src_option"])
    left_out = {"src": sources[-1], "also": (), "optimizer": False, "delete_source": False}
    job = AverageJob.of(
        make_job("hf", {**values, **left_out}),
        [places.first, *places.further(sources[1:])],
        Weighting.from_options(values["weights"], values["ema"]),
        last=values["last"],
        take_last=values["take_last"],
    )
    _run_command(output, "average", job, values)


def _run_command(output: Output, title: str, job: ConversionJob, values: Mapping[str, Any]) -> None:
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
    done = Consolidated(out, result.manifest, progress.seconds, progress.notes, progress.kept)
    progress.warn(done.notes)
    output.document(done.to_json() | _removal_json(result.removal))
    output.lines(consolidation_page(output, done))
    if result.removal is not None:
        count, size = counted(len(result.removal.files), "file"), result.removal.size_bytes
        text = f"{count} of the source, {size_text(size)}, after the output was read back"
        output.lines([f"  removed    {text}"])


def _show_plan(job: ConversionJob, output: Output) -> None:
    """Shows what a run would do, and fails where it would fail before its first byte."""
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
    out = os.fspath(job.out or "")
    with job.plan_output() as planned:
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
