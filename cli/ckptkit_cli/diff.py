"""`ckptkit diff`: two models side by side, bit by bit or by their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptkit.storage.locations import Sources
from ckptkit_cli._options import (
    BASE,
    HTML,
    JSON,
    MAP,
    OVERWRITE_HTML,
    SELECT,
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
    number_text,
    table,
    wrapped,
    write_html,
)
from ckptkit_cli._program import Argument, Option, command

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference, NumericDifference, TensorDifference

_COMPARED = "What is compared"
_LISTED = 20
_LISTED_LONE = 3


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
        _COMPARED,
        "Compare values, whatever their types, and show how far they are apart: the largest"
        " absolute and relative difference, and the cosine.",
    ),
    Option(
        "--rtol",
        _COMPARED,
        "With --numeric: how far a value may be from that in B, as a part of it.  [default: 0]",
        "X",
        parse=partial(parse_number, option="--rtol"),
    ),
    Option(
        "--atol",
        _COMPARED,
        "With --numeric: how far it may be in addition.  [default: 0]",
        "X",
        parse=partial(parse_number, option="--atol"),
    ),
    Option(
        "--unpacked",
        _COMPARED,
        "With --numeric: compare packed weights by the numbers that they stand for.",
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
    unpacked: bool,
    **tolerances: Any,
) -> None:
    """Compare two models bit by bit, or by their numbers.

        ckptkit diff runs/llama/checkpoint-500 models/llama
        ckptkit diff runs/megatron/iter_0001000 models/llama
        ckptkit diff models/llama models/llama-bf16 --numeric --rtol 0.004
        ckptkit diff models/llama models/llama-fp8 --numeric --unpacked
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
            unpacked=unpacked,
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
        numbers = [number_text(number) for number in (gaps.largest, gaps.relative)]
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
