"""`ckptkit verify`: all data is read, and checked against its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit_cli._options import ALSO, JSON, OUTPUT, QUIET, SELECT, SRC_OPTION
from ckptkit_cli._output import (
    Output,
    counted,
    escaped,
    exit_unless,
    first_of,
    fold_problems,
    wrapped,
)
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.conversion.verify import Verification

_LISTED = 20
_KINDS = {"output": "an output of ckptkit", "delta": "a delta"}


@command(
    Argument("path", "PATH", "An output of ckptkit, a checkpoint, or a folder that contains one."),
    SELECT,
    ALSO,
    Option(
        "--repair",
        OUTPUT,
        "Replace damaged files, all of them or none, by those of the copies of --from. PATH is the"
        " folder of one step or output.",
    ),
    Option(
        "--from",
        OUTPUT,
        "Another copy of PATH, such as that on a node's disk: a folder or a URL. It is only read."
        " Can be repeated.",
        "COPY",
        repeated=True,
        keyword="copies",
    ),
    SRC_OPTION,
    JSON,
    QUIET,
    order=5,
)
def verify(
    output: Output,
    path: str,
    src_option: Mapping[str, Any],
    **values: Any,
) -> None:
    """Check all data against its checksums.

        ckptkit verify models/llama

    For an output of ckptkit, every digest is checked. For other checkpoints, the checksums that
    their format stores are checked, and that no part of a tensor is missing. A delta is read and
    decompressed. Exits with 6 if something is wrong. With --repair, what is damaged is mended from
    a copy, and proven, before a file is replaced.
    """
    from ckptkit import api
    from ckptkit_cli._progress import Progress

    with Progress(output, "verify") as progress:
        report = api.verify(path, src_options=src_option, listener=progress.listen, **values)
    progress.warn(progress.notes)
    output.document(report.to_json())
    output.lines(_verification_page(output, report))
    if output.quiet and not output.as_json:
        for problem in report.problems[:_LISTED]:
            output.fail(f"problem[{problem.code}]", str(problem))
    exit_unless(report.ok)


def _verification_page(output: Output, report: Verification) -> Iterator[str]:
    verdict = output.styled("ok", "green") if report.ok else output.styled("damaged", "red")
    what = _KINDS.get(report.kind, "a checkpoint")
    read = f"{counted(report.tensors, 'tensor')} read, {size_text(report.size_bytes)}"
    yield f"{verdict}: {escaped(report.path)}, {what}: {read}"
    for line in report.proven:
        yield f"  {line}"
    for line in report.mended:
        yield f"  mended: {escaped(line)}"
    if report.unverified:
        count = counted(len(report.unverified), "tensor")
        if report.kind == "output":
            yield f"  the source had no checksum for {count}; the digests are of what was written"
        else:
            yield f"  {count} read whole, but no checksum was stored to compare with"
    problems = fold_problems(report.problems)
    if problems:
        yield output.styled(f"  {counted(len(problems), 'problem')}:", "red")
    for line in first_of(problems, _LISTED):
        yield from wrapped(line, width=output.width, first="    ", rest="      ")
    if len(problems) > _LISTED:
        yield "    --json lists all of them"
