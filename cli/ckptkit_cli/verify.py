"""`ckptkit verify`: every stored checksum of a source, or of an output of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.core.texts import size_text
from ckptkit_cli._failures import exit_unless, told
from ckptkit_cli._options import Also, AsJson, Quiet, Selection
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress
from ckptkit_cli._storage_options import SrcOption, sources_of
from ckptkit_cli._text import counted, escaped, first_of, wrapped

if TYPE_CHECKING:
    from ckptkit.pipeline.verifying import Verification

_LISTED = 20


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A path in or above a checkpoint, or an output of ckptkit.",
            show_default=False,
        ),
    ],
    select: Selection = None,
    also: Also = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check all data against its checksums.

    Of an output of ckptkit every digest is checked, of anything else the checksums that its
    format stores, and that no part of a tensor is missing. Exits 6 when something is wrong.
    """
    output = Output(as_json=as_json, quiet=quiet)
    with told(output):
        from ckptkit.pipeline.verifying import run_verification

        with Progress(output, "verify") as progress:
            sources = sources_of(path, src_option)
            further = sources.further(also or ())
            report = run_verification(
                sources.first, select=select, also=further, listener=progress.listen
            )
        output.document(report.to_json())
        output.lines(_page(output, report))
        if quiet and not as_json:
            _tell_problems(output, report)
        exit_unless(report.ok)


def _tell_problems(output: Output, report: Verification) -> None:
    for problem in report.problems[:_LISTED]:
        output.fail(f"problem[{problem.code}]", str(problem))


def _page(output: Output, report: Verification) -> Iterator[str]:
    verdict = output.styled("ok", "green") if report.ok else output.styled("damaged", "red")
    what = "an output of ckptkit" if report.kind == "output" else "a checkpoint"
    read = f"{counted(report.tensors, 'tensor')} read, {size_text(report.size_bytes)}"
    yield f"{verdict}: {escaped(report.path)}, {what}: {read}"
    for line in report.proven:
        yield f"  {line}"
    if report.unverified:
        count = counted(len(report.unverified), "tensor")
        if report.kind == "output":
            yield f"  the source had no checksum for {count}; the digests are of what was written"
        else:
            yield f"  {count} read whole, but no checksum was stored to compare with"
    problems = [f"[{escaped(p.code)}] {escaped(str(p))}" for p in report.problems]
    if problems:
        yield output.styled(f"  {counted(len(problems), 'problem')}:", "red")
    for line in first_of(problems, _LISTED):
        yield from wrapped(line, width=output.width, first="    ", rest="      ")
    if len(problems) > _LISTED:
        yield "    --json lists all of them"
