"""`ckptkit verify` and `ckptkit diff`: data against its checksums, and models bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit.storage.locations import Sources
from ckptkit_cli._command import Argument, command
from ckptkit_cli._options import ALSO, BASE, JSON, MAP, QUIET, SELECT, SRC_OPTION
from ckptkit_cli._output import Output, counted, escaped, exit_unless, first_of, wrapped
from ckptkit_cli._progress import Progress

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference, TensorDifference
    from ckptkit.conversion.verify import Verification


_LISTED = 20


@command(
    Argument("path", "PATH", "An output of ckptkit, a checkpoint, or a folder that contains one."),
    SELECT,
    ALSO,
    SRC_OPTION,
    JSON,
    QUIET,
)
def verify(
    output: Output,
    path: str,
    select: str | None,
    also: Sequence[str],
    src_option: Mapping[str, Any],
) -> None:
    """Check all data against its checksums.

        ckptkit verify models/llama

    For an output of ckptkit, every digest is checked. For other checkpoints, the checksums that
    their format stores are checked, and that no part of a tensor is missing. Exits with 6 if
    something is wrong.
    """
    from ckptkit.conversion.verify import run_verification

    with Progress(output, "verify") as progress:
        sources = Sources(path, src_option)
        report = run_verification(
            sources.first, select=select, also=sources.further(also), listener=progress.listen
        )
    output.document(report.to_json())
    output.lines(_verification_page(output, report))
    if output.quiet and not output.as_json:
        for problem in report.problems[:_LISTED]:
            output.fail(f"problem[{problem.code}]", str(problem))
    exit_unless(report.ok)


def _verification_page(output: Output, report: Verification) -> Iterator[str]:
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


@command(
    Argument("a", "A", "A checkpoint, or a folder that contains one."),
    Argument("b", "B", "Another one, of any format."),
    replace(
        BASE,
        help="Folder with the config.json of the model. A side without one takes this, or else that"
        " of the other side.",
    ),
    MAP,
    SRC_OPTION,
    JSON,
)
def diff(
    output: Output,
    a: str,
    b: str,
    base: str | None,
    map: str,  # noqa: A002
    src_option: Mapping[str, Any],
) -> None:
    """Compare two models bit by bit.

        ckptkit diff runs/llama/checkpoint-500 models/llama
        ckptkit diff runs/megatron/iter_0001000 models/llama

    Tensors are compared by name, whatever the two formats; --map converts the names of each side
    that it is for. Exits with 6 if the models differ.
    """
    from ckptkit.conversion.diff import run_diff

    with Progress(output, "diff") as progress:
        sources = Sources(a, src_option)
        difference = run_diff(
            sources.first,
            sources.place(b),
            choice=map,
            base=sources.optional(base),
            listener=progress.listen,
        )
    output.document(difference.to_json())
    output.lines(_diff_page(output, difference))
    exit_unless(difference.same)


def _diff_page(output: Output, difference: Difference) -> Iterator[str]:
    paths = f"{escaped(difference.a)} and {escaped(difference.b)}"
    equal = f"{counted(difference.equal, 'tensor')} equal bit by bit"
    if difference.same:
        yield f"{output.styled('same', 'green')}: {paths}: {equal}"
        return
    yield f"{output.styled('different', 'red')}: {paths}: {equal}"
    yield from _group(output, f"only in {escaped(difference.a)}", difference.only_in_a)
    yield from _group(output, f"only in {escaped(difference.b)}", difference.only_in_b)
    reshaped = [f"{name}: {a} against {b}" for name, (a, b) in difference.reshaped.items()]
    yield from _group(output, "of another dtype or shape", reshaped)
    yield from _group(output, "with other values", list(map(_change, difference.changed)))
    if difference.note:
        yield from wrapped(f"note: {difference.note}", width=output.width, first="  ", rest="    ")


def _group(output: Output, title: str, items: Sequence[str]) -> Iterator[str]:
    if not items:
        return
    yield f"  {counted(len(items), 'tensor')} {title}:"
    for item in first_of(items, _LISTED):
        yield from wrapped(escaped(item), width=output.width, first="    ", rest="      ")


def _change(change: TensorDifference) -> str:
    text = f"{change.name}: {counted(change.elements, 'element')}"
    if change.largest is None:
        return f"{text}, none of them a difference of two finite numbers"
    return f"{text}, largest difference {change.largest:.3g}"
