"""`ckptkit verify`, `diff` and `stats`: checksums of data, models side by side, their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptkit.core.text import size_text
from ckptkit.options import ConsolidateRequest, parse_not_finite
from ckptkit.storage.locations import Sources
from ckptkit_cli._options import (
    ALSO,
    BASE,
    COMPARED,
    EXCLUDE,
    HTML,
    INCLUDE,
    JSON,
    MAP,
    OUTPUT,
    OVERWRITE_HTML,
    QUIET,
    READ,
    SELECT,
    SRC,
    SRC_OPTION,
    parse_number,
)
from ckptkit_cli._output import (
    Output,
    check_html,
    counted,
    escaped,
    exit_unless,
    first_of,
    fold_problems,
    table,
    wrapped,
    write_html,
)
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference, NumericDifference, TensorDifference
    from ckptkit.conversion.stats import Statistics, TensorStatistics
    from ckptkit.conversion.verify import Verification


_LISTED = 20
_LISTED_LONE = 3
_MOST_MEASURED = 200  # tensors in a terminal
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


@command(
    Argument("a", "A", "A checkpoint, or a folder that contains one."),
    Argument("b", "B", "Another one, of any format."),
    replace(
        BASE,
        help="Folder with the config.json of the model. A side without one takes this, or else that"
        " of the other side.",
    ),
    MAP,
    replace(
        SELECT,
        help="Model or checkpoint to take where there are several: of each side that has it, or"
        " given twice, of A and then of B. Of an adapter and its base, both are compared.",
        repeated=True,
    ),
    Option(
        "--numeric",
        COMPARED,
        "Compare values, whatever their types, and show how far they are apart: the largest"
        " absolute and relative difference, and the cosine.",
    ),
    Option(
        "--rtol",
        COMPARED,
        "With --numeric: how far a value may be from that in B, as a part of it.  [default: 0]",
        "X",
        parse=partial(parse_number, option="--rtol"),
    ),
    Option(
        "--atol",
        COMPARED,
        "With --numeric: how far it may be in addition.  [default: 0]",
        "X",
        parse=partial(parse_number, option="--atol"),
    ),
    SRC_OPTION,
    HTML,
    OVERWRITE_HTML,
    JSON,
    order=6,
)
def diff(
    output: Output,
    a: str,
    b: str,
    base: str | None,
    map: str,  # noqa: A002
    select: Sequence[str],
    src_option: Mapping[str, Any],
    html: str | None,
    overwrite: bool,
    **tolerances: Any,
) -> None:
    """Compare two models bit by bit, or by their numbers.

        ckptkit diff runs/llama/checkpoint-500 models/llama
        ckptkit diff runs/megatron/iter_0001000 models/llama
        ckptkit diff models/llama models/llama-bf16 --numeric --rtol 0.004
        ckptkit diff models/llama models/tuned --html diff.html

    Tensors are compared by name, whatever the two formats; --map converts the names of each side
    that it is for. Exits with 6 if the models differ, or if --numeric finds values that are further
    apart than --atol + --rtol x |B|. The page of --html shows how far each layer has changed.
    """
    from ckptkit.conversion.diff import make_tolerance, run_diff
    from ckptkit_cli._progress import Progress

    check_html(html, overwrite=overwrite)
    with Progress(output, "diff") as progress:
        sources = Sources(a, src_option)
        difference = run_diff(
            sources.first,
            sources.place(b),
            choice=map,
            base=sources.optional(base),
            select=select,
            tolerance=make_tolerance(**tolerances),
            measures=html is not None,
            listener=progress.listen,
        )
    progress.warn(progress.notes)
    written: list[str] = []
    if html is not None:
        from ckptkit.report.page import plan_difference_report

        written = write_html(plan_difference_report(difference), html, overwrite=overwrite)
    output.document(difference.to_json())
    output.lines([*_diff_page(output, difference), *written])
    exit_unless(difference.same)


def _diff_page(output: Output, difference: Difference) -> Iterator[str]:
    paths = f"{escaped(difference.a)} and {escaped(difference.b)}"
    how, tolerance = "equal bit by bit", difference.tolerance
    if tolerance is not None:
        how = f"within a tolerance of {tolerance.atol:g} + {tolerance.rtol:g} x |B|"
        if not (tolerance.atol or tolerance.rtol):
            how = "with equal values"
    equal = f"{counted(difference.equal, 'tensor')} {how}"
    if difference.same:
        yield f"{output.styled('same', 'green')}: {paths}: {equal}"
        yield from _roles_lines(difference)
        yield from _gaps_tables(output, difference)
        return
    yield f"{output.styled('different', 'red')}: {paths}: {equal}"
    yield from _roles_lines(difference)
    yield from _group(output, f"only in {escaped(difference.a)}", difference.only_in_a)
    yield from _group(output, f"only in {escaped(difference.b)}", difference.only_in_b)
    reshaped = [f"{name}: {a} against {b}" for name, (a, b) in difference.reshaped.items()]
    yield from _group(
        output, "of another dtype or shape" if tolerance is None else "of another shape", reshaped
    )
    if tolerance is None:
        yield from _group(output, "with other values", [_change(c) for c in difference.changed])
    yield from _gaps_tables(output, difference)
    if difference.note:
        yield from wrapped(f"note: {difference.note}", width=output.width, first="  ", rest="    ")


def _roles_lines(difference: Difference) -> Iterator[str]:
    """Shows an adapter and its base apart."""
    for role, (equal, count) in difference.roles.items():
        yield f"  {role}: {equal:,} of {counted(count, 'tensor')} equal"


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


def _gaps_tables(output: Output, difference: Difference) -> Iterator[str]:
    """Shows how far tensors are apart as numbers, if they were so compared."""
    if difference.tolerance is None:
        return
    changed = {change.name for change in difference.changed}
    unequal = [gaps for gaps in difference.numeric if gaps.unequal]
    apart = [gaps for gaps in unequal if gaps.name in changed]
    close = [gaps for gaps in unequal if gaps.name not in changed]
    yield from _gaps_table(output, "with other values", apart)
    yield from _gaps_table(output, "with other values that are within the tolerance", close)


def _gaps_table(output: Output, title: str, apart: list[NumericDifference]) -> Iterator[str]:
    if not apart:
        return
    apart.sort(key=_by_distance)
    rows: list[tuple[str, ...]] = [("tensor", "dtypes", "unequal", "largest", "relative", "cosine")]
    for gaps in apart[:_LISTED]:
        numbers = [_short(number) for number in (gaps.largest, gaps.relative)]
        dtypes = " ".join(dict.fromkeys(gaps.dtypes))
        cosine = "-" if gaps.cosine is None else f"{gaps.cosine:.9f}"
        rows.append((escaped(gaps.name), dtypes, f"{gaps.unequal:,}", *numbers, cosine))
    yield f"  {counted(len(apart), 'tensor')} {title}, the furthest apart first:"
    yield from table(rows, width=output.width, right={2, 3, 4, 5})
    if len(apart) > _LISTED:
        yield f"  and {len(apart) - _LISTED:,} more: --json lists all of them"
    yield from _lone_values(output, [gaps for gaps in apart if gaps.lone])


def _lone_values(output: Output, lone: Sequence[NumericDifference]) -> Iterator[str]:
    """Says which values have no distance, and are in none of the numbers."""
    if lone:
        count = counted(sum(gaps.lone for gaps in lone), "value")
        names = [f"{escaped(gaps.name)} {gaps.lone:,}" for gaps in lone]
        text = f"NaN or infinite on one side only, or in different ways: {count}"
        text += f" ({', '.join(first_of(names, _LISTED_LONE))}), in none of these numbers"
        yield from wrapped(text, width=output.width, first="  ", rest="    ")


def _by_distance(gaps: NumericDifference) -> float:
    return -math.inf if gaps.lone or gaps.relative is None else -gaps.relative


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


_SORTS: Mapping[str, Callable[[TensorStatistics], Any]] = {
    "norm": lambda tensor: -(math.inf if tensor.norm is None else tensor.norm),
    "max": lambda tensor: -max(abs(tensor.minimum or 0), abs(tensor.maximum or 0)),
    "zeros": lambda tensor: -tensor.zero_share,
    "nan": lambda tensor: -(tensor.nan + tensor.infinite),
}


@command(
    SRC,
    SELECT,
    INCLUDE,
    EXCLUDE,
    ALSO,
    replace(BASE, help="Folder with the config.json of the model, if SRC has none; for --map."),
    Option("--optimizer", READ, "Measure the states of the optimizer too."),
    replace(MAP, default="none"),
    Option(
        "--fail-on",
        OUTPUT,
        "Exit with 4 if a tensor has NaN ('nan'), or an infinite element ('inf'). Can be repeated.",
        "nan|inf",
        repeated=True,
        parse=partial(parse_not_finite, option="--fail-on"),
    ),
    Option(
        "--sort",
        OUTPUT,
        "Show the largest first: by norm, by absolute value, by share of zeros, or by NaN and"
        " infinite elements. Without it, tensors are in the order of SRC.",
        choices=tuple(_SORTS),
    ),
    Option("--all", OUTPUT, "Show all tensors; without it, a terminal shows the first 200."),
    SRC_OPTION,
    JSON,
    QUIET,
    order=7,
)
def stats(output: Output, src: str, **values: Any) -> None:
    """Show norms, ranges, zeros, NaN and infinities.

        ckptkit stats runs/llama/checkpoint-500
        ckptkit stats models/llama --fail-on nan --fail-on inf --quiet

    Norm, minimum, maximum and mean are those of the finite elements. Every tensor is read once, and
    checked against its stored checksums.
    """
    from ckptkit.conversion.stats import run_stats
    from ckptkit_cli._progress import Progress

    with Progress(output, "stats") as progress:
        sources = Sources(src, values["src_option"])
        statistics = run_stats(
            sources.first,
            ConsolidateRequest.from_options(values),
            also=sources.further(values["also"]),
            base=sources.optional(values["base"]),
            listener=progress.listen,
        )
    progress.warn(progress.notes)
    refused = statistics.find_refusal(*values["fail_on"])
    # With --json, the document of the error is the one document: it has the numbers too.
    output.document(
        statistics.to_json() | ({} if refused is None else {"error": refused.to_json()})
    )
    tensors = statistics.tensors
    if values["sort"] is not None:
        tensors = tuple(sorted(tensors, key=_SORTS[values["sort"]]))
    limit = None if values["all"] or output.width is None else _MOST_MEASURED
    output.lines(_statistics_page(output, statistics, tensors, limit))
    if refused is not None:
        output.fail(f"error[{refused.code}]", str(refused), refused.hint)
        exit_unless(passed=False, kind=type(refused))


_HEADER = ("tensor", "dtype", "shape", "norm", "min", "max", "mean", "zeros", "nan", "inf")


def _statistics_page(
    output: Output,
    statistics: Statistics,
    tensors: Sequence[TensorStatistics],
    limit: int | None,
) -> Iterator[str]:
    """Yields a line for each tensor, or for the first so many, and one for all together."""
    step = "" if statistics.step is None else f", step {statistics.step:,}"
    listed = f"{counted(len(tensors), 'tensor')}, {counted(statistics.elements, 'element')}"
    if any(tensor.label and tensor.parameters != tensor.elements for tensor in tensors):
        listed += f", {counted(statistics.parameters, 'parameter')} of the model"
    yield f"{escaped(statistics.path)}: {statistics.format}{step}: {listed}"
    rows: list[tuple[str, ...]] = [_HEADER]
    is_apart = len(statistics.norms) > 1
    if is_apart:  # stable: each of both parts stays in its order
        tensors = sorted(tensors, key=lambda tensor: tensor.role != "adapter")
    for tensor in tensors[:limit]:
        numbers = (tensor.norm, tensor.minimum, tensor.maximum, tensor.mean)
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        share = f"{tensor.zero_share:.2%}"
        counts = (share, f"{tensor.nan:,}", f"{tensor.infinite:,}")
        shape = f"{shape} ({tensor.label})" if tensor.label else shape
        rows.append((escaped(tensor.name), tensor.dtype, shape, *map(_short, numbers), *counts))
    totals = [(str(role), norm) for role, norm in statistics.norms.items()] if is_apart else []
    for role, norm in [*totals, ("", statistics.norm)]:
        own = [tensor for tensor in statistics.tensors if role in {"", tensor.role}]
        zeros, elements = sum(t.zeros for t in own), sum(t.elements for t in own)
        share = f"{zeros / elements if elements else 0:.2%}"
        broken = f"{sum(t.nan for t in own):,}", f"{sum(t.infinite for t in own):,}"
        title = f"total of the {role}" if role else "total"
        rows.append((title, "", "", _short(norm), "", "", "", share, *broken))
    lines = table(rows, width=output.width, right=set(range(3, 10)))
    ends = len(lines) - len(totals) - 1
    yield from lines[:ends]
    if limit is not None and len(tensors) > limit:
        yield f"  ... and {len(tensors) - limit:,} more (--all)"
    yield from lines[ends:]
